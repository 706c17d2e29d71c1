"""The simulated shell of the manager: its ledger, its blobs, its calls, and tasks that merge and plan tags."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ckpt_engine.core.deadlines import Deadlines
from ckpt_engine.core.machines import events
from ckpt_engine.core.machines.events import Call, Peer
from ckpt_engine.core.machines.manager import ManagerMachine
from ckpt_engine.core.machines.versions import Intended, Meant
from ckpt_engine.core.problems import invalid, precondition
from ckpt_engine.v1 import manager_pb2, weights_pb2
from tests.simulation.shell import Faults, Shell, Stream
from tests.simulation.weights import SLICES, Blobs, Truth
from tests.simulation.world import Signal, Steps, World

KEEP_SECONDS = 2.0
"""How long a blob is kept that nobody needs: between its upload and the message that names it."""

if TYPE_CHECKING:
    from tests.simulation.members import MemberShell


@dataclass
class Ledger:
    """What survives the manager. refuses: what its disk says to every write; empty if it works.

    generation: rises with every manager that opens it. One that lost its lock, so that another could, is fenced off.
    """

    cluster: str = "cluster-1"
    epoch: int = 0
    generation: int = 0
    refuses: str = ""
    intents: dict[int, weights_pb2.Identity] = field(default_factory=dict)
    selections: dict[int, tuple[str, ...]] = field(default_factory=dict)
    meant: dict[str, Meant] = field(default_factory=dict)
    reports: dict[int, manager_pb2.UpdateReport] = field(default_factory=dict)

    def open(self) -> int:
        """Takes it over; raises FAILED_PRECONDITION if it cannot be written."""
        self.check(self.generation)
        self.generation += 1
        return self.generation

    def check(self, generation: int) -> None:
        """Raises FAILED_PRECONDITION for a write that the disk refuses, or of a manager that was fenced off."""
        if self.refuses:
            raise precondition(f"the ledger cannot be written: {self.refuses}")
        if generation != self.generation:
            raise precondition("another manager has taken this ledger over")

    def copied(self) -> Ledger:
        """A copy as an operator makes it, to be put back some day."""
        return replace(
            self,
            refuses="",
            intents=dict(self.intents),
            selections=dict(self.selections),
            meant=dict(self.meant),
            reports=dict(self.reports),
        )

    def last_intents(self) -> list[Intended]:
        """The last one of each lineage, oldest first."""
        last: dict[str, int] = {}
        for epoch in sorted(self.intents):
            last[self.intents[epoch].lineage] = epoch
        return [Intended(epoch, self.intents[epoch], self.selections[epoch]) for epoch in sorted(last.values())]


@dataclass
class OpenCall:
    """A call of UpdateWeights. over: set with the report, or the problem, when it reaches the caller."""

    over: Signal
    request: manager_pb2.UpdateWeightsRequest
    begun: float
    report: manager_pb2.UpdateReport | None = None


class ManagerShell(Shell):
    """One manager process. watch: called with every command before it is performed (for invariants)."""

    def __init__(
        self,
        world: World,
        faults: Faults,
        truth: Truth,
        ledger: Ledger,
        deadlines: Deadlines,
        watch: Callable[[ManagerShell, Any], None],
        machine: type[ManagerMachine] = ManagerMachine,
    ) -> None:
        self.generation = ledger.open()
        made = machine(ledger.cluster, ledger.epoch, ledger.last_intents(), deadlines, meant=ledger.meant)
        super().__init__(world, faults, "manager", made)
        self.machine: ManagerMachine
        self.truth, self.ledger, self.watch = truth, ledger, watch
        self.blobs = Blobs(world)
        self.streams: dict[Peer, Stream] = {}
        self.calls: dict[Call, OpenCall] = {}
        self.sleep_calls: dict[Call, Signal] = {}
        self.progress: list[manager_pb2.UpdateProgress] = []  # of all updates
        self._names = 0
        self._processes.append(world.spawn(self._collect_garbage()))

    def _collect_garbage(self) -> Steps:
        """Drops blobs that nobody has touched for a while and that the machine does not name as in use."""
        while True:
            yield KEEP_SECONDS / 4
            used = {ref.digest for refs in self.machine.blobs_in_use().values() for ref in refs}
            self.blobs.drop(used, self.world.now - KEEP_SECONDS)
            self.machine.status()

    def accept(self, member: MemberShell, at_member: Peer) -> Stream:
        """A member dials in."""
        self._names += 1
        peer = Peer(f"stream-{self._names}")
        self.streams[peer] = Stream(member, self, at_member, peer, member.envelopes)
        return self.streams[peer]

    def crash(self) -> None:
        """All streams and calls end."""
        super().crash()
        for stream in self.streams.values():
            stream.break_off("the manager was killed")
        for call in self.calls.values():
            call.over.set(weights_pb2.Problem(code=weights_pb2.Problem.UNAVAILABLE, message="the manager was killed"))

    def open_call(self, request: manager_pb2.UpdateWeightsRequest) -> tuple[Call, Signal]:
        """A call of UpdateWeights has arrived."""
        self._names += 1
        call = Call(f"call-{self._names}")
        self.calls[call] = OpenCall(Signal(), request, self.world.now)
        over = self.calls[call].over
        self.feed(events.UpdateCall(call, request))
        return call, over

    def sleep_or_wake(
        self, wake: bool, replicas: list[str], level: int = 1, tags: Sequence[str] = (), seconds: float = 0.0
    ) -> Signal:
        """A Sleep or Wake call has arrived; its results, or its problem."""
        self._names += 1
        call = Call(f"call-{self._names}")
        over = self.sleep_calls[call] = Signal()
        if wake:
            self.feed(events.WakeCall(call, manager_pb2.WakeRequest(replicas=replicas, tags=tags)))
        else:
            self.feed(
                events.SleepCall(
                    call, manager_pb2.SleepRequest(replicas=replicas, level=level, timeout_seconds=seconds)
                )
            )
        return over

    def operate(self, request: events.OperatorRequest) -> Signal:
        """An operator's call has arrived; its response, or its problem."""
        self._names += 1
        call = Call(f"call-{self._names}")
        over = self.sleep_calls[call] = Signal()
        self.feed(events.OperatorCall(call, request))
        return over

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
                if call in self.sleep_calls:
                    self.sleep_calls.pop(call).set(problem or response)
                elif call in self.calls:
                    done = self.calls.pop(call)
                    delay = self.world.between(0.0005, self.faults.delay)
                    self.world.after(delay, lambda: done.over.set(problem or done.report))
            case events.Run(key, task):
                fallible = not isinstance(task, events.RecordOutcome)
                self.run_task(key, task.seconds, self._task(task), fallible)
            case _:
                raise AssertionError(command)

    def _task(self, task: Any) -> Steps:
        match task:
            case events.SpendEpoch(epoch):
                yield from self._written()
                self.ledger.epoch = max(self.ledger.epoch, epoch)
            case events.RecordIntent(epoch, identity, _, selection, meant):
                yield from self._written()
                self.ledger.intents[epoch] = identity
                self.ledger.selections[epoch] = selection
                self.ledger.meant |= dict.fromkeys(meant, (epoch, identity.lineage))
                self.truth.recorded.setdefault((self.ledger.cluster, epoch), []).append(identity)
                self.ledger.epoch = max(self.ledger.epoch, epoch)
            case events.RecordOutcome(report):
                yield from self._written()
                self.ledger.reports[report.fence.epoch] = report
            case events.MergeTables():
                yield self.world.between(0.001, 0.1)
                return self._merge(task)
            case events.CompilePlans():
                yield self.world.between(0.001, 0.1)
                return self._compile(task)
            case events.CombineSeals():
                yield self.world.between(0.001, 0.1)
                return self._combine(task)
        return None

    def _written(self) -> Steps:
        yield self.world.between(0.001, 0.02)
        self.ledger.check(self.generation)

    def _on_disk(self, table: manager_pb2.BlobRef) -> bool:
        return self.truth.sources[table.digest].kind == "directory"

    def _merge(self, task: events.MergeTables) -> events.Published:
        tables = [weights_pb2.SourceTable.FromString(self.blobs.get(ref)) for ref in task.tables]
        models = {json.loads(table.description)[3] for table in tables}
        if len(models) != 1:
            raise invalid(f"the ranks publish different models: {sorted(models)}")
        sources = tuple(
            events.SourceOffer(table.id, table.rank, ref, table.stays_sealed, table.source_copies, self._on_disk(ref))
            for table, ref in zip(tables, task.tables, strict=True)
        )
        return events.Published(self.blobs.put(models.pop().encode()), sources, SLICES, SLICES)

    def _compile(self, task: events.CompilePlans) -> events.Compiled:
        sources = task.published.sources
        holder = {str(index): sources[index % len(sources)].table.digest.hex() for index in range(SLICES)}
        for worker in task.workers:
            self.blobs.get(worker.needs)
        wanted = [worker.needs.digest.hex() for worker in task.workers]
        plans = {worker.key: self.blobs.put_json(holder) for worker in task.workers}
        atoms = {
            source.source: self.blobs.put_json({"table": source.table.digest.hex(), "wanted": wanted})
            for source in sources
        }
        return events.Compiled(plans, atoms, dict.fromkeys(plans, SLICES))

    def _combine(self, task: events.CombineSeals) -> events.Combined:
        digests: dict[str, str] = {}
        for ref in task.digests.values():
            digests |= self.blobs.get_json(ref)
        assert len(digests) == SLICES
        expected = self.blobs.put_json(digests)
        return events.Combined(self.truth.root(digests), dict.fromkeys(task.compiled.plans, expected))
