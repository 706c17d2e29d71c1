"""Gives the answer to a request with bounds, as far as they hold. Used on the API server's event loop.

It decides when an answer is given, withheld or broken off; bounds.py judges the versions. A whole answer is withheld
until it is there and its versions are known. Of a stream each message is judged when the engine sends it: if no worker
has begun an install by then, its tokens are of the version that let the request in.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any

from ckpt_engine.core.json_text import load_json
from ckpt_engine.core.openai_errors import error_object
from ckpt_engine.core.version_stamps import may_end, stamp
from ckpt_engine.gate.asgi import HeaderList, Message, Send, header, refuse, with_headers
from ckpt_engine.gate.bounds import BoundedVisit, Unmet
from ckpt_engine.gate.holding import GateDecision
from ckpt_engine.gate.reader import StateReader
from ckpt_engine.v1 import weights_pb2

POLL_SECONDS = 0.005
"""How often running requests are judged beside their own messages: a version may come and go between two of these."""

ADMITTED_VERSION_HEADER = b"x-ckpt-engine-admitted-version"
ADMITTED_ROOT_HEADER = b"x-ckpt-engine-admitted-root"
"""The version that the workers held when the request was let in. Its tokens may be of a later one, if it waits in the
engine. Only the body can say which version made them."""

END_VERSION_HEADER = b"x-ckpt-engine-end-version"
END_ROOT_HEADER = b"x-ckpt-engine-end-root"
"""The version that the workers held when a whole answer was there. If it is the admitted one, it made all tokens,
unless the replica went to another version and back. A stream has none, since its headers are sent before; neither has
an answer that came while an install wrote."""

_DONE = b"data: [DONE]"


class BoundedAnswer:
    """The answer to one request. Give the application `send`."""

    def __init__(self, visit: BoundedVisit, state: StateReader, send: Send, count: Callable[[str], None], stamps: bool):
        """count: called with the reason of a refusal. stamps: whether the body is to say which version it began and
        ended under."""
        self._visit, self._state, self._send, self._count, self._stamps = visit, state, send, count, stamps
        self._lock = asyncio.Lock()
        self._start: Message | None = None  # withheld until something of the body may be sent
        self._passes = False  # an error of the engine: it has no tokens
        self._parts: list[bytes] = []  # of a whole answer
        self._started = False  # whether anything was sent
        self.ended = False  # whether the answer was sent, or broken off: what the application sends then is dropped

    async def send(self, message: Message) -> None:
        """Takes a message of the application."""
        async with self._lock:
            if self.ended:
                return
            if message["type"] == "http.response.start":
                self._start, self._passes = message, message["status"] >= 400
            elif message["type"] == "http.response.body":
                await self._body(message.get("body", b""), message.get("more_body", False))
            else:
                await self._send(message)

    def see(self, decision: GateDecision) -> Unmet | None:
        """Judges the versions by what the page says now."""
        return self._visit.see(decision)

    async def break_off(self, unmet: Unmet) -> None:
        """Answers with a refusal; in a stream that has begun, with an event, at which OpenAI's client raises."""
        async with self._lock:
            await self._break_off(unmet)

    async def _break_off(self, unmet: Unmet) -> None:
        if self.ended:
            return
        self.ended = True
        self._count(unmet.reason)
        if self._started:
            error = {**error_object(409, unmet.reason, unmet.detail), "status": 409, "reason": unmet.reason}
            event = b"data: " + json.dumps({"error": error}).encode() + b"\n\n" + _DONE + b"\n\n"
            await self._send({"type": "http.response.body", "body": event, "more_body": False})
        else:
            await refuse("http", self._send, 409, unmet.detail, unmet.reason, 1 if unmet.may_pass else None)

    async def _body(self, body: bytes, more: bool) -> None:
        assert self._start is not None
        unmet = None if self._passes or (body.startswith(_DONE) and self._started) else self.see(self._state.decision())
        if unmet is not None and (body or not self._started):
            await self._break_off(unmet)
        elif self._passes or is_event_stream(self._start):
            if body or not more:
                await self._stream(body, more)
        else:
            self._parts.append(body)
            if not more:
                await self._whole(b"".join(self._parts))

    async def _stream(self, body: bytes, more: bool) -> None:
        if not self._started:
            assert self._start is not None
            self._started = True
            await self._send(with_headers(self._start, VersionHeaders(self._visit.first).admitted))
        if self._stamps and not self._passes and may_end(body):
            body = b"\n\n".join(map(self._stamped_event, body.split(b"\n\n")))
        self.ended = not more
        await self._send({"type": "http.response.body", "body": body, "more_body": more})

    async def _whole(self, body: bytes) -> None:
        assert self._start is not None
        self._started = self.ended = True
        headers = VersionHeaders(self._visit.first).admitted + VersionHeaders(self._visit.last).end
        if self._stamps:
            body = self._stamped(body)
            headers.append((b"content-length", str(len(body)).encode()))
        start = with_headers(self._start, headers)
        await self._send(start)
        await self._send({"type": "http.response.body", "body": body})

    def _stamped_event(self, event: bytes) -> bytes:
        return b"data: " + self._stamped(event[6:]) if event.startswith(b"data: ") and may_end(event) else event

    def _stamped(self, data: bytes) -> bytes:
        """The object with the versions; as it is if it is no JSON object."""
        try:
            content: Any = load_json(data)
        except ValueError:
            return data
        first, last = self._visit.first, self._visit.last
        stamp(content, first.version if first else None, last.version if last else None)
        return json.dumps(content, separators=(",", ":")).encode()


