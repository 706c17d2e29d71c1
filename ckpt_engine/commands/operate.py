"""``ckpt-engine replica list|retry|hold|release|evict``: which there are, and what an operator does about one."""

from __future__ import annotations

from typing import Annotated

import typer

from ckpt_engine.addresses import MANAGER
from ckpt_engine.commands.asking import Manager, ask_manager
from ckpt_engine.core.message_json import as_json_array
from ckpt_engine.machines.ledger_tasks import OperatorHold

Name = Annotated[str, typer.Argument(help="The replica, as `ckpt-engine status` names it.")]


def list_replicas(
    manager: Manager = MANAGER,
    pool: Annotated[str | None, typer.Option(help="Of one pool. Default: all.")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print a JSON array, as of `status`.")] = False,
) -> None:
    """Show each replica: what it serves and is to serve, and why these differ."""
    from ckpt_engine.commands.status import show_replicas  # takes a while, for which no other command waits

    found = ask_manager(manager, lambda client: client.replicas(pool), "its status")
    if json_output:
        typer.echo(as_json_array(found))
    else:
        show_replicas(found)


def retry(name: Name, manager: Manager = MANAGER) -> None:
    """Bring a quarantined replica to the latest version now, however often that has failed before.

    Exits with 1 and says why if that cannot work, for example because no source of that version stays sealed.
    """
    answer = ask_manager(manager, lambda client: client.retry(name), f"retry of {name}")
    typer.echo(f"replica {name}: {answer}")


def hold(
    name: Name,
    manager: Manager = MANAGER,
    reason: Annotated[str, typer.Option(help="For people: shown in status until it is released.")] = "",
) -> None:
    """Leave a replica as it is until it is released: nothing brings it to what it is to serve.

    Updates and rollbacks leave it out, and are refused if they name it; what has begun with it goes on. It serves on,
    sleeps and wakes. It stays held when its agent or the manager is restarted.
    """
    answer = ask_manager(manager, lambda client: client.hold(name, reason), f"hold of {name}")
    held = OperatorHold(answer.since, answer.reason)
    typer.echo(f"replica {name}: {held.told(name)}")


def release(name: Name, manager: Manager = MANAGER) -> None:
    """Let a replica that was held be brought to what it is to serve again."""
    answer = ask_manager(manager, lambda client: client.release(name), f"release of {name}")
    typer.echo(f"replica {name}: {answer}")


def evict(
    name: Name,
    manager: Manager = MANAGER,
    reason: Annotated[str, typer.Option(help="For the log of its agent.")] = "",
) -> None:
    """Take a replica out: its agent ends for good, and with it an engine that it launched. Its name is free then.

    Updates do not count it any more. One whose agent is not connected is forgotten; its engine stays as it is.
    """
    answer = ask_manager(manager, lambda client: client.evict(name, reason), f"eviction of {name}")
    typer.echo(
        f"replica {name}: evicted" + ("" if answer else "; its agent was not connected, so its engine stays as it is")
    )
