"""A relay on one of two hosts, and a raw socket beside it, driven by one JSON line at a time.

Run as a script it answers {"fill": [slot, wish]} (seconds, and what came over the network), {"cpu": true} (CPU seconds
of this process so far), {"chunks": true} (where it is asked for chunks), {"serve": slot} (the port at which the slot is
sent raw) and {"receive": [address, port, way, lanes]} (seconds). Its last argument says when it uses deltas.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from typing import Any

import torch

from ckpt_engine.addresses import join_address
from ckpt_engine.host.facts import this_host
from ckpt_engine.relay.arena import Arena
from ckpt_engine.relay.deltas import DeltaUse
from ckpt_engine.relay.slots import Slots
from ckpt_engine.transport.base import Network
from ckpt_engine.transport.registry import all_transports
from tests.relay.relay_process import read_wish

CHUNK = 4 << 20
WAYS = {"sendfile": b"f", "send": b"s"}


class Raw:
    """Sends a slot as a program would that knows nothing else: one socket, the whole slot, nothing is looked at."""

    def __init__(self, slots: Slots, slot: int, size: int, address: str) -> None:
        self._memory = slots._arena.lendable()
        self._first, self._size = slot * slots.slot_bytes, size
        self._listener = socket.create_server((address, 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            threading.Thread(target=self._serve, args=(self._listener.accept()[0],), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        view = self._memory.bytes.numpy().data
        while asked := connection.recv(1):
            at, end = self._first, self._first + self._size
            while at < end:
                if asked == WAYS["sendfile"]:
                    at += os.sendfile(connection.fileno(), self._memory.descriptor, at, min(CHUNK, end - at))
                else:
                    at += connection.send(view[at : min(end, at + CHUNK)])


class Receiver:
    """The other side of it: into memory of the same kind as a relay's slot."""

    def __init__(self, size: int) -> None:
        self._arena = Arena(2 * size + (8 << 20))
        self._arena.reserve(0, size, "raw")
        self._view = self._arena.tensor(0, 0, (size,), torch.uint8).numpy().data
        self._connections: dict[tuple[str, int], socket.socket] = {}

    def receive(self, address: str, port: int, way: str) -> float:
        if (address, port) not in self._connections:
            self._connections[address, port] = socket.create_connection((address, port))
        connection = self._connections[address, port]
        began = time.perf_counter()
        connection.send(WAYS[way])
        at, end = 0, len(self._view)
        while at < end:
            at += connection.recv_into(self._view[at : min(end, at + CHUNK)], 0, socket.MSG_WAITALL)
        return time.perf_counter() - began


def _main(name: str, memory: str, address: str, deltas: DeltaUse = "auto") -> None:
    network = Network(join_address(address, 0), address, 30.0, insecure=True)
    slots = Slots(name, this_host(), int(memory), all_transports(), network=network, deltas=deltas)
    receiver: Receiver | None = None
    print(os.getpid(), flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        answer: Any = None
        if "fill" in question:
            slot, wish = question["fill"]
            began = time.perf_counter()
            held = slots.fill(slot, read_wish(wish), 600.0)
            seconds = time.perf_counter() - began
            assert not held.filled.missing, held.filled.missing[0].problem.message
            answer = {
                "table": held.table.SerializeToString().hex(),
                "seconds": seconds,
                "bytes": held.layout.bytes,
                "size": held.layout.size,
                "network_bytes": held.filled.deltas.network_bytes,
                "delta_bytes": held.filled.deltas.delta_bytes,
                "whole": dict(held.filled.deltas.whole),
            }
        elif "chunks" in question:
            answer = slots.chunks.SerializeToString().hex() if slots.chunks is not None else ""
        elif "serve" in question:
            answer = Raw(slots, *question["serve"], address).port
        elif "receive" in question:
            *where, way, size = question["receive"]
            receiver = receiver or Receiver(size)
            answer = receiver.receive(*where, way)
        elif "cpu" in question:
            answer = time.process_time()
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    _main(*sys.argv[1:])
