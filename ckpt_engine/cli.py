"""The ``ckpt-engine`` command: puts the commands together and does nothing else.

Only the module of the requested command is imported: commands start fast, and one command's missing dependency does not
break the others. So this module lists the commands.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from ckpt_engine.commands.choices import Level, LogForm
from ckpt_engine.commands.loading import begin_loading
from ckpt_engine.commands.renamed import command_now
from ckpt_engine.manager.about import software_version

COMMANDS = {
    "manager": "Run the manager, which trainers and replicas connect to.",
    "agent": "Run the agent of one inference server, and that server.",
    "relay": "Keep weights in this host's memory, ready for its engines.",
    "gateway": "Run one address for generation over all replicas.",
    "prime-rl": "Answer prime-rl's orchestrator for all replicas.",
    "update": "Bring all replicas to the weights of a checkpoint.",
    "deploy": "Show deployments in waves, and decide them.",
    "rollback": "Bring replicas back to a version that is still held.",
    "replica": "List replicas, or do something about one.",
    "version": "List the versions that can be read, or find a bad one.",
    "lineage": "List lineages, and what uses each, or end one.",
    "pull": "Write the weights of a version into a directory.",
    "status": "Show lineages, trainers, replicas and what they serve.",
    "trace": "Write an update as a timeline that Perfetto shows.",
    "engines": "Show what each engine can do, and what it cannot.",
    "plan": "Tell what an update would do on a cluster, without it.",
    "doctor": "Check this host: transports, engines, permissions.",
    "demo": "Train a tiny model here and watch replicas follow it.",
}

OPERATIONS = {
    "deploy": {
        "status": "Show deployments: their waves, and what each waits for.",
        "approve": "Let the next wave begin.",
        "pause": "Have no wave begin.",
        "resume": "End a pause.",
        "undo": "Bring its replicas back.",
    },
    "replica": {
        "list": "Show each replica: what it serves and is to serve.",
        "retry": "Bring a quarantined replica to the latest version now.",
        "hold": "Leave a replica as it is, also in updates.",
        "release": "Let a held replica be updated again.",
        "evict": "Take a replica out.",
        "sleep": "Have replicas give their memory up.",
        "wake": "Have replicas take their memory back.",
    },
    "version": {
        "list": "Show each version, where it is held and served.",
        "bisect": "Find the first bad version between two.",
    },
    "lineage": {
        "list": "Show each lineage: its ranks, its versions, its replicas.",
        "evict": "End a run: send its ranks away.",
        "forget": "Forget a lineage that nothing uses.",
    },
}
"""Commands about deployments, replicas, versions and lineages."""

GLOBAL = {
    "--manager": True,
    "--json": False,
    "--verbose": False,
    "-v": False,
    "--log-level": True,
    "--log-format": True,
}
"""Options that several commands have, and that may therefore stand before a command too; whether one takes a value."""

_HELP = {"help_option_names": ["-h", "--help"]}

_COMPLETE = "_CKPT_ENGINE_COMPLETE"
"""Set by a shell that asks for completions; the typed words are then in a variable, not among the arguments."""


def command_first(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Splits a command line into the words of the command and the rest, which begins with the options before them.

    `--manager A replica --json list x` is `replica list`, and `--manager A --json x`. Without a command there are no
    words, and the arguments stay as they are.
    """
    words: list[str] = []
    options: list[str] = []
    at = 0
    while True:
        while at < len(arguments) and (name := arguments[at].partition("=")[0]) in GLOBAL:
            size = 2 if GLOBAL[name] and "=" not in arguments[at] else 1
            options += arguments[at : at + size]
            at += size
        word = arguments[at] if at < len(arguments) else ""
        if not words and (not word or word.startswith("-")):
            return [], list(arguments)
        if words and (len(words) > 1 or word not in OPERATIONS.get(words[0], ())):
            return words, [*options, *arguments[at:]]
        words.append(word)
        at += 1


