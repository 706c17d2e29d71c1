"""The protocol between relays over TCP: fixed headers, all little-endian, every count bounded. Pure: without sockets.

    asker                                          owner
    HELLO    magic, version, arena, token, name    YES, or NO and why not; then it hangs up
    CHUNK    how, number, key of the version       one of the answers below, maybe after some WAIT
    BASE     key, root of another version          (nothing) the asker holds that, and takes deltas against it
    RELEASE  number, key                           (nothing) the asker has read what PLACE named, or gives that up
    LEAVE    key                                   (nothing) the asker asks for no more of this version

    DATA   bytes of the chunk, in as many frames as it takes
    DELTA  how many bytes a delta of the chunk has, which follow as DATA; only to a question that asks for it
    WHOLE  why DATA of the chunk follows, where a delta was asked for
    WAIT   a number that changes whenever the owner receives some of the version; once a second until it can answer
    TO     name of the relay to which the chunk was granted
    NOT    why this chunk does not come from here: the connection goes on
    LATER  why this chunk is not here now (NOW), though it may come: the connection goes on
    PLACE  slot, and runs of it where the chunk lies: the owner leaves them as they are until RELEASE
    GONE   why the connection ends, also in the middle of a chunk

An asker may ask for further chunks before the last one has come; answers come in the order of the questions.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

from ckpt_engine.core.chunks import KEY_BYTES
from ckpt_engine.core.problems import invalid
from ckpt_engine.transport.base import ChunkAsk

VERSION = 3

MAGIC = b"ckwt"

TOKEN_BYTES = 32

ARENA_BYTES = 16

NAME_BYTES = 256
"""The most of a relay's name."""

HELLO = struct.Struct(f"<4sB3x{ARENA_BYTES}s{TOKEN_BYTES}sH")
"""Magic, version, arena, token, and how many bytes the asker's name has, which follows."""

QUESTION = struct.Struct(f"<BB2xI{KEY_BYTES}s")
"""Kind, how (ChunkAsk, with PLACED or BASED added), number of the chunk, key of the version. A BASE is followed by the
root."""

CHUNK, RELEASE, LEAVE, BASE = range(1, 5)

ROOT_BYTES = 32

BASED = 0x40
"""A delta is welcome, against the base that was named last for this version."""

PLACED = 0x80
"""The asker can read memory of the owner itself: PLACE is as welcome as DATA."""

FRAME = struct.Struct("<B3xI")
"""What follows, and how many bytes of it."""

YES, NO, DATA, WAIT, TO, NOT, PLACE, GONE, LATER, DELTA, WHOLE = range(1, 12)

PULSE = struct.Struct("<Q")

LENGTH = struct.Struct("<Q")

SLOT = struct.Struct("<I")

RUN = struct.Struct("<QQ")
"""Offset in the slot, length; bytes."""

FRAME_BYTES = 4 << 20
"""The most of one DATA frame. Between two frames the owner checks that the chunk may still be sent."""

WORDS_BYTES = 1024
"""The most of a reason."""

MOST_RUNS = 4096
"""The most runs of one PLACE; a chunk of more is sent."""

_LEAST_AND_MOST = {
    YES: (0, 0),
    NO: (0, WORDS_BYTES),
    DATA: (1, FRAME_BYTES),
    WAIT: (PULSE.size, PULSE.size),
    TO: (1, NAME_BYTES),
    NOT: (0, WORDS_BYTES),
    PLACE: (SLOT.size + RUN.size, SLOT.size + MOST_RUNS * RUN.size),
    GONE: (0, WORDS_BYTES),
    LATER: (0, WORDS_BYTES),
    DELTA: (LENGTH.size, LENGTH.size),
    WHOLE: (0, WORDS_BYTES),
}
"""Bytes that may follow the head of each answer."""


class Hello(NamedTuple):
    """What an asker says first."""

    arena: bytes
    token: bytes
    name: int  # bytes of its name, which follows


class Question(NamedTuple):
    """A message of an asker."""

    kind: int  # CHUNK, RELEASE, LEAVE or BASE
    how: ChunkAsk
    placed: bool  # whether it can read the owner's memory itself
    based: bool  # whether a delta is welcome
    chunk: int
    key: bytes


class Frame(NamedTuple):
    """The head of an answer."""

    kind: int
    size: int  # bytes that follow


class PlacedRuns(NamedTuple):
    """Where a chunk lies in the owner's arena."""

    slot: int
    runs: list[tuple[int, int]]  # (offset in the slot, length)


