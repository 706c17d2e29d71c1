"""``ckpt-engine deploy status|approve|pause|resume|undo``: shows staged deployments, and says what a person decides."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import typer

from ckpt_engine.addresses import MANAGER
from ckpt_engine.commands.asking import Manager, ask_manager
from ckpt_engine.core.message_json import as_json_array
from ckpt_engine.core.names import printable
from ckpt_engine.report import DeploymentReport
from ckpt_engine.v1 import manager_pb2

if TYPE_CHECKING:
    from ckpt_engine.options import DeployAction

Number = Annotated[
    int | None, typer.Argument(help="The deployment, as `deploy status` numbers it. Default: the only undecided one.")
]


def status(
    manager: Manager = MANAGER,
    json_output: Annotated[bool, typer.Option("--json", help="Print a JSON array, as of `status`.")] = False,
) -> None:
    """Show the deployments that are undecided, and the last that were decided: their waves, and what each waits for."""
    found = ask_manager(manager, lambda client: client.status(), "its status").deployments
    if json_output:
        typer.echo(as_json_array(found))
    else:
        typer.echo(printable("\n".join(lines(found)) or "no deployment is undecided"))


def lines(deployments: Iterable[manager_pb2.Deployment]) -> list[str]:
    """One line a deployment."""
    return [str(DeploymentReport(each)) for each in deployments]


def approve(number: Number = None, manager: Manager = MANAGER) -> None:
    """Approve a wave that has ended: the next one begins.

    Exits with 1 while the wave goes on: there is nothing to approve yet.
    """
    _steer("approve", number, manager)


def pause(number: Number = None, manager: Manager = MANAGER) -> None:
    """Have no wave begin until `deploy resume`; one that goes on does so."""
    _steer("pause", number, manager)


def resume(number: Number = None, manager: Manager = MANAGER) -> None:
    """End a pause."""
    _steer("resume", number, manager)


def undo(
    number: Number = None,
    manager: Manager = MANAGER,
    reason: Annotated[str, typer.Option(help="Reason, for the report.")] = "",
) -> None:
    """Bring the replicas of a deployment back to what they were to serve. Its version's number stays used."""
    _steer("undo", number, manager, reason)


def _steer(action: DeployAction, number: int | None, manager: str, reason: str = "") -> None:
    answer = ask_manager(manager, lambda client: client.deploy(action, number, reason=reason), f"deploy {action}")
    typer.echo(printable(str(DeploymentReport(answer))))