def app_for(arguments: Sequence[str]) -> typer.Typer:
    """The application for this command line: with the command that it names, else with all of them, to be listed."""
    app = typer.Typer(
        name="ckpt-engine",
        cls=_CommandFirst,
        help="Each training step's weights, in every inference server, exactly.",
        context_settings=_HELP,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    app.callback(invoke_without_command=True, no_args_is_help=True)(_in_common)
    words, _ = command_first(arguments)
    command = words[0] if words else ""
    if command in OPERATIONS:
        app.add_typer(_operations(command), name=command)
        return app
    if command in COMMANDS:
        kind = {"agent": _BeforeAnother, "update": _OfACheckpoint}.get(command, _Command)
        function = command.replace("-", "_")
        app.command(command, cls=kind, help=None, context_settings=_HELP)(_function(function, function))
        return app
    for name, summary in COMMANDS.items():
        app.command(name, help=summary)(_only_listed)
        for operation, words_of in OPERATIONS.get(name, {}).items():
            app.command(f"{name} {operation}", help=words_of)(_only_listed)
    return app


def main() -> None:
    """Runs the process's command line."""
    begin_loading()
    arguments = sys.argv[1:]
    if _COMPLETE in os.environ:
        arguments = os.environ.get("COMP_WORDS", os.environ.get("_TYPER_COMPLETE_ARGS", "")).split()[1:]
    # Without this gRPC prints lines of its own beside our errors; it reads the variable when it is imported.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from ckpt_engine.core.problems import CkptEngineError

    try:
        app_for(arguments)()
    except CkptEngineError as error:
        print(f"{' '.join(('ckpt-engine', *command_first(arguments)[0]))}: {error.problem.message}", file=sys.stderr)
        sys.exit(error.exit_status)


class _CommandFirst(TyperGroup):
    """Accepts the options of `GLOBAL` before a command as well as behind it."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Exits with 2 for an old spelling, and names the new one."""
        words, rest = command_first(args)
        spelling = command_now(words, rest)
        if spelling is not None and not ctx.resilient_parsing:
            old, new = spelling
            hint = f"; what is asked about one: `ckpt-engine {old} -h`" if old in OPERATIONS else ""
            ctx.fail(f"`ckpt-engine {old}` is now `ckpt-engine {new}`{hint}")
        with _hint(f"Options of a command stand behind it; also before it: {', '.join(GLOBAL)}"):
            return super().parse_args(ctx, [*words, *rest])


def _operations(noun: str) -> typer.Typer:
    """The application of a noun's commands, such as `replica retry`."""
    operations = typer.Typer(
        help=COMMANDS[noun],
        no_args_is_help=True,
        context_settings=_HELP,
        rich_markup_mode=None,
    )
    for name, summary in OPERATIONS[noun].items():
        function = _function(noun, f"list_{noun}s" if name == "list" else name)
        operations.command(name, cls=_Command, short_help=summary, context_settings=_HELP)(function)
    return operations


def _function(module: str, name: str) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(import_module(f"ckpt_engine.commands.{module}"), name)
    return function


def _in_common(
    context: typer.Context,
    manager: Annotated[str, typer.Option(metavar="HOST:PORT", help="The manager.")] = "",
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables and sentences.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Print all of a report.")] = False,
    log_level: Annotated[Level | None, typer.Option(help="Least level that is logged.")] = None,
    log_format: Annotated[LogForm | None, typer.Option(help="Format of the log.")] = None,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)] = False,
) -> None:
    """Each training step's weights, in every inference server, exactly.

    Options before a command may also come behind it, if the command knows them.
    """
    if version:
        typer.echo(f"ckpt-engine {software_version()}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        context.fail("Missing command: `ckpt-engine -h` lists them.")


class _Command(TyperCommand):
    """A command whose refusals are plain words."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Takes out of the refusal of a value how typer has checked it."""
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            if hasattr(error, "message"):
                words = str(error.message).removeprefix("Value error, ")
                error.message = re.sub(r"^Input should be (.*), unable to parse .*", r"must be \1", words)
            raise


class _BeforeAnother(_Command):
    """A command that takes another command and its arguments behind --."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Adds to the refusal of an unknown option where it may belong."""
        with _hint("An argument of the engine stands behind --: -- {name} ..."):
            return super().parse_args(ctx, args)


class _OfACheckpoint(_Command):
    """A command that names a directory by an option."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Adds to the refusal of an extra argument which option it may belong to."""
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            message = str(getattr(error, "message", ""))
            if message.startswith("Got unexpected extra argument"):
                error.message = f"{message}. Name the checkpoint's directory by --checkpoint"  # type: ignore[attr-defined]
            raise


@contextmanager
def _hint(where: str) -> Iterator[None]:
    """Adds to the refusal of an unknown option where it may belong. where: {name} in it is the option."""
    try:
        yield
    except Exception as error:
        if type(error).__name__ == "NoSuchOption":
            name = getattr(error, "option_name", "")
            error.message = f"No such option: {name}. {where.format(name=name)}"  # type: ignore[attr-defined]
        raise


def _only_listed() -> None:
    """Stands for a command in the list; never runs, since a command line that names a command gets only that one."""
