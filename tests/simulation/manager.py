"""The simulated shell of the manager: its ledger, its blobs, its calls, and tasks that merge and plan tags."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ckpt_engine.core.deadlines import Deadlines
from ckpt_engine.core.problems import CkptEngineError, data_loss, invalid, precondition
from ckpt_engine.core.version import Fence, Version
from ckpt_engine.machines import events
from ckpt_engine.machines.events import Call, OperatorHold, Peer
from ckpt_engine.machines.manager.machine import ManagerMachine
from ckpt_engine.machines.manager.state import EpochRetry
from ckpt_engine.machines.manager.update import Update
from ckpt_engine.machines.manager.versions import Commit, Commits
from ckpt_engine.v1 import manager_pb2, weights_pb2
from tests.simulation.hosts import locator_of, ways
from tests.simulation.shell import Faults, Shell, Stream
from tests.simulation.terms import keep, way
from tests.simulation.weights import SLICES, Blobs, Truth
from tests.simulation.world import BrokenPromiseError, Signal, Steps, World

KEEP_SECONDS = 2.0
"""How long a blob is kept that nobody needs: between its upload and the message that names it."""

if TYPE_CHECKING:
    from tests.simulation.members import MemberShell


@dataclass
class Ledger:
    """What survives the manager. refuses: what its disk says to every write; empty if it works.

    generation: rises with every manager that opens it. One that lost its lock, or its term, is fenced off.
    term: how long a term lasts of a ledger that managers share; 0: it is a file. until: when the present one ends.
    unreachable: generations of managers that do not reach it. slow: how often a way there takes long.
    """

    cluster: str = "cluster-1"
    epoch: int = 0
    generation: int = 0
    refuses: str = ""
    term: float = 0.0
    until: float = 0.0
    unreachable: set[int] = field(default_factory=set)
    slow: float = 0.0
    intents: dict[int, Version] = field(default_factory=dict)
    desired: dict[str, Commit] = field(default_factory=dict)
    highest: dict[str, Version] = field(default_factory=dict)
    reports: dict[int, manager_pb2.UpdateReport] = field(default_factory=dict)
    late: set[int] = field(default_factory=set)
    holds: dict[str, OperatorHold] = field(default_factory=dict)
    deployments: dict[int, manager_pb2.Deployment] = field(default_factory=dict)
    seals: dict[Version, tuple[int, dict[str, str]]] = field(default_factory=dict)  # fill epoch and record, by version
    promised: dict[str, int] = field(default_factory=dict)  # replicas of which an operator was told that they are held,
    # since which epoch; until somebody asks for their release

    def open(self, now: float) -> int:
        """Takes it over; raises FAILED_PRECONDITION if it cannot be written."""
        if self.refuses:
            raise precondition(f"the ledger cannot be written: {self.refuses}")
        self.until = now + self.term
        self.generation += 1
        return self.generation

    def check(self, generation: int, now: float) -> None:
        """Raises FAILED_PRECONDITION for a write that the disk refuses, or of a manager that was fenced off."""
        if self.refuses or generation in self.unreachable:
            raise precondition(f"the ledger cannot be written: {self.refuses or 'it does not answer'}")
        if generation != self.generation or (self.term and now >= self.until):
            raise precondition("another manager has taken this ledger over, or may")

    def renew(self, generation: int, now: float) -> bool:
        """Has a term last from now on, if that manager still has it. Returns whether it has."""
        try:
            self.check(generation, now)
        except CkptEngineError:
            return False
        self.until = now + self.term
        return True

    def copied(self) -> Ledger:
        """A copy as an operator makes it, to be put back some day."""
        return replace(
            self,
            refuses="",
            intents=dict(self.intents),
            desired=dict(self.desired),
            highest=dict(self.highest),
            reports=dict(self.reports),
            late=set(self.late),
            holds=dict(self.holds),
            deployments=dict(self.deployments),
            seals=dict(self.seals),
            promised={name: epoch for name, epoch in self.promised.items() if name in self.holds},
        )

    def commits(self) -> Commits:
        """Its commits: the last one of each lineage, the newest one of each replica and pool, and deployments."""
        last: dict[str, Commit] = {}
        for epoch in sorted(self.intents.keys() - self.late):
            last[self.intents[epoch].lineage] = Commit(epoch, self.intents[epoch])
        undecided = manager_pb2.Deployment.STATE_UNDECIDED
        highest = {(each.lineage, each.number) for each in self.highest.values()}
        deployments = tuple(
            row
            for row in self.deployments.values()
            if row.state == undecided or (row.target.lineage, row.target.version) in highest
        )
        return Commits(max(self.intents, default=0), tuple(last.values()), dict(self.desired), deployments)


@dataclass
class OpenCall:
    """A call of UpdateWeights or Rollback. over: set with the report, or the problem, when it reaches the caller."""

    over: Signal
    request: manager_pb2.UpdateWeightsRequest | manager_pb2.RollbackRequest
    begun: float
    report: manager_pb2.UpdateReport | None = None


class ManagerShell(Shell):
    """One manager process. For invariants, watch: called with every command before it is performed; took: called with
    every event once it was taken and its commands were performed."""

    def __init__(
        self,
        world: World,
        faults: Faults,
        truth: Truth,
        ledger: Ledger,
        deadlines: Deadlines,
        watch: Callable[[ManagerShell, Any], None],
        took: Callable[[ManagerShell, object], None],
        machine: type[ManagerMachine] = ManagerMachine,
    ) -> None:
        self.generation = ledger.open(world.now)
        self.term_end = ledger.until if ledger.term else float("inf")  # as it knows by its own clock
        highest = tuple(ledger.highest.values())
        self.truth, self.ledger, self.watch, self.took = truth, ledger, watch, took
        self.blobs = Blobs(world)
        made = machine(
            *(ledger.cluster, ledger.epoch, deadlines),
            commits=self._commits(),
            highest=highest,
            identities=tuple(ledger.intents.values()),
            holds=dict(ledger.holds),
        )
        super().__init__(world, faults, "manager", made)
        self.machine: ManagerMachine
        self.streams: dict[Peer, Stream] = {}
        self.calls: dict[Call, OpenCall] = {}
        self.sleep_calls: dict[Call, Signal] = {}
        self._holding: dict[Call, str] = {}  # the replica that a call is to hold
        self.progress: list[manager_pb2.UpdateProgress] = []  # of all updates
        self._names = 0
        self._writes: list[Signal] = []
        self._processes.append(world.spawn(self._collect_garbage()))
        if ledger.term:
            self._processes.append(world.spawn(keep(self)))

    def _collect_garbage(self) -> Steps:
        """Drops blobs that nobody has touched for a while and that the machine does not name as in use."""
        while self.alive:
            yield KEEP_SECONDS / 4
            used = {ref.digest for refs in self.machine.blobs_in_use().values() for ref in refs}
            self.blobs.drop(used, self.world.now - KEEP_SECONDS)
            self.machine.status()

    def feed(self, event: object) -> None:
        """Hands an event to the machine, performs what it says, and lets invariants look."""
        taken = self._held is None
        if taken and self.alive and not self.leads:
            self.stand_down()
        super().feed(event)
        if taken and self.alive:
            self.took(self, event)

    @property
    def leads(self) -> bool:
        """Whether it may decide anything, as it knows by its own clock."""
        return self.world.now < self.term_end

    @property
    def is_stopped(self) -> bool:
        """Whether it is stopped now."""
        return self._held is not None

    def stand_down(self) -> None:
        """Ends all sessions and calls. What it has sent to the ledger may still come there."""
        if self.alive:
            self.world.note(f"leader {self.generation} stands down")
            self.alive = False
            self._end_all()

    @property
    def clock(self) -> float:
        """The time as its machine knows it."""
        return self.world.now * self._rate + self._began

    def accept(self, member: MemberShell, at_member: Peer) -> Stream:
        """A member dials in."""
        self._names += 1
        peer = Peer(f"stream-{self._names}")
        self.streams[peer] = Stream(member, self, at_member, peer, member.envelopes)
        return self.streams[peer]

    def update_of(self, fence: weights_pb2.Fence) -> Update | None:
        """The one that is recorded under this install fence."""
        return next((update for update in self.machine._updates.all() if update.installs == Fence.of(fence)), None)

    def crash(self) -> None:
        """All streams and calls end."""
        super().crash()
        self._end_all()

    def _end_all(self) -> None:
        for stream in self.streams.values():
            stream.break_off("the manager was killed")
        for call in self.calls.values():
            call.over.set(
                weights_pb2.Problem(code=weights_pb2.Problem.CODE_UNAVAILABLE, message="the manager was killed")
            )

    def open_call(self, request: manager_pb2.UpdateWeightsRequest) -> tuple[Call, Signal]:
        """A call of UpdateWeights has arrived."""
        self._names += 1
        call = Call(f"call-{self._names}")
        self.calls[call] = OpenCall(Signal(), request, self.world.now)
        over = self.calls[call].over
        self.feed(events.UpdateCall(call, request))
        return call, over

    def roll_back(self, version: int, lineage: str = "", **wishes: Any) -> tuple[Call, Signal]:
        """A call of Rollback has arrived."""
        self._names += 1
        call = Call(f"call-{self._names}")
        options = manager_pb2.UpdateOptions(**wishes)
        request = manager_pb2.RollbackRequest(version=version, lineage=lineage, options=options)
        self.calls[call] = OpenCall(Signal(), request, self.world.now)
        over = self.calls[call].over
        self.feed(events.RollbackCall(call, request))
        return call, over

    def wait_for(self, version: int, lineage: str, seconds: float = 0.0) -> Signal:
        """A call of WaitForUpdate has arrived; the report, or the call's problem."""
        self._names += 1
        call = Call(f"call-{self._names}")
        over = self.sleep_calls[call] = Signal()
        request = manager_pb2.WaitForUpdateRequest(lineage=lineage, version=version, timeout_seconds=seconds)
        self.feed(events.WaitCall(call, request))
        return over

    def sleep_or_wake(
        self,
        wake: bool,
        replicas: list[str],
        level: int = 1,
        tags: Sequence[str] = (),
        seconds: float = 0.0,
        pool: str = "",
    ) -> Signal:
        """A Sleep or Wake call has arrived; its results, or its problem."""
        self._names += 1
        call = Call(f"call-{self._names}")
        over = self.sleep_calls[call] = Signal()
        if wake:
            self.feed(events.WakeCall(call, manager_pb2.WakeRequest(replicas=replicas, tags=tags, pool=pool)))
        else:
            request = manager_pb2.SleepRequest(replicas=replicas, level=level, timeout_seconds=seconds, pool=pool)
            self.feed(events.SleepCall(call, request))
        return over

    @property
    def is_writing(self) -> bool:
        """Whether it waits for the ledger to have written an intent."""
        return any(not write.ready for write in self._writes)

    def operate(self, request: events.OperatorRequest) -> Signal:
        """An operator's call has arrived; its response, or its problem."""
        self._names += 1
        call = Call(f"call-{self._names}")
        over = self.sleep_calls[call] = Signal()
        if isinstance(request, manager_pb2.HoldReplicaRequest):
            self._holding[call] = request.name
        elif isinstance(request, manager_pb2.ReleaseReplicaRequest | manager_pb2.EvictReplicaRequest):
            self.ledger.promised.pop(request.name, None)
        self.feed(events.OperatorCall(call, request))
        return over

    def prepare_beside(self, name: str) -> None:
        """A replica is to prepare under a fill fence of its own, beside an update that is not filling it itself. Its
        answer is nobody's."""
        state, updates = self.machine._state, self.machine._updates.all()
        filling = any(update.phase == "preparing" or update.goal.is_attempt for update in updates)
        if state.epoch_ready() and not filling:
            fence = state.next_fill().message()
            manifest = self.blobs.put(b"model A")
            state.send_to(name, manager_pb2.Prepare(fence=fence, manifest=manifest, deadline_seconds=1.0))
            self.feed(events.TimerFired(EpochRetry()))  # hands the commands out

    def cancel_call(self, call: Call) -> None:
        """Its caller has gone."""
        if self.calls.pop(call, None) is not None:
            self.feed(events.CallCancelled(call))

    def perform(self, command: Any) -> None:
        """Carries out one command."""
        self.watch(self, command)
        match command:
            case events.Send(peer, body):
                self.streams[peer].send(False, body)
            case events.ClosePeer(peer, problem):
                if problem is not None:
                    self.streams[peer].send(False, manager_pb2.Refused(problem=problem))
                self.streams.pop(peer).close(by_manager=True)
            case events.SetTimer(key, seconds):
                self.set_timer(key, seconds, lambda: events.TimerFired(key))
            case events.CancelTimer(key):
                self.cancel_timer(key)
            case events.EmitEvent(call, event):
                if event.HasField("progress"):
                    self.progress.append(event.progress)
                elif call in self.calls:
                    self.calls[call].report = event.report
            case events.FinishCall(call, problem, response):
                if isinstance(response, manager_pb2.HoldReplicaResponse):
                    self.ledger.promised.setdefault(self._holding[call], self.machine._state.epoch)
                if call in self.sleep_calls:
                    self.sleep_calls.pop(call).set(problem or response)
                elif call in self.calls:
                    done = self.calls.pop(call)
                    delay = self.world.between(0.0005, self.faults.delay)
                    self.world.after(delay, lambda: done.over.set(problem or done.report))
            case events.Run(key, task):
                fallible = not isinstance(task, events.RecordOutcome | events.CorrectOutcome)
                seal = task.seal if isinstance(task, events.RecordIntent) else None
                # Read at once: an intent may be written long after its update was refused and the blob dropped.
                record = None if seal is None or seal.record is None else self.blobs.get_json(seal.record)
                over = self.run_task(key, task.seconds, self._task(task, record), fallible)
                if isinstance(task, events.RecordIntent):
                    self._writes.append(over)
            case _:
                raise AssertionError(command)

    def _task(self, task: Any, record: dict[str, str] | None = None) -> Steps:
        match task:
            case events.SpendEpoch(epoch):
                yield from self._written()
                self.ledger.epoch = max(self.ledger.epoch, epoch)
            case events.RecordIntent(epoch, identity, _, selection, deployment, seal, keeps):
                yield from self._written()
                if seal is not None:
                    if record is not None and (seal.fill or identity not in self.ledger.seals):
                        self.ledger.seals[identity] = seal.fill, record
                    self.ledger.seals = {each: kept for each, kept in self.ledger.seals.items() if each in keeps}
                self.ledger.intents[epoch] = identity
                self.ledger.late |= set() if selection else {epoch}
                if identity.number >= self.ledger.highest.get(identity.lineage, identity).number:
                    self.ledger.highest[identity.lineage] = identity
                for name in selection:  # a write that was slow is no newer than those that were made meanwhile
                    known = self.ledger.desired.get(name)
                    if known is None or known.epoch < epoch:
                        self.ledger.desired[name] = Commit(epoch, identity)
                if deployment is not None:
                    self.ledger.deployments[deployment.number] = deployment
                self.truth.recorded.setdefault((self.ledger.cluster, epoch), []).append(identity)
                self.ledger.epoch = max(self.ledger.epoch, epoch)
            case events.RecordDeployment(row):
                yield from self._written()
                self.ledger.deployments[row.number] = row
            case events.ReadCommits():
                while any(not write.ready for write in self._writes):  # the ledger does one thing after the other
                    yield 0.01
                yield from self._written()
                return self._commits()
            case events.RecordHold(replica, reason):
                yield from self._written()
                since = self.ledger.holds[replica].since if replica in self.ledger.holds else self.world.now
                self.ledger.holds[replica] = OperatorHold(since, reason)
                return self.ledger.holds[replica]
            case events.RecordRelease(replica):
                yield from self._written()
                self.ledger.holds.pop(replica, None)
            case events.RecordForgotten(lineage, epoch):
                yield from self._written()
                self.ledger.seals = {each: kept for each, kept in self.ledger.seals.items() if each.lineage != lineage}
                for name, commit in list(self.ledger.desired.items()):
                    if commit.identity.lineage == lineage and commit.epoch <= epoch:
                        del self.ledger.desired[name]
            case events.FindReport(lineage, version):
                yield self.world.between(0.001, 0.02)
                return self._find(lineage, version)
            case events.RecordOutcome(report) | events.CorrectOutcome(report):
                yield from self._written()
                self.ledger.reports[report.fence.epoch] = report
            case events.MergeTables():
                yield self.world.between(0.001, 0.1)
                return self._merge(task)
            case events.JoinSources():
                yield self.world.between(0.001, 0.1)
                return self._join(task)
            case events.CompilePlans():
                yield self.world.between(0.001, 0.1)
                return self._compile(task)
            case events.CombineSeals():
                yield self.world.between(0.001, 0.1)
                return self._combine(task)
        return None

    def _commits(self) -> Commits:
        """The ledger's commits, with the records that hash to the roots of their versions."""
        commits = self.ledger.commits()
        known = {each: self.ledger.seals[each] for each in commits.identities if each in self.ledger.seals}
        good = {each: kept for each, kept in known.items() if self.truth.hash(kept[1]) == each.root}
        seals = {each: events.StoredSeal(fill, self.blobs.put_json(record)) for each, (fill, record) in good.items()}
        return replace(commits, seals=seals)

    def _find(self, lineage: str, version: int) -> events.Found:
        asked = {epoch: each.number for epoch, each in self.ledger.intents.items() if each.lineage == lineage}
        last = [number for epoch, number in sorted(asked.items(), reverse=True) if epoch not in self.ledger.late]
        epochs = [epoch for epoch in asked if asked[epoch] == version and epoch not in self.ledger.late]
        epoch = max(epochs, default=None)
        return events.Found(epoch, None if epoch is None else self.ledger.reports.get(epoch), tuple(last[:4]))

    def _written(self) -> Steps:
        yield way(self.world, self.ledger.slow)
        self.ledger.check(self.generation, self.world.now)
        if self.ledger.term and self.generation != self.ledger.generation:
            raise BrokenPromiseError(f"former leader {self.generation} writes to the ledger")

    def _on_disk(self, table: manager_pb2.BlobRef) -> bool:
        return self.truth.sources[table.digest].kind == "directory"

    def _merge(self, task: events.MergeTables) -> events.Published:
        tables = [weights_pb2.SourceTable.FromString(self.blobs.get(ref)) for ref in task.tables]
        models = {json.loads(table.description)[3] for table in tables}
        if len(models) != 1:
            raise invalid(f"the ranks publish different models: {sorted(models)}")
        sources = tuple(
            self._offer(table, table.rank, ref, table.source_copies, self._on_disk(ref))
            for table, ref in zip(tables, task.tables, strict=True)
        )
        (model,) = models
        for trainer in self.machine._members.ranks(task.lineage).values():
            self.truth.models[trainer.lineage] = model
        return self._published(model, sources)

    def _offer(
        self, table: weights_pb2.SourceTable, rank: int | None, ref: manager_pb2.BlobRef, copies: int, outlives: bool
    ) -> events.SourceOffer:
        ways = tuple(frozenset(offer.transport for offer in region.offers) for region in table.regions)
        return events.SourceOffer(table.id, rank, ref, table.stays_sealed, copies, outlives, host=table.host, ways=ways)

    def _published(self, model: str, sources: tuple[events.SourceOffer, ...]) -> events.Published:
        holders = (frozenset(source.source for source in self._who_has(sources, index)) for index in range(SLICES))
        parts = frozenset(filter(None, holders))
        return events.Published(self.blobs.put(model.encode()), sources, SLICES, SLICES, parts=parts)

    def _who_has(self, sources: Sequence[events.SourceOffer], index: int) -> list[events.SourceOffer]:
        return [source for source in sources if self.truth.sources[source.table.digest].has(index)]

    def _compile(self, task: events.CompilePlans) -> events.Compiled:
        sources = task.published.sources
        record = None if task.record is None else self._record(task.record, task.root)
        for worker in task.workers:
            self.blobs.get(worker.needs)
        read = {worker.key: self._reads(worker, sources, task.collective) for worker in task.workers}
        failed = {key[0]: found for key, found in read.items() if isinstance(found, weights_pb2.Problem)}
        planned = {
            key: found
            for key, found in read.items()
            if key[0] not in failed and not isinstance(found, weights_pb2.Problem)
        }
        wanted = [worker.needs.digest.hex() for worker in task.workers]
        plans = {key: self.blobs.put_json(holder) for key, (holder, _) in planned.items()}
        distances = {key: distance for key, (_, distance) in planned.items()}
        coarse = record is not None and self.world.chance(0.5)  # needs are unions of what is recorded
        atoms = {
            source.source: self.blobs.put_json({"table": source.table.digest.hex(), "wanted": wanted})
            for source in ([] if coarse else sources)
        }
        handle = record, task.root
        compiled = events.Compiled(plans, atoms, dict.fromkeys(plans, SLICES), handle, failed, distances=distances)
        return replace(compiled, collective=self._collective(task, plans.keys())) if task.collective else compiled

    def _collective(self, task: events.CompilePlans, planned: Collection[events.WorkerKey]) -> events.CollectivePlan:
        """Each slice comes from one rank, and goes to everybody."""
        lead, *_ = sources = task.published.sources
        plan = {str(index): self._who_has(sources, index)[0].source for index in range(SLICES)}
        members = [source.source for source in sources], sorted(key for key in planned if key[0] in task.collective)
        meeting = self.truth.sources[lead.table.digest].meeting
        return events.CollectivePlan((*members[0], *members[1]), self.blobs.put_json(plan), meeting.encode())

    def _reads(
        self, worker: events.PlanWorker, sources: Sequence[events.SourceOffer], collective: Collection[str]
    ) -> tuple[dict[str, str], int] | weights_pb2.Problem:
        """From where a worker reads each slice, and how far the farthest of them is."""
        plan, farthest = {}, 0
        for index in range(SLICES):
            near: list[tuple[int, events.SourceOffer]] = []
            holders = self._who_has(sources, index)
            for holder in holders:
                offered = sorted({transport for way in holder.ways for transport in way})
                shut = {each.transport for each in worker.shut if each.locator == locator_of(holder.table.digest)}
                found = ways(holder.host, sorted({*offered} - shut), worker.host, worker.transports)
                near += [(found[0].distance, holder)] if found else []
            if worker.key[0] in collective:
                near = [(0, holder) for holder in holders]
            if not near:
                message = f"slice {index} is out of reach from host {worker.host.name}"
                return precondition(message if holders else f"nobody holds slice {index} any more").problem
            least = min(distance for distance, _ in near)
            nearest = [source for distance, source in near if distance == least]
            plan[str(index)] = nearest[index % len(nearest)].table.digest.hex()
            farthest = max(farthest, least)
        return plan, farthest

    def _combine(self, task: events.CombineSeals) -> events.Combined:
        record, root = task.compiled.handle  # type: ignore[misc]
        digests: dict[str, str] = dict(record or {})
        for ref in task.digests.values():
            for index, digest in self.blobs.get_json(ref).items():
                if digests.setdefault(index, digest) != digest:
                    raise data_loss(f"slice {index} does not add up to the record")
        assert len(digests) == SLICES
        expected = dict.fromkeys(task.compiled.plans, self.blobs.put_json(digests))
        if record is not None:
            return events.Combined(root, expected)
        return events.Combined(self.truth.root(digests), expected, self.blobs.put_json(digests))

    def _record(self, ref: manager_pb2.BlobRef, root: bytes) -> dict[str, str]:
        """What a record says; raises DATA_LOSS unless it hashes to the root."""
        digests: dict[str, str] = self.blobs.get_json(ref)
        if self.truth.hash(digests) != root:
            raise data_loss("the record is of other weights")
        return digests

    def _join(self, task: events.JoinSources) -> events.Joined:
        refused: dict[str, weights_pb2.Problem] = {}
        sources, records, model = [], [] if task.record is None else [task.record], ""
        for offer in task.offers:
            try:
                if offer.record is not None:
                    self._record(offer.record, task.identity.root)
                table = weights_pb2.SourceTable.FromString(self.blobs.get(offer.table))
            except CkptEngineError as error:
                refused[offer.source] = error.problem
                continue
            records += [] if offer.record is None else [offer.record]
            model = json.loads(table.description)[3]
            sources.append(self._offer(table, offer.rank, offer.table, 0, self._on_disk(offer.table)))
        if not sources:
            return events.Joined(None, None, refused)
        return events.Joined(self._published(model, tuple(sources)), records[0], refused)
