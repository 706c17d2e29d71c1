"""A real reader of a relay in a process of its own, driven by one JSON line at a time.

Run as a script it answers {"open": regions}, {"check": true}, {"sum": index}, {"rest": true}, {"close": true},
{"fork": true} with the pid of a child that sleeps, and {"seize": index}, which tries every way to change what it reads.
It ends when its input does.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.transport.relay_memory.reader import RelayMemoryTransport
from ckpt_engine.v1.weights_pb2 import Region, SourceTable
from tests.line_process import LineProcess


def regions_of(table: SourceTable) -> list[Region]:
    """The regions of a relay's table, as a plan has them."""
    return [
        Region(id=each.id, size=each.size, transport=offer.transport, locator=offer.locator)
        for each in table.regions
        for offer in each.offers
        if offer.transport == "relay_memory"
    ]


class ReaderProcess(LineProcess):
    """Starts a reader. before: of its command, as `unshare`."""

    def __init__(self, before: Sequence[str] = ()) -> None:
        super().__init__("tests.relay.relay_reader", before=before)
        self.pid: int = self.answer()

    def open(self, table: SourceTable) -> Any:
        return self.ask(open=[region.SerializeToString().hex() for region in regions_of(table)])


def _seize(transport: RelayMemoryTransport) -> list[str]:
    """The ways that worked."""
    (arena,) = transport._arenas.values()
    descriptor, libc = arena._descriptor, ctypes.CDLL(None, use_errno=True)

    def again() -> mmap.mmap:
        return mmap.mmap(os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR), mmap.PAGESIZE, flags=mmap.MAP_SHARED)

    def punched() -> None:
        if libc.fallocate(descriptor, 3, ctypes.c_long(0), ctypes.c_long(mmap.PAGESIZE)):
            raise OSError(ctypes.get_errno(), "fallocate")

    ways: dict[str, Callable[[], object]] = {
        "map": lambda: mmap.mmap(descriptor, mmap.PAGESIZE, flags=mmap.MAP_SHARED),
        "map anew": again,
        "write": lambda: os.pwrite(descriptor, b"x", 0),
        "punch": punched,
        "shrink": lambda: os.ftruncate(descriptor, 0),
        "grow": lambda: os.ftruncate(descriptor, 1 << 40),
    }
    worked = []
    for name, way in ways.items():
        try:
            way()
            worked.append(name)
        except OSError:
            pass
    return worked


def _main() -> None:
    transport = RelayMemoryTransport()
    regions: list[Region] = []
    print(os.getpid(), flush=True)
    opened = transport.open([])
    for line in sys.stdin:
        question = json.loads(line)
        answer: object = None
        try:
            if "open" in question:
                regions = [Region.FromString(bytes.fromhex(each)) for each in question["open"]]
                opened = transport.open(regions)
            elif "check" in question:
                opened.check()
            elif "sum" in question:
                region = regions[question["sum"]]
                answer = int(opened.view(region, 0, (region.size,), (1,), "uint8").sum())
            elif "rest" in question:
                opened.rest()
            elif "fork" in question:
                answer = os.fork()
                if not answer:
                    time.sleep(120)
                    os._exit(0)
            elif "seize" in question:
                answer = _seize(transport)
            else:
                opened.close()
        except CkptEngineError as error:
            answer = str(error)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    _main()
