"""Which numbers each lineage has used, which version it sealed last, and which replica is to hold which of them.

A number never goes down and never gets another root, also when the manager was restarted in between: the ledger keeps
each lineage's highest number apart from its last intent, and members tell of numbers that the ledger lost. Only a
rollback installs a lower one, under the root that the ledger or a worker's words know it by; numbers go on above the
highest all the same.

A replica belongs to the lineage whose update was for it last: one that named it, or one for its pool. It is to hold
that lineage's last version, if that is for it too. So runs that share no replica do not meet, one that takes a replica
over has it from then on, and a replica that came after its lineage chose others waits for an update that is for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ckpt_engine.core.problems import precondition
from ckpt_engine.core.version import Version
from ckpt_engine.machines.events import Published, RecordIntent
from ckpt_engine.machines.manager.goal import Goal
from ckpt_engine.v1 import manager_pb2

HIGHEST_VERSION = (1 << 63) - 1
"""What the wire and the state words hold."""

_POOL = "pool\n"
"""No replica's name begins so."""

KNOWN_ROOTS = 1000
"""Versions whose roots are remembered, the newest: as many as the ledger keeps reports."""

EVERYBODY = ""
"""In place of a replica's name: all that receive weights and are in the pool without a name."""

Meant = tuple[int, str]
"""The epoch of an update, and its lineage."""


@dataclass(frozen=True)
class Intended:
    """An intent as the ledger has it. selection: the replicas that the version is for; none: `EVERYBODY`."""

    epoch: int
    identity: Version
    selection: tuple[str, ...] = ()


@dataclass
class Latest:
    """The last version of a lineage that was sealed and meant for installing.

    epoch: the highest that a replica may have installed it with, late replicas aside. published: where its bytes lie;
    None after a restart of the manager, until its ranks have published again. selection: the replicas that it is for,
    by name, or everybody in a pool. record: its SealedRecord, a blob; None: there is none. sealed_since: its ranks
    were told to seal another version since, so what they hold now must be hashed again before it is called this one.
    """

    identity: Version
    epoch: int
    published: Published | None = None
    selection: frozenset[str] = frozenset((EVERYBODY,))
    record: manager_pb2.BlobRef | None = None
    sealed_since: bool = False


