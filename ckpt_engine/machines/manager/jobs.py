"""Says what each job of an update does, what they share, and how an update ends. The jobs themselves, and what follows
which, are in `update.py`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from ckpt_engine.core.version import Version
from ckpt_engine.machines.events import Call, StoredSeal
from ckpt_engine.machines.manager.absences import Absences, Ranks
from ckpt_engine.machines.manager.collective import UpdateCollective
from ckpt_engine.machines.manager.course import Course
from ckpt_engine.machines.manager.deploy import Deployment
from ckpt_engine.machines.manager.goal import Goal
from ckpt_engine.machines.manager.members import Member
from ckpt_engine.machines.manager.plan_pipeline import PlanPipeline, Way
from ckpt_engine.machines.manager.recipients import Recipients
from ckpt_engine.machines.manager.update_relays import UpdateRelays
from ckpt_engine.v1 import manager_pb2, weights_pb2


@dataclass(frozen=True)
class SealedVersion:
    """The version of an update, once its root is known."""

    identity: Version
    direct: Way  # of replicas that read its sources
    seal: StoredSeal  # its record is that which it was read by, unless another one was made


class Job:
    """One part of an update's course. What a kind of job does not define does nothing."""

    def send(self, now: float) -> None:
        """Sends to all that have not answered: when the job begins, then every `resend` and when a member is back."""

    def message(self, member: Member, body: object, now: float) -> None:
        """Takes a message, which may carry another update's fence."""

    def session_ended(self, name: str) -> None:
        """Drops what counts only in the session in which this replica said it."""

    def overdue(self, seconds: float, now: float) -> Job | None:
        """Goes on without silent members, or ends, when its phase's time is up, `seconds` after the update began."""
        return None

    def advance(self, now: float) -> Job | None:
        """Goes on as far as it can now. Returns the next job, if it is done."""
        return None


@dataclass(frozen=True)
class Started:
    """A staged deployment whose first wave is committed. It goes on without the update that sealed its version."""

    deployment: Deployment
    report: manager_pb2.UpdateReport  # of the update, with outcomes of replicas that cannot take part
    calls: dict[int, Call]  # by trainer rank, those that wait
    until: manager_pb2.Until  # what these wait for
    began: float  # when the update did, monotonic seconds
    committed: float  # when the first wave was
    end: float  # by which the calls are answered


@dataclass(frozen=True)
class Over(Job):
    """How an update ended."""

    refusal: weights_pb2.Problem | None = None
    report: manager_pb2.UpdateReport | None = None  # None: it was refused, or a deployment goes on
    started: Started | None = None  # the deployment that goes on; None: there is none


class Entry(Enum):
    """Tasks of an update that write to the ledger."""

    INTENT = auto()
    REPORT = auto()


@dataclass
class Parts:
    """What all jobs of one update share."""

    course: Course
    recipients: Recipients
    absences: Absences
    ranks: Ranks
    collective: UpdateCollective
    pipeline: PlanPipeline  # of what replicas read from the sources
    before: Parts | None  # of the update with installs that go on; None: there is none
    relays: UpdateRelays | None = None  # None: no relay brings anything, as far as is known

    @property
    def goal(self) -> Goal:
        """What it is to do."""
        return self.course.goal
