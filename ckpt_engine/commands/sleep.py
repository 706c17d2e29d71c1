"""``ckpt-engine sleep``: has replicas give their memory up, as a trainer's loop or an operator would."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Any

import grpc
import typer

from ckpt_engine.client import error_of, manager_stub, open_channel
from ckpt_engine.core.deadlines import Deadlines, check_seconds
from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.v1 import manager_pb2

Manager = Annotated[str, typer.Option(envvar="CKPT_ENGINE_MANAGER", help="The manager, host:port.")]
Names = Annotated[list[str] | None, typer.Argument(help="Replicas, as `ckpt-engine status` names them. Default: all.")]


def _waited(seconds: float) -> float:
    try:
        check_seconds("a timeout", seconds)
    except CkptEngineError as error:
        raise typer.BadParameter(error.problem.message) from error
    return seconds


Timeout = Annotated[float, typer.Option(help="Seconds that the slowest may take.", min=1, callback=_waited)]


def sleep(
    replicas: Names = None,
    manager: Manager = "127.0.0.1:50051",
    level: Annotated[int, typer.Option(help="1 keeps weights on the host, 2 discards them.", min=1)] = 1,
    timeout: Timeout = Deadlines.sleep_wake,
) -> None:
    """Close replicas and give their memory up, until they are woken; an update wakes hybrid ones.

    Exits with 1 if one of them does not sleep, and says why.
    """
    request = manager_pb2.SleepRequest(replicas=replicas or (), level=level, timeout_seconds=timeout)
    show(ask(manager, lambda stub: stub.Sleep(request, timeout=timeout + Deadlines.call_grace)), "asleep")


def ask(manager: str, call: Callable[[Any], Awaitable[Any]]) -> Sequence[manager_pb2.SleepWakeResult]:
    """One call of the manager; exits with 1 and its reason if it is refused."""

    async def answer() -> Any:
        async with open_channel(manager) as channel:
            try:
                return await call(manager_stub(channel))
            except grpc.RpcError as error:
                raise error_of(error) from error

    try:
        results: Sequence[manager_pb2.SleepWakeResult] = asyncio.run(answer()).results
    except CkptEngineError as error:
        typer.echo(f"manager {manager}: {error.problem.message}", err=True)
        raise typer.Exit(1) from error
    return results


def show(results: Sequence[manager_pb2.SleepWakeResult], done: str) -> None:
    """One line a replica; exits with 1 if there is a problem among them."""
    failed = False
    for result in results:
        wrong = result.HasField("problem")
        failed = failed or wrong
        typer.echo(f"replica {result.replica}: {result.problem.message if wrong else done}", err=wrong)
    if failed:
        raise typer.Exit(1)
