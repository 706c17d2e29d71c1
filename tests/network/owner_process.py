"""A relay's memory that lends chunks over TCP, and UCX if it has devices, as a process of its own.

One command a line, one answer a line, both JSON. Arguments: devices (comma-separated, or none), address at which others
reach it. Commands: {"do": NAME, ...}; answers: {"ok": ...} or {"no": WHY}.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.digest.boxes import digest_box
from ckpt_engine.transport.base import Network
from ckpt_engine.transport.ucx.lanes import UcxLanes
from ckpt_engine.v1.weights_pb2 import OfferedRegion
from tests.network.chunk_owner import SLOT_BYTES, Asking, Owner

WHOLE = [[(number << 20, 1 << 20)] for number in range(SLOT_BYTES >> 20)]
"""All of a slot in chunks of 1 MiB."""


class _Commands:
    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._asking: Asking | None = None

    def facts(self) -> dict[str, Any]:
        found: dict[str, Any] = {"held": self._owner.held}
        for lanes in self._owner.arena.carriers:
            assert isinstance(lanes, UcxLanes)
            found |= {"fork_server": lanes.fork_server, "helpers": lanes.helpers}
        return found

    def lend(self) -> str:
        """Both ways to slot 0, of which all chunks of CHUNKS are lent."""
        self._owner.lend()
        return self._owner.offered.SerializeToString().hex()

    def lend_whole(self) -> str:
        self._owner.lend(chunks=WHOLE, verified=range(len(WHOLE)))
        return self._owner.offered.SerializeToString().hex()

    def connect(self, offered: str) -> None:
        found = OfferedRegion.FromString(bytes.fromhex(offered))
        self._asking = Asking(found, landing=self._owner.slot(1))

    def read_whole(self) -> float:
        """Reads all of the other's slot 0 into slot 1; the seconds that took."""
        assert self._asking is not None
        began = time.monotonic()
        for chunk in range(len(WHOLE)):
            self._asking.asker.ask(chunk)
        for chunk, runs in enumerate(WHOLE):
            assert self._asking.receive(chunk, runs) == ""
        return time.monotonic() - began

    def close(self) -> None:
        assert self._asking is not None
        self._asking.asker.close()

    def digest(self, slot: int) -> int:
        return digest_box(self._owner.slot(slot), (0,))


def main() -> None:
    """Until its input ends."""
    devices, address = sys.argv[1:]
    network = Network(f"{address}:0", address, 5.0, insecure=True)
    commands = _Commands(Owner(network, () if devices == "none" else tuple(devices.split(","))))
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = {"ok": getattr(commands, command.pop("do"))(**command)}
        except CkptEngineError as error:
            answer = {"no": str(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
