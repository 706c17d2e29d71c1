"""Lends a slot of random bytes in chunks over TCP, and sends the same bytes over a raw socket beside it.

Arguments: bytes of the slot, bytes of a chunk, bytes of a run (a chunk's runs lie with gaps of a quarter of that).
Prints the OfferedRegion in hexadecimal and the raw socket's port, then waits until its input ends. A byte on the raw
socket asks for as many bytes as all chunks have, of memory without gaps.
"""

from __future__ import annotations

import os
import socket
import sys
import threading

import torch

from ckpt_engine.core.offers import region_offered
from ckpt_engine.relay.arena import Arena
from ckpt_engine.transport.base import ChunkRuns, LentChunks, Network
from ckpt_engine.transport.tcp.server import TcpChunkLender

KEY = b"b" * 16

FRAME = 4 << 20


def chunks_in(size: int, chunk: int, run: int) -> list[ChunkRuns]:
    """All chunks of a slot, each with its runs."""
    found: list[ChunkRuns] = []
    at = 0
    step = run + run // 4 // 64 * 64
    while at + chunk // run * step <= size:
        found.append([(at + number * step, run) for number in range(chunk // run)])
        at += chunk // run * step
    return found


def send_raw(listener: socket.socket, descriptor: int, size: int) -> None:
    """Sends the first bytes of a memory file whenever it is asked for them."""
    connection, _ = listener.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while connection.recv(1):
        at = 0
        while at < size:
            at += os.sendfile(connection.fileno(), descriptor, at, min(FRAME, size - at))


def main() -> None:
    """Until its input ends."""
    size, chunk, run = map(int, sys.argv[1:])
    arena = Arena(2 * size)
    arena.reserve(0, arena.slot_bytes, "a benchmark")
    memory = arena.tensor(0, 0, (arena.slot_bytes,), torch.uint8)
    memory.copy_(torch.randint(0, 256, memory.shape, dtype=torch.uint8))
    lender = TcpChunkLender(arena.lendable(), Network("127.0.0.1:0", "127.0.0.1", 5.0))
    chunks = chunks_in(arena.slot_bytes, chunk, run)
    lending = lender.lend(LentChunks(0, KEY, chunks.__getitem__, range(len(chunks))))
    for number in range(len(chunks)):
        lending.verified(number)
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=send_raw, args=(listener, arena.descriptor, len(chunks) * chunk), daemon=True).start()
    offered = region_offered([lender.chunks]).SerializeToString().hex()
    print(offered, listener.getsockname()[1], flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
