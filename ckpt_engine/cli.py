"""The ``ckpt-engine`` command: puts the commands together and does nothing else.

Only the module of the command that was asked for is imported: commands start fast, and one command's missing
dependency does not take the others away. The list of commands is therefore told here and not by them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Annotated, Any

import typer

from ckpt_engine.manager.about import software_version

COMMANDS = {
    "serve": "Run the manager, which trainers and replicas connect to.",
    "replica": "Run the agent of one inference server, and launch the server unless it runs already.",
    "trainer": "List the runs that the manager knows, or take one out.",
    "gateway": "Run one address for generation over all replicas, which resumes what breaks off.",
    "update": "Bring all replicas to the weights of a checkpoint directory.",
    "sleep": "Have replicas give their memory up.",
    "wake": "Have replicas take their memory back.",
    "status": "Show trainers, replicas and what they serve.",
    "engines": "Show what each engine can do, and what it cannot.",
    "doctor": "Check this host: transports, engines, permissions.",
    "demo": "Train a tiny model on this machine and watch replicas follow.",
}


OPERATIONS = {"replica": ("retry", "evict"), "trainer": ("list", "evict")}
"""What an operator does about a replica that runs already, and about a run."""

_MODULES = {"replica": "operate", "trainer": "trainers"}


def app_for(arguments: Sequence[str]) -> typer.Typer:
    """The application for this command line: with the command that it names, or with all of them to list."""
    app = typer.Typer(
        name="ckpt-engine",
        help="Each training step's weights, in every inference server, exactly.",
        add_completion=False,
        pretty_exceptions_show_locals=False,
    )
    app.callback(invoke_without_command=True, no_args_is_help=True)(_in_common)
    wanted = next((argument for argument in arguments if not argument.startswith("-")), None)
    behind = set(arguments[arguments.index(wanted) + 1 :][:1]) if wanted is not None else set()
    if wanted == "trainer" or (wanted == "replica" and behind & set(OPERATIONS[wanted])):
        app.add_typer(_operations(wanted), name=wanted)
        return app
    if wanted in COMMANDS:
        app.command(wanted, help=None)(_function(wanted))
        return app
    for name, summary in COMMANDS.items():
        app.command(name, help=summary)(_only_listed)
    return app


def main() -> None:
    """Runs the process's command line."""
    app_for(sys.argv[1:])()


def _operations(wanted: str) -> typer.Typer:
    """`replica retry` and the like; `replica` with anything else behind it runs an agent."""
    module = import_module(f"ckpt_engine.commands.{_MODULES[wanted]}")
    operations = typer.Typer(help=f"What an operator does about one {wanted}.", no_args_is_help=True)
    for name in OPERATIONS[wanted]:
        operations.command(name)(getattr(module, f"{name}_runs" if name == "list" else name))
    return operations


def _function(name: str) -> Callable[..., Any]:
    module = import_module(f"ckpt_engine.commands.{name}")
    function: Callable[..., Any] = getattr(module, name)
    return function


def _in_common(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)] = False,
) -> None:
    """Each training step's weights, in every inference server, exactly."""
    if version:
        typer.echo(f"ckpt-engine {software_version()}")
        raise typer.Exit


def _only_listed() -> None:
    """Never runs: a command line that names a command gets that command alone."""
