"""One session stream: an ordered way in, a bounded way out, and one reason why it ended.

It carries messages, and checks that the peer reads them. It does not decide what messages mean, nor when a lease ends:
the state machine does. Runs on the manager's event loop thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, TypeVar

import grpc
import grpc.aio

from ckpt_engine.core.problems import CkptEngineError, deadline
from ckpt_engine.manager.errors import refuse
from ckpt_engine.shell.outbox import Outbox

EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]  # the stubs lack it

log = logging.getLogger("ckpt_engine.manager")

Incoming = TypeVar("Incoming")
Outgoing = TypeVar("Outgoing")


async def carry(
    context: grpc.aio.ServicerContext[Any, Any],
    outbox: Outbox[Outgoing],
    on_message: Callable[[Incoming], None],
    write_seconds: float,
) -> str:
    """Carries messages both ways until either side ends the stream, and returns why it ended, for people.

    Ends with ``outbox.problem`` as the call's status if the manager closed it with one. A peer that takes no message
    for ``write_seconds`` is cut off. Messages that were queued when the peer ended its side are still sent. Whatever
    ``on_message`` raises is a defect and propagates.
    """
    reading = asyncio.ensure_future(_read(context, on_message))
    writing = asyncio.ensure_future(_write(context, outbox, write_seconds))
    try:
        await asyncio.wait((reading, writing), return_when=asyncio.FIRST_COMPLETED)
        if not writing.done():
            # The current write must end first: a call takes no status while it takes a message.
            outbox.close()
            await asyncio.wait((writing,))
            reading.result()
            reason = "the peer ended the stream"
        else:
            reason = outbox.problem.message if outbox.problem is not None else "closed by the manager"
        writing.result()
    finally:
        outbox.close()
        for task in (reading, writing):
            task.cancel()
        await asyncio.gather(reading, writing, return_exceptions=True)
    if outbox.problem is not None:
        await refuse(context, CkptEngineError(outbox.problem))
    return reason


async def write(context: grpc.aio.ServicerContext[Any, Any], message: Any, seconds: float) -> None:
    """Writes one message. Raises CancelledError if the peer does not take it within ``seconds``. The call then ends
    without a status, since none can follow a message that is stuck."""
    writing = asyncio.ensure_future(context.write(message))
    writing.add_done_callback(lambda done: done.cancelled() or done.exception())
    done, _ = await asyncio.wait((writing,), timeout=seconds)
    if not done:
        log.warning("a peer took no message for %g s: its call ends peer=%s", seconds, context.peer())
        raise asyncio.CancelledError
    writing.result()


async def first_message(context: grpc.aio.ServicerContext[Incoming, Any], seconds: float) -> Incoming | None:
    """The stream's first message; None: the peer ended the stream before it.

    Raises DEADLINE_EXCEEDED if it does not come within ``seconds``.
    """
    try:
        message = await asyncio.wait_for(context.read(), seconds)
    except TimeoutError:
        raise deadline(f"no hello came within {seconds:g} s: it must be the first message of a session") from None
    return None if message is EOF else message


async def _read(context: grpc.aio.ServicerContext[Any, Any], on_message: Callable[[Any], None]) -> None:
    while (message := await context.read()) is not EOF:
        on_message(message)


async def _write(context: grpc.aio.ServicerContext[Any, Any], outbox: Outbox[Any], seconds: float) -> None:
    while (message := await outbox.take()) is not None:
        await write(context, message, seconds)
