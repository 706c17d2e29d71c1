"""Server-sent events: the bytes of a stream into the data of whole events, and back. Pure."""

from __future__ import annotations

DONE = b"[DONE]"
COMMENT = b": waiting\n\n"
MOST_EVENT_BYTES = 64 << 20
"""Most bytes of one event of an engine; SGLang's repeat all tokens with their log-probabilities."""


class EventTooLargeError(Exception):
    """An engine sent an event of more than MOST_EVENT_BYTES."""


class Events:
    """Cuts a stream into whole events. An event that is incomplete at the end of the stream is dropped."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Adds bytes of the stream; returns the data of the events that are now whole. Raises EventTooLargeError."""
        *whole, self._rest = (self._rest + data).replace(b"\r\n", b"\n").split(b"\n\n")
        if len(self._rest) > MOST_EVENT_BYTES:
            raise EventTooLargeError(f"an event of more than {MOST_EVENT_BYTES} bytes")
        return [event for event in map(_data, whole) if event]


def done() -> bytes:
    """The last event of a stream."""
    return b"data: " + DONE + b"\n\n"


def _data(block: bytes) -> bytes:
    lines = [line[5:].removeprefix(b" ") for line in block.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines)
