"""Reads and completes an engine's command line, as far as adapters need. Pure; also used inside engines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ckpt_engine.addresses import join_address

Options = Mapping[str, tuple[str, ...]]
"""Options by their long names, each with the values that follow it; a flag has none."""

BYPASS = "it would answer requests that the gate does not see"
"""Why options and variables are refused that give an engine a second server beside its HTTP application."""


def command_options(command: Sequence[str], aliases: Mapping[str, str] | None = None) -> dict[str, tuple[str, ...]]:
    """Parses the options of a command, `--name value ...` or `--name=value`; the last one of two counts.

    aliases: other names to long ones. A word with one hyphen is an option only if it is among them, and else a value.
    """
    long_names = aliases or {}
    options: dict[str, tuple[str, ...]] = {}
    name = ""
    for argument in command:
        word, equals, value = argument.partition("=")
        if word.startswith("--") or word in long_names:
            name = word.replace("_", "-")
            name = long_names.get(name, name)
            options[name] = (value,) if equals else ()
        elif name:
            options[name] = (*options[name], argument)
    return options


def value(options: Options, name: str, default: str = "") -> str:
    """The first value of an option; `default` if the option is missing or has no value."""
    return (options.get(name) or (default,))[0]


def size(options: Options, name: str) -> int:
    """The number of a size option; 1 without it. Raises ValueError if it is not a number."""
    return int(value(options, name, "1"))


def check_refused(
    options: Options,
    refused: Mapping[str, tuple[tuple[str, ...], str]],
    environment: Mapping[str, str],
    variables: Mapping[str, str],
) -> None:
    """Checks a command's options. Raises ValueError with a message for the user if its server could not be kept behind
    the gate, or could not be updated.

    refused: option to its harmless values (may be none) and why others are refused. variables: of the environment, and
    why they may not be set.
    """
    for name, (harmless, reason) in refused.items():
        if name in options and value(options, name) not in harmless:
            raise ValueError(
                f"{' '.join((name, *options[name]))} cannot be used with ckpt-engine: {reason}; leave it out"
            )
    for name, reason in variables.items():
        if environment.get(name, "").lower() not in ("", "0", "false"):
            raise ValueError(f"{name}={environment[name]} cannot be used with ckpt-engine: {reason}; unset it")


def completed(options: Options, model_option: str, model: str, port: int) -> tuple[list[str], str]:
    """Completes a server's options with model, port and host: the missing arguments, and the URL of the server.

    model: empty: the options name it. port: used if the options name none. Servers listen at loopback unless the
    options name a host.
    """
    additions = [] if not model or model_option in options else [model_option, model]
    if port_option := value(options, "--port"):
        port = int(port_option)
    else:
        additions += ["--port", str(port)]
    host = value(options, "--host")
    if not host:
        additions += ["--host", "127.0.0.1"]
    return additions, _local_url(host, port)


def _local_url(host: str, port: int) -> str:
    """The URL for reaching a server on this host that listens at `host`; empty: at loopback.

    One that listens at `::` may refuse IPv4 there (uvicorn's own socket does) or take it.
    """
    own = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://{join_address(own, port)}"
