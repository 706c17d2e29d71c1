"""The requests that a gate holds while an install runs: their bodies, their clients, and their turns.

While any request waits, one task reads the page every few milliseconds. Everything is used on the API server's event
loop.
"""

from __future__ import annotations

import asyncio

from ckpt_engine.gate.asgi import Message, Receive
from ckpt_engine.gate.holding import GateDecision, Queue, RequestTicket
from ckpt_engine.gate.reader import StateReader

POLL_SECONDS = 0.005


class HeldRequest:
    """A request that has stopped waiting."""

    def __init__(
        self, decision: GateDecision | None, body: list[Message], reading: asyncio.Future[Message] | None
    ) -> None:
        self.decision = decision  # None: the client has disconnected
        self._body = body
        self._reading = reading

    def receive(self, after: Receive) -> Receive:
        """A `receive` for the application: it returns the messages that were read meanwhile, then the rest."""

        async def receive() -> Message:
            if self._body:
                return self._body.pop(0)
            reading, self._reading = self._reading, None
            return await (after() if reading is None else reading)

        return receive

    def close(self) -> None:
        """Drops the rest of the body."""
        self._body.clear()
        if self._reading is not None:
            self._reading.cancel()


class _HeldBody:
    """The part of a request's body that has come while it waits."""

    def __init__(self, receive: Receive) -> None:
        self.messages: list[Message] = []
        self.size = 0  # bytes
        self._receive = receive
        self.reading: asyncio.Future[Message] = asyncio.ensure_future(receive())  # the next message

    async def next(self) -> Message:
        """Waits for the next message. Cancelling this call loses none: `reading` continues."""
        await asyncio.wait((self.reading,))
        message = self.reading.result()
        if message["type"] == "http.request":
            self.messages.append(message)
            self.size += len(message.get("body", b""))
            self.reading = asyncio.ensure_future(self._receive())
        return message


class WaitingRoom:
    """The requests that wait at one gate, and the task that calls them."""

    def __init__(self, state: StateReader) -> None:
        self.queue = Queue()
        self._state = state
        self._turns: dict[RequestTicket, asyncio.Future[GateDecision | None]] = {}
        self._calling: asyncio.Task[None] | None = None

    async def wait(self, ticket: RequestTicket, receive: Receive) -> HeldRequest:
        """Waits for the ticket's turn, or until its client disconnects. Reads the request's body meanwhile: a server
        reports a disconnect only after the messages before it were read."""
        turn = self._turns[ticket] = asyncio.get_running_loop().create_future()
        if self._calling is None or self._calling.done():
            self._calling = asyncio.create_task(self._call())
        body = _HeldBody(receive)
        reader = asyncio.create_task(self._read(ticket, body, turn))
        decision: GateDecision | None = None
        try:
            # Nothing else is awaited in this method: so requests that are called together wake in order.
            decision = await turn
        finally:
            self.queue.leave(ticket)
            del self._turns[ticket]
            reader.cancel()
            if decision is None:
                body.reading.cancel()
        return HeldRequest(decision, body.messages, body.reading)

    async def _read(self, ticket: RequestTicket, body: _HeldBody, turn: asyncio.Future[GateDecision | None]) -> None:
        """Ends the ticket's wait if its client disconnects, its body is too large, or reading fails."""
        try:
            while (await body.next())["type"] == "http.request":
                refusal = self.queue.grow(ticket, body.size, self._state.decision(), self._state.limits)
                if refusal is not None:
                    _tell(turn, refusal)
                    return
            _tell(turn, None)
        except Exception as error:  # the request fails with it
            if not turn.done():
                turn.set_exception(error)
        finally:
            self.queue.leave(ticket)

    async def _call(self) -> None:
        """Calls requests as their turns come, until none waits."""
        try:
            while self.queue:
                decision = self._state.decision()
                for ticket, answer in self.queue.turn(decision, self._state.clock(), self._state.limits):
                    _tell(self._turns[ticket], answer)
                await asyncio.sleep(POLL_SECONDS)
        except Exception as error:  # no request may wait for a task that has ended: each fails with its error
            for turn in self._turns.values():
                if not turn.done():
                    turn.set_exception(error)


def _tell(turn: asyncio.Future[GateDecision | None], decision: GateDecision | None) -> None:
    if not turn.done():  # it may have a decision already, or its task was cancelled
        turn.set_result(decision)
