"""Decides about each request: let it in, hold it until the weights are whole again, or refuse it with a reason. Pure.

`decide` judges the engine by its page. `Queue` holds the requests that wait: in the order of arrival, and bounded in
number, bytes and time. It does not read the page (reader.py) or speak HTTP (gate.py).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

from ckpt_engine.gate.page import DIRTY, NONE, Admission, EngineMark, HoldLimits, RequestHold, WorkerWord, admission

BATCH = 32
"""How many requests are let in at once when the gate opens; the next ones follow a moment later."""

ALONE = "alone"
ASLEEP = "asleep"
DEAD_WORKER = "dead_worker"
FULL = "hold_full"
NO_WEIGHTS = "no_weights"
QUARANTINED = "quarantined"
UPDATING = "updating"
"""Why a request is refused, for programs: `reason` in the body of a 503. Two of them pass by themselves: hold_full (too
many requests wait already) and updating (the request has waited as long as it may)."""


class DecisionKind(Enum):
    ADMIT = "let it in"
    HOLD = "keep it"
    REFUSE = "refuse it"


@dataclass(frozen=True, slots=True)
class GateDecision:
    """What the gate does with one request, and why."""

    kind: DecisionKind
    reason: str  # for programs; empty when it is let in
    detail: str  # for people; empty when it is let in
    until: float  # latest end of the running update, monotonic seconds; 0.0: none runs
    verdict: Admission  # of the weights
    installs: tuple[int, ...] = ()  # the epoch of each worker's last install, also of one that writes; by rank


def decide(
    words: Sequence[WorkerWord], mark: EngineMark, hold: RequestHold, now: float, alone: bool = False
) -> GateDecision:
    """Decides about a request that comes at `now` (monotonic seconds). alone: see `EnginePage.alone`.

    During an update requests are held whatever the words say: half a version, none yet, or an old one of an engine that
    is about to be paused. That ends at the deadline that the agent wrote, even if the agent is dead.
    """
    verdict, installs = admission(words, mark, alone), tuple(word.epoch for word in words)
    if alone:
        return GateDecision(DecisionKind.REFUSE, ALONE, verdict.reason, 0.0, verdict, installs)
    dead = any(word.boot_id and not word.alive for word in words)
    if hold.epoch and not hold.closed and now < hold.until and not dead:
        detail = f"its weights are being updated (epoch {hold.epoch})"
        return GateDecision(DecisionKind.HOLD, UPDATING, detail, hold.until, verdict, installs)
    if verdict.open and hold.closed:
        detail = f"its engine has not resumed since the update of epoch {hold.epoch}; its agent asks it again"
        return GateDecision(DecisionKind.REFUSE, QUARANTINED, detail, 0.0, verdict, installs)
    if verdict.open:
        return GateDecision(DecisionKind.ADMIT, "", "", 0.0, verdict, installs)
    return GateDecision(DecisionKind.REFUSE, *_why_closed(words, mark, dead, verdict), 0.0, verdict, installs)


def _why_closed(words: Sequence[WorkerWord], mark: EngineMark, dead: bool, verdict: Admission) -> tuple[str, str]:
    """Reason and detail of a refusal while no update runs."""
    if mark.sleeping:
        return ASLEEP, verdict.reason
    if dead:
        return DEAD_WORKER, verdict.reason
    torn = next((word for word in words if word.state == DIRTY), None)
    if torn is not None and not mark.own_weights:
        detail = f"worker {torn.rank} was left half updated by epoch {torn.epoch}"
        return QUARANTINED, f"{detail}; the next update, or a restart of the engine, brings whole weights"
    if not words or any(not word.boot_id or word.state == NONE for word in words):
        return NO_WEIGHTS, verdict.reason
    return QUARANTINED, verdict.reason


@dataclass(slots=True, eq=False)
class RequestTicket:
    """One request that waits."""

    arrived: float  # monotonic seconds
    size: int  # bytes of its body, announced or received, whichever is more


class Queue:
    """The requests that wait, oldest first, and those that were called and are not inside yet."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[RequestTicket, None] = OrderedDict()
        self._entering: set[RequestTicket] = set()
        self.bytes = 0

    def __len__(self) -> int:
        """The number of requests that wait."""
        return len(self._waiting)

    @property
    def empty(self) -> bool:
        """Whether a request that comes now would overtake no other."""
        return not self._waiting and not self._entering

    def full(self, limits: HoldLimits) -> bool:
        """Whether there is no place even for a request without a body."""
        return len(self) >= limits.requests or self.bytes > limits.bytes

    def arrive(self, decision: GateDecision, size: int, now: float, limits: HoldLimits) -> GateDecision | RequestTicket:
        """Adds a request and returns its ticket, or decides at once to let it in or refuse it. It overtakes no request
        that waits."""
        if decision.kind is DecisionKind.REFUSE or (decision.kind is DecisionKind.ADMIT and self.empty):
            return decision
        if decision.kind is DecisionKind.HOLD and limits.seconds <= 0:
            return _refused(decision, UPDATING, decision.detail)
        if len(self) >= limits.requests:
            return _refused(decision, FULL, f"{len(self)} requests wait already for the end of an update")
        if self.bytes + size > limits.bytes:
            return self._too_large(decision, limits)
        ticket = RequestTicket(now, size)
        self._waiting[ticket] = None
        self.bytes += size
        return ticket

    def grow(self, ticket: RequestTicket, size: int, decision: GateDecision, limits: HoldLimits) -> GateDecision | None:
        """Notes that `size` bytes of its body have come. Returns a refusal if these are more than announced, and too
        many."""
        if ticket not in self._waiting or size <= ticket.size:
            return None
        if self.bytes + size - ticket.size > limits.bytes:
            return self._too_large(decision, limits)
        self.bytes += size - ticket.size
        ticket.size = size
        return None

    def leave(self, ticket: RequestTicket) -> None:
        """Removes a ticket and frees its place. Does nothing if it was removed already."""
        self._entering.discard(ticket)
        self._free(ticket)

    def turn(self, decision: GateDecision, now: float, limits: HoldLimits) -> list[tuple[RequestTicket, GateDecision]]:
        """Calls the tickets that stop waiting now, in order, each with its decision. Call it every few milliseconds.

        Their places are free. Each counts as not inside yet until it leaves.
        """
        turns: list[tuple[RequestTicket, GateDecision]] = []
        while self._waiting:
            ticket = next(iter(self._waiting))
            answer = decision
            if decision.kind is DecisionKind.ADMIT and len(turns) >= BATCH:
                break
            if decision.kind is DecisionKind.HOLD:
                if now < ticket.arrived + limits.seconds:
                    break
                detail = f"{decision.detail}, and this request has waited {limits.seconds:g} s for it"
                answer = _refused(decision, UPDATING, detail)
            self._free(ticket)
            self._entering.add(ticket)
            turns.append((ticket, answer))
        return turns

    def _free(self, ticket: RequestTicket) -> None:
        if ticket in self._waiting:
            del self._waiting[ticket]
            self.bytes -= ticket.size

    def _too_large(self, decision: GateDecision, limits: HoldLimits) -> GateDecision:
        limit = f"the bodies of requests that wait for the end of an update may have {limits.bytes} bytes together"
        return _refused(decision, FULL, f"{limit}; with {self.bytes} bytes waiting, this one is too large")


def _refused(decision: GateDecision, reason: str, detail: str) -> GateDecision:
    return replace(decision, kind=DecisionKind.REFUSE, reason=reason, detail=detail)
