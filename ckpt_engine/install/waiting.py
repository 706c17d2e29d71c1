"""The requests that a gate keeps while an install runs: their bodies, their clients, and whose turn it is.

One task looks at the page every few milliseconds while anybody waits; nothing runs while nobody does. Everything is
used on the API server's event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from ckpt_engine.install.holding import Decision, Queue, Ticket
from ckpt_engine.install.reader import StateReader

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]

POLL_SECONDS = 0.005


class Held:
    """A request whose wait is over. receive: for the application; it gets what was read meanwhile, and then the rest.

    decision: None: the client has gone.
    """

    def __init__(self, decision: Decision | None, body: list[Message], reading: asyncio.Future[Message] | None) -> None:
        self.decision = decision
        self._body = body
        self._reading = reading

    def receive(self, after: Receive) -> Receive:
        async def receive() -> Message:
            if self._body:
                return self._body.pop(0)
            reading, self._reading = self._reading, None
            return await (after() if reading is None else reading)

        return receive

    def close(self) -> None:
        """Nobody asks for the rest any more."""
        self._body.clear()
        if self._reading is not None:
            self._reading.cancel()


class WaitingRoom:
    """See the module."""

    def __init__(self, state: StateReader) -> None:
        self.queue = Queue()
        self._state = state
        self._turns: dict[Ticket, asyncio.Future[Decision]] = {}
        self._calling: asyncio.Task[None] | None = None

    async def wait(self, ticket: Ticket, receive: Receive) -> Held:
        """Until it is the ticket's turn, or its client has gone. Reads the request's body: a server tells that the
        client has gone only to who has read what came before."""
        turn = self._turns[ticket] = asyncio.get_running_loop().create_future()
        if self._calling is None or self._calling.done():
            self._calling = asyncio.create_task(self._call())
        body: list[Message] = []
        size = 0
        reading: asyncio.Future[Message] = asyncio.ensure_future(receive())
        handed_over = False
        try:
            while True:
                await asyncio.wait((turn, reading), return_when=asyncio.FIRST_COMPLETED)
                if turn.done():
                    handed_over = True
                    return Held(turn.result(), body, reading)
                message = reading.result()
                if message["type"] != "http.request":
                    return Held(None, [], None)
                body.append(message)
                size += len(message.get("body", b""))
                refused = self.queue.grow(ticket, size, self._state.decision(), self._state.limits)
                if refused is not None:
                    return Held(refused, [], None)
                reading = asyncio.ensure_future(receive())
        finally:
            self.queue.leave(ticket)
            del self._turns[ticket]
            if not handed_over:
                reading.cancel()

    async def _call(self) -> None:
        """Calls those whose turn it is, until nobody waits."""
        try:
            while self.queue:
                decision = self._state.decision()
                for ticket, told in self.queue.turn(decision, self._state.clock(), self._state.limits):
                    self._turns[ticket].set_result(told)
                await asyncio.sleep(POLL_SECONDS)
        except Exception as error:  # nobody shall wait for a task that has ended: each request fails with it
            for turn in self._turns.values():
                if not turn.done():
                    turn.set_exception(error)
