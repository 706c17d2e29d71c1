"""Counts what a member says to the manager and hears from it: a stub around the generated one, for measuring.

Every call goes through unchanged; each costs two additions more. Counted on the members' side, where every call of
the control plane begins. Heartbeats are told apart, since they depend on the clock and not on updates.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable, Generator
from typing import Any

from google.protobuf.message import Message


def kind(message: Message) -> str:
    """ "ReplicaMessage.prepared" for an envelope, "BlobRef" for anything else."""
    name = type(message).__name__
    if "body" in message.DESCRIPTOR.oneofs_by_name:
        return f"{name}.{message.WhichOneof('body')}"
    return name


class CountingStub:
    """Stands in for a ManagerStub. counts: "call GetBlob" and "message BlobChunk" to numbers."""

    def __init__(self, stub: Any, counts: Counter[str]) -> None:
        self._stub, self._counts = stub, counts

    def __getattr__(self, name: str) -> Callable[..., CountedCall]:
        method = getattr(self._stub, name)

        def call(request: Any, **options: Any) -> CountedCall:
            self._counts[f"call {name}"] += 1
            if isinstance(request, Message):
                self._counts[f"message {kind(request)}"] += 1
            else:
                request = self._passing(request)
            return CountedCall(method(request, **options), self._counts)

        return call

    async def _passing(self, messages: AsyncIterator[Message]) -> AsyncIterator[Message]:
        async for message in messages:
            self._counts[f"message {kind(message)}"] += 1
            yield message


class CountedCall:
    """A call in progress, awaited or iterated as the original is; everything else is the original's."""

    def __init__(self, call: Any, counts: Counter[str]) -> None:
        self._call, self._counts = call, counts

    def __await__(self) -> Generator[Any, None, Message]:
        answer: Message = yield from self._call.__await__()
        self._counts[f"message {kind(answer)}"] += 1
        return answer

    async def __aiter__(self) -> AsyncIterator[Message]:
        async for message in self._call:
            self._counts[f"message {kind(message)}"] += 1
            yield message

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)


def per_update(before: Counter[str], after: Counter[str], updates: int) -> dict[str, Any]:
    """What one update takes on average: calls, messages without heartbeats, and messages by kind."""
    grown = {name: count - before[name] for name, count in after.items() if count > before[name]}
    messages = {name[8:]: count for name, count in grown.items() if name.startswith("message ")}
    steady = {name: count for name, count in sorted(messages.items()) if not name.endswith(".heartbeat")}
    calls = sum(count for name, count in grown.items() if name.startswith("call "))
    return {
        "calls": round(calls / updates, 2),
        "messages": round(sum(steady.values()) / updates, 2),
        "worker_requests": round(grown.get("worker requests", 0) / updates, 2),
        "heartbeats": round((sum(messages.values()) - sum(steady.values())) / updates, 2),
        "messages_by_kind": {name: round(count / updates, 2) for name, count in steady.items()},
    }
