"""The versions: their numbers and roots, where the bytes of each lie, and which one each replica is to serve.

A number never goes down and never gets another root, also across restarts of the manager: the ledger stores each
lineage's highest number apart from its commits, and members tell of numbers that the ledger lost. Only a rollback
installs a lower number, under the root that the ledger or a worker's words know it by; the next update's number is
still above the highest.

A *commit* is the durable decision that a selection of replicas, some names or everybody in a pool, is to serve a
version. A replica is to serve the version of the newest commit that selects it, and a newcomer that of its pool. So
runs that share no replica do not meet. A run that takes a replica over has it from then on. A replica that a commit
does not select keeps what it was to serve.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ckpt_engine.core.problems import precondition
from ckpt_engine.core.version import Version
from ckpt_engine.machines.events import Published, RecordIntent, StoredSeal
from ckpt_engine.machines.manager.goal import Goal, HeldVersion
from ckpt_engine.v1 import manager_pb2

HIGHEST_VERSION = (1 << 63) - 1
"""What the wire and the state words hold."""

_POOL = "pool\n"
"""The prefix of what stands for a pool; no replica's name begins with it."""

KNOWN_ROOTS = 1000
"""The number of newest versions with remembered roots: as many as the ledger keeps reports."""

EVERYBODY = ""
"""Stands for all replicas that receive weights in the pool without a name, in place of a replica's name."""


@dataclass(frozen=True)
class Commit:
    """The decision that a selection of replicas is to serve a version, as the ledger has it."""

    epoch: int  # orders commits
    identity: Version
    keeps_draft: bool = False  # draft models that the version has no weights for keep their own


@dataclass(frozen=True)
class Commits:
    """What the ledger knows of commits when a manager begins."""

    until: int = 0  # epoch of the last intent, also of one that carried out an older commit; later ones may be spent
    last: tuple[Commit, ...] = ()  # the newest one of each lineage
    desired: Mapping[str, Commit] = field(default_factory=dict)  # by replica, or by `everybody` in a pool
    deployments: tuple[manager_pb2.Deployment, ...] = ()  # undecided ones, and those of each lineage's highest version
    seals: Mapping[Version, StoredSeal] = field(default_factory=dict)  # those that are known of the versions above

    @property
    def identities(self) -> list[Version]:
        """The versions that are to be served, or were committed last, or that a deployment may lead to."""
        commits = (*_last(self).values(), *self.desired.values())
        undecided = (row for row in self.deployments if row.state == manager_pb2.Deployment.STATE_UNDECIDED)
        staged = (each for row in undecided for each in (row.base, row.target))
        return list(dict.fromkeys((*(commit.identity for commit in commits), *map(Version.of, staged))))

    def content(self, identity: Version) -> Content:
        """A version's content as far as the ledger knows it."""
        seal = self.seals.get(identity, StoredSeal(0, None))
        return Content(identity, record=seal.record, fill=seal.fill)


@dataclass
class Content:
    """Where the bytes of a version lie."""

    identity: Version
    published: Published | None = None  # None after a restart of the manager, until its ranks have published again
    record: manager_pb2.BlobRef | None = None  # its SealedRecord; None: there is none
    probe: manager_pb2.BlobRef | None = None  # its ProbeScores; None: it has none, or another manager had them
    sealed_since: bool = False  # its ranks sealed another version since: what they hold must be hashed again
    fill: int = 0  # epoch of the fill fence under which its ranks sealed it; 0: unknown

    def was_sealed_for(self, goal: Goal) -> bool:
        """Whether the ranks of a goal sealed this very content for a manager that led before."""
        identity = self.identity
        return goal.fill == self.fill != 0 and (goal.lineage, goal.version) == (identity.lineage, identity.number)


