"""A worker's part in a collective: it joins when its plan is made ready, votes before it is DIRTY, and runs after *go*.

The plan decides what is brought and where to (`plans.py`); `transport/collective` moves it, and stops all members
together. A failure before *go* has written nothing. Used on the engine's thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ckpt_engine.core.problems import precondition
from ckpt_engine.engine.target import LoadTarget
from ckpt_engine.install.plans import ReadyPlan
from ckpt_engine.install.ready import await_device
from ckpt_engine.trace import span, trace
from ckpt_engine.transport.collective.seat import Seat
from ckpt_engine.v1 import worker_pb2

Order = worker_pb2.ReadyOrder | worker_pb2.InstallOrder


class InstallPart:
    """The part of one worker. Its methods raise CkptEngineError."""

    def __init__(self, target: LoadTarget) -> None:
        self._target = target
        self._seat = Seat()
        self._joined = 0, 0.0  # the epoch of the last join, and the seconds that it took

    @property
    def communicators(self) -> list[bytes]:
        """The name of the communicator that this worker is a member of, or none."""
        return [self._seat.communicator] if self._seat.communicator else []

    @property
    def memory(self) -> int:
        """Bytes of this member's buffers."""
        return self._seat.memory

    def joined(self, order: Order) -> float:
        """Seconds that joining took for an order; 0: it was a member already."""
        epoch, seconds = self._joined
        return seconds if epoch == order.fence.epoch else 0.0

    @contextmanager
    def leaving(self, order: Order) -> Iterator[None]:
        """Runs the work of an order; if that fails, notifies the other members of its collective at once."""
        try:
            yield
        except Exception as error:
            if order.HasField("collective"):
                self._seat.leave(order.collective, order.fence.epoch, error)
            raise

    def join(self, order: worker_pb2.ReadyOrder, plan: ReadyPlan, seconds: float) -> None:
        """Joins the order's collective, and makes room for all that it brings. The engine is not paused, but computes
        nothing meanwhile. Raises what `Seat.join` does."""
        self._check(order, plan)
        if not order.HasField("collective"):
            self._seat.close()  # its communicator may be of a trainer that has ended
            return
        with span("worker.ready", "join"):
            if not self._seat.has(order.collective):
                started = time.monotonic()
                self._seat.join(order.collective, order.fence.epoch, seconds)
                self._joined = order.fence.epoch, time.monotonic() - started
            plan.make_room(self._seat.device)
            if not order.asleep:
                self._bind(plan)

    def vote(
        self, order: worker_pb2.InstallOrder, plan: ReadyPlan, in_time: Callable[[], None], stop_at: float
    ) -> None:
        """Votes, and returns when all members begin; at once without a collective. Raises ABORTED if they do not."""
        self._check(order, plan)
        if not order.HasField("collective"):
            return
        if not self._seat.has(order.collective):
            raise precondition("this worker was not made ready for this collective")
        plan.make_room(self._seat.device)
        self._bind(plan)
        await_device(in_time)  # the engine's GPU work from before its pause
        trace("worker.install", "vote")
        self._seat.vote(order.fence.epoch, order.collective.arm_seconds, stop_at - time.monotonic())

    def run(self, order: worker_pb2.InstallOrder, stop_at: float, on_bytes: Callable[[int], None]) -> None:
        """Receives what the collective brings, if there is one. The worker is DIRTY."""
        if not order.HasField("collective"):
            return
        total = 0

        def on_arrival(count: int) -> None:
            nonlocal total
            if not total:
                trace("worker.install", "first")  # until here it waited for others, from here on for the links
            total += count
            on_bytes(count)

        self._seat.run(order.fence.epoch, stop_at - time.monotonic(), on_arrival)
        trace("worker.install", "arrived")
        self._seat.done(order.fence.epoch)

    def release(self) -> None:
        """Releases the model's memory."""
        self._seat.unbind()

    def close(self) -> None:
        """Leaves the collective."""
        self._seat.close()

    def _bind(self, plan: ReadyPlan) -> None:
        resident = plan.lay_out(self._target)
        self._seat.bind((plan.digest, resident), lambda: plan.arrivals(self._target))

    def _check(self, order: Order, plan: ReadyPlan) -> None:
        if plan.resolved.collective and not order.HasField("collective"):
            raise precondition(
                "the plan has weights brought by a collective, but the order has no collective: update again, or offer "
                "the weights over another transport"
            )
