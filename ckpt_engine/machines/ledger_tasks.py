"""Tasks that the manager's machine has for its ledger (see tasks.py). events.py exports these names too."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TypeAlias

from ckpt_engine.core.version import Version
from ckpt_engine.v1 import manager_pb2


@dataclass(frozen=True)
class SpendEpoch:
    """Spends an epoch: no manager on this ledger uses it again. Result of Ledger.spend_epoch: None, once it is on the
    disk."""

    epoch: int
    seconds: float


@dataclass(frozen=True)
class StoredSeal:
    """How a version was sealed, as the ledger has it."""

    fill: int  # epoch of the fill fence under which its ranks sealed it; 0: unknown
    record: manager_pb2.BlobRef | None  # its SealedRecord; None: there is none, or it is too large for the ledger


@dataclass(frozen=True)
class RecordIntent:
    """Stores an intent. Result of Ledger.record_intent: None, once it is on the disk."""

    epoch: int
    identity: Version
    seconds: float
    # The replicas that are to serve the version from now on, by name, or all of a pool (versions.everybody). Empty: a
    # late replica is brought to what it was to serve already.
    selection: tuple[str, ...] = ()
    deployment: manager_pb2.Deployment | None = None  # its row with this commit; None: it is of no deployment
    seal: StoredSeal | None = None  # of the version, to be stored with the commit; None: what is stored stays
    keeps: tuple[Version, ...] = ()  # versions of which the ledger keeps the seals, if one is stored now


@dataclass(frozen=True)
class RecordOutcome:
    """Stores a report. Result of Ledger.record_outcome: None. Its failure is logged and changes no outcome."""

    report: manager_pb2.UpdateReport
    seconds: float


@dataclass(frozen=True)
class CorrectOutcome:
    """Corrects a stored report, once the outcome of one of its replicas is known. Result of Ledger.record_outcome:
    None. Its failure is logged."""

    report: manager_pb2.UpdateReport
    replica: str
    seconds: float


@dataclass(frozen=True)
class Found:
    """What the ledger knows of updates to one version, except attempts for late replicas."""

    epoch: int | None  # of the last one's intent; None: there was none
    report: manager_pb2.UpdateReport | None  # of that one; None: the manager ended before it did
    last: tuple[int, ...]  # the versions of the lineage's last updates, newest first


@dataclass(frozen=True)
class FindReport:
    """Looks for the last update to a version. Result of Ledger.last_update: Found."""

    lineage: str
    version: int
    seconds: float


@dataclass(frozen=True)
class ReadCommits:
    """Reads the commits, after all earlier writes are done. Result of Ledger.commits: versions.Commits."""

    seconds: float


@dataclass(frozen=True)
class OperatorHold:
    """An operator's hold on a replica: it is left as it is until it is released."""

    since: float  # when it was held first, seconds since 1970; for people
    reason: str  # for people; may be empty

    def describe(self, name: str) -> str:
        """Describes it to people, in words that follow "it is". name: the replica's."""
        since = datetime.fromtimestamp(self.since, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        why = f" ({self.reason})" if self.reason else ""
        return f"held by an operator since {since}{why}: release it with `ckpt-engine replica release {name}`"

    def message(self) -> manager_pb2.OperatorHold:
        """The hold as a protobuf message."""
        return manager_pb2.OperatorHold(since=self.since, reason=self.reason)


@dataclass(frozen=True)
class RecordHold:
    """Stores a hold. Result of Ledger.record_hold: the OperatorHold, once it is on the disk."""

    replica: str
    reason: str
    seconds: float


@dataclass(frozen=True)
class RecordRelease:
    """Stores the end of a hold. Result of Ledger.record_release: None, once it is on the disk."""

    replica: str
    seconds: float


@dataclass(frozen=True)
class RecordForgotten:
    """Stores that commits of a lineage up to an epoch do not count any more. Result of Ledger.record_forgotten: None,
    once it is on the disk."""

    lineage: str
    epoch: int
    seconds: float


@dataclass(frozen=True)
class RecordDeployment:
    """Stores the row of a deployment. Result of Ledger.record_deployment: None, once it is on the disk."""

    row: manager_pb2.Deployment
    seconds: float


LedgerTask: TypeAlias = (
    SpendEpoch
    | RecordIntent
    | RecordOutcome
    | CorrectOutcome
    | FindReport
    | ReadCommits
    | RecordHold
    | RecordRelease
    | RecordForgotten
    | RecordDeployment
)