def hello(arena: bytes, token: bytes, name: str) -> bytes:
    """An asker's first message. Raises INVALID_ARGUMENT for a name that is empty or too long."""
    text = name.encode()
    if not 1 <= len(text) <= NAME_BYTES:
        raise invalid(f"the name of a relay has {len(text)} bytes, not 1 to {NAME_BYTES}: {name[:40]!r}")
    return HELLO.pack(MAGIC, VERSION, arena, token, len(text)) + text


def read_hello(data: bytes) -> Hello:
    """Reads a greeting. Raises INVALID_ARGUMENT for a malformed one, or one of another version."""
    try:
        magic, version, arena, token, name = HELLO.unpack(data)
    except struct.error as error:
        raise invalid(f"{len(data)} bytes are not a greeting of a relay") from error
    if magic != MAGIC:
        raise invalid("the caller is not a relay")
    if version != VERSION:
        raise invalid(f"it speaks version {version} of relays' protocol, and this relay version {VERSION}")
    if not 1 <= name <= NAME_BYTES:
        raise invalid(f"its name has {name} bytes, not 1 to {NAME_BYTES}")
    return Hello(arena, token, name)


def read_name(data: bytes) -> str:
    """Reads a relay's name. Raises INVALID_ARGUMENT if it is not text."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise invalid(f"the name of a relay is not UTF-8: {data[:40]!r}") from error


def question(
    kind: int,
    key: bytes,
    chunk: int = 0,
    how: ChunkAsk = ChunkAsk.WAIT,
    placed: bool = False,
    based: bool = False,
) -> bytes:
    """A message of an asker."""
    return QUESTION.pack(kind, how | (PLACED if placed else 0) | (BASED if based else 0), chunk, key)


def base(key: bytes, root: bytes) -> bytes:
    """BASE: an asker's message about the version that it holds besides."""
    return question(BASE, key) + root


def read_question(data: bytes) -> Question:
    """Reads a message of an asker. Raises INVALID_ARGUMENT for an invalid one."""
    try:
        kind, how, chunk, key = QUESTION.unpack(data)
    except struct.error as error:
        raise invalid(f"{len(data)} bytes are not a question") from error
    if kind not in (CHUNK, RELEASE, LEAVE, BASE):
        raise invalid(f"there is no question of kind {kind}")
    plain = how & ~(PLACED | BASED)
    if plain not in list(ChunkAsk) or (kind != CHUNK and how):
        raise invalid(f"a question of kind {kind} cannot be asked in the way {how}")
    return Question(kind, ChunkAsk(plain), bool(how & PLACED), bool(how & BASED), chunk, key)


def frame(kind: int, content: bytes = b"") -> bytes:
    """The bytes of an answer."""
    return FRAME.pack(kind, len(content)) + content


def refusal(kind: int, why: str) -> bytes:
    """NO, NOT, LATER, GONE or WHOLE, with the reason."""
    return frame(kind, why.encode()[:WORDS_BYTES])


def place(slot: int, runs: Sequence[tuple[int, int]]) -> bytes:
    """PLACE. runs: at most MOST_RUNS."""
    return frame(PLACE, SLOT.pack(slot) + b"".join(RUN.pack(*run) for run in runs))


def read_frame(data: bytes) -> Frame:
    """Reads the head of an answer. Raises INVALID_ARGUMENT for a malformed one, or a size that it cannot have."""
    try:
        found = Frame(*FRAME.unpack(data))
    except struct.error as error:
        raise invalid(f"{len(data)} bytes are not an answer") from error
    least, most = _LEAST_AND_MOST.get(found.kind, (1, 0))
    if not least <= found.size <= most:
        raise invalid(f"a relay gives no answer of kind {found.kind} with {found.size} bytes")
    return found


def read_place(data: bytes) -> PlacedRuns:
    """Reads what follows the head of PLACE. Raises INVALID_ARGUMENT if it is malformed. Whether the runs lie in the
    owner's arena is for the reader of that memory to check."""
    if len(data) < SLOT.size or (len(data) - SLOT.size) % RUN.size:
        raise invalid(f"{len(data)} bytes do not say where a chunk lies")
    runs = list(RUN.iter_unpack(data[SLOT.size :]))
    if not all(length for _, length in runs) or any(offset + length >= 1 << 63 for offset, length in runs):
        raise invalid("a chunk is said to lie in runs that no memory has")
    (slot,) = SLOT.unpack_from(data)
    return PlacedRuns(slot, runs)
