"""Decides when a member that does not say goodbye is forgotten, and with it what it holds of the manager's memory.

A rank that says goodbye is forgotten at once. One that was killed only loses its session, so it is forgotten
- `forget` seconds after that, if it has not come back (that costs nothing: a hello brings all of it again);
- as soon as no rank of its run is connected and updates of other runs have taken over every replica that it was for;
- when an operator evicts its run.
A holder that was killed, and a replica that no update ever reached, are forgotten `forget` seconds later. A replica
that was prepared for a version, or holds one, stays until it is evicted: it may go on serving that version.

Names cost nothing to make, so a stranger must not leave any behind. A member that has brought nothing is forgotten as
soon as its session ends: a replica that never had a worker, a holder that holds nothing and can hold nothing, a rank
that has published nothing in a lineage without a version. Of the other replicas that no update reached, `MOST_LOST`
wait for `forget`; beyond that the one that was lost first is forgotten. A member's word about itself is believed: only
tokens keep out one that lies about what it holds.

What a run published is forgotten with its last rank, unless it can be read without the run (files) and some replica is
to hold it. Then it stays for late replicas, until other updates have taken over the last of them.

A lineage is unused if it has no rank, nothing of it can be read, and no replica holds it or is to serve it. An unused
lineage is forgotten between `forget` and twice that later, or when an operator says so: newcomers are not brought to it
any more. That is durable. Its numbers stay taken: none is used again for a version with another root.
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
"""Replicas that are remembered without a session, have workers and were never prepared for a version: far more than an
outage disconnects before a first update."""


@dataclass(frozen=True, slots=True)
class ForgetTimer:
    """Key of the timer after which a lost member is forgotten."""

    member: MemberId


@dataclass(frozen=True, slots=True)
class LineagesLook:
    """Key of the timer after which lineages that nothing uses are looked for."""


@dataclass(frozen=True, slots=True)
class ForgottenWrite:
    """Key of the task that writes to the ledger that a lineage is forgotten."""

    lineage: str
    call: Call | None  # that waits for it
    effects: tuple[str, ...]  # for the call's answer


@dataclass
class Forgetting:
    """Says which members are to be forgotten; the manager's machine forgets them. Forgets lineages itself."""

    state: ManagerState
    unused: frozenset[str] = frozenset()  # lineages that were unused at the last look
    unreached: dict[str, None] = field(default_factory=dict)  # lost replicas that no update reached, oldest first

    def lost(self, member: Member) -> Member | None:
        """Notes that a session ended without a goodbye. Returns a member that is to be forgotten at once."""
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
        """Stops waiting for a member: it said hello again, or is forgotten already."""
        if isinstance(member, Replica):
            self.unreached.pop(member.name, None)
        self.state.cancel_timer(ForgetTimer(member_id(member)))

    def due(self, key: ForgetTimer) -> Member | None:
        """The member to forget now; None: it is connected, or forgotten already."""
        member = self.state.members.get(key.member)
        return member if member is not None and member.peer is None else None

    def _holds_anything(self, member: Member) -> bool:
        """Whether something would be lost with the member, or may be."""
        if isinstance(member, Replica):
            return bool(member.workers) or _reached(member)
        if isinstance(member, Holder):
            return bool(member.held) or member.filling is not None
        return member.table is not None or member.lineage in self.state.versions.last

    def taken_over(self) -> list[TrainerRank]:
        """Ranks of runs without a connected rank, of which other runs have taken over all replicas."""
        versions, trainers = self.state.versions, self.state.members.trainers.values()
        ended_runs = {trainer.lineage for trainer in trainers} & versions.last.keys() - versions.served_lineages()
        ended_runs -= {trainer.lineage for trainer in trainers if trainer.peer is not None}
        return [trainer for trainer in trainers if trainer.lineage in ended_runs]

    def look(self) -> None:
        """Forgets lineages that were unused at the last look, too, and sets the timer of the next look."""
        self.state.set_timer(LineagesLook(), self.state.deadlines.forget)
        unused = frozenset(each.name for each in lineages(self.state).values() if self._unused(each))
        for name in sorted(unused & self.unused):
            self._forget(name, None)
        self.unused = unused - self.unused

    def _unused(self, lineage: Lineage) -> bool:
        """Whether a lineage may be forgotten: none may while the ledger is silent about a commit."""
        return not lineage.used and not self.state.versions.doubtful

    def join(self, call: Call, request: manager_pb2.ForgetLineageRequest) -> None:
        """Takes an operator's call to forget a lineage. The answer comes when that is on the disk. Refused while ranks
        or replicas use the lineage."""
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
        """Answers the call once the ledger has written, or could not. In that case a restarted manager knows the
        lineage again, and forgets it again."""
        if key.call is not None:
            response = None if done.problem is not None else manager_pb2.ForgetLineageResponse(effects=key.effects)
            self.state.out.append(FinishCall(key.call, done.problem, response))

    def _forget(self, name: str, call: Call | None, effects: tuple[str, ...] = ()) -> None:
        self.state.versions.forget(name, self.state.members.replicas)
        self.state.communicators.pop(name, None)
        task = RecordForgotten(name, self.state.epoch, self.state.deadlines.ledger)
        self.state.run(ForgottenWrite(name, call, effects), task)

    def _effects(self, lineage: Lineage) -> list[str]:
        """Sentences for people: the effects of forgetting a lineage that no rank and no replica uses."""
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
        """Drops publications that are of no use any more: those of runs without ranks, and those of versions that only
        departed replicas were to serve."""
        alive = {lineage for lineage, _ in self.state.members.trainers}
        served, needed = self.state.versions.served_lineages(), self.state.versions.needed(self.state.members.replicas)
        for content in self.state.versions.contents.values():
            lineage, published = content.identity.lineage, content.published
            orphaned = published is not None and lineage not in alive
            files = published is not None and all(source.outlives for source in published.sources)
            if content.identity not in needed or (orphaned and not (files and lineage in served)):
                content.published = content.record = None


def _reached(replica: Replica) -> bool:
    """Whether an update has reached a replica, so that its workers may hold a version: preparing comes first."""
    holds = any(Version.or_none(worker.identity) for worker in replica.workers)
    return holds or bool(replica.prepared) or replica.last_outcome is not None


def _check_free(lineage: Lineage) -> None:
    """Raises FAILED_PRECONDITION if ranks or replicas use a lineage."""
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
