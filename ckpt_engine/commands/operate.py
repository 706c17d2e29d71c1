"""``ckpt-engine replica retry|evict``: what an operator does about one replica."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Annotated, Any

import grpc
import typer

from ckpt_engine.client import error_of, manager_stub, open_channel
from ckpt_engine.commands.options import configured_deadlines
from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.v1 import manager_pb2

Manager = Annotated[str, typer.Option(envvar="CKPT_ENGINE_MANAGER", help="The manager, host:port.")]
Name = Annotated[str, typer.Argument(help="The replica, as `ckpt-engine status` names it.")]


def retry(name: Name, manager: Manager = "127.0.0.1:50051") -> None:
    """Bring a quarantined replica to the latest version now, however often that has failed before.

    Exits with 1 and says why if that cannot work, for example because no source of that version stays sealed.
    """
    seconds = configured_deadlines(None).status
    request = manager_pb2.RetryReplicaRequest(name=name)
    answer = call(manager, lambda stub: stub.RetryReplica(request, timeout=seconds))
    typer.echo(f"replica {name}: {answer.message}")


def evict(
    name: Name,
    manager: Manager = "127.0.0.1:50051",
    reason: Annotated[str, typer.Option(help="For the log of its agent.")] = "",
) -> None:
    """Take a replica out: its agent ends for good, and with it an engine that it launched. Its name is free then.

    Updates do not count it any more. One whose agent is not connected is forgotten; its engine stays as it is.
    """
    seconds = configured_deadlines(None).status
    request = manager_pb2.EvictReplicaRequest(name=name, reason=reason)
    answer = call(manager, lambda stub: stub.EvictReplica(request, timeout=seconds))
    typer.echo(
        f"replica {name}: evicted"
        + ("" if answer.was_connected else "; its agent was not connected, so its engine stays as it is")
    )


def call(manager: str, ask: Callable[[Any], Awaitable[Any]]) -> Any:
    """One call of the manager; exits with 1 and its reason if it is refused."""

    async def answer() -> Any:
        async with open_channel(manager) as channel:
            try:
                return await ask(manager_stub(channel))
            except grpc.RpcError as error:
                raise error_of(error) from error

    try:
        return asyncio.run(answer())
    except CkptEngineError as error:
        typer.echo(f"manager {manager}: {error.problem.message}", err=True)
        raise typer.Exit(1) from error
