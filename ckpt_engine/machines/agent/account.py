"""The numbers of one install: seconds of its stages, pause and sync, progress, and its workers' reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ckpt_engine.core.stages import in_order, later
from ckpt_engine.machines.clock import ManagersClock
from ckpt_engine.v1 import manager_pb2, weights_pb2, worker_pb2


@dataclass
class Account:
    """The account of one install. All moments are monotonic seconds."""

    clock: ManagersClock = field(default_factory=ManagersClock)  # of the session
    reports: dict[int, worker_pb2.WorkerInstalled] = field(default_factory=dict)  # by rank, of workers that have ended
    unopened: dict[int, Sequence[weights_pb2.Unopened]] = field(default_factory=dict)  # by rank, what it could not open
    pause_started: float | None = None
    pause_ended: float | None = None
    steps: int = 0  # progress messages of all workers, and answers to a probe
    _stage: manager_pb2.Stage = manager_pb2.STAGE_PLAN
    _reported_stage: manager_pb2.Stage = manager_pb2.STAGE_PLAN
    _progress: dict[int, worker_pb2.WorkerProgress] = field(default_factory=dict)
    _seconds: dict[manager_pb2.Stage, float] = field(default_factory=dict)
    _entered: list[tuple[manager_pb2.Stage, float]] = field(default_factory=list)
    _ordered: dict[int, float] = field(default_factory=dict)
    _started: float = 0.0
    _stage_started: float = 0.0

    def begin(self, now: float) -> None:
        """Starts the clock: the command has come."""
        self._started = self._stage_started = now
        self._entered.append((self._stage, now))

    def enter(self, stage: manager_pb2.Stage, now: float) -> None:
        """Begins another stage."""
        self._count(now)
        self._stage = stage
        self._entered.append((stage, now))
        self._reported_stage = later(self._reported_stage, stage)

    def take_progress(self, rank: int, progress: worker_pb2.WorkerProgress) -> None:
        """Takes a worker's progress."""
        self._progress[rank] = progress
        self.steps += 1
        self._reported_stage = later(self._reported_stage, progress.stage)

    def take_early(self, rank: int, early: worker_pb2.WorkerEarly) -> None:
        """Takes a worker's news of what it brings into stage memory."""
        progress = worker_pb2.WorkerProgress(
            fence=early.fence,
            stage=manager_pb2.STAGE_READY,
            bytes_done=early.bytes_done,
            bytes_total=early.bytes_total,
        )
        self.take_progress(rank, progress)

    def ordered(self, rank: int, now: float) -> None:
        """Notes when a worker was first given its order."""
        self._ordered.setdefault(rank, now)

    def installed(self, rank: int, installed: worker_pb2.WorkerInstalled, now: float) -> None:
        """Takes a worker's report. The time that it does not account for is split evenly between the order's way to it
        and the report's way back."""
        self.reports[rank] = installed
        if rank in self._ordered and installed.seconds > 0:
            way = max(0.0, now - self._ordered[rank] - installed.seconds) / 2
            span = manager_pb2.Span(begin=self._ordered[rank] + way, seconds=installed.seconds, error=way)
            installed.report.span.CopyFrom(span)

    def progress(self, fence: weights_pb2.Fence, goes_back: bool, ready: bool) -> manager_pb2.Progress:
        """The progress of all workers together. goes_back, ready: see Progress."""
        return manager_pb2.Progress(
            goes_back=goes_back,
            fence=fence,
            stage=self._reported_stage,
            bytes_done=sum(progress.bytes_done for progress in self._progress.values()),
            bytes_total=sum(progress.bytes_total for progress in self._progress.values()),
            steps=self.steps,
            ready=ready,
        )

    def outcome(
        self,
        replica: str,
        fence: weights_pb2.Fence,
        outcome: manager_pb2.Outcome,
        problem: weights_pb2.Problem | None,
        held: tuple[weights_pb2.Identity | None, weights_pb2.Identity | None],
        now: float,
    ) -> manager_pb2.ReplicaOutcome:
        """The outcome of the install, with its numbers. held: the version before and after it. A pause that has not
        ended counts until now."""
        self._count(now)
        workers = [self.reports[rank].report for rank in sorted(self.reports)]
        answer = manager_pb2.ReplicaOutcome(
            replica=replica,
            fence=fence,
            outcome=outcome,
            problem=problem,
            before=held[0],
            after=held[1],
            bytes=sum(report.bytes for report in workers),
            edges=[edge for rank in sorted(self.reports) for edge in self.reports[rank].edges],
            stages=self._stage_seconds(workers),
            sync_seconds=now - self._started,
            workers=workers,
            unopened=[each for rank in sorted(self.unopened) for each in self.unopened[rank]],
            span=self.clock.span(self._started, now),
            entered=[
                manager_pb2.StageEntered(stage=stage, after=moment - self._started) for stage, moment in self._entered
            ],
        )
        if self.pause_started is not None:
            answer.pause_after = self.pause_started - self._started
            answer.pause_seconds = (now if self.pause_ended is None else self.pause_ended) - self.pause_started
        return answer

    def _count(self, now: float) -> None:
        """Counts the time since the last call to the stage that goes on."""
        self._seconds[self._stage] = self._seconds.get(self._stage, 0.0) + now - self._stage_started
        self._stage_started = now

    def _stage_seconds(self, workers: list[manager_pb2.WorkerReport]) -> list[manager_pb2.StageSeconds]:
        """Seconds of the agent's own steps, and of each step that workers do side by side that of the slowest."""
        seconds = dict(self._seconds)
        if workers:
            seconds[manager_pb2.STAGE_TRANSFER] = max(report.transfer_seconds for report in workers)
            seconds[manager_pb2.STAGE_INSTALL] = max(report.install_seconds for report in workers)
            seconds[manager_pb2.STAGE_VERIFY] = max(report.verify_seconds for report in workers)
        return in_order(seconds)
