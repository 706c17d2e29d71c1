"""The simulated shell of a relay: two slots that are filled slice by slice, while whoever has a plan may read them.

A slot's table is the same whatever version lies in it, so a plan of a version that was given up reads the next one. It
waits for no reader, which is the worst that a real one does. Like a real one it reads nothing that it does not reach.
"""

from __future__ import annotations

import json
from typing import Any

from ckpt_engine.core.offers import holder_id
from ckpt_engine.core.problems import CkptEngineError, aborted, data_loss, deadline, invalid
from ckpt_engine.core.relay_layout import SLOTS
from ckpt_engine.machines import events
from ckpt_engine.machines.relay.member import KIND, RelayMachine
from ckpt_engine.machines.relay.tasks import CountSlot, FillSlot, LetGoOf, SlotFilled, StopFilling
from ckpt_engine.v1 import manager_pb2, weights_pb2
from tests.simulation.hosts import HOST, NETWORK, RELAY, WORKERS_READ, ways
from tests.simulation.members import Cluster, MemberShell
from tests.simulation.passing import Passing, ask, ask_all, order_of
from tests.simulation.weights import SLICES, HeldSource, Source, SourceGoneError, ref_of
from tests.simulation.world import Signal, Steps


class RelayShell(MemberShell):
    """One relay. fills: how often it began to overwrite a slot. watched: called with the slot before that. mapped:
    digests of the tables whose memory it has open."""

    envelopes = (manager_pb2.HolderMessage, manager_pb2.HolderCommand)

    def __init__(
        self,
        cluster: Cluster,
        name: str,
        machine: type[RelayMachine] = RelayMachine,
        host: weights_pb2.Host = HOST,
    ) -> None:
        session = f"{name}-{cluster.world.random.getrandbits(32):08x}"
        self.filling = filling = manager_pb2.Filling(memory_bytes=1 << 30, reads=WORKERS_READ, lends=(RELAY, NETWORK))
        filling.chunks.offers.add(transport=NETWORK, locator=session.encode())
        cluster.truth.passing[session.encode()] = self
        self.passings: list[Passing | None] = [None] * SLOTS
        self.passing: Passing | None = None  # its newest filling
        self.sends: manager_pb2.Rate | None = None  # what it says of its network once somebody read from it
        super().__init__(cluster, name, machine(name, session, host, filling, cluster.deadlines))
        self.host = host
        self.slots = [self._slot() for _ in range(SLOTS)]
        self.fills = 0
        self._last = Signal()
        self._last.set()
        self._stops = 0  # how often it was told to stop
        self._keeps = False  # and to keep what had come, the last time
        self.watched: list[Any] = []
        self.mapped: set[bytes] = set()
        self.feed(events.Start())
        self.feed(events.HoldVersions(()))

    def passing_of(self, root: bytes) -> Passing | None:
        """What it sends of a version."""
        found = [each for each in self.passings if each is not None and each.root == root]
        return max(found, key=lambda each: len(each.verified), default=None)

    def _slot(self) -> HeldSource:
        number = self.world.random.getrandbits(32)
        return HeldSource(
            "", 0, 1, "held", "", number, {}, {}, host=self.host, source=holder_id(KIND, self.name), relay=self.name
        )

    def crash(self) -> None:
        """What is mapped stays readable; who has not mapped it finds nothing. Here: nothing."""
        super().crash()
        for slot in self.slots:
            slot.alive = False

    def stop_for(self, seconds: float) -> None:
        """What is mapped can be read; on the network nobody answers."""
        super().stop_for(seconds)
        for slot in self.slots:
            slot.silent = self._held is not None

    def _go_on(self) -> None:
        for slot in self.slots:
            slot.silent = False
        super()._go_on()

    def own(self, command: Any) -> None:
        """Ends a filling."""
        match command:
            case StopFilling(keep):
                self._stops += 1
                self._keeps = keep
            case events.PublicationDecided() | events.Released():
                return
            case _:
                raise AssertionError(command)

    def start_task(self, key: events.Key, task: Any) -> None:
        """The relay's tasks."""
        match task:
            case events.PutBlobs(blobs):
                self.run_task(key, task.seconds, self.put(blobs))
            case events.SealSource():
                self.run_task(key, task.seconds, self._seal(task))
            case CountSlot():
                self.run_task(key, task.seconds, self._count(task))
            case FillSlot():
                self.run_task(key, task.seconds, self._fill(task, self.world.now + task.seconds, self._stops))
            case LetGoOf():
                self.run_task(key, task.seconds, self._let_go(task))

    def _seal(self, task: events.SealSource) -> Steps:
        yield self.world.between(0.001, 0.02)
        wanted = yield from self.fetch((task.atoms,))
        table = json.loads(wanted[0])["table"]
        for slot in self.slots:
            if table == ref_of(slot.table()).digest.hex() and len(slot.memory) == SLICES - len(slot.lacks):
                return (yield from self.put_digests(slot, task.atoms))
        raise invalid("these atoms are of nothing that it holds")

    def _count(self, task: CountSlot) -> Steps:
        command = task.command
        wanted = [ref for wants in command.want_table.wants for ref in (*wants.needs, *wants.within)]
        yield from self.fetch((command.record, *command.tables, *command.needs, *command.within, *wanted))
        self.mapped |= {table.digest for table in command.tables}
        return 1

    def _fill(self, task: FillSlot, end: float, stops: int) -> Steps:
        before, self._last = self._last, Signal()
        mine = self._last
        try:
            yield before
            return (yield from self._overwrite(task, end, stops))
        except BaseException:
            if (passing := self.passings[task.slot]) is not None and not task.more:
                passing.end()
            raise
        finally:
            mine.set()

    def _overwrite(self, task: FillSlot, end: float, stops: int) -> Steps:
        self._may_go_on(end, stops)
        command, slot, truth = task.command, self.slots[task.slot], self.cluster.truth
        held = set(range(SLICES)) - slot.lacks if task.more and slot.filled == command.identity else set()
        for look in self.watched if not held else ():
            look(self, slot)
        self.fills += not held
        slot.lineage, slot.model = command.identity.lineage, truth.models[command.identity.lineage]
        truth.sources[ref_of(slot.table()).digest] = slot
        (data,) = yield from self.fetch((command.record,))
        record = json.loads(data)
        lacks: dict[int, weights_pb2.Problem] = {}
        table = command.want_table if command.HasField("want_table") else None
        order = order_of(table, slot.source, truth.sources) if table is not None else {}
        passing = self.passing = self.passings[task.slot] = Passing(command.identity.root, slot, set(held))
        others = [each for each in range(SLICES) if each not in held]
        go_on = lambda: self._may_go_on(end, stops)  # noqa: E731
        try:
            for index in sorted(
                others, key=lambda each: bool(order) and not self._near(command, each, record[str(each)])
            ):
                yield self.world.between(0.001, 0.03)
                go_on()
                wanted = record[str(index)]
                found = self._near(command, index, wanted)
                if found is None and table is not None:
                    yield self.world.between(0.0, self.faults.wire_delay)
                    # What its sources were to bring it asks only of relays that have it by now: others may wait for it.
                    before = () if self._is_near(command, index) else order[index]
                    found = yield from ask(self, passing, before, index, wanted, go_on)
                    found = found or (yield from ask_all(self, passing, table, index, wanted, go_on))
                try:
                    slot.memory[index] = slot.sealed[index] = found or self._read(command, index, wanted)
                    passing.verified.add(index)
                except CkptEngineError as error:
                    slot.memory.pop(index, None)
                    lacks[index] = error.problem
        except CkptEngineError as stopped:
            if self._stops == stops or not self._keeps:
                raise
            passing.waits = None
            for index in set(others) - passing.verified:
                slot.memory.pop(index, None)
                lacks[index] = stopped.problem
        passing.over = True
        if len(lacks) == SLICES:
            raise CkptEngineError(lacks[0])
        slot.filled, slot.lacks = command.identity, frozenset(lacks)
        truth.sources[ref_of(slot.table()).digest] = slot
        told = manager_pb2.RelayFilled(
            bytes=SLICES - len(lacks),
            wanted_bytes=SLICES,
            missing=list(lacks.values()),
            missing_cells=len(lacks),
            brought=passing.brought(),
        )
        if table is not None and self.sends is not None:
            told.sent.CopyFrom(self.sends)
        return SlotFilled(slot.table(), data, told)

    def _may_go_on(self, end: float, stops: int) -> None:
        if self._stops != stops:
            raise aborted("a newer command came")
        if self.world.now >= end:
            raise deadline("the time for filling is over")

    def _near(self, command: manager_pb2.FillRelay, index: int, wanted: str) -> str | None:
        """What sources of its host have of a slice; None: not this."""
        try:
            return self._read(command, index, wanted)
        except CkptEngineError:
            return None

    def _is_near(self, command: manager_pb2.FillRelay, index: int) -> bool:
        """Whether a source within its reach has offered a slice, which may be gone by now."""
        sources = (self.cluster.truth.sources[ref.digest] for ref in command.tables)
        return any(self._way(each) and index in each.memory for each in sources)

    def _way(self, source: Source) -> str:
        """The transport over which it reads a source; empty if none leads there."""
        found = ways(source.host, source.offered, self.host, WORKERS_READ)
        return found[0].transport if found else ""

    def _read(self, command: manager_pb2.FillRelay, index: int, wanted: str) -> str:
        for ref in command.tables:
            source = self.cluster.truth.sources[ref.digest]
            if not self._way(source):
                continue
            try:
                found = source.read(index)
            except SourceGoneError:
                continue
            if found == wanted:
                return found
        raise data_loss(f"nobody brings slice {index} as it was sealed")

    def _let_go(self, task: LetGoOf) -> Steps:
        yield self._last
        self.mapped -= set(task.tables)

    def hears(self, other: RelayShell) -> bool:
        """Whether another relay says anything on the network."""
        cut = frozenset({other.host.name, self.host.name}) in self.faults.wire_cuts
        return not cut and not other.slots[0].silent and not self.world.chance(self.faults.wire)
