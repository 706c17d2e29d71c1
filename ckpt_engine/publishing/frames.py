"""The frames that a manager and its publishing process exchange over pipes.

A frame is its kind (one byte), its length (four bytes, little endian) and a protobuf message. Both ends are processes
of one program and one user, so nothing is checked but that a frame is whole.
"""

from __future__ import annotations

import struct
from typing import BinaryIO

LINEAGE = "directory"
"""Default lineage of directories."""

REQUEST = b"q"
"""UpdateFromDirectoryRequest: to the process."""
EVENT = b"e"
"""UpdateEvent: from it; one with a report is the last of its request."""
PROBLEM = b"p"
"""Problem: from it, in place of a report."""

HEAD = struct.Struct("<cI")


def encode_frame(kind: bytes, body: bytes) -> bytes:
    """The bytes of one frame."""
    return HEAD.pack(kind, len(body)) + body


def read_frame(source: BinaryIO) -> tuple[bytes, bytes] | None:
    """The kind and the body of the next frame; None: the other end has closed. Blocks."""
    head = source.read(HEAD.size)
    if len(head) < HEAD.size:
        return None
    kind, size = HEAD.unpack(head)
    body = source.read(size)
    return (kind, body) if len(body) == size else None