@dataclass
class Versions:
    """Which version each lineage, and each replica, is to have.

    meant: by replica, the last update that was for it; by `everybody`, the last one for a pool. pools: of each
    replica that has said hello, its pool; of one that has left, only if an update was for it. known_until: the
    epoch of the last intent that the ledger had when the manager began; epochs above it may have been spent ahead, so
    what a word says of those is news. highest: of each lineage the version with the highest number, which need not
    be its latest one. roots: of versions that were meant for installing, by lineage and number.
    """

    known_until: int = 0
    latest: dict[str, Latest] = field(default_factory=dict)
    meant: dict[str, Meant] = field(default_factory=dict)
    pools: dict[str, str] = field(default_factory=dict)
    highest: dict[str, Version] = field(default_factory=dict)
    roots: dict[tuple[str, int], bytes] = field(default_factory=dict)
    revision: int = 0  # rises when what replicas are to hold changes by more than the one that says hello

    @classmethod
    def from_ledger(
        cls,
        intents: Sequence[Intended],
        meant: Mapping[str, Meant],
        highest: Sequence[Version] = (),
        identities: Sequence[Version] = (),
    ) -> Versions:
        """The versions with which a manager begins. intents: the last one of each lineage. highest: of each lineage, at
        least as high. identities: of all intents that are kept, oldest first."""
        latest = {
            intent.identity.lineage: Latest(
                intent.identity, intent.epoch, None, frozenset(intent.selection or (EVERYBODY,))
            )
            for intent in intents
        }
        versions = cls(max((intent.epoch for intent in intents), default=0), latest, dict(meant))
        for identity in (*(intent.identity for intent in intents), *highest):
            versions.take_number(identity)
        for identity in (*identities, *highest, *(intent.identity for intent in intents)):
            versions.remember(identity)
        return versions

    # -- numbers

    def take_number(self, identity: Version) -> bool:
        """Notes that its number is used. Returns whether it is above all that the lineage has used before."""
        known = self.highest.get(identity.lineage)
        if known is not None and identity.number <= known.number:
            return False
        self.highest[identity.lineage] = identity
        return True

    def doubt(self, identity: Version) -> None:
        """It is not known whether its intent was written. It may be on the disk all the same, and what is there counts
        after a restart: its number is taken."""
        self.take_number(identity)

    def remember(self, identity: Version) -> None:
        """The ledger, or the words of a worker, say that this version has this root. The first word is believed."""
        named = identity.lineage, identity.number
        self.roots[named] = self.roots.pop(named, identity.root)
        while len(self.roots) > KNOWN_ROOTS:
            del self.roots[next(iter(self.roots))]

    def knows(self, identity: Version) -> bool:
        """Whether this version was meant for installing with this root. What a holder says does not make it so."""
        return self.roots.get((identity.lineage, identity.number)) == identity.root

    def next_number(self, lineage: str) -> int:
        """The number of an update that names none: 0 in a new lineage. Raises FAILED_PRECONDITION if none is left."""
        known = self.highest.get(lineage)
        if known is not None and known.number >= HIGHEST_VERSION:
            raise precondition(f"no number is left above {known}: start a new lineage")
        return 0 if known is None else known.number + 1

    def check_rises(self, lineage: str, version: int) -> None:
        """Raises FAILED_PRECONDITION for a number below the lineage's highest."""
        known = self.highest.get(lineage)
        if known is not None and version < known.number:
            raise precondition(
                f"version {version} goes backwards: {known} was installed before. To go back to a version "
                f"that is still held, `ckpt-engine rollback --version {version}`; to other weights, start a new "
                'lineage: Trainer(..., lineage="NAME"), or `ckpt-engine update --lineage NAME`'
            )

    def check_number(self, identity: Version, sealed: Version | None) -> None:
        """Whether weights are the version that they say they are, now that their root is known. sealed: the version
        that was sealed before and is read again; None: they are to be the lineage's next version, or the last one
        once more.

        Raises FAILED_PRECONDITION for a number that went down, or that has another root.
        """
        if sealed is None:
            self.check_rises(identity.lineage, identity.number)
        known = sealed or self.highest.get(identity.lineage)
        if known is not None and known.number == identity.number and known != identity:
            raise precondition(
                f"the weights are not those of {known}: their root is {identity.root.hex()[:12]}; "
                "take a higher version, or start a new lineage"
            )

    # -- what each is to hold

    def intent(self, epoch: int, identity: Version, goal: Goal, seconds: float) -> RecordIntent:
        """What the ledger is to know. A late replica gets what it was meant to have, so nothing is meant anew."""
        late = goal.late is not None
        whole = self.selection(identity, frozenset() if late else goal.selection)
        meant = () if late else tuple(sorted(goal.selection))
        return RecordIntent(epoch, identity, seconds, tuple(sorted(whole)), meant)

    def begin(self, identity: Version, epoch: int, goal: Goal, record: manager_pb2.BlobRef | None) -> None:
        """A version is about to be installed into those that its update is for; or a late replica is to get it, for
        which all of it was hashed again if there is a record now."""
        latest = self.latest.get(identity.lineage)
        self.remember(identity)
        self.revision += 1
        if goal.late is None:
            whole = self.selection(identity, goal.selection)
            # Which holders have what was gone back to, and its record, is asked whenever that is needed.
            published = goal.published if goal.back is None else None
            self.latest[identity.lineage] = Latest(identity, epoch, published, whole, record)
            self.meant |= dict.fromkeys(goal.selection, (epoch, identity.lineage))
        elif latest is not None and latest.identity == identity:
            latest.record = latest.record or record

    def sealed_anew(self, lineage: str) -> None:
        """The ranks of a lineage are told to seal what they have now."""
        if lineage in self.latest:
            self.latest[lineage].sealed_since = True

    def selection(self, identity: Version, selection: frozenset[str]) -> frozenset[str]:
        """What a version is for, if it is asked for once more for these: for all that it was ever asked for."""
        known = self.latest.get(identity.lineage)
        if known is None or known.identity != identity:
            return selection
        return known.selection | selection

    def joined(self, name: str, pool: str) -> None:
        """A replica said hello. One that comes back in another pool belongs to that one alone."""
        if self.pools.get(name, pool) != pool:
            self.meant.pop(name, None)
        self.pools[name] = pool

    def left(self, name: str) -> None:
        """A replica is not registered any more."""
        if name not in self.meant:
            self.pools.pop(name, None)

    def learn(self, name: str, identity: Version, epoch: int) -> None:
        """A replica holds what the ledger does not know of. It tells of that replica, and of no other."""
        lineage = identity.lineage
        known = self.latest.get(lineage)
        if epoch <= self.known_until or (known is not None and epoch < known.epoch):
            return
        self.revision += 1
        if known is None:
            self.latest[lineage] = Latest(identity, epoch, None, frozenset((name,)))
        else:
            selection = known.selection | {name}
            if known.identity == identity:
                self.latest[lineage] = replace(known, epoch=epoch, selection=selection)
            else:
                self.latest[lineage] = Latest(identity, epoch, None, selection)
        if self._meant_for(name)[0] < epoch:
            self.meant[name] = epoch, lineage

    def of(self, name: str) -> Latest | None:
        """What a replica is to hold; None: nothing, until an update is for it."""
        latest = self.latest.get(self._meant_for(name)[1])
        if latest is None or latest.selection.isdisjoint((name, self._everybody_with(name))):
            return None
        return latest

    def newest(self) -> Latest | None:
        """The newest version of all lineages."""
        return max(self.latest.values(), key=lambda latest: latest.epoch, default=None)

    def lineages(self) -> set[str]:
        """The lineages that some replica belongs to, or one that comes for the first time would."""
        return {self._meant_for(name)[1] for name in (*self.meant, EVERYBODY)}

    def _meant_for(self, name: str) -> Meant:
        return max(self.meant.get(name, (0, "")), self.meant.get(self._everybody_with(name), (0, "")))

    def _everybody_with(self, name: str) -> str:
        """What stands for everybody of a replica's pool, or of the pool that this means."""
        if name.startswith(_POOL):
            return name
        return everybody(self.pools.get(name, ""))


def everybody(pool: str) -> str:
    """What stands in place of a replica's name for all of a pool that receive weights."""
    return _POOL + pool if pool else EVERYBODY
