"""One update, from its report, as tracks: manager, trainers, relays, agents, workers, and the bytes between them. Pure.

A member of an older version reports no times: its slices are drawn from durations, and say so.
"""

from __future__ import annotations

from ckpt_engine.core.enums import enum_word
from ckpt_engine.timeline.clocks import Alignment, Window, align, guess
from ckpt_engine.timeline.plausible import believable
from ckpt_engine.timeline.tracks import Arrow, Timeline, Track, TrackSlice
from ckpt_engine.v1 import manager_pb2

MANAGER = "manager"
KEPT = "weights stay as they were sealed"
HOLDS = "holds the version"

_AGENTS = {
    manager_pb2.STAGE_PLAN: "look, fetch the plan",
    manager_pb2.STAGE_READY: "workers get ready",
    manager_pb2.STAGE_QUIESCE: "quiesce",
    manager_pb2.STAGE_TRANSFER: "workers install",
    manager_pb2.STAGE_VERIFY: "look at the state words",
    manager_pb2.STAGE_RESUME: "resume",
}
"""What an agent does in each stage."""

_INSTALLING = {_AGENTS[manager_pb2.STAGE_TRANSFER], "transfer", "install", "verify"}
"""Slices during which an agent's workers install. The last three are of an agent that reports only the durations of its
slowest worker."""


def draw(report: manager_pb2.UpdateReport) -> Timeline:
    """All tracks of an update that has ended. Impossible numbers of a member are not drawn, and named in `odd`."""
    report, odd = believable(report)
    drawing = _Drawing(report)
    drawing.timeline.odd += odd
    drawing.manager()
    for source in report.timeline.sources:
        drawing.source(source)
    for relay in sorted(report.relays, key=lambda relay: (relay.stage, relay.relay)):
        drawing.relay(relay)
    for relay in report.relays:
        for amount in relay.filled.brought:
            drawing.draw_fill_edge(relay, amount)
    for outcome in report.replicas:
        drawing.replica(outcome)
    return drawing.timeline


def name_of_worker(rank: int) -> str:
    """The name of a worker's thread in the timeline."""
    return f"worker {rank}"


