"""What workers with stage memory bring before a pause, and what must be true of it.

It follows install/early_copy.py: a process of its own beside the engine's calls, which tells how far it is, ends when
nobody waits for it, and has ended before the worker does anything else with its sources.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ckpt_engine.core.problems import CkptEngineError, aborted, data_loss, unavailable
from ckpt_engine.v1 import manager_pb2, worker_pb2
from tests.simulation.weights import SLICES, SourceGoneError
from tests.simulation.world import BrokenPromiseError, Process, Steps

if TYPE_CHECKING:
    from tests.simulation.engine import Engine, Worker

Key = tuple[bytes, bytes]
"""Digests of a plan, and of what its slices hash to."""


def key_of(plan: bytes, expected: bytes) -> Key:
    """What names a version in stage memory."""
    return hashlib.sha256(plan).digest(), hashlib.sha256(expected).digest()


@dataclass
class Stage:
    """The stage memory of one worker. there: whether it has any. held: which version lies in it, verified."""

    there: bool = False
    held: Key | None = None
    tags: list[str] = field(default_factory=list)
    process: Process | None = None  # that brings, or brought, a version
    stopped: bool = False
    silent: bool = False  # that it was stopped is not told

    def stop(self) -> Steps:
        """Ends what is on its way, and waits for that."""
        if self.process is not None:
            self.stopped = self.silent = True
            yield self.process.over
            self.process = None

    def begin(self, process: Process) -> None:
        """Something is on its way from now on."""
        self.process, self.stopped, self.silent = process, False, False

    def empty(self) -> None:
        """The memory is given back."""
        self.stopped, self.held = True, None

    def kill(self) -> None:
        """Its worker's process is gone."""
        if self.process is not None:
            self.process.kill()


def bring_early(engine: Engine, worker: Worker, order: worker_pb2.ReadyOrder) -> Steps:
    """Brings a version, verifies it and tells the end."""
    stage, key = worker.stage, key_of(order.plan, order.expected)
    news = worker_pb2.WorkerEarly(fence=order.fence, bytes_total=SLICES)
    try:
        if stage.held != key:
            stage.held = None
            yield from _bring(engine, worker, order, news)
            if stage.stopped:
                raise aborted("stopped")
            stage.held = key
        news.verified, news.bytes_done = True, SLICES
    except CkptEngineError as error:
        news.problem.CopyFrom(error.problem)
    if not stage.silent:
        yield from engine.ask(worker, worker_pb2.WorkerRequest(early=news), 3.0)


def _bring(engine: Engine, worker: Worker, order: worker_pb2.ReadyOrder, news: worker_pb2.WorkerEarly) -> Steps:
    stage, plan = worker.stage, json.loads(order.plan)
    stage.tags = []
    for index in range(SLICES):
        yield engine.world.between(0.001, 0.3)
        if stage.stopped:
            raise aborted("stopped")
        if engine.world.chance(engine.faults.worker_early):
            raise unavailable("the simulator made this worker fail while it brought a version early")
        try:
            stage.tags.append(engine.truth.sources[bytes.fromhex(plan[str(index)])].read(index))
        except SourceGoneError as error:
            raise unavailable(str(error)) from error
        news.bytes_done = index + 1
        reply = yield from engine.ask(worker, worker_pb2.WorkerRequest(early=news), 3.0)
        if reply is None or not reply.HasField("acknowledged"):
            raise aborted("nobody waits for it")
    if {str(index): tag for index, tag in enumerate(stage.tags)} != json.loads(order.expected):
        raise data_loss("what was brought early is not what was sealed")


def check_a_pause_comes_after_what_is_brought_early(engine: Engine, install: manager_pb2.Install) -> None:
    """Each worker with stage memory has the version there, verified, when its engine is asked to pause."""
    orders = {worker.rank: (worker.plan.digest, worker.expected.digest) for worker in install.workers}
    for worker in engine.workers:
        if worker.stage.there and not engine.asleep and worker.stage.held != orders[worker.rank]:
            raise BrokenPromiseError(f"{engine.name} pauses before worker {worker.rank} has the version there")
