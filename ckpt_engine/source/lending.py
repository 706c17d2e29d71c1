"""What one source lends, over every transport that takes such memory. It knows no transport by name.

The transports are those of core/transports.py: the one that the user asked for, or all that lend unasked. The thread
that owns the weights.
"""

from __future__ import annotations

import time

from ckpt_engine.core.offers import region_offered
from ckpt_engine.core.problems import CkptEngineError, error, unavailable
from ckpt_engine.core.transports import TransportKind, lending, made
from ckpt_engine.transport.base import Lender, Memory
from ckpt_engine.v1.weights_pb2 import OfferedRegion, Problem


class Lending:
    """The regions of one source. reasons: why some memory could not be lent in some way."""

    def __init__(self, asked: str | None = None) -> None:
        """asked: the transport that the user named; None: all that need not be named."""
        self._asked = asked
        self._lenders: dict[str, Lender] = {}
        self._regions: dict[int, OfferedRegion] = {}
        self.reasons: list[str] = []

    @property
    def regions(self) -> list[OfferedRegion]:
        """Those that are offered, by id."""
        return [self._regions[id] for id in sorted(self._regions)]

    def takes(self, kind: str) -> bool:
        """Whether there is a way for memory of this kind (core/transports.py) at all."""
        return bool(lending(kind, self._asked))

    def offer(self, id: int, memory: Memory) -> bool:
        """Lends memory in as many ways as it can. False, and reasons, if there is none. Raises what a transport raises
        that cannot even begin, and a driver's errors."""
        ways = []
        for kind in lending(memory.kind, self._asked):
            try:
                ways.append(self._lender(kind).offer(id, memory))
            except CkptEngineError as refused:
                if refused.problem.code != Problem.UNAVAILABLE:
                    raise
                self._say(refused.problem.message)
        if ways:
            self._regions[id] = region_offered(ways)
        return bool(ways)

    def must_offer(self, id: int, memory: Memory) -> None:
        """As `offer`. Raises UNAVAILABLE, with the reasons, if there is no way."""
        if not self.offer(id, memory):
            asked = f"transport={self._asked!r}" if self._asked else "any transport"
            raise unavailable(
                f"{memory.kind} cannot be lent over {asked}: {'; '.join(self.reasons) or 'none takes it'}"
            )

    @property
    def readers(self) -> int:
        """Those who keep memory from being freed now."""
        return sum(lender.readers for lender in self._lenders.values())

    def unchanged(self) -> bool:
        """Whether all that is offered is still there and the same."""
        return all(lender.unchanged() for lender in self._lenders.values())

    def withdraw(self, seconds: float) -> None:
        """Returns once no reader keeps memory from being freed. Raises DEADLINE_EXCEEDED if some do after `seconds`;
        new readers are refused by then, over every transport."""
        stop_at = time.monotonic() + seconds
        problem: Problem | None = None
        for lender in self._lenders.values():
            try:
                lender.withdraw(max(0.0, stop_at - time.monotonic()))
            except CkptEngineError as late:
                problem = problem or late.problem
        if problem is not None:
            raise error(problem.code, problem.message)

    def close(self) -> None:
        """Takes everything back without waiting. May be repeated."""
        for lender in self._lenders.values():
            lender.close()

    def _lender(self, kind: TransportKind) -> Lender:
        found = self._lenders.get(kind.name)
        if found is None:
            assert kind.lender is not None, kind.name
            found = self._lenders[kind.name] = made(kind.lender)
        return found

    def _say(self, reason: str) -> None:
        if reason not in self.reasons:
            self.reasons.append(reason)