class _Drawing:
    def __init__(self, report: manager_pb2.UpdateReport) -> None:
        self._report = report
        self._began = report.timeline.began
        identity = report.identity
        self.timeline = Timeline(
            about={
                "lineage": identity.lineage,
                "version": identity.version,
                "root": identity.root.hex(),
                "epoch": report.fence.epoch,
                "cluster": report.fence.cluster,
            }
        )
        self._phases = _phases(report)
        self._filled: dict[str, Track] = {}

    def manager(self) -> None:
        """Draws the manager's phases."""
        report, track = self._report, self.timeline.track(MANAGER, "update")
        begin = min((window.begin for _, window in self._phases), default=0.0)
        whole = track.slice(
            f"update to version {report.identity.version}",
            begin,
            report.seconds,
            {**self.timeline.about, "ok": report.ok, "bytes": report.bytes},
        )
        for name, window in self._phases:
            whole.part(name, window.begin, window.end)

    def source(self, sealing: manager_pb2.Timeline.Source) -> None:
        """Draws how a source sealed."""
        within = self._window("sealing")
        seconds = sealing.copy_seconds + sealing.digest_seconds
        span, clock = self._align(sealing.span, sealing.HasField("span"), seconds, within)
        process, window = sealing.source, clock.window(span)
        if sealing.source.startswith("rank "):
            process = f"trainer {sealing.source}"
        track = self.timeline.track(process, "weights")
        self.timeline.clocks[process] = (clock.error, clock.by)
        whole = track.slice("seal", window.begin, window.end, {"host": sealing.host, **_clock_args(clock)})
        digested = clock.at(sealing.digested) if sealing.digested and sealing.HasField("span") else None
        whole.backwards([("copy", sealing.copy_seconds), ("digest", sealing.digest_seconds)], digested)
        track.slice(KEPT, window.end, self._report.seconds)
        self._filled[sealing.source] = track

    def relay(self, report: manager_pb2.RelayReport) -> None:
        """Draws how a relay was filled."""
        filled = report.filled
        track = self._filled[report.relay] = self.timeline.track(report.relay, "memory")
        if not report.HasField("filled") or filled.HasField("problem"):
            within = self._window("filling")
            why = filled.problem.message if report.HasField("filled") else "it did not answer"
            track.slice("is not filled", within.begin, within.end, {"problem": why})
            return
        seconds = filled.wait_seconds + filled.fill_seconds
        span, clock = self._align(filled.span, filled.HasField("span"), seconds, self._window("filling"))
        window = clock.window(span)
        self.timeline.clocks[report.relay] = (clock.error, clock.by)
        numbers = {"bytes": filled.bytes, "cells_read_again": filled.again, "wave": report.stage}
        whole = track.slice("fill", window.begin, window.end, {**numbers, **_clock_args(clock)})
        if seconds <= span.seconds:
            whole.backwards([("wait for readers", filled.wait_seconds), ("read and digest", filled.fill_seconds)])
        else:
            whole.part("was filled before", window.begin, window.end, {"seconds": seconds})
        track.slice(HOLDS, window.end, self._report.seconds)

    def draw_fill_edge(self, relay: manager_pb2.RelayReport, amount: manager_pb2.RelayFilled.Brought) -> None:
        """Draws an arrow for the bytes that a relay brought from one source."""
        track = self._filled[relay.relay]
        self._arrow(amount.source, track, track.slices[0], {"bytes": amount.bytes, "source": amount.source})

    def replica(self, outcome: manager_pb2.ReplicaOutcome) -> None:
        """Draws how a replica was installed."""
        process = f"replica {outcome.replica}"
        track = self.timeline.track(process, "agent")
        outcome_word = enum_word(manager_pb2.Outcome, outcome.outcome)
        args = {"outcome": outcome_word} | ({"problem": outcome.problem.message} if outcome.HasField("problem") else {})
        within = self._window("installing")
        if not outcome.sync_seconds:
            name = "is not reached" if outcome_word == "not_reached" else "is left as it is"
            track.slice(name, within.begin, within.end, args)
            return
        span, clock = self._align(outcome.span, outcome.HasField("span"), outcome.sync_seconds, within)
        window = clock.window(span)
        self.timeline.clocks[process] = (clock.error, clock.by)
        numbers = {"bytes": outcome.bytes, "pause_seconds": outcome.pause_seconds}
        whole = track.slice("install", window.begin, window.end, {**args, **numbers, **_clock_args(clock)})
        installs = _agents_steps(outcome, whole)
        self._pause(outcome, whole)
        for worker in outcome.workers:
            self._worker(outcome, worker, clock, installs)

    def _pause(self, outcome: manager_pb2.ReplicaOutcome, whole: TrackSlice) -> None:
        if outcome.pause_seconds <= 0:
            return
        begin = whole.end - outcome.pause_seconds  # a little late: the time after resuming is not known
        if outcome.HasField("pause_after"):
            begin = whole.begin + outcome.pause_after
        engine = self.timeline.track(f"replica {outcome.replica}", "engine")
        engine.slice("paused", begin, min(begin + outcome.pause_seconds, whole.end))

    def _worker(
        self, outcome: manager_pb2.ReplicaOutcome, report: manager_pb2.WorkerReport, agent: Alignment, installs: Window
    ) -> None:
        steps = [
            ("transfer", report.transfer_seconds),
            ("install", report.install_seconds),
            ("verify", report.verify_seconds),
        ]
        if report.HasField("span"):
            begin = agent.at(report.span.begin)
            window = Window(begin, begin + report.span.seconds)
            clock_args = {"clock_error_seconds": round(agent.error + report.span.error, 6), "clock_by": agent.by}
        else:
            span, clock = guess(sum(seconds for _, seconds in steps), installs)
            window, clock_args = clock.window(span), _clock_args(clock)
        track = self.timeline.track(f"replica {outcome.replica}", name_of_worker(report.rank))
        numbers: dict[str, float] = {"bytes": report.bytes, "tensors": report.tensors, "copies": report.copies}
        if report.early_bytes:
            numbers |= {"early_bytes": report.early_bytes, "early_seconds": report.early_seconds}
        verified = {"verified": report.verified, "verified_as_loaded": report.verified_as_loaded}
        problem = {"problem": report.problem.message} if report.HasField("problem") else {}
        whole = track.slice("install", window.begin, window.end, {**numbers, **verified, **problem, **clock_args})
        whole.backwards(steps)
        reads = next((part for part in whole.parts if part.name == "transfer"), whole)
        for edge in outcome.edges:
            if edge.worker_rank == report.rank:
                args = {"bytes": edge.bytes, "transport": edge.transport, "source": edge.source, "why": edge.reason}
                self._arrow(_source_of(edge), track, reads, args)

    def _arrow(self, source: str, target: Track, reads: TrackSlice, args: dict[str, object]) -> None:
        """Draws an arrow from the source's track, at the begin of the read, to the middle of the slice that reads."""
        track = self._filled.get(source)
        if track is None:  # of a version that was sealed before
            track = self._filled[source] = self.timeline.track(source, "weights")
            track.slice(KEPT, min(0.0, reads.begin), max(self._report.seconds, reads.end))
        departure = track.near(reads.begin)
        arrival = max(departure, (reads.begin + reads.end) / 2)  # what is read was sealed before, whatever clocks say
        self.timeline.arrows.append(Arrow(track, departure, target, arrival, args))

    def _align(
        self, span: manager_pb2.Span, has_span: bool, seconds: float, within: Window
    ) -> tuple[manager_pb2.Span, Alignment]:
        return (span, align(span, within, self._began)) if has_span else guess(seconds, within)

    def _window(self, phase: str) -> Window:
        """The time from the first begin to the last end of a phase; the whole update if the manager reports no
        phases."""
        found = [window for name, window in self._phases if name == phase]
        if not found:
            return Window(0.0, self._report.seconds)
        return Window(found[0].begin, found[-1].end)


