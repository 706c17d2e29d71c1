"""A real relay's memory in a process of its own, driven by one JSON line at a time.

Run as a script it answers {"fill": [slot, wish, seconds]}, {"retire": slot}, {"readers": true}, {"reserved": true},
{"pages": true}, {"flat": true} (descriptors and threads) and {"close": true}; a wish is its messages, in hex. It ends
when its input does.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
from collections.abc import Sequence
from typing import Any

from ckpt_engine.addresses import join_address
from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.host.facts import this_host
from ckpt_engine.relay.slots import FillWish, Slots, Want
from ckpt_engine.transport.base import Network, Transport
from ckpt_engine.transport.file.files import FileTransport
from ckpt_engine.transport.relay_memory.reader import RelayMemoryTransport
from ckpt_engine.transport.shared_memory.memory import SharedMemoryTransport
from ckpt_engine.transport.tcp import asker
from ckpt_engine.v1.manager_pb2 import WantTable
from ckpt_engine.v1.weights_pb2 import Identity, SealedRecord, SourceTable, WorkerNeeds
from tests.line_process import LineProcess

MEMORY = 64 << 20


class RelayProcess(LineProcess):
    """Starts a relay. before: of its command, as `unshare`. address: of its host, where it listens for other relays;
    it reads them over TCP then. environment: added to ours."""

    def __init__(
        self,
        name: str = "a",
        memory: int = MEMORY,
        grace: float = 30.0,
        before: Sequence[str] = (),
        users: str = "",
        address: str = "",
        **environment: str,
    ) -> None:
        arguments = (name, str(memory), str(grace), users, address)
        super().__init__("tests.relay.relay_process", *arguments, before=before, **environment)
        self.pid: int = self.answer()

    def fill(self, slot: int, wish: FillWish, seconds: float = 60.0) -> dict[str, Any]:
        """What came of it; `table` is a SourceTable."""
        self.send(fill=[slot, written(wish), seconds])
        return self.filled()

    def filled(self) -> dict[str, Any]:
        answer: dict[str, Any] = self.answer()
        if "table" in answer:
            answer["table"] = SourceTable.FromString(bytes.fromhex(answer["table"]))
        return answer


def written(wish: FillWish) -> dict[str, Any]:
    """As JSON takes it."""
    return {
        "identity": wish.identity.SerializeToString().hex(),
        "record": wish.record.SerializeToString().hex(),
        "tables": [table.SerializeToString().hex() for table in wish.tables],
        "needs": [needs.SerializeToString().hex() for needs in wish.want.needs],
        "everything": wish.want.everything,
        "table": None if wish.table is None else wish.table.SerializeToString().hex(),
    }


def read_wish(told: dict[str, Any]) -> FillWish:
    return FillWish(
        Identity.FromString(bytes.fromhex(told["identity"])),
        SealedRecord.FromString(bytes.fromhex(told["record"])),
        [SourceTable.FromString(bytes.fromhex(each)) for each in told["tables"]],
        want := Want([WorkerNeeds.FromString(bytes.fromhex(each)) for each in told["needs"]], told["everything"]),
        None if told["table"] is None else WantTable.FromString(bytes.fromhex(told["table"])),
        [want],
    )


def _fill(slots: Slots, slot: int, wish: dict[str, Any], seconds: float) -> dict[str, Any]:
    held = slots.fill(slot, read_wish(wish), seconds)
    return {
        "table": held.table.SerializeToString().hex(),
        "missing": [each.problem.message for each in held.filled.missing],
        "faults": [each.message for each in held.filled.faults],
        "brought": dict(held.filled.bytes_by_source),
        "again": held.filled.again,
        "seconds": held.filled.seconds,
        "overruled": held.overruled,
        "bytes": held.layout.bytes,
    }


def _main(name: str, memory: str, grace: str, users: str, address: str) -> None:
    transports: dict[str, Transport] = {
        each.name: each for each in (SharedMemoryTransport(), FileTransport(), RelayMemoryTransport())
    }
    allowed = [int(user) for user in users.split(",") if user]
    network = None
    if address:
        network = Network(join_address(address, 0), address, float(grace), insecure=True)
        asker.SILENCE_SECONDS = asker.ASK_SECONDS = float(os.environ.get("STALL_SECONDS", 15.0))
    slots = Slots(name, this_host(), int(memory), transports, float(grace), allowed, network)
    print(os.getpid(), flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        answer: Any = None
        try:
            if "fill" in question:
                answer = _fill(slots, *question["fill"])
            elif "retire" in question:
                answer = slots._ways.retire(question["retire"])
            elif "readers" in question:
                answer = slots.readers
            elif "reserved" in question:
                answer = slots.reserved
            elif "flat" in question:
                answer = [len(os.listdir("/proc/self/fd")), threading.active_count()]
            elif "chunks" in question:
                answer = "" if slots.chunks is None else slots.chunks.SerializeToString().hex()
            elif "pages" in question:
                answer = slots.pages
            else:
                slots.close()
        except CkptEngineError as error:
            answer = {"problem": str(error)}
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    _main(*sys.argv[1:])
