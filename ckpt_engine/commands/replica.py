"""``ckpt-engine replica list|retry|hold|release|evict|sleep|wake``: lists replicas and acts on them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, cast

import typer

from ckpt_engine.addresses import MANAGER
from ckpt_engine.client import POLL_SECONDS, AsyncClient
from ckpt_engine.commands.asking import Manager, Names, Pool, ask_manager
from ckpt_engine.commands.choices import Tag
from ckpt_engine.commands.options import Timeout, Wait, configured_deadlines, seconds_to_wait
from ckpt_engine.core.message_json import as_json_array
from ckpt_engine.core.problems import deadline, not_found
from ckpt_engine.machines.ledger_tasks import OperatorHold
from ckpt_engine.v1 import manager_pb2

if TYPE_CHECKING:
    from ckpt_engine.options import MemoryTag

Name = Annotated[str, typer.Argument(help="The replica, as `ckpt-engine status` names it.")]


def list_replicas(
    manager: Manager = MANAGER,
    pool: Annotated[str | None, typer.Option(help="Only this pool. Default: all.")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print a JSON array, as of `status`.")] = False,
) -> None:
    """Show each replica: what it serves and is to serve, and why these differ."""
    from ckpt_engine.commands.status import show_replicas  # takes a while, for which no other command waits

    found = ask_manager(manager, lambda client: client.replicas(pool), "its status")
    if json_output:
        typer.echo(as_json_array(found))
    else:
        show_replicas(found)


def retry(name: Name, manager: Manager = MANAGER, wait: Wait = False, timeout: Timeout = None) -> None:
    """Bring a quarantined replica to the latest version now, however often that has failed before.

    Exits with 1 and the reason if that cannot work, for example because no source of that version stays sealed; with
    --wait also if the replica does not hold that version in time.
    """
    seconds = seconds_to_wait(wait, timeout, configured_deadlines(None).catch_up)
    answer = ask_manager(manager, lambda client: client.retry(name), f"retry of {name}")
    typer.echo(f"replica {name}: {answer}")
    _wait_for(name, manager, seconds)


def hold(
    name: Name,
    manager: Manager = MANAGER,
    reason: Annotated[str, typer.Option(help="Reason, shown in status until the release.")] = "",
) -> None:
    """Leave a replica as it is until it is released, also in updates and rollbacks.

    Updates and rollbacks leave it out, and are refused if they name it; a running one goes on. It still serves, sleeps
    and wakes. It stays held when its agent or the manager is restarted.
    """
    answer = ask_manager(manager, lambda client: client.hold(name, reason), f"hold of {name}")
    operator_hold = OperatorHold(answer.since, answer.reason)
    typer.echo(f"replica {name}: {operator_hold.describe(name)}")


def release(name: Name, manager: Manager = MANAGER, wait: Wait = False, timeout: Timeout = None) -> None:
    """Release a held replica: it is brought to what it is to serve again.

    With --wait exits with 1 and the reason if the replica does not hold that in time.
    """
    seconds = seconds_to_wait(wait, timeout, configured_deadlines(None).catch_up)
    answer = ask_manager(manager, lambda client: client.release(name), f"release of {name}")
    typer.echo(f"replica {name}: {answer}")
    _wait_for(name, manager, seconds)


def _wait_for(name: str, manager: str, seconds: float | None) -> None:
    """Waits until a replica holds what it is to serve, and prints that. seconds: at most; None: returns at once. Exits
    with 1 and the reason if it does not."""
    if seconds is None:
        return

    async def await_version(client: AsyncClient) -> str:
        end = time.monotonic() + seconds
        while True:
            found = next((each for each in await client.replicas() if each.name == name), None)
            if found is None:
                raise not_found("it is not a member any more", replica=name)
            if found.connected and not found.HasField("drift"):
                version = f"version {found.identity.version} of {found.identity.lineage}"
                return f"it holds {version}" if found.HasField("identity") else "nothing is meant for it"
            if time.monotonic() >= end:
                why = found.drift.reason if found.connected else "its agent is not connected"
                raise deadline(f"it does not hold what it is to serve after {seconds:g} s: {why}", replica=name)
            await asyncio.sleep(POLL_SECONDS)

    typer.echo(f"replica {name}: {ask_manager(manager, await_version, f'{name}, up to {seconds:g} s')}")


def evict(
    name: Name,
    manager: Manager = MANAGER,
    reason: Annotated[str, typer.Option(help="Reason, for the log of its agent.")] = "",
) -> None:
    """Take a replica out: its agent ends for good, with the engine that it launched. Then its name is free.

    Updates do not count it any more. Without a connected agent it is only forgotten; its engine stays as it is.
    """
    answer = ask_manager(manager, lambda client: client.evict(name, reason), f"eviction of {name}")
    typer.echo(
        f"replica {name}: evicted" + ("" if answer else "; its agent was not connected, so its engine stays as it is")
    )


def sleep(
    replicas: Names = None,
    manager: Manager = MANAGER,
    pool: Pool = "",
    level: Annotated[int, typer.Option(help="1 keeps weights on the host, 2 discards them.", min=1)] = 1,
    timeout: Timeout = None,
) -> None:
    """Close replicas and have them give their memory up, until they are woken; an update wakes hybrid ones.

    Exits with 1 if one of them does not sleep, and says why.
    """
    names = tuple(replicas or ())
    _show_results(
        ask_manager(manager, lambda client: client.sleep(level, replicas=names, pool=pool, timeout=timeout), "sleep"),
        "asleep",
    )


def wake(
    replicas: Names = None,
    manager: Manager = MANAGER,
    pool: Pool = "",
    tag: Annotated[
        list[Tag] | None, typer.Option(help="Memory to take back, weights first; repeatable. Default: both.")
    ] = None,
    timeout: Timeout = None,
) -> None:
    """Have replicas take their memory back. One that discarded its weights serves again after its next update.

    Exits with 1 if one of them does not wake, and says why.
    """
    names, tags = tuple(replicas or ()), cast("tuple[MemoryTag, ...]", tuple(tag or ()))
    _show_results(
        ask_manager(manager, lambda client: client.wake(tags, replicas=names, pool=pool, timeout=timeout), "wake"),
        "awake",
    )


def _show_results(results: Sequence[manager_pb2.SleepWakeResult], done: str) -> None:
    """Prints one line a replica; exits with 1 if one of them has a problem."""
    any_problem = False
    for result in results:
        wrong = result.HasField("problem")
        any_problem = any_problem or wrong
        typer.echo(f"replica {result.replica}: {result.problem.message if wrong else done}", err=wrong)
    if any_problem:
        raise typer.Exit(1)