def _phases(report: manager_pb2.UpdateReport) -> list[tuple[str, Window]]:
    """The phases in their order. Of an older manager the two that its durations allow."""
    phases = report.timeline.phases
    if not phases:
        planning_seconds = sum(each.seconds for each in report.stages if each.stage == manager_pb2.STAGE_PLAN)
        least = max((outcome.sync_seconds for outcome in report.replicas), default=0.0)
        planning_seconds = max(0.0, min(planning_seconds, report.seconds - least))
        return [("planning", Window(0.0, planning_seconds)), ("installing", Window(planning_seconds, report.seconds))]
    ends = [phase.after for phase in phases[1:]] + [report.seconds]
    return [(phase.name, Window(phase.after, max(phase.after, end))) for phase, end in zip(phases, ends, strict=True)]


def _agents_steps(outcome: manager_pb2.ReplicaOutcome, whole: TrackSlice) -> Window:
    """Adds an agent's stages to its slice; returns when its workers installed."""
    steps: list[tuple[manager_pb2.Stage, float, float]] = []
    if outcome.entered:
        begins = [whole.begin + entered.after for entered in outcome.entered]
        for entered, begin, end in zip(outcome.entered, begins, [*begins[1:], whole.end], strict=True):
            steps.append((entered.stage, begin, end))
    else:
        at = whole.begin
        for each in outcome.stages:
            steps.append((each.stage, at, at + each.seconds))
            at += each.seconds
    for stage, begin, end in steps:
        plain = enum_word(manager_pb2.Stage, stage)
        whole.part(_AGENTS.get(stage, plain) if outcome.entered else plain, begin, end)
    installs = [part for part in whole.parts if part.name in _INSTALLING]
    return Window(installs[0].begin, installs[-1].end) if installs else Window(whole.begin, whole.end)


def _source_of(edge: manager_pb2.EdgeReport) -> str:
    return edge.source or (f"rank {edge.source_rank}" if edge.HasField("source_rank") else "an unknown source")


def _clock_args(clock: Alignment) -> dict[str, object]:
    return {"clock_error_seconds": round(clock.error, 6), "clock_by": clock.by}
