"""A real process that owns leased memory, driven by one JSON line at a time.

Run as a script it answers: {"open": parts} with its office's name, {"readers": true} with their number,
{"withdraw": seconds} with "" or why not, {"fork": true} with the pid of a child that sleeps. It ends when its input
does.
"""

from __future__ import annotations

import json
import os
import sys
import time
from functools import partial
from typing import Any

from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.transport.cuda_ipc.lease import BATCH, LeaseOffice
from tests.line_process import LineProcess


class Owner(LineProcess):
    """Starts a process that owns leased memory."""

    def __init__(self) -> None:
        super().__init__("tests.transport.lease_owner")


def _export(parts: int, region: int, first: int) -> list[int]:
    descriptors = []
    for part in range(first, min(first + BATCH, parts)):
        descriptor = os.memfd_create("part", os.MFD_CLOEXEC)
        os.write(descriptor, f"{region}.{part}".encode())
        descriptors.append(descriptor)
    return descriptors


def _main() -> None:
    office: LeaseOffice | None = None
    for line in sys.stdin:
        question = json.loads(line)
        answer: Any = None
        if "open" in question:
            parts = question["open"]
            office = LeaseOffice(partial(_export, parts) if parts else None)
            answer = office.name
        elif "fork" in question:
            answer = os.fork()
            if not answer:
                time.sleep(120)
                os._exit(0)
        assert office is not None
        if "readers" in question:
            answer = office.readers
        elif "withdraw" in question:
            try:
                office.withdraw(question["withdraw"])
                answer = ""
            except CkptEngineError as error:
                answer = error.problem.message
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    _main()
