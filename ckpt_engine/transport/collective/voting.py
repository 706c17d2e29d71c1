"""One member's vote: it waits here until all members begin, or none.

Called when the member is ready for its first byte: its engine is paused, its plan is checked, its device is idle. What
a member may do next is decided in core/arming.py.
"""

from __future__ import annotations

import time

from ckpt_engine.core.arming import BallotStep, Participant
from ckpt_engine.core.problems import CkptEngineError, aborted
from ckpt_engine.transport.collective.frames import CALL_SECONDS
from ckpt_engine.transport.collective.meeting import Attendance

ASK_SECONDS = 0.002
"""Least seconds between two questions, unless there is a decision: all members are paused meanwhile."""

LONGEST_ASK_SECONDS = 0.02
"""The same for a member that has waited for long."""

HOLD_SECONDS = 0.1
"""How long the meeting may hold an answer back until there is a decision, so that members hear of *go* when it is
written and not when they ask next."""


def wait_for_go(attendance: Attendance, epoch: int, patience: float, seconds: float) -> None:
    """Votes, and returns when all members begin. patience: seconds to wait for a decision. seconds: until this member's
    part must have ended.

    Raises ABORTED, saying why, if they do not begin; then nothing was written, and nothing may be.
    """
    now = time.monotonic()
    part = Participant(patience, CALL_SECONDS, now + seconds, now)
    wait = ASK_SECONDS
    while (step := part.step(time.monotonic())) not in (BallotStep.GO, BallotStep.BACK, BallotStep.STOP):
        start = time.monotonic()
        hold = max(0.0, min(HOLD_SECONDS, part.waits_until - start))
        try:
            if step is BallotStep.VOTE and part.until is not None:
                answer = attendance.ballot(epoch, "vote", until=part.until, hold=hold)
            elif step is BallotStep.GIVE_UP:
                answer = attendance.ballot(epoch, "give up")
            else:
                answer = attendance.ballot(epoch, "ask", hold=hold)
        except CkptEngineError as error:
            # No *go* can reach this member any more: a connection that failed is not used again.
            raise aborted(f"the collective does not begin: {error.problem.message}") from error
        part.took(answer, time.monotonic(), step)
        if part.step(time.monotonic()) in (BallotStep.ASK, BallotStep.GIVE_UP):
            time.sleep(max(0.0, start + wait - time.monotonic()))
            wait = min(LONGEST_ASK_SECONDS, wait * 1.1)
    if step is not BallotStep.GO:
        raise aborted(f"the collective does not begin: {part.why}")
