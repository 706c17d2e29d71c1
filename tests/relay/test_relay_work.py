"""The relay's machine and its memory together: commands in, answers and what is held out. Only a stream is missing."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Sequence

import pytest
from google.protobuf.message import DecodeError

from ckpt_engine.core.manifest import blob_digest, canonical
from ckpt_engine.core.problems import CkptEngineError, not_found
from ckpt_engine.core.sealed_record import ProvenRecord, read_record
from ckpt_engine.host.facts import this_host
from ckpt_engine.machines.clock import ManagersClock
from ckpt_engine.machines.events import Done, Run
from ckpt_engine.machines.relay.machine import HeldNotice, RelayCommand, RelayFilling
from ckpt_engine.machines.relay.tasks import CountSlot, FillSlot
from ckpt_engine.relay.slots import Slots
from ckpt_engine.relay.work import RelayWork
from ckpt_engine.transport.relay_memory.reader import RelayMemoryTransport
from ckpt_engine.transport.shared_memory.memory import SharedMemoryTransport
from ckpt_engine.v1.manager_pb2 import BlobRef, FillRelay, RelayFilled
from ckpt_engine.v1.relay_pb2 import RelayMemoryLocator
from ckpt_engine.v1.weights_pb2 import Fence, Identity, Problem, Region, SealedRecord, SourceTable
from tests.fuzz.mutation import mutated
from tests.install.install_models import TensorParallel
from tests.install.install_world import Checkpoint
from tests.relay.relay_reader import regions_of
from tests.relay.relay_world import seal, tables


class Relay:
    """A relay whose manager keeps blobs in a dictionary."""

    def __init__(self, slots: Slots) -> None:
        self.blobs: dict[bytes, bytes] = {}
        self.work = RelayWork(slots, self._fetch)
        self.answers: list[object] = []
        self.held: tuple[HeldNotice, ...] = ()
        self._todo: list[Run] = []
        self._machine = RelayFilling(self._emit, self.answers.append, self._hold, ManagersClock())

    def _emit(self, command: RelayCommand) -> None:
        if isinstance(command, Run):
            self._todo.append(command)
        else:
            self.work.stop()

    def _hold(self, versions: tuple[HeldNotice, ...]) -> None:
        self.held = versions

    def _fetch(self, refs: Sequence[BlobRef], seconds: float) -> list[bytes]:
        try:
            return [self.blobs[ref.digest] for ref in refs]
        except KeyError as missing:
            raise not_found(f"no blob {missing}") from None

    def put(self, data: bytes) -> BlobRef:
        self.blobs[blob_digest(data)] = data
        return BlobRef(digest=blob_digest(data), size=len(data))

    def tell(self, command: FillRelay) -> object:
        """Carries it out; its answer."""
        before = len(self.answers)
        self._machine.message(command, "cluster", 0.0)
        while self._todo:
            run = self._todo.pop(0)
            assert isinstance(run.task, CountSlot | FillSlot)
            self.work.begin()
            try:
                done = Done(run.key, self.work.perform(run.task))
            except CkptEngineError as error:
                done = Done(run.key, problem=error.problem)
            self._machine.done(done, 0.0)
        (answer,) = self.answers[before:]
        return answer

    def command(self, epoch: int, recorded: ProvenRecord, sources: list[SourceTable]) -> FillRelay:
        return FillRelay(
            fence=Fence(cluster="cluster", epoch=epoch),
            identity=Identity(lineage="run", version=epoch, root=recorded.root),
            record=self.put(canonical(recorded.record)),
            tables=[self.put(canonical(table)) for table in sources],
            everything=True,
            deadline_seconds=60.0,
        )

    def fill(
        self, epoch: int, recorded: ProvenRecord, sources: list[SourceTable], keep: ProvenRecord | None = None
    ) -> RelayFilled:
        command = self.command(epoch, recorded, sources)
        if keep is not None:
            command.keep.CopyFrom(Identity(lineage="run", version=epoch - 1, root=keep.root))
        answer = self.tell(command)
        assert isinstance(answer, RelayFilled)
        return answer


@pytest.fixture
def slots() -> Iterator[Slots]:
    found = Slots("a", this_host(), 16 << 20, {"shared_memory": SharedMemoryTransport()}, 5.0)
    yield found
    found.close()


def test_versions_come_and_go_and_what_is_held_proves_itself(slots: Slots) -> None:
    checkpoint = Checkpoint(TensorParallel(0, 1).checkpoint(), 1)
    relay = Relay(slots)
    before: ProvenRecord | None = None
    for epoch in range(1, 5):
        checkpoint.weights = {name: weight + epoch for name, weight in checkpoint.weights.items()}
        recorded = seal(checkpoint, [])
        answer = relay.fill(epoch, recorded, tables(checkpoint), before)
        assert not answer.HasField("problem"), answer.problem.message
        assert answer.bytes == sum(weight.nbytes for weight in checkpoint.weights.values())
        assert sum(each.bytes for each in answer.brought) == answer.bytes
        assert [each.identity.number for each in relay.held] == [epoch, epoch - 1][: 1 if epoch == 1 else 2]
        for held in relay.held:
            assert read_record(SealedRecord.FromString(held.record), held.identity.root).root == held.identity.root
        before = recorded


def test_a_filling_that_is_stopped_before_its_thread_has_begun_does_not_begin(slots: Slots) -> None:
    checkpoint = Checkpoint(TensorParallel(0, 1).checkpoint(), 1)
    recorded = seal(checkpoint, [])
    relay = Relay(slots)
    task = FillSlot(0, relay.command(1, recorded, tables(checkpoint)), 60.0)
    relay.work.begin()
    relay.work.stop(keep=True)
    with pytest.raises(CkptEngineError) as caught:
        relay.work.perform(task)
    assert caught.value.problem.code == Problem.CODE_ABORTED
    relay.work.begin()
    relay.work.perform(task)
    held = slots.held(0)
    assert held is not None
    assert not held.filled.missing


def test_what_cannot_be_brought_is_said_and_what_was_held_stays(slots: Slots) -> None:
    checkpoint = Checkpoint(TensorParallel(0, 1).checkpoint(), None)
    recorded = seal(checkpoint, [])
    relay = Relay(slots)
    relay.fill(1, recorded, tables(checkpoint))
    relay.fill(2, recorded, tables(checkpoint), recorded)
    lost = FillRelay(fence=Fence(cluster="cluster", epoch=3), identity=Identity(lineage="run", version=3))
    lost.record.CopyFrom(BlobRef(digest=b"nobody has it", size=1))
    answer = relay.tell(lost)
    assert isinstance(answer, RelayFilled)
    assert answer.problem.code == Problem.CODE_NOT_FOUND
    checkpoint.weights = {"w": checkpoint.weights["norm.weight"]}
    other = seal(Checkpoint(checkpoint.weights, None), [])
    for broken, why in ((b"\xff\xff", "cannot be read"), (canonical(other.record), "it is of other weights")):
        command = FillRelay(
            fence=Fence(cluster="cluster", epoch=4 + len(why)),
            identity=Identity(lineage="run", version=4, root=recorded.root),
            record=relay.put(broken),
            deadline_seconds=60.0,
        )
        answer = relay.tell(command)
        assert isinstance(answer, RelayFilled)
        assert why in answer.problem.message
    assert [each.identity.number for each in relay.held] == [2, 1]


def test_damage_is_told_by_name(slots: Slots) -> None:
    checkpoint = Checkpoint(TensorParallel(0, 1).checkpoint(), None)
    recorded = seal(checkpoint, [])
    checkpoint.flip("norm.weight", (1,))
    answer = Relay(slots).fill(1, recorded, tables(checkpoint))
    assert not answer.HasField("problem")
    assert (answer.missing_cells, list(answer.missing[0].tensors)) == (1, ["norm.weight"])
    assert list(answer.faults[0].tensors) == ["norm.weight"]


def test_damaged_messages_are_refused_and_nothing_else(slots: Slots) -> None:
    """Each input is honest but for a few fields; whatever comes of it, the relay goes on."""
    rng = random.Random(13)
    checkpoint = Checkpoint(TensorParallel(0, 1).checkpoint(), None)
    recorded = seal(checkpoint, [])
    (table, *_), relay = tables(checkpoint), Relay(slots)
    honest = {SealedRecord: canonical(recorded.record), SourceTable: canonical(table)}
    refused = 0
    for number in range(200):
        kind = rng.choice([SealedRecord, SourceTable])
        data = {**honest, kind: mutated(honest[kind], kind, rng)}
        command = FillRelay(
            fence=Fence(cluster="cluster", epoch=number + 1),
            identity=Identity(lineage="run", version=number, root=recorded.root),
            record=relay.put(data[SealedRecord]),
            tables=[relay.put(data[SourceTable])],
            everything=True,
            deadline_seconds=60.0,
        )
        answer = relay.tell(command)
        assert isinstance(answer, RelayFilled)
        refused += answer.HasField("problem")
    assert 0 < refused < 200
    answer = relay.fill(1000, recorded, [table])
    assert not answer.HasField("problem")
    (region, *_) = regions_of(SourceTable.FromString(relay.held[0].table))
    transport = RelayMemoryTransport()
    transport.open([region]).close()
    for _ in range(200):
        with contextlib.suppress(CkptEngineError, DecodeError):
            damaged = Region.FromString(mutated(region.SerializeToString(), Region, rng))
            damaged.locator = mutated(damaged.locator, RelayMemoryLocator, rng)
            transport.open([damaged]).close()
    transport.open([region]).close()
