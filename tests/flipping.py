"""Flips a bit of a tensor in the memory of another process, as a cosmic ray, a stray pointer or bad memory would.

It finds the tensor by its bytes, in memory that the process may write to and shares with no other: so it needs neither
a hook in the engine nor its goodwill. A fake of the fault only: no honest part of ours writes to another process.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

_CHUNK = 64 << 20


def flip_in(pid: int, tensor: torch.Tensor) -> None:
    """Flips one bit in the middle of each copy of a tensor's bytes that the process has. The process itself must be the
    caller's own. Raises AssertionError if it has none, or so many that others are among them."""
    other = bytearray(_bytes(tensor))
    other[len(other) // 2] ^= 1
    write_in(pid, tensor, bytes(other))


def write_in(pid: int, tensor: torch.Tensor, other: torch.Tensor | bytes) -> None:
    """Writes other values over each copy of a tensor's bytes that the process has. Raises as `flip_in`."""
    pattern, data = _bytes(tensor), other if isinstance(other, bytes) else _bytes(other)
    assert len(pattern) >= 64, "short patterns are found by chance"
    assert len(pattern) == len(data)
    with Path(f"/proc/{pid}/mem").open("r+b", buffering=0) as memory:
        places = [place for begin, end in _writable(pid) for place in _find(memory, begin, end, pattern)]
        assert 1 <= len(places) <= 4, f"process {pid} has {len(places)} copies of a tensor of {len(pattern)} bytes"
        for place in places:
            memory.seek(place)
            memory.write(data)


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def _writable(pid: int) -> Iterator[tuple[int, int]]:
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        span, rights, *_ = line.split()
        if rights.startswith("rw-p") and not line.endswith(("[vvar]", "[vsyscall]")):
            begin, end = (int(each, 16) for each in span.split("-"))
            yield begin, end


def _find(memory: object, begin: int, end: int, pattern: bytes) -> Iterator[int]:
    """The addresses of a pattern in a mapping, chunks of which overlap."""
    assert hasattr(memory, "seek")
    assert hasattr(memory, "read")
    at = begin
    while at < end:
        memory.seek(at)
        try:
            chunk: bytes = memory.read(min(_CHUNK, end - at))
        except OSError:  # unmapped since, or a guard
            return
        found = chunk.find(pattern)
        while found >= 0:
            yield at + found
            found = chunk.find(pattern, found + 1)
        if len(chunk) <= len(pattern):
            return
        at += len(chunk) - len(pattern) + 1
