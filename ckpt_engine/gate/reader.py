"""Reads an engine's page often and cheaply: for the gate at every request, for the reference engine at every step."""

from __future__ import annotations

import time
from collections.abc import Callable

from ckpt_engine.gate.holding import GateDecision, decide
from ckpt_engine.gate.page import Admission, EnginePage, HoldLimits, RequestHold
from ckpt_engine.v1 import weights_pb2

_LIVENESS_SECONDS = 0.05


class StateReader:
    """The gate's decision by the page; while the page does not change, it only compares a few hundred bytes.

    It asks the kernel at most every 50 ms whether the workers live. Used on the API server's event loop.
    """

    def __init__(self, page: EnginePage, clock: Callable[[], float] = time.monotonic) -> None:
        """clock: monotonic seconds, the same for all processes of the host."""
        self.clock = clock
        self.hold = RequestHold()
        self.limits = HoldLimits()
        self.last_identity: weights_pb2.Identity | None = None  # the version of the last look that found whole weights
        # The highest version that a look found, of the lineage that was found last.
        self.highest: weights_pb2.Identity | None = None
        self._page = page
        self._raw = b""
        self._again = 0.0
        self._decision: GateDecision | None = None

    def decision(self) -> GateDecision:
        """The decision (`decide`) by the page as it is now."""
        now = self.clock()
        raw = self._page.raw()
        decision = self._decision
        if decision is None or now >= self._again or raw != self._raw:
            self._raw = raw
            self.hold, self.limits = self._page.held()
            self._decision = decision = decide(
                self._page.read(), self._page.marked(), self.hold, now, self._page.alone(now)
            )
            if decision.verdict.open:
                self.last_identity = identity = decision.verdict.identity
                highest = self.highest
                if identity is not None and (
                    highest is None or highest.lineage != identity.lineage or highest.version < identity.version
                ):
                    self.highest = identity
            self._again = now + _LIVENESS_SECONDS
            if now < decision.until:
                self._again = min(self._again, decision.until)
        return decision

    def verdict(self) -> Admission:
        """Whether the weights are whole, regardless of a running update."""
        return self.decision().verdict
