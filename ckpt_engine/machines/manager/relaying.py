"""The part of an update in which weights go by way of relays: these are filled, then installs are planned from them.

It lies between sealing and the intent, so nothing is paused meanwhile, and whatever fails in it leaves every replica as
it was. Replicas that no relay serves are installed from the trainer's memory, unless the trainer is not to wait for
them (`until="held"`): then they keep what they serve.
"""

from __future__ import annotations

from ckpt_engine.machines.events import Compiled, Done
from ckpt_engine.machines.manager.course import Course
from ckpt_engine.machines.manager.members import Holder, Member
from ckpt_engine.machines.manager.prefetch import Prefetch
from ckpt_engine.machines.manager.relay_facts import away
from ckpt_engine.machines.manager.routes import Routes
from ckpt_engine.machines.manager.targets import Targets, Way, with_words
from ckpt_engine.v1 import manager_pb2, weights_pb2


class Relaying:
    """Of one update whose root is known. record: its sealed record. ways: of the replicas that are installed from
    relays, once that is settled. left: why the trainer is not to be read any more; None: it may be."""

    def __init__(
        self, course: Course, targets: Targets, identity: weights_pb2.Identity, record: manager_pb2.BlobRef
    ) -> None:
        self._course = course
        self._targets = targets
        self._identity = identity
        self._prefetch = Prefetch(course, targets, identity, record)
        self._routes = Routes(course, targets, identity, record)
        self.ways: dict[str, Way] = {}
        self.left: weights_pb2.Problem | None = None

    def start(self, compiled: Compiled, before: Relaying | None, now: float) -> bool:
        """Begins to fill relays; whether there are any to fill. before: of the update whose installs go on."""
        self._prefetch.choose(compiled, None if before is None else before._prefetch)
        if not self._prefetch.missing():
            return False
        seconds = min(self._course.state.deadlines.fill, (self._course.order.end - now) / 2)
        self._course.begin("filling", seconds, now)
        return True

    def send(self, now: float) -> None:
        """Tells, again, everybody who has not answered."""
        if self._course.phase == "filling":
            self._prefetch.send(self._course.left(now))
        else:
            self._routes.send(now)

    def over(self, now: float) -> bool:
        """Goes on if it can; whether everything is known."""
        if self._course.phase == "filling":
            self._prefetch.advance(self._course.left(now))
        if self._course.phase == "filling" and not self._prefetch.missing():
            self._course.begin("joining", self._course.state.deadlines.plan, now)
            self._routes.start(self._prefetch.held(), now)
        return self._course.phase == "joining" and self._routes.over

    def overdue(self, seconds: float, now: float) -> None:
        """This phase's time is over, `seconds` after the update began: who has not answered is left out."""
        if self._course.phase == "filling":
            self._prefetch.overdue(seconds)
        else:
            self._routes.overdue(seconds, now)

    def settle(self) -> None:
        """Decides how each replica is installed, and leaves those out that cannot be."""
        self.ways = self._routes.ways()
        for relay, problem in self._routes.unread().items():
            self._prefetch.leave_out(relay, problem)
        why = self._prefetch.why_not()
        for name, problem in self._routes.unfit().items():
            why[name] = with_words(problem, why[name].message if name in why else "")
        for name, lacks in self._prefetch.lacking().items():
            if name in why:
                why[name] = with_words(why[name], lacks)
        never, unknown = "", "no relay within its reach holds the version"
        if gone := away(self._course.state):
            unknown += f"; {gone}"
        if self.left is not None:
            never, unknown = self.left.message, "no relay was filled for it"
        elif self._course.order.until == manager_pb2.HELD:
            never = "the trainer goes on when relays hold the version"
        why = dict.fromkeys(self._targets.prepared(), weights_pb2.Problem(message=unknown)) | why
        self._targets.take_ways(self._identity, self.ways.keys(), why, never)

    def alone(self, problem: weights_pb2.Problem) -> bool:
        """The trainer is gone, or may change its weights: whether the update goes on without it, from relays that hold
        the version or are being filled. Then nobody is to read the trainer."""
        if self.left is None and (self._prefetch.missing() or self._prefetch.held()):
            self.left = problem
        return self.left is not None

    def add_to(self, report: manager_pb2.UpdateReport) -> None:
        """What relays did."""
        report.relays.extend(self._prefetch.reports())
        report.prefetch = self._prefetch.said()
        report.warnings.extend(self._prefetch.warnings())

    def blobs(self) -> list[manager_pb2.BlobRef]:
        """Blobs that members may fetch, or that are still needed."""
        return [*self._prefetch.blobs(), *self._routes.blobs()]

    # -- relays come, go and answer

    def lost(self, holder: Holder) -> None:
        """Its session ended."""
        if self._course.refusable:
            self._prefetch.lost(holder)

    def back(self, holder: Holder) -> bool:
        """It said hello; whether it takes part."""
        return self._prefetch.back(holder)

    def gone(self, relay: str, why: str, now: float) -> None:
        """It is not there any more, and nobody waits for it."""
        if self._course.refusable:
            self._prefetch.gone(relay, why)
            self._routes.gone(relay, why, now)

    def timer(self, step: str, now: float) -> bool:
        """A timer of the update fired; whether it is one of a relay's."""
        what, _, relay = step.partition(" ")
        if what == "relay":
            lease = self._course.state.deadlines.lease
            lost = f"it lost its session and did not come back within {lease:g} s"
            self.gone(relay, f"{lost}: see whether it runs and reaches this manager", now)
        elif what == "again":
            self._prefetch.again(relay)
        return what in ("relay", "again")

    def answered(self, member: Member, body: manager_pb2.RelayFilled | manager_pb2.RelayProgress) -> None:
        """A relay was filled, or says how far it is."""
        if self._course.phase != "filling" or not isinstance(member, Holder):
            return
        if isinstance(body, manager_pb2.RelayFilled):
            self._prefetch.take(member, body)
        else:
            said = f"filling {member.source}"
            progress = manager_pb2.UpdateProgress(
                stage=manager_pb2.PLAN, bytes_done=body.bytes_done, bytes_total=body.bytes_total, message=said
            )
            self._course.tell(progress)

    def sealed(self, body: manager_pb2.Sealed, now: float) -> None:
        """An answer to being asked for finer digests."""
        if self._course.phase == "joining":
            self._routes.take(body, now)

    def done(self, step: str, number: int, done: Done, now: float) -> None:
        """A task ended."""
        if self._course.phase == "joining":
            self._routes.done(step, number, done, now)
