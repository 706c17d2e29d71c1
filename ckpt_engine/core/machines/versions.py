"""Which version each lineage sealed last, and which replica is to hold which of them.

A replica belongs to the lineage whose update was for it last: one that named it, or one for all. It is to hold that
lineage's last version, if that is for it too. So runs that share no replica do not meet, one that takes a replica over
has it from then on, and a replica that came after its lineage chose others waits for an update that is for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ckpt_engine.core.machines.events import Published, RecordIntent
from ckpt_engine.v1 import weights_pb2

EVERYBODY = ""
"""In place of a replica's name: all that receive weights."""

Meant = tuple[int, str]
"""The epoch of an update, and its lineage."""


@dataclass(frozen=True)
class Intended:
    """An intent as the ledger has it. selection: the replicas that the version is for; none: all."""

    epoch: int
    identity: weights_pb2.Identity
    selection: tuple[str, ...] = ()


@dataclass
class Latest:
    """The last version of a lineage that was sealed and meant for installing.

    epoch: the highest that anybody may have installed it with, late replicas aside. published: where its bytes lie;
    None after a restart of the manager, until its ranks have published again. selection: the replicas that it is for;
    None: all that receive weights.
    """

    identity: weights_pb2.Identity
    epoch: int
    published: Published | None = None
    selection: frozenset[str] | None = None


@dataclass
class Versions:
    """meant: by replica, the last update that was for it; EVERYBODY: the last one for all. ledger_epoch: what the
    ledger knew of when the manager began."""

    ledger_epoch: int = 0
    latest: dict[str, Latest] = field(default_factory=dict)
    meant: dict[str, Meant] = field(default_factory=dict)

    @classmethod
    def from_ledger(cls, epoch: int, intents: Sequence[Intended], meant: Mapping[str, Meant]) -> Versions:
        """As a manager begins. intents: the last one of each lineage."""
        latest = {
            intent.identity.lineage: Latest(intent.identity, intent.epoch, None, frozenset(intent.selection) or None)
            for intent in intents
        }
        return cls(epoch, latest, dict(meant))

    def intent(
        self, epoch: int, identity: weights_pb2.Identity, selection: frozenset[str] | None, late: bool, seconds: float
    ) -> RecordIntent:
        """What the ledger is to know. late: a replica gets what it was meant to have, so nothing is meant anew."""
        whole = self.selection(identity, frozenset() if late else selection)
        meant = () if late else tuple(sorted(selection or (EVERYBODY,)))
        return RecordIntent(epoch, identity, seconds, tuple(sorted(whole or ())), meant)

    def begin(
        self, identity: weights_pb2.Identity, epoch: int, published: Published, selection: frozenset[str] | None
    ) -> None:
        """A version is about to be installed into those that its update is for."""
        whole = self.selection(identity, selection)
        self.latest[identity.lineage] = Latest(identity, epoch, published, whole)
        self.meant |= dict.fromkeys(selection or (EVERYBODY,), (epoch, identity.lineage))

    def selection(self, identity: weights_pb2.Identity, selection: frozenset[str] | None) -> frozenset[str] | None:
        """Whom a version is for, if it is asked for once more for these: for all that it was ever asked for."""
        known = self.latest.get(identity.lineage)
        if known is None or known.identity != identity:
            return selection
        return None if selection is None or known.selection is None else known.selection | selection

    def learn(self, name: str, identity: weights_pb2.Identity, epoch: int) -> None:
        """A replica holds what the ledger does not know of. It tells of that replica, and of nobody else."""
        lineage = identity.lineage
        known = self.latest.get(lineage)
        if epoch <= self.ledger_epoch or (known is not None and epoch < known.epoch):
            return
        if known is None:
            self.latest[lineage] = Latest(identity, epoch, None, frozenset((name,)))
        else:
            selection = None if known.selection is None else known.selection | {name}
            published = known.published if known.identity == identity else None
            self.latest[lineage] = Latest(identity, epoch, published, selection)
        if self._meant_for(name)[0] < epoch:
            self.meant[name] = epoch, lineage

    def of(self, name: str) -> Latest | None:
        """What a replica is to hold; None: nothing, until an update is for it."""
        latest = self.latest.get(self._meant_for(name)[1])
        if latest is None or (latest.selection is not None and name not in latest.selection):
            return None
        return latest

    def newest(self) -> Latest | None:
        """Of all lineages."""
        return max(self.latest.values(), key=lambda latest: latest.epoch, default=None)

    def lineages(self) -> set[str]:
        """Those that some replica belongs to, or one that comes for the first time would."""
        return {self._meant_for(name)[1] for name in (*self.meant, EVERYBODY)}

    def _meant_for(self, name: str) -> Meant:
        return max(self.meant.get(name, (0, "")), self.meant.get(EVERYBODY, (0, "")))
