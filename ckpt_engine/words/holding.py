"""What becomes of a request: let in, kept until the weights are whole again, or refused with a reason. Pure.

`decide` judges the engine by what its page says. `Queue` keeps the requests that wait: in the order of arrival, bounded
in number and bytes, none longer than it may. Who reads the page and who speaks HTTP is elsewhere (gate.py).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from ckpt_engine.words.state import DIRTY, NONE, EngineMark, Hold, HoldLimits, Verdict, WorkerWord, admission

BATCH = 32
"""Requests that are let in at once when the gate opens; the next ones follow a moment later."""

ALONE = "alone"
ASLEEP = "asleep"
DEAD_WORKER = "dead_worker"
FULL = "hold_full"
NO_WEIGHTS = "no_weights"
QUARANTINED = "quarantined"
UPDATING = "updating"
"""Why a request is refused, for programs: `reason` in the body of a 503. hold_full and updating pass by themselves:
too many requests wait already; a request has waited as long as it may."""


class Kind(Enum):
    ADMIT = "let it in"
    HOLD = "keep it"
    REFUSE = "refuse it"


@dataclass(frozen=True, slots=True)
class Decision:
    """What the gate does with one request, and why.

    reason: for programs, detail: for people; both empty when it is let in. until: monotonic seconds; the end of the
    update for which it waits or is refused, 0.0: there is nothing to wait for. verdict: of the weights.
    """

    kind: Kind
    reason: str
    detail: str
    until: float
    verdict: Verdict


def decide(words: Sequence[WorkerWord], mark: EngineMark, hold: Hold, now: float, alone: bool = False) -> Decision:
    """What the gate does with a request that comes at `now` (monotonic seconds). alone: see `EnginePage.alone`.

    While an update goes on requests are kept, whatever the words say: half a version, none yet, or an old one of an
    engine that is about to be paused. Its time is over at the deadline that the agent wrote down, also without it.
    """
    verdict = admission(words, mark, alone)
    if alone:
        return Decision(Kind.REFUSE, ALONE, verdict.reason, 0.0, verdict)
    dead = any(word.boot_id and not word.alive for word in words)
    if hold.epoch and not hold.closed and now < hold.until and not dead:
        return Decision(Kind.HOLD, UPDATING, f"its weights are being updated (epoch {hold.epoch})", hold.until, verdict)
    if verdict.open and hold.closed:
        said = f"its engine has not resumed since the update of epoch {hold.epoch}; its agent asks it again"
        return Decision(Kind.REFUSE, QUARANTINED, said, 0.0, verdict)
    if verdict.open:
        return Decision(Kind.ADMIT, "", "", 0.0, verdict)
    return Decision(Kind.REFUSE, *_why_closed(words, mark, dead, verdict), 0.0, verdict)


def _why_closed(words: Sequence[WorkerWord], mark: EngineMark, dead: bool, verdict: Verdict) -> tuple[str, str]:
    """Reason and detail. Nobody updates the engine now."""
    if mark.sleeping:
        return ASLEEP, verdict.reason
    if dead:
        return DEAD_WORKER, verdict.reason
    torn = next((word for word in words if word.state == DIRTY), None)
    if torn is not None and not mark.own_weights:
        said = f"worker {torn.rank} was left half updated by epoch {torn.epoch}"
        return QUARANTINED, f"{said}; the next update, or a new start of the engine, brings whole weights"
    if not words or any(not word.boot_id or word.state == NONE for word in words):
        return NO_WEIGHTS, verdict.reason
    return QUARANTINED, verdict.reason


@dataclass(slots=True, eq=False)
class Ticket:
    """One request that waits. arrived: monotonic seconds. size: bytes of its body, as announced or as received."""

    arrived: float
    size: int


class Queue:
    """The requests that wait, the oldest first, and those that have been called and are still on their way in."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[Ticket, None] = OrderedDict()
        self._called: set[Ticket] = set()
        self.bytes = 0

    def __len__(self) -> int:
        """How many wait."""
        return len(self._waiting)

    @property
    def empty(self) -> bool:
        """Whether a request that comes now would overtake nobody."""
        return not self._waiting and not self._called

    def full(self, limits: HoldLimits) -> bool:
        """Whether not even a request without a body would find a place."""
        return len(self) >= limits.requests or self.bytes > limits.bytes

    def arrive(self, decision: Decision, size: int, now: float, limits: HoldLimits) -> Decision | Ticket:
        """Takes a request in: a decision to let it in or refuse it at once, or a ticket. Nobody overtakes those that
        wait."""
        if decision.kind is Kind.REFUSE or (decision.kind is Kind.ADMIT and self.empty):
            return decision
        if decision.kind is Kind.HOLD and limits.seconds <= 0:
            return _refused(decision, UPDATING, decision.detail)
        if len(self) >= limits.requests:
            return _refused(decision, FULL, f"{len(self)} requests wait already for the end of an update")
        if self.bytes + size > limits.bytes:
            return self._too_large(decision, limits)
        ticket = Ticket(now, size)
        self._waiting[ticket] = None
        self.bytes += size
        return ticket

    def grow(self, ticket: Ticket, size: int, decision: Decision, limits: HoldLimits) -> Decision | None:
        """`size` bytes of its body are here. A refusal if that is more than was announced, and too much."""
        if ticket not in self._waiting or size <= ticket.size:
            return None
        if self.bytes + size - ticket.size > limits.bytes:
            return self._too_large(decision, limits)
        self.bytes += size - ticket.size
        ticket.size = size
        return None

    def leave(self, ticket: Ticket) -> None:
        """Takes a ticket out, which waits no longer for whatever reason; its place is free. Does nothing if it has left
        already."""
        self._called.discard(ticket)
        self._free(ticket)

    def turn(self, decision: Decision, now: float, limits: HoldLimits) -> list[tuple[Ticket, Decision]]:
        """The tickets that wait no longer, in order, and what becomes of each. Call it every few milliseconds.

        Their places are free; each is on its way in until it leaves.
        """
        told: list[tuple[Ticket, Decision]] = []
        while self._waiting:
            ticket = next(iter(self._waiting))
            answer = decision
            if decision.kind is Kind.ADMIT and len(told) >= BATCH:
                break
            if decision.kind is Kind.HOLD:
                if now < ticket.arrived + limits.seconds:
                    break
                said = f"{decision.detail}, and this request has waited {limits.seconds:g} s for it"
                answer = _refused(decision, UPDATING, said)
            self._free(ticket)
            self._called.add(ticket)
            told.append((ticket, answer))
        return told

    def _free(self, ticket: Ticket) -> None:
        if ticket in self._waiting:
            del self._waiting[ticket]
            self.bytes -= ticket.size

    def _too_large(self, decision: Decision, limits: HoldLimits) -> Decision:
        said = f"the requests that wait for the end of an update may have {limits.bytes} bytes together, and this one"
        return _refused(decision, FULL, f"{said} is too much ({self.bytes} bytes wait)")


def _refused(decision: Decision, reason: str, detail: str) -> Decision:
    return Decision(Kind.REFUSE, reason, detail, decision.until, decision.verdict)