class BoundedAnswers:
    """The answers that are being made, and the task that judges them."""

    def __init__(self, state: StateReader) -> None:
        self._state = state
        self._inside: set[BoundedAnswer] = set()
        self._looking: asyncio.Task[None] | None = None
        self._last: tuple[object, ...] = ()  # what the last look found; empty: an answer came since
        self._ending: set[asyncio.Task[None]] = set()

    @contextlib.contextmanager
    def judged(self, answer: BoundedAnswer) -> Iterator[None]:
        """Judges an answer every few milliseconds, and breaks it off when a bound does not hold any more."""
        self._inside.add(answer)
        self._last = ()
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look())
        try:
            yield
        finally:
            self._inside.discard(answer)

    async def _look(self) -> None:
        while self._inside:
            decision = self._state.decision()
            found = decision.installs, decision.verdict.open
            if found != self._last:
                self._last = found
                self._judge(decision)
            await asyncio.sleep(POLL_SECONDS)

    def _judge(self, decision: GateDecision) -> None:
        for answer in list(self._inside):
            if not answer.ended and (unmet := answer.see(decision)) is not None:
                # A task each: a client that does not read may not keep others from being judged.
                task = asyncio.create_task(answer.break_off(unmet))
                self._ending.add(task)
                task.add_done_callback(self._ending.discard)
                self._inside.discard(answer)


class VersionHeaders:
    """The headers of one version. None: the engine's own weights, of which there are none."""

    def __init__(self, identity: weights_pb2.Identity | None) -> None:
        self.identity = identity
        version, root = (
            (b"", b"") if identity is None else (str(identity.version).encode(), identity.root.hex().encode())
        )
        named = identity is not None
        self.admitted: HeaderList = [(ADMITTED_VERSION_HEADER, version), (ADMITTED_ROOT_HEADER, root)] if named else []
        self.end: HeaderList = [(END_VERSION_HEADER, version), (END_ROOT_HEADER, root)] if named else []


def is_event_stream(start: Message) -> bool:
    """Whether an answer is a stream of events."""
    return header(start, b"content-type").startswith(b"text/event-stream")


def is_whole(start: Message) -> bool:
    """Whether an answer was there before its headers: its length is known."""
    return bool(header(start, b"content-length"))
