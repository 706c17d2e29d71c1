"""Lends the memory of one source over every transport that takes it. It knows no transport by name.

The transports are those of core/transports.py: the one that the user asked for, or all that lend unasked. If
CKPT_ENGINE_COLLECTIVE is 1 and other hosts reach this one, memory of a GPU is also offered for collectives, since other
hosts may have no other way. Not in a cluster that encrypts, since collectives do not: there the user must ask for
`transport="nccl"`. Runs on the thread that owns the weights.
"""

from __future__ import annotations

import logging
import os
import time

from ckpt_engine.core.offers import region_offered
from ckpt_engine.core.problems import CkptEngineError, error, invalid, unavailable
from ckpt_engine.core.transports import GPU_MEMORY, TransportKind, collective_kinds, lending, make
from ckpt_engine.security.client import AUTHORITY
from ckpt_engine.transport.base import Lender, Memory
from ckpt_engine.v1.weights_pb2 import OfferedRegion, Problem, Region

log = logging.getLogger(__name__)

COLLECTIVE = "CKPT_ENGINE_COLLECTIVE"
"""Environment variable; 1: memory of GPUs is offered for collectives as well."""


def encrypts() -> bool:
    """Whether this process belongs to a cluster that encrypts what it sends."""
    return bool(os.environ.get(AUTHORITY))


def offers_collectives() -> bool:
    """Whether memory of GPUs is offered for collectives without `transport="nccl"`. Raises INVALID_ARGUMENT for another
    value of the variable than 0 and 1."""
    value = os.environ.get(COLLECTIVE, "")
    if value not in ("", "0", "1"):
        raise invalid(
            f"{COLLECTIVE} is {value!r}: set it to 1 to offer weights on GPUs for collectives as well, or leave it out"
        )
    return value == "1" and not encrypts()


class Lending:
    """The regions of one source. reasons: why some memory could not be lent in some way."""

    def __init__(self, transport: str | None = None, advertise: str = "") -> None:
        """transport: the one that the user named; None: all that need not be named. advertise: the address at which
        other hosts reach this one, if there is one. Raises INVALID_ARGUMENT as `offers_collectives`."""
        self._transport = transport
        self._advertise = advertise
        self._collectives = transport is None and bool(advertise) and offers_collectives()
        self._lenders: dict[str, Lender] = {}
        self._lender_problems: dict[str, Problem] = {}
        self._logged_reasons: set[str] = set()
        self._regions: dict[int, OfferedRegion] = {}
        self.reasons: list[str] = []

    @property
    def regions(self) -> list[OfferedRegion]:
        """The regions that are offered, by id."""
        return [self._regions[id] for id in sorted(self._regions)]

    def takes(self, kind: str) -> bool:
        """Whether any transport lends memory of this kind (core/transports.py)."""
        return bool(lending(kind, self._transport))

    def offer(self, id: int, memory: Memory) -> bool:
        """Lends memory over all transports that take it. False, and `reasons`, if none does. Raises what a transport
        raises that cannot start, and a driver's errors."""
        ways = []
        for kind in lending(memory.kind, self._transport):
            try:
                ways.append(self._lender(kind).offer(id, memory))
            except CkptEngineError as refusal:
                if refusal.problem.code != Problem.CODE_UNAVAILABLE:
                    raise
                self._note_reason(refusal.problem.message)
        if ways and self._collectives and memory.kind == GPU_MEMORY:
            ways += self._for_collectives(id, memory)
        if ways:
            self._regions[id] = region_offered(ways)
        return bool(ways)

    def must_offer(self, id: int, memory: Memory) -> None:
        """Offers as `offer` does. Raises UNAVAILABLE, with the reasons, if no transport takes it."""
        if not self.offer(id, memory):
            way = f"transport={self._transport!r}" if self._transport else "any transport"
            raise unavailable(f"{memory.kind} cannot be lent over {way}: {'; '.join(self.reasons) or 'none takes it'}")

    def unchanged(self) -> bool:
        """Whether all offered memory still exists, unchanged."""
        return all(lender.unchanged() for lender in self._lenders.values())

    def withdraw(self, seconds: float) -> None:
        """Returns once no reader keeps memory from being freed. Raises DEADLINE_EXCEEDED if some do after `seconds`;
        new readers are refused by then, over every transport."""
        stop_at = time.monotonic() + seconds
        problem: Problem | None = None
        for lender in self._lenders.values():
            try:
                lender.withdraw(max(0.0, stop_at - time.monotonic()))
            except CkptEngineError as timeout:
                problem = problem or timeout.problem
        if problem is not None:
            raise error(problem.code, problem.message)

    def close(self) -> None:
        """Takes everything back without waiting. May be repeated."""
        for lender in self._lenders.values():
            lender.close()

    def _for_collectives(self, id: int, memory: Memory) -> list[Region]:
        """Offers memory for collectives. A failure is logged and hinders nothing else."""
        found = []
        for kind in collective_kinds(memory.kind):
            try:
                found.append(self._lender(kind).offer(id, memory))
            except CkptEngineError as refusal:
                if refusal.problem.message not in self._logged_reasons:
                    self._logged_reasons.add(refusal.problem.message)
                    log.info("ckpt-engine: not offered over %s: %s", kind.name, refusal.problem.message)
        return found

    def _lender(self, kind: TransportKind) -> Lender:
        """The lender of a transport, made for the first region. After a failure it is not tried again, since that may
        take seconds."""
        found = self._lenders.get(kind.name)
        if found is None:
            if (problem := self._lender_problems.get(kind.name)) is not None:
                raise CkptEngineError(problem)
            assert kind.lender is not None, kind.name
            arguments = (self._advertise,) if kind.collective else ()
            try:
                found = self._lenders[kind.name] = make(kind.lender, *arguments)
            except CkptEngineError as refusal:
                self._lender_problems[kind.name] = refusal.problem
                raise
        return found

    def _note_reason(self, reason: str) -> None:
        if reason not in self.reasons:
            self.reasons.append(reason)
