"""One call of the manager for a command: its answer, or one sentence and the error's exit status."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine
from typing import Annotated, Any, TypeVar

import typer

from ckpt_engine.client import AsyncClient
from ckpt_engine.core.deadlines import NOTICE_SECONDS
from ckpt_engine.core.names import printable
from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.v1.weights_pb2 import Problem

Answer = TypeVar("Answer")

Manager = Annotated[str, typer.Option(envvar="CKPT_ENGINE_MANAGER", help="The manager, host:port.")]
Pool = Annotated[str, typer.Option(help="Only replicas in this pool. Default: those started without --pool.")]
Names = Annotated[
    list[str] | None, typer.Argument(help="Replicas, as `ckpt-engine status` names them. Default: all of the pool.")
]


def ask_manager(manager: str, ask: Callable[[AsyncClient], Coroutine[Any, Any, Answer]], what: str) -> Answer:
    """Returns the answer to one call. Exits with the error's status and prints the reason if the call fails. After a
    while it prints that it waits. what: what for."""

    async def answer() -> Answer:
        async with AsyncClient(manager) as client:
            call = asyncio.ensure_future(ask(client))
            done, _ = await asyncio.wait((call,), timeout=NOTICE_SECONDS)
            if not done:
                typer.echo(f"waiting for the manager at {manager}: {what}", err=True)
            return await call

    try:
        return asyncio.run(answer())
    except CkptEngineError as error:
        raise failure_exit(manager, error) from error


def failure_exit(manager: str, error: CkptEngineError) -> typer.Exit:
    """Prints why the manager did not answer, or what it refused; returns the exit to raise."""
    typer.echo(printable(refusal_of(manager, error)), err=True)
    return typer.Exit(error.exit_status)


def refusal_of(manager: str, error: CkptEngineError) -> str:
    """One sentence about a failed call, which names the manager once."""
    return f"manager {manager}: {with_replica(error.problem).removeprefix(f'manager {manager}: ')}"


def with_replica(problem: Problem) -> str:
    """The message of a problem, behind the name of the replica that it is about unless it says that itself."""
    says = re.search(rf"\breplica '?{re.escape(problem.replica)}(?!\w)", problem.message)
    return f"replica {problem.replica}: {problem.message}" if problem.replica and not says else problem.message
