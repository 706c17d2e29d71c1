"""What a relay has of UCX, as a process of its own: one command a line, one answer a line, both JSON.

Arguments: bytes of a slot, devices (comma-separated). Commands: {"do": NAME, ...}; answers: {"ok": ...} or {"no": WHY}.
"""

from __future__ import annotations

import json
import sys
import time
from functools import partial
from typing import Any

import torch

from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.digest.boxes import digest_box
from ckpt_engine.relay.arena import Arena
from ckpt_engine.transport.base import ByteRun, Network
from ckpt_engine.transport.ucx.lanes import UcxLanes, lanes_on
from ckpt_engine.transport.ucx.lender import UcxLender
from ckpt_engine.transport.ucx.reader import UcxFetcher, UcxLink
from ckpt_engine.v1.weights_pb2 import Region


def pattern(size: int, seed: int) -> torch.Tensor:
    """The same bytes in every process."""
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


class Relay:
    """One arena of two slots, all of it reserved, and both sides of UCX. stall: of its fetcher."""

    def __init__(self, slot_bytes: int, devices: tuple[str, ...], stall: float = 20.0) -> None:
        self.arena = Arena(2 * slot_bytes, writers=[partial(lanes_on, devices=devices)])
        for slot in range(2):
            self.arena.reserve(slot, slot_bytes, "a test")
        (lanes,) = self.arena.writers
        assert isinstance(lanes, UcxLanes)
        self.lanes = lanes
        try:
            self.lender = UcxLender(self.arena.lendable(), Network("", "", 5.0))
        except CkptEngineError:
            self.arena.close()
            raise
        self.fetcher = UcxFetcher(stall)

    def slot(self, slot: int) -> torch.Tensor:
        """uint8[slot_bytes]."""
        return self.arena.tensor(slot, 0, (self.arena.slot_bytes,), torch.uint8)

    def lent(self, slot: int, offset: int = 0, size: int = 0) -> Region:
        """A part of a slot, lent."""
        region = self.lender.offer(3, slot, offset, size or self.arena.slot_bytes - offset)
        self.lender.lend(slot)
        return region

    def linked(self, region: Region, slot: int = 0, seconds: float = 60.0) -> UcxLink:
        """A link that lands in a slot."""
        link = self.fetcher.connect(region, self.slot(slot), seconds)
        link.hold(seconds)
        return link

    def close(self) -> None:
        """Ends everything."""
        self.lender.close()
        self.arena.close()


def fetched(link: UcxLink, runs: list[ByteRun], seconds: float = 60.0) -> None:
    """Reads runs and waits for them. Raises what the link raises, and TimeoutError."""
    ticket, until = link.read(runs), time.monotonic() + seconds
    while ticket.poll() < sum(run.length for run in runs):
        if time.monotonic() > until:
            raise TimeoutError(f"{runs} have not landed")
        time.sleep(50e-6)


class _Commands:
    def __init__(self, relay: Relay) -> None:
        self._relay = relay
        self._link: UcxLink | None = None

    def facts(self) -> dict[str, Any]:
        return {"fork_server": self._relay.lanes.fork_server, "helpers": self._relay.lanes.helpers}

    def fill(self, slot: int, seed: int) -> int:
        memory = self._relay.slot(slot)
        memory.copy_(pattern(memory.nbytes, seed))
        return digest_box(memory, (0,))

    def offer(self, slot: int) -> str:
        return self._relay.lent(slot).SerializeToString().hex()

    def refuse(self, slot: int) -> None:
        self._relay.lender.refuse(slot)

    def connect(self, region: str, slot: int) -> None:
        self._link = self._relay.linked(Region.FromString(bytes.fromhex(region)), slot)

    def read(self, runs: list[list[int]]) -> float:
        assert self._link is not None
        began = time.monotonic()
        fetched(self._link, [ByteRun(*run) for run in runs])
        return time.monotonic() - began

    def sever(self) -> None:
        assert self._link is not None
        self._link.sever()

    def digest(self, slot: int) -> int:
        return digest_box(self._relay.slot(slot), (0,))


def main() -> None:
    """Until its input ends."""
    size, devices, stall = sys.argv[1:]
    commands = _Commands(Relay(int(size), tuple(devices.split(",")), float(stall)))
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = {"ok": getattr(commands, command.pop("do"))(**command)}
        except CkptEngineError as error:
            answer = {"no": str(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
