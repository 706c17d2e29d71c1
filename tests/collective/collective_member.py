"""One member of a collective as a process. stdin: one line, where the meeting is (the lead is told nothing there).

    python -m tests.collective.collective_member CASE MEMBER UPDATES FAULT SECONDS SILENCE DEVICE

DEVICE: "cpu", or "cuda": the member's number is its GPU's.
FAULT: "-", or "kill", "stop" or "fail", which it does to itself in the middle of the last update. Prints JSON lines:
the lead where the meeting is; then for each update what came of it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time

import torch

from ckpt_engine.core.problems import CkptEngineError, internal
from ckpt_engine.transport.collective.door import MeetingDoor
from ckpt_engine.transport.collective.meeting import Attendance
from ckpt_engine.transport.collective.on_gpu import GpuMember
from ckpt_engine.transport.collective.on_host import HostMember
from tests.collective.collective_case import DTYPES, KEY, LIMIT, Memory, make_case
from tests.line_process import say


def main() -> None:
    name, member, updates, fault, seconds, silence, kind = sys.argv[1:]
    number = int(member)
    case = make_case(name)
    if number == 0:
        door = MeetingDoor()
        door.meeting(b"", KEY, float(silence))
        say(address=door.address)
    host, port = json.loads(sys.stdin.readline()) if number else door.address
    attendance = Attendance((host, port), KEY, case.members[number].name, case.members[0].name, LIMIT)
    device = kind if kind == "cpu" else f"{kind}:{number}"
    memory = Memory(case, number, device)
    began = time.monotonic()
    try:
        given = case.schedule, number, attendance, memory.places, DTYPES
        one: HostMember | GpuMember
        if kind == "cpu":
            one = HostMember(*given, "127.0.0.1", LIMIT)
        else:
            one = GpuMember(*given, torch.device(device), LIMIT)
        for version in range(1, int(updates) + 1):
            if case.members[number].is_source:
                memory.renew(version)
            done = 0

            def told(size: int, last: bool = version == int(updates)) -> None:
                nonlocal done
                done += size
                if last and fault != "-" and done > one.bytes // 2:
                    if fault == "fail":
                        raise internal("its memory went away")
                    os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[fault])

            began = time.monotonic()
            moved = one.run(float(seconds), told)
            wrong = [] if case.members[number].is_source else memory.wrong(version)
            say(version=version, moved=moved, wrong=wrong)
        one.close()
        attendance.close()
    except CkptEngineError as error:
        say(code=error.code, message=error.problem.message, seconds=time.monotonic() - began)
    if number == 0:
        sys.stdin.readline()  # the meeting stays until all have ended
        door.close()


if __name__ == "__main__":
    main()
