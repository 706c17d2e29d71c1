"""A real process at the other end of shared memory, driven by one JSON line at a time.

Run as a script it answers: {"own": bytes} with a region, {"read": region} with the sum of its bytes (and keeps it
mapped), {"write": region} by dying of a fault, {"forget": true}. It ends when its input does.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from ckpt_engine.v1.weights_pb2 import Region, SharedMemoryLocator
from tests.line_process import LineProcess


class Peer(LineProcess):
    """Starts a process."""

    def __init__(self) -> None:
        super().__init__("tests.transport.peer", OMP_NUM_THREADS="1")

    def own(self, size: int) -> Region:
        return Region.FromString(bytes.fromhex(self.ask(own=size)))

    def read(self, region: Region) -> Any:
        return self.ask(read=region.SerializeToString().hex())


def holders(region: Region) -> list[int]:
    """Pids of the processes that have this memory open or mapped: while there are none, it does not exist."""
    locator = SharedMemoryLocator.FromString(region.locator)
    return [
        int(process.name)
        for process in Path("/proc").iterdir()
        if process.name.isdigit() and (_open(process, locator) or _mapped(process, locator))
    ]


def _open(process: Path, locator: SharedMemoryLocator) -> bool:
    try:
        for descriptor in (process / "fd").iterdir():
            status = descriptor.stat()
            if (status.st_dev, status.st_ino) == (locator.device, locator.inode):
                return True
    except OSError:
        return False
    return False


def _mapped(process: Path, locator: SharedMemoryLocator) -> bool:
    try:
        lines = (process / "maps").read_text().splitlines()
    except OSError:
        return False
    device = f"{os.major(locator.device):02x}:{os.minor(locator.device):02x}"
    return any(line.split()[3:5] == [device, str(locator.inode)] for line in lines)


def _serve() -> None:
    import torch

    from ckpt_engine.core.problems import CkptEngineError
    from ckpt_engine.transport.shared_memory.memory import SharedArena, SharedMemoryTransport

    arenas, opened, transport = [], [], SharedMemoryTransport()
    for line in sys.stdin:
        question = json.loads(line)
        answer: object = None
        try:
            if "own" in question:
                arenas.append(SharedArena(question["own"]))
                arenas[-1].tensor(0, (question["own"],), torch.uint8).fill_(1)
                answer = arenas[-1].region(0).SerializeToString().hex()
            elif "read" in question or "write" in question:
                region = Region.FromString(bytes.fromhex(question.get("read") or question["write"]))
                opened.append(transport.open([region]))
                view = opened[-1].view(region, 0, (region.size,), (1,), "uint8")
                if "write" in question:
                    view.fill_(9)
                answer = int(view.sum())
            else:
                for regions in opened:
                    regions.close()
                opened.clear()
        except CkptEngineError as error:
            answer = str(error)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    _serve()
