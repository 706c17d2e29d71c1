"""When a member that does not say goodbye is forgotten, and with it what it holds of the manager's memory.

A rank that says goodbye is forgotten at once. One that was killed only loses its session, so it is forgotten
- `forget` seconds after that, if it has not come back (that costs nothing: a hello brings all of it again);
- as soon as no rank of its run is connected and updates of other runs have taken over every replica that its own were
  for;
- when an operator evicts its run.
So is a holder that was killed, `forget` seconds later, and a replica that no update ever reached. A replica that was
prepared for a version, or holds one, stays until it is evicted: it may go on serving that one.

Names cost nothing to make, so a stranger must not leave any. A member that has brought nothing is forgotten as soon as
its session ends: a replica that never had a worker, a holder that holds nothing and can hold nothing, a rank of a
lineage without a version that has published nothing. Of the other replicas that no update reached, `MOST_LOST` wait
for `forget`; beyond that the one that was lost first goes. What a member says of itself is believed: one that lies
about what it holds is kept out by tokens only.

What the run published goes with its last rank, unless it can be read without it (files) and there is a replica that is
to hold it: then it stays for late ones, until other updates have taken over the last of them.

A lineage that has no rank, of which nothing is to be read, and which no replica holds or is to serve, is forgotten
between `forget` and twice that later, or when an operator says so: newcomers are not brought to it any more. That is
durable. Its numbers stay taken: no version of that lineage gets one again with another root.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ckpt_engine.core.names import some
from ckpt_engine.core.problems import CkptEngineError, precondition
from ckpt_engine.core.version import Version
from ckpt_engine.machines.events import Call, Done, FinishCall, RecordForgotten
from ckpt_engine.machines.manager.lineages import FILES, Lineage, known_lineage, lineages
from ckpt_engine.machines.manager.members import Holder, Member, MemberId, Replica, TrainerRank, member_id
from ckpt_engine.machines.manager.state import ManagerState
from ckpt_engine.machines.manager.versions import selected
from ckpt_engine.v1 import manager_pb2

MOST_LOST = 1024
"""Replicas without a session that have workers and were never prepared for a version: far more than an outage takes
before a first update."""


@dataclass(frozen=True, slots=True)
class ForgetTimer:
    """Key of the timer after which a lost member is forgotten."""

    member: MemberId


@dataclass(frozen=True, slots=True)
class LineagesLook:
    """Key of the timer after which lineages that nothing uses are looked for."""


@dataclass(frozen=True, slots=True)
class ForgottenWrite:
    """Key of the task that makes it durable that a lineage is forgotten."""

    lineage: str
    call: Call | None  # that waits for it
    effects: tuple[str, ...]  # that the call is told


@dataclass
class Forgetting:
    """Says which members are to be forgotten; the manager's machine then tells all that must know. Forgets lineages."""

    state: ManagerState
    unused: frozenset[str] = frozenset()  # lineages that nothing used when that was looked last
    unreached: dict[str, None] = field(
        default_factory=dict
    )  # lost replicas that no update reached; the first one first

    def lost(self, member: Member) -> Member | None:
        """Notes that its session ended without a goodbye. Returns a member that is to be forgotten at once."""
        if not self._holds_anything(member):
            return member
        if isinstance(member, Replica):
            if _reached(member):
                return None
            self.unreached[member.name] = None
        self.state.set_timer(ForgetTimer(member_id(member)), self.state.deadlines.forget)
        if len(self.unreached) > MOST_LOST:
            return self.state.members.replicas.get(next(iter(self.unreached)))
        return None

    def cancel(self, member: Member) -> None:
        """Notes that a member said hello again, or will not."""
        if isinstance(member, Replica):
            self.unreached.pop(member.name, None)
        self.state.cancel_timer(ForgetTimer(member_id(member)))

    def due(self, key: ForgetTimer) -> Member | None:
        """The member whose time is over; None: it is connected, or gone."""
        member = self.state.members.get(key.member)
        return member if member is not None and member.peer is None else None

    def _holds_anything(self, member: Member) -> bool:
        """Whether something is lost with it, or may be."""
        if isinstance(member, Replica):
            return bool(member.workers) or _reached(member)
        if isinstance(member, Holder):
            return bool(member.held) or member.filling is not None
        return member.table is not None or member.lineage in self.state.versions.last

    def taken_over(self) -> list[TrainerRank]:
        """Ranks of runs that are gone and whose replicas all belong to others now."""
        versions, trainers = self.state.versions, self.state.members.trainers.values()
        ended_runs = {trainer.lineage for trainer in trainers} & versions.last.keys() - versions.served_lineages()
        ended_runs -= {trainer.lineage for trainer in trainers if trainer.peer is not None}
        return [trainer for trainer in trainers if trainer.lineage in ended_runs]

    def look(self) -> None:
        """Forgets the lineages that nothing used at the look before this one either; another one comes."""
        self.state.set_timer(LineagesLook(), self.state.deadlines.forget)
        unused = frozenset(each.name for each in lineages(self.state).values() if self._unused(each))
        for name in sorted(unused & self.unused):
            self._forget(name, None)
        self.unused = unused - self.unused

    def _unused(self, lineage: Lineage) -> bool:
        """Whether it may be forgotten: what the ledger did not answer about may be of it."""
        return not lineage.used and not self.state.versions.doubtful

    def join(self, call: Call, request: manager_pb2.ForgetLineageRequest) -> None:
        """An operator has a lineage forgotten: the answer comes when that is on the disk. Refused while ranks or
        replicas use it."""
        try:
            lineage = known_lineage(lineages(self.state), request.lineage)
            _check_free(lineage)
            self.state.check_ledger()
            if self.state.versions.doubtful:
                raise precondition("the ledger has not answered yet what was committed last: try again")
        except CkptEngineError as error:
            self.state.finish(call, error.problem)
            return
        effects = tuple(self._effects(lineage))
        if request.dry_run:
            self.state.out.append(FinishCall(call, response=manager_pb2.ForgetLineageResponse(effects=effects)))
        else:
            self._forget(lineage.name, call, effects)

    def written(self, key: ForgottenWrite, done: Done) -> None:
        """The ledger has written that a lineage is forgotten, or could not: then a manager that is started again knows
        it again, and it is forgotten again."""
        if key.call is not None:
            response = None if done.problem is not None else manager_pb2.ForgetLineageResponse(effects=key.effects)
            self.state.out.append(FinishCall(key.call, done.problem, response))

    def _forget(self, name: str, call: Call | None, effects: tuple[str, ...] = ()) -> None:
        self.state.versions.forget(name, self.state.members.replicas)
        self.state.communicators.pop(name, None)
        task = RecordForgotten(name, self.state.epoch, self.state.deadlines.ledger)
        self.state.run(ForgottenWrite(name, call, effects), task)

    def _effects(self, lineage: Lineage) -> list[str]:
        """What comes of forgetting a lineage that no rank and no replica uses."""
        versions = self.state.versions
        effects = [
            f"{selected(key)} is not brought to version {commit.identity.number} any more"
            for key, commit in sorted(versions.desired.items())
            if commit.identity.lineage == lineage.name
        ]
        if FILES in lineage.sources:
            effects.append("its files are not read any more for replicas that start late")
        stays = "goes on holding a version of it until it is filled with others; it is listed until then"
        return [*effects, *(f"{source} {stays}" for source in sorted(lineage.sources - {FILES}))]

    def prune(self) -> None:
        """Lets go of what runs without ranks have published, and of versions that only replicas which have left were to
        serve, if it is of no use any more."""
        alive = {lineage for lineage, _ in self.state.members.trainers}
        served, needed = self.state.versions.served_lineages(), self.state.versions.needed(self.state.members.replicas)
        for content in self.state.versions.contents.values():
            lineage, published = content.identity.lineage, content.published
            orphaned = published is not None and lineage not in alive
            files = published is not None and all(source.outlives for source in published.sources)
            if content.identity not in needed or (orphaned and not (files and lineage in served)):
                content.published = content.record = None


def _reached(replica: Replica) -> bool:
    """Whether a version is, or may be, in its workers: it is prepared before it is told to install."""
    holds = any(Version.or_none(worker.identity) for worker in replica.workers)
    return holds or bool(replica.prepared) or replica.last_outcome is not None


def _check_free(lineage: Lineage) -> None:
    """Raises FAILED_PRECONDITION if ranks or replicas use it."""
    name = lineage.name
    if lineage.ranks:
        count, connected = len(lineage.ranks), sum(rank.peer is not None for rank in lineage.ranks)
        raise precondition(
            f"lineage {name!r} has {count} rank{'s' * (count != 1)}, {connected} of them connected: end its run, or "
            f"send them away with `ckpt-engine lineage evict {name}`"
        )
    if lineage.replicas:
        raise precondition(
            f"replicas hold a version of lineage {name!r} or are to serve one: {some(sorted(lineage.replicas))}. Bring "
            "them another one (`ckpt-engine update`, `ckpt-engine rollback`), or take them out (`ckpt-engine replica "
            "evict`)"
        )
