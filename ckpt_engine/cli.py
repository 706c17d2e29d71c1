"""The ``ckpt-engine`` command: puts the commands together and does nothing else.

Only the module of the command that was asked for is imported: commands start fast, and one command's missing
dependency does not take the others away. The list of commands is therefore told here and not by them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from ckpt_engine.commands.loading import begin_loading
from ckpt_engine.manager.about import software_version

COMMANDS = {
    "serve": "Run the manager, which trainers and replicas connect to.",
    "replica": "Run the agent of one inference server, and that server.",
    "relay": "Keep weights in this host's memory, ready for its engines.",
    "trainer": "List the runs that the manager knows, or take one out.",
    "version": "List the versions that can be read or gone back to.",
    "gateway": "Run one address for generation over all replicas.",
    "prime-rl": "Answer prime-rl's orchestrator for all replicas.",
    "update": "Bring all replicas to the weights of a checkpoint.",
    "rollback": "Bring replicas back to a version that is still held.",
    "pull": "Write the weights of a version into a directory.",
    "sleep": "Have replicas give their memory up.",
    "wake": "Have replicas take their memory back.",
    "status": "Show trainers, replicas and what they serve.",
    "trace": "Write an update as a timeline that Perfetto shows.",
    "engines": "Show what each engine can do, and what it cannot.",
    "plan": "Tell what an update would do on a cluster, without it.",
    "doctor": "Check this host: transports, engines, permissions.",
    "demo": "Train a tiny model here and watch replicas follow it.",
}


OPERATIONS = {
    "replica": ("list", "retry", "hold", "release", "evict"),
    "trainer": ("list", "evict"),
    "version": ("list",),
}
"""What an operator does about a replica that runs already, about a run and about a version."""

_SUMMARIES = {
    "replica list": "Show each replica: what it serves and is to serve.",
    "replica retry": "Bring a quarantined replica to the latest version now.",
    "replica hold": "Leave a replica as it is, also in updates.",
    "replica release": "Let a held replica be updated again.",
    "replica evict": "Take a replica out.",
    "trainer list": "Show each run, and what the manager keeps for whom.",
    "trainer evict": "Forget a run.",
    "version list": "Show each version, where it is held and served.",
}

_MODULES = {"replica": "operate", "trainer": "trainers", "version": "versions"}

_HELP = {"help_option_names": ["-h", "--help"]}

_COMPLETE = "_CKPT_ENGINE_COMPLETE"
"""Set by a shell that asks what could come next; what was typed is then in a variable, not among the arguments."""


def app_for(arguments: Sequence[str]) -> typer.Typer:
    """The application for this command line: with the command that it names, or with all of them to list."""
    app = typer.Typer(
        name="ckpt-engine",
        help="Each training step's weights, in every inference server, exactly.",
        context_settings=_HELP,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    app.callback(invoke_without_command=True, no_args_is_help=True)(_in_common)
    words = [argument for argument in arguments if not argument.startswith("-")]
    wanted = words[0] if words else None
    behind = set(arguments[arguments.index(wanted) + 1 :][:1]) if wanted is not None else set()
    if wanted in ("trainer", "version") or (wanted == "replica" and behind & set(OPERATIONS[wanted])):
        app.add_typer(_operations(wanted), name=wanted)
        return app
    if wanted in OPERATIONS["replica"] and wanted != "list":
        app.command(wanted, context_settings=_HELP)(_function("operate", wanted))
        return app
    if wanted in COMMANDS:
        kind = _BeforeAnother if wanted == "replica" else TyperCommand
        app.command(wanted, cls=kind, help=None, context_settings=_HELP)(
            _function(wanted.replace("-", "_"), wanted.replace("-", "_"))
        )
        return app
    for name, summary in COMMANDS.items():
        app.command(name, help=summary)(_only_listed)
        for operation in OPERATIONS.get(name, ()):
            app.command(f"{name} {operation}", help=_SUMMARIES[f"{name} {operation}"])(_only_listed)
    return app


def main() -> None:
    """Runs the process's command line."""
    begin_loading()
    arguments = sys.argv[1:]
    if _COMPLETE in os.environ:
        arguments = os.environ.get("COMP_WORDS", os.environ.get("_TYPER_COMPLETE_ARGS", "")).split()[1:]
    # gRPC's own lines would stand among ours, which say the same in words; it reads this when it is imported.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from ckpt_engine.core.problems import CkptEngineError

    try:
        app_for(arguments)()
    except CkptEngineError as error:
        name = next(iter(word for word in arguments if not word.startswith("-")), "")
        print(f"ckpt-engine {name}: {error.problem.message}", file=sys.stderr)
        sys.exit(error.exit_status)


def _operations(wanted: str) -> typer.Typer:
    """`replica retry` and the like; `replica` with anything else behind it runs an agent."""
    operations = typer.Typer(
        help=COMMANDS[wanted] if wanted == "version" else f"What an operator does about one {wanted}.",
        no_args_is_help=True,
        context_settings=_HELP,
        rich_markup_mode=None,
    )
    for name in OPERATIONS[wanted]:
        function = _function(_MODULES[wanted], f"list_{wanted}s" if name == "list" else name)
        summary = _SUMMARIES[f"{wanted} {name}"]
        operations.command(name, short_help=summary, context_settings=_HELP)(function)
    return operations


def _function(module: str, name: str) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(import_module(f"ckpt_engine.commands.{module}"), name)
    return function


def _in_common(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)] = False,
) -> None:
    """Each training step's weights, in every inference server, exactly."""
    if version:
        typer.echo(f"ckpt-engine {software_version()}")
        raise typer.Exit


class _BeforeAnother(TyperCommand):
    """A command whose line goes on, behind --, with the arguments of another one."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Says of an unknown option where it may belong."""
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            name = getattr(error, "option_name", "")
            if type(error).__name__ == "NoSuchOption":
                error.message = f"No such option: {name}. An argument of the engine stands behind --: -- {name} ..."  # type: ignore[attr-defined]
            raise


def _only_listed() -> None:
    """Never runs: a command line that names a command gets that command alone."""
