"""The protocol between relays over TCP: fixed headers, all little-endian, every count bounded.

    reader                                       owner
    HELLO  magic, version, slot, arena, token    YES, or NO and why not; then it hangs up
    HOLD                                         YES and the lending, or NO and why not
    READ   lending, runs of the slot             DATA frames: the runs' bytes in their order; GONE and why instead, once
                                                 the lending has ended
    RELEASE                                      (nothing)
    PASS   key of a filling, number of a chunk   DATA frames once that chunk is verified, WAIT until then; GONE and why

A reader may ask for the next runs before the last ones have come; they come in the order in which they were asked for.
PASS is about what is being filled, so its greeting names no slot (NO_SLOT).
Pure: no socket is touched here.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

from ckpt_engine.core.problems import invalid

VERSION = 1

MAGIC = b"ckwt"

TOKEN_BYTES = 32

LENDING_BYTES = 16

ARENA_BYTES = 16

HELLO = struct.Struct(f"<4sB3xI{ARENA_BYTES}s{TOKEN_BYTES}s")
"""Magic, version, slot, arena, token: what a connection is for, from its first byte to its last."""

QUESTION = struct.Struct(f"<B3xI{LENDING_BYTES}s")
"""Kind, how many runs follow, lending."""

HOLD, RELEASE, READ, PASS = range(1, 5)

NO_SLOT = 2**32 - 1
"""In a greeting: the connection asks for chunks of what is being filled."""

RUN = struct.Struct("<QQ")
"""Offset in the slot, length; bytes."""

FRAME = struct.Struct("<B3xI")
"""What follows, and how many bytes of it."""

YES, NO, DATA, GONE, WAIT = range(1, 6)

PULSE = struct.Struct("<Q")
"""With WAIT: a number that changes whenever its sender receives bytes of what it is being filled with."""

FRAME_BYTES = 4 << 20
"""The most of one DATA frame. Between two frames the owner checks that the lending still holds."""

WORDS_BYTES = 1024
"""The most of a reason."""

MOST_RUNS = 1024
"""The most runs of one READ."""

MOST_BYTES = 64 << 20
"""The most that the runs of one READ may have together."""


class Hello(NamedTuple):
    """What a connection is for."""

    slot: int
    arena: bytes
    token: bytes


class ReaderMessage(NamedTuple):
    """A message of a reader."""

    kind: int  # HOLD, RELEASE, READ or PASS
    runs: int  # how many follow; of PASS: the number of a chunk
    lending: bytes  # of PASS: the key of the filling


class Frame(NamedTuple):
    """The head of an answer."""

    kind: int
    size: int  # bytes that follow


def hello(slot: int, arena: bytes, token: bytes) -> bytes:
    """A reader's first message."""
    return HELLO.pack(MAGIC, VERSION, slot, arena, token)


def read_hello(data: bytes) -> Hello:
    """Reads a greeting. Raises INVALID_ARGUMENT for a malformed one, or one of another version."""
    try:
        magic, version, slot, arena, token = HELLO.unpack(data)
    except struct.error as error:
        raise invalid(f"{len(data)} bytes are no greeting of a relay") from error
    if magic != MAGIC:
        raise invalid("the caller is no relay")
    if version != VERSION:
        raise invalid(f"it speaks version {version} of relays' protocol, and this relay version {VERSION}")
    return Hello(slot, arena, token)


def question(kind: int, lending: bytes = bytes(LENDING_BYTES), runs: Sequence[tuple[int, int]] = ()) -> bytes:
    """A message of a reader. runs: (offset in the slot, length)."""
    return QUESTION.pack(kind, len(runs), lending) + b"".join(RUN.pack(*run) for run in runs)


def chunk_question(key: bytes, chunk: int) -> bytes:
    """A reader's question for a chunk of a filling. key: 16 bytes."""
    return QUESTION.pack(PASS, chunk, key)


def read_question(data: bytes) -> ReaderMessage:
    """Reads a message of a reader. Raises INVALID_ARGUMENT for an invalid one."""
    try:
        found = ReaderMessage(*QUESTION.unpack(data))
    except struct.error as error:
        raise invalid(f"{len(data)} bytes are no question") from error
    if found.kind not in (HOLD, RELEASE, READ, PASS):
        raise invalid(f"there is no question of kind {found.kind}")
    if found.kind != PASS and not (1 <= found.runs <= MOST_RUNS if found.kind == READ else found.runs == 0):
        raise invalid(f"question {found.kind} is about {found.runs} runs; a read is about 1 to {MOST_RUNS}")
    return found


def read_runs(data: bytes, size: int) -> list[tuple[int, int]]:
    """(offset, length) of each run. size: bytes of the slot that are lent. Raises INVALID_ARGUMENT for runs that do not
    lie in it, and for too many bytes at once."""
    if len(data) % RUN.size:
        raise invalid(f"{len(data)} bytes are no list of runs")
    found = list(RUN.iter_unpack(data))
    for offset, length in found:
        if not length or offset + length > size:
            raise invalid(f"a run of {length} bytes at {offset} does not lie in the {size} bytes that are lent")
    if (total := sum(length for _, length in found)) > MOST_BYTES:
        raise invalid(f"{total} bytes were asked for at once, and {MOST_BYTES} may be")
    return found


def frame(kind: int, size: int) -> bytes:
    """The head of an answer."""
    return FRAME.pack(kind, size)


def refusal(kind: int, why: str) -> bytes:
    """NO or GONE, with the reason."""
    words = why.encode()[:WORDS_BYTES]
    return frame(kind, len(words)) + words


def read_frame(data: bytes) -> Frame:
    """Reads the head of an answer. Raises INVALID_ARGUMENT for a malformed one, or a size that is too large."""
    try:
        found = Frame(*FRAME.unpack(data))
    except struct.error as error:
        raise invalid(f"{len(data)} bytes are no answer") from error
    most = {YES: LENDING_BYTES, NO: WORDS_BYTES, GONE: WORDS_BYTES, DATA: FRAME_BYTES, WAIT: PULSE.size}.get(found.kind)
    if most is None or found.size > most or found.size < {DATA: 1, WAIT: PULSE.size}.get(found.kind, 0):
        raise invalid(f"an answer of kind {found.kind} with {found.size} bytes is none of a relay")
    return found
