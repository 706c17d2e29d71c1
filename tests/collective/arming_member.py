"""One member of a collective as a process, which votes before each update. stdin: one line, where the meeting is.

    python -m tests.collective.arming_member CASE MEMBER UPDATES FAULT SECONDS PATIENCE

FAULT: "-", or WHAT-WHEN, which it does to itself in the last update: "kill" or "stop"; "vote" (before it votes),
"voted" (when its vote is in) or "middle". Prints JSON lines: the lead where the meeting is; then "go" when it begins an
update, and what came of it. A member that cannot begin prints "back".
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Sequence

from ckpt_engine.core.arming import BallotAnswer
from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.transport.collective.door import MeetingDoor
from ckpt_engine.transport.collective.meeting import Attendance
from ckpt_engine.transport.collective.on_host import HostMember
from ckpt_engine.transport.collective.voting import wait_for_go
from tests.collective.collective_case import DTYPES, KEY, LIMIT, Memory, make_case
from tests.line_process import say


class Struck(Attendance):
    """Does to its process what FAULT says once its vote is in."""

    fault = ""

    def ballot(self, epoch: int, verb: str, **given: float | str | Sequence[str]) -> BallotAnswer:
        answer = super().ballot(epoch, verb, **given)
        if answer.voted and self.fault.endswith("-voted"):
            strike(self.fault)
        return answer


def strike(fault: str) -> None:
    os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[fault.partition("-")[0]])


def main() -> None:
    name, member, updates, fault, seconds, patience = sys.argv[1:]
    number = int(member)
    case = make_case(name)
    names = [each.name for each in case.members]
    if number == 0:
        door = MeetingDoor()
        meeting = door.meeting(b"", KEY)
        say(address=door.address)
    host, port = json.loads(sys.stdin.readline()) if number else door.address
    attendance = Struck((host, port), KEY, names[number], names[0], LIMIT)
    memory = Memory(case, number)
    step = "setup"
    began = time.monotonic()
    try:
        one = HostMember(case.schedule, number, attendance, memory.places, DTYPES, "127.0.0.1", LIMIT)
        for version in range(1, int(updates) + 1):
            last = version == int(updates)
            if case.members[number].is_source:
                memory.renew(version)
            if number == 0:
                meeting.open_ballot(version, names)
            if last and fault.endswith("-vote"):
                strike(fault)
            attendance.fault = fault if last else ""
            step, began, done = "back", time.monotonic(), 0
            wait_for_go(attendance, version, float(patience), float(seconds))
            say(go=version)

            def told(size: int, last: bool = last) -> None:
                nonlocal done
                done += size
                if last and fault.endswith("-middle") and done > one.bytes // 2:
                    strike(fault)

            step, began = "stopped", time.monotonic()
            one.run(float(seconds), told)
            attendance.ballot(version, "done")
            say(version=version, wrong=[] if case.members[number].is_source else memory.wrong(version))
            step = "back"  # whoever the next one's fault strikes may be there before this member
            attendance.set(f"{version} {number}", b"done")
            for other in range(len(names) if not last else 0):  # no fault of the next one strikes this
                attendance.wait(f"{version} {other}", time.monotonic() + LIMIT, {})
        one.close()
        attendance.close()
    except CkptEngineError as error:
        say(**{step: error.problem.message}, seconds=time.monotonic() - began)
    if number == 0:
        sys.stdin.readline()  # the meeting stays until all have ended
        door.close()


if __name__ == "__main__":
    main()