@dataclass
class Versions:
    """The known versions, and which one each replica is to serve."""

    known_until: int = 0  # see Commits.until: what workers' words say of higher epochs is new
    desired: dict[str, Commit] = field(default_factory=dict)  # by replica, or by `everybody` in a pool
    last: dict[str, Commit] = field(default_factory=dict)  # by lineage
    contents: dict[Version, Content] = field(default_factory=dict)  # of all commits above
    pools: dict[str, str] = field(default_factory=dict)  # by replica that has said hello, or that a commit names
    highest: dict[str, Version] = field(default_factory=dict)  # by lineage, with the highest number
    undone: dict[str, manager_pb2.Deployment] = field(default_factory=dict)  # by lineage, the last that was undone
    roots: dict[tuple[str, int], bytes] = field(default_factory=dict)  # of what was committed, by lineage and number
    doubtful: dict[int, frozenset[str]] = field(default_factory=dict)
    """By epoch of an intent without an answer, the keys of `desired` with a newest commit that is unknown."""
    pending: dict[int, Version] = field(default_factory=dict)
    """By epoch of its intent, a version of which the ledger may have stored the seal, and that is in `contents` only
    once that is known."""
    staged: frozenset[Version] = frozenset()  # bases and targets of deployments, of which the contents are kept
    revision: int = 0  # rises when what replicas are to serve changes, except for one that says hello

    @classmethod
    def from_ledger(
        cls, commits: Commits, highest: Sequence[Version] = (), identities: Sequence[Version] = ()
    ) -> Versions:
        """The versions with which a manager begins. highest: of each lineage, at least as high. identities: of all
        intents that are kept, oldest first."""
        versions = cls(commits.until, dict(commits.desired), _last(commits))
        versions.contents = {identity: commits.content(identity) for identity in commits.identities}
        committed = [each.identity for each in (*commits.last, *commits.desired.values())]
        for identity in (*committed, *highest):
            versions.take_number(identity)
        for identity in (*identities, *highest, *committed):
            versions.remember(identity)
        return versions

    # -- numbers

    def take_number(self, identity: Version) -> bool:
        """Notes that a version's number is used. Returns whether it is the lineage's highest."""
        highest = self.highest.get(identity.lineage)
        if highest is not None and identity.number <= highest.number:
            return False
        self.highest[identity.lineage] = identity
        return True

    def doubt(self, epoch: int, identity: Version, selection: frozenset[str]) -> None:
        """Notes that a version's intent may be on the disk, where it counts: its number is taken, and nothing is
        committed for the selection until the ledger is read again."""
        self.take_number(identity)
        if selection:
            self.doubtful[epoch] = selection

    def refuse(self, epoch: int) -> None:
        """Notes that the ledger has not stored this intent, and will not."""
        self.pending.pop(epoch, None)

    def read_again(self, commits: Commits) -> None:
        """Takes the commits that were read from the ledger; newer ones than the known are to be served."""
        self.revision += 1
        for epoch in self.doubtful:
            self.pending.pop(epoch, None)
        self.doubtful = {}
        for stored_commits, known in ((commits.desired, self.desired), (_last(commits), self.last)):
            for key, commit in stored_commits.items():
                if key not in known or known[key].epoch < commit.epoch:
                    known[key] = commit
                    self.contents.setdefault(commit.identity, commits.content(commit.identity))
                    self.remember(commit.identity)
        self._forget_superseded()

    def is_certain(self, names: Iterable[str], pool: str) -> bool:
        """Whether it is known what these replicas of a pool are to serve."""
        keys = {*names, everybody(pool)}
        return all(keys.isdisjoint(each) for each in self.doubtful.values())

    def remember(self, identity: Version) -> None:
        """Remembers a version's root, which the ledger or a worker's words tell. The first one is believed."""
        key = identity.lineage, identity.number
        self.roots[key] = self.roots.pop(key, identity.root)
        while len(self.roots) > KNOWN_ROOTS:
            del self.roots[next(iter(self.roots))]

    def knows(self, identity: Version) -> bool:
        """Whether this root of the version is known from the ledger or a worker; a holder's word does not count."""
        return self.roots.get((identity.lineage, identity.number)) == identity.root

    def next_number(self, lineage: str) -> int:
        """The number of an update that names none: 0 in a new lineage. Raises FAILED_PRECONDITION if none is left."""
        highest = self.highest.get(lineage)
        if highest is not None and highest.number >= HIGHEST_VERSION:
            raise precondition(f"no number is left above {highest}: start a new lineage")
        return 0 if highest is None else highest.number + 1

    def check_rises(self, lineage: str, version: int) -> None:
        """Raises FAILED_PRECONDITION for a number below the lineage's highest, or of a deployment that was undone."""
        highest, undone = self.highest.get(lineage), self.undone.get(lineage)
        if undone is not None and undone.target.version == version:
            raise precondition(
                f"version {version} of lineage {lineage!r} was undone (deployment {undone.number}: {undone.reason}), "
                "and its number stays used: update to the next one, or name none"
            )
        if highest is not None and version < highest.number:
            raise precondition(
                f"version {version} goes backwards: {highest} was installed before. To go back to a version "
                f"that is still held, `ckpt-engine rollback --version {version}`; to other weights, start a new "
                'lineage: Trainer(..., lineage="NAME"), or `ckpt-engine update --lineage NAME`'
            )

    def check_number(self, identity: Version, sealed: Version | None) -> None:
        """Raises FAILED_PRECONDITION if weights with this root cannot be this version: its number is too low, or has
        another root.

        sealed: the version that was sealed before and is read again; None: they are to be the lineage's next version,
        or its last one again.
        """
        if sealed is None:
            self.check_rises(identity.lineage, identity.number)
        expected = sealed or self.highest.get(identity.lineage)
        if expected is not None and expected.number == identity.number and expected != identity:
            raise precondition(
                f"the weights are not those of {expected}: their root is {identity.root.hex()[:12]}; "
                "take a higher version, or start a new lineage"
            )

    def resumed(self, goal: Goal) -> HeldVersion | None:
        """The version that the ranks of a goal have sealed for a manager that led before, if that committed it, it is
        what all are to serve that the goal is for, and its record is known; None: it is to be sealed."""
        for content in self.contents.values():
            identity = content.identity
            if content.was_sealed_for(goal) and content.record is not None:
                commits = (self.commit_of(key) for key in (*goal.replicas, *goal.selection))
                if all(commit is not None and commit.identity == identity for commit in commits):
                    return HeldVersion(identity, content.record, content.fill)
        return None

    # -- what each is to serve

    def intent(
        self,
        epoch: int,
        identity: Version,
        seconds: float,
        selection: tuple[str, ...],
        deployment: manager_pb2.Deployment | None,
        seal: StoredSeal,
    ) -> RecordIntent:
        """The ledger's task that records an intent. That of an attempt selects nothing, so it stores no seal. Beside
        this version's the ledger keeps the seals of those that were to be served, or committed last, until now, and of
        those that other intents may have stored meanwhile."""
        if not selection:
            return RecordIntent(epoch, identity, seconds)
        self.pending[epoch] = identity
        keeps = tuple(dict.fromkeys((*self.contents, *self.pending.values())))
        return RecordIntent(epoch, identity, seconds, selection, deployment, seal, keeps)

    def begin(self, identity: Version, epoch: int, goal: Goal, seal: StoredSeal) -> None:
        """Takes a version that is about to be installed: commits it for the goal's selection. For an attempt keeps the
        record, if all was hashed again."""
        self.remember(identity)
        self.revision += 1
        if goal.is_attempt:
            content = self.contents.get(identity)
            if content is not None:
                content.record = content.record or seal.record
            return
        self.pending.pop(epoch, None)
        commit = Commit(epoch, identity, goal.keeps_draft)
        self.desired |= dict.fromkeys(goal.selection, commit)
        self.last[identity.lineage] = commit
        # The holders of what was rolled back to are looked up when they are needed.
        published = None if goal.is_rollback else goal.published
        self.contents[identity] = Content(identity, published, seal.record, goal.probe, fill=seal.fill)
        if not goal.is_rollback:
            self._overwritten(identity)
        self._forget_superseded()

    def stage(self, *identities: Version) -> None:
        """Keeps the contents of these versions, and of no others for a deployment."""
        self.staged = frozenset(identities)
        for identity in identities:
            self.contents.setdefault(identity, Content(identity))
            self.take_number(identity)
            self.remember(identity)
        self._forget_superseded()

    def begin_staged(self, identity: Version, goal: Goal, seal: StoredSeal) -> None:
        """Takes a version that ranks have sealed, and that a deployment is about to commit in waves."""
        self.contents[identity] = Content(identity, goal.published, seal.record, goal.probe, fill=seal.fill)
        self.staged |= {identity} if goal.staging is None else {identity, goal.staging.base}
        self._overwritten(identity)

    def select(self, commit: Commit, selection: Iterable[str], is_last: bool) -> None:
        """Takes a commit of a deployment. is_last: it decides the deployment, so that it is the lineage's last."""
        self.remember(commit.identity)
        self.revision += 1
        self.pending.pop(commit.epoch, None)
        self.desired |= dict.fromkeys(selection, commit)
        if is_last:
            self.last[commit.identity.lineage] = commit
        self._forget_superseded()

    def keep_last(self, base: Commit) -> None:
        """Takes the base of an undecided deployment as its lineage's last commit: the waves after it decide nothing."""
        self.last[base.identity.lineage] = base

    def sealed_anew(self, lineage: str) -> None:
        """Notes that the ranks of a lineage are told to seal what they have now."""
        for content in self.contents.values():
            if content.identity.lineage == lineage:
                content.sealed_since = True

    def register(self, name: str, pool: str) -> None:
        """Takes a replica that said hello. One that comes back in another pool belongs to that one alone."""
        if self.pools.get(name, pool) != pool:
            self.desired.pop(name, None)
        self.pools[name] = pool

    def unregister(self, name: str) -> None:
        """Takes a replica out that is not registered any more."""
        if name not in self.desired:
            self.pools.pop(name, None)

    def learn(self, name: str, identity: Version, epoch: int) -> None:
        """Takes a version that a replica holds and the ledger may not know, as a commit for this replica alone."""
        commit, last = self.commit_of(name), self.last.get(identity.lineage)
        if epoch <= self.known_until or (commit is not None and epoch <= commit.epoch):
            return
        self.revision += 1
        self.desired[name] = Commit(epoch, identity)
        if last is None or last.epoch < epoch:
            self.last[identity.lineage] = self.desired[name]
        self.contents.setdefault(identity, Content(identity))
        self._forget_superseded()

    def commit_of(self, name: str) -> Commit | None:
        """The newest commit that selects a replica, by its name, or all of a pool; None: there is none."""
        commits = [self.desired[key] for key in (name, self._everybody_with(name)) if key in self.desired]
        return max(commits, key=lambda commit: commit.epoch, default=None)

    def keeps_draft(self, name: str) -> bool:
        """Whether a replica's draft model may keep its weights, if what it is to serve has none for it."""
        commit = self.commit_of(name)
        return commit is not None and commit.keeps_draft

    def of(self, name: str) -> Content | None:
        """The content that a replica is to serve; None: nothing, until it is selected."""
        commit = self.commit_of(name)
        return None if commit is None else self.contents[commit.identity]

    def last_of(self, lineage: str) -> Content | None:
        """The content of a lineage that was committed last; None: none was."""
        commit = self.last.get(lineage)
        return None if commit is None else self.contents[commit.identity]

    def newest(self) -> Version | None:
        """The version that was committed last, of all lineages; None: none was."""
        commit = max(self.last.values(), key=lambda commit: commit.epoch, default=None)
        return None if commit is None else commit.identity

    def forget(self, lineage: str, registered: Collection[str]) -> None:
        """Forgets what was committed of a lineage, except its numbers and their roots. registered: the names of all
        replicas, of which none is to serve it."""
        self.revision += 1
        self.last.pop(lineage, None)
        for key in [key for key, commit in self.desired.items() if commit.identity.lineage == lineage]:
            del self.desired[key]
            if key not in registered:
                self.pools.pop(key, None)
        self._forget_superseded()

    def served_lineages(self) -> set[str]:
        """The lineages that some replica is to serve, or that a newcomer would."""
        commits = (self.commit_of(key) for key in (*self.desired, EVERYBODY))
        return {commit.identity.lineage for commit in commits if commit is not None}

    def needed(self, registered: Collection[str]) -> set[Version]:
        """The versions that a replica is to serve or a newcomer would be, and those that lineages committed last.
        registered: the names of all replicas."""
        keys = (key for key in self.desired if key in registered or key == self._everybody_with(key))
        last = {commit.identity for commit in self.last.values()}
        return {self.desired[key].identity for key in keys} | last | self.staged

    def _overwritten(self, identity: Version) -> None:
        """Notes that the ranks of a lineage have this version now: others of it can be read from files only."""
        for content in self.contents.values():
            other = content.identity.lineage == identity.lineage and content.identity != identity
            if other and content.published is not None:
                files = all(source.outlives for source in content.published.sources)
                content.published = content.published if files else None

    def _forget_superseded(self) -> None:
        """Forgets commits that no longer apply to any replica, and the contents of their versions."""
        for key in [key for key, commit in self.desired.items() if self.commit_of(key) != commit]:
            del self.desired[key]
        in_use = {commit.identity for commit in (*self.desired.values(), *self.last.values())} | self.staged
        self.contents = {identity: content for identity, content in self.contents.items() if identity in in_use}

    def _everybody_with(self, name: str) -> str:
        """What stands for everybody in a replica's pool. name: of a replica, or what stands for a pool itself."""
        if name.startswith(_POOL):
            return name
        return everybody(self.pools.get(name, ""))


def _last(commits: Commits) -> dict[str, Commit]:
    """The last commits, by lineage, of the lineages that some replica should still serve."""
    served = {commit.identity.lineage for commit in commits.desired.values()}
    return {each.identity.lineage: each for each in commits.last if each.identity.lineage in served}


def selected(key: str) -> str:
    """The replicas that a key of `Versions.desired` stands for, for people."""
    if key == EVERYBODY:
        return "a replica that comes to the pool without a name"
    pool = key.startswith(_POOL)
    return (
        f"a replica that comes to pool {key.removeprefix(_POOL)!r}"
        if pool
        else f"replica {key!r}, should it come back,"
    )


def everybody(pool: str) -> str:
    """What stands in place of a replica's name for all of a pool that receive weights."""
    return _POOL + pool if pool else EVERYBODY
