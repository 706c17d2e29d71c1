"""What follows an update's decision: the intent, the installs, the report. From the intent on there is no refusing."""

from __future__ import annotations

from enum import Enum, auto

from ckpt_engine.core.problems import deadline
from ckpt_engine.core.version import Version
from ckpt_engine.machines.events import RecordOutcome
from ckpt_engine.machines.manager.absences import Absences
from ckpt_engine.machines.manager.collecting import Collecting
from ckpt_engine.machines.manager.course import Course
from ckpt_engine.machines.manager.plan_pipeline import Way
from ckpt_engine.machines.manager.recipients import Recipients
from ckpt_engine.machines.manager.relaying import Relaying
from ckpt_engine.machines.manager.report import build_report, tell_not_finite
from ckpt_engine.v1 import manager_pb2, weights_pb2

Problem = weights_pb2.Problem


class Entry(Enum):
    """Tasks of an update that write to the ledger."""

    INTENT = auto()
    REPORT = auto()


class Installing:
    """The installs of one update. fence: of its intent. direct: what replicas are installed with that are not installed
    from relays. reported: the report, once every replica has an outcome."""

    def __init__(
        self,
        course: Course,
        recipients: Recipients,
        absences: Absences,
        identity: Version,
        direct: Way,
        relaying: Relaying | None,
        collecting: Collecting,
    ) -> None:
        self._course = course
        self._state = course.state
        self._goal = course.goal
        self._recipients = recipients
        self._absences = absences
        self._identity = identity
        self._direct = direct
        self._relaying = relaying
        self._collecting = collecting
        self._started = 0.0
        self.fence = course.state.next_install()
        self.reported: manager_pb2.UpdateReport | None = None
        course.awaited["installing"] = self._named

    def record(self, now: float) -> None:
        """Has the intent made durable."""
        self._recipients.decided(self.fence, self._identity, self._collecting.replicas)
        self._state.admission.only_reads(self._course.number)
        self._course.begin("recording", self._state.deadlines.ledger, now)
        seconds = self._course.left(now)
        intent = self._state.versions.intent(self.fence.epoch, self._identity, self._goal, seconds)
        self._course.run(Entry.INTENT, intent)

    def begin(self, now: float, cut: str) -> None:
        """The intent is on the disk. cut: why none is to be told to install any more."""
        versions = self._state.versions
        self._state.intent_ended(self.fence)
        versions.take_number(self._identity)
        versions.begin(self._identity, self.fence.epoch, self._goal, self._direct.combined.record)
        self._started = now
        if cut:
            for name in self._recipients.waiting_for():
                self._recipients.leave_out(name, Problem(code=Problem.ABORTED, message=cut))
        self._absences.begin(self._recipients.waiting_for(), now)
        self._collecting.begin(self.fence)
        self._course.begin("installing", self._goal.end - now, now)

    def send(self, now: float) -> None:
        """Tells, again, all that have no outcome."""
        ways, seconds = {} if self._relaying is None else self._relaying.ways, self._course.left(now)
        self._recipients.install(self._identity, ways, self._direct, seconds, self._collecting.install)
        self._collecting.send(self.fence, seconds)

    def waiting_for(self) -> list[str] | list[int]:
        """Replicas without an outcome; once all have one, ranks whose part in a collective goes on."""
        return self._recipients.waiting_for() or self._collecting.waiting_for()

    def _named(self) -> list[str]:
        return [f"{'rank' if isinstance(each, int) else 'replica'} {each}" for each in self.waiting_for()]

    def out_of_time(self, seconds: float) -> None:
        """Waits no more, `seconds` after the update began."""
        self._collecting.out_of_time()
        for name in self._recipients.waiting_for():
            message = f"no outcome within {seconds:.1f} s; its agent goes on by itself{self._recipients.says(name)}"
            self._recipients.leave_out(name, deadline(message, replica=name).problem)

    def finish(self, now: float) -> None:
        """Every replica has an outcome."""
        self._course.phase = "reporting"
        self._course.note("reporting", now)
        self._recipients.look(self._identity)
        self._collecting.over()
        self.reported = self.report(now)
        # Callers wait for this, and the update has kept no more than that back; a disk that hangs changes no outcome.
        self._course.run(Entry.REPORT, RecordOutcome(self.reported, self._state.deadlines.report))

    def report(self, now: float, held: bool = False) -> manager_pb2.UpdateReport:
        """What is to be told now. held: relays hold the version, and installs go on."""
        report = build_report(
            self.fence,
            self._identity,
            self._goal,
            self._recipients.outcomes,
            seconds=now - self._course.started,
            planning=self._started - self._course.started,
            held=held,
        )
        if self._relaying is not None:
            self._relaying.add_to(report)
        tell_not_finite(report, self._course.not_finite)
        report.collective = self._collecting.said()
        report.timeline.CopyFrom(self._course.timeline)
        return report
