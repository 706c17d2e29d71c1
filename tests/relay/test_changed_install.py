"""Workers install what has changed since the version that they hold: bit for bit, or they are not CLEAN."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckpt_engine.core.problems import CkptEngineError, unavailable
from ckpt_engine.core.sealed_record import ProvenRecord
from ckpt_engine.delta import table
from ckpt_engine.delta.table import AtomChanges, ChangeTable
from ckpt_engine.host.facts import this_host
from ckpt_engine.install import changes
from ckpt_engine.install.changes import ChangedInstall, overlapping
from ckpt_engine.relay import slots as relay_slots
from ckpt_engine.relay.chunk_fill import ChunkFilling
from ckpt_engine.relay.door import ArenaDoor, _DoorReader
from ckpt_engine.relay.slots import Slots
from ckpt_engine.transport.relay_memory.reader import CHANGES, HOLD
from ckpt_engine.transport.shared_memory.memory import SharedMemoryTransport
from ckpt_engine.v1 import manager_pb2
from ckpt_engine.v1.weights_pb2 import Identity, Problem, SourceTable
from ckpt_engine.v1.worker_pb2 import WorkerInstalled
from tests.install.install_models import TensorParallel, assert_same, bits, state
from tests.install.install_world import Checkpoint
from tests.relay.relay_world import Replica, seal, tables, wish
from tests.waiting import eventually

SHAPE = {"layers": 2}
DIRTY = manager_pb2.WORKER_STATE_DIRTY


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads of a busy machine may take long."""
    monkeypatch.setattr(changes, "ASK_SECONDS", 60.0)


@contextmanager
def relay_memory() -> Iterator[Slots]:
    """What a relay holds and lends, in this process."""
    slots = Slots("a", this_host(), 64 << 20, {"shared_memory": SharedMemoryTransport()})
    try:
        yield slots
    finally:
        slots.close()


@dataclass
class World:
    """A trainer, a relay and a replica of tensor-parallel workers that reads it."""

    checkpoint: Checkpoint
    replica: Replica
    relay: Slots
    version: int = 0
    sealed: dict[int, tuple[ProvenRecord, SourceTable]] = field(default_factory=dict)

    def train(self, share: float = 0.005) -> None:
        """Changes a share of the elements, at least one of a tensor; some become -0, NaN or the like."""
        generator = torch.Generator().manual_seed(self.version)
        for name, weight in self.checkpoint.weights.items():
            fresh = torch.randn(weight.shape, generator=generator).to(weight.dtype)
            flat = fresh.view(-1)
            flat[:: max(1, len(flat) // 5)] = -0.0 if self.version % 2 else float("nan")
            chosen = torch.rand(weight.shape, generator=generator) < share
            chosen.view(-1)[self.version % weight.numel()] = True
            self.checkpoint.weights[name] = torch.where(chosen, fresh, weight)

    def fill(self) -> None:
        """The relay brings the trainer's weights as the next version, into the slot of the one before the last."""
        self.version += 1
        recorded = seal(self.checkpoint, [self.replica])
        wanted = wish(recorded, self.version, tables(self.checkpoint), [self.replica])
        held = self.relay.fill(self.version % 2, wanted, 60)
        assert not held.filled.missing
        self.sealed[self.version] = recorded, held.table

    def install(self, version: int = 0) -> list[WorkerInstalled]:
        version = version or self.version
        recorded, table = self.sealed[version]
        return self.replica.install(table, recorded, version, ahead=True)

    def next(self, share: float = 0.005) -> list[WorkerInstalled]:
        self.train(share)
        self.fill()
        return self.install()

    def assert_installed(self, answers: list[WorkerInstalled], weights: dict[str, torch.Tensor] | None = None) -> None:
        for rank, (worker, model, answer) in enumerate(
            zip(self.replica.workers, self.replica.models, answers, strict=True)
        ):
            assert not answer.report.HasField("problem"), answer.report.problem.message
            like = TensorParallel(rank, len(self.replica.models), **SHAPE)
            like.load_weights((weights or self.checkpoint.weights).items())
            assert_same(state(model), state(like))
            assert answer.report.verified >= answer.report.tensors
            [word] = worker.page.read()
            assert word.state == manager_pb2.WORKER_STATE_CLEAN


@pytest.fixture(params=[2, 4], ids=["2 workers", "replicated heads"])
def world(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[World]:
    made = TensorParallel(0, request.param, **SHAPE)
    checkpoint = Checkpoint(made.checkpoint(), 1)
    with relay_memory() as relay:
        yield World(checkpoint, Replica(checkpoint, tmp_path / "engine", request.param, **SHAPE), relay)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[World]:
    """Two workers that have installed one version in full, and one by its changes."""
    checkpoint = Checkpoint(TensorParallel(0, 2, **SHAPE).checkpoint(), 1)
    with relay_memory() as relay:
        made = World(checkpoint, Replica(checkpoint, tmp_path / "engine", 2, **SHAPE), relay)
        made.next()
        made.assert_installed(answers := made.next())
        assert_by_changes(answers)
        yield made


def assert_by_changes(answers: list[WorkerInstalled]) -> None:
    for answer in answers:
        assert answer.report.by_changes, answer.report.in_full
        assert answer.report.changed_elements
        assert not answer.report.in_full


def assert_in_full(answers: list[WorkerInstalled], why: str) -> None:
    for answer in answers:
        assert not answer.report.by_changes
        assert not answer.report.since_full
        assert why in answer.report.in_full


def test_version_after_version_goes_by_changes(world: World) -> None:
    world.assert_installed(answers := world.next())
    assert_in_full(answers, "holds no version that it has proved")
    whole = [answer.report.bytes for answer in answers]
    for number in range(1, 9):
        world.assert_installed(answers := world.next())
        assert_by_changes(answers)
        for answer, size in zip(answers, whole, strict=True):
            assert answer.report.since_full == number
            assert answer.report.bytes < size / 4
            assert sum(edge.bytes for edge in answer.edges) == answer.report.bytes


def test_the_way_back_goes_by_the_same_changes(pair: World) -> None:
    before = dict(pair.checkpoint.weights)
    pair.assert_installed(pair.next())
    for version, weights in ((2, before), (3, pair.checkpoint.weights)):
        answers = pair.install(version)
        pair.assert_installed(answers, weights)
        assert_by_changes(answers)


def test_every_so_many_installs_one_is_in_full(pair: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckpt_engine.install.installer.FULL_EVERY", 3)
    assert_by_changes(pair.next())
    pair.assert_installed(answers := pair.next())
    assert_in_full(answers, "2 installs went by changes since")
    assert_by_changes(pair.next())


def test_a_worker_that_missed_a_version_takes_the_next_in_full(pair: World) -> None:
    pair.train()
    pair.fill()
    pair.assert_installed(answers := pair.next())
    assert_in_full(answers, "the relay has compared")


def test_too_many_changes_go_in_full(pair: World) -> None:
    pair.assert_installed(answers := pair.next(0.5))
    assert_in_full(answers, "too much differs")
    pair.assert_installed(answers := pair.next())
    assert_by_changes(answers)


def test_a_relay_that_has_started_again_has_compared_nothing(pair: World) -> None:
    with relay_memory() as other:
        pair.relay = other
        pair.assert_installed(answers := pair.next())
        assert_in_full(answers, "it does not hold two whole versions")
        pair.assert_installed(answers := pair.next())
        assert_by_changes(answers)


def test_another_process_or_moved_tensors_have_no_base(pair: World) -> None:
    pair.replica.workers[0].installer.release()
    parameter = pair.replica.models[1].norm.weight
    parameter.data = parameter.data.clone()
    pair.assert_installed(answers := pair.next())
    assert_in_full(answers[:1], "holds no version that it has proved and kept in place")
    assert not answers[1].report.by_changes
    assert_by_changes(pair.next())


def test_a_dirty_worker_has_no_base(pair: World) -> None:
    for worker in pair.replica.workers:
        worker.slot.dirty(worker.epoch)
    pair.assert_installed(answers := pair.next())
    assert_in_full(answers, "holds no version that it has proved")


def flip(tensor: torch.Tensor, element: int) -> None:
    bits(tensor)[element * tensor.itemsize] ^= 1


def test_memory_that_is_not_the_base_is_noticed_before_anything_is_written(pair: World) -> None:
    """The next version changes this very element; its old value would be part of the proof."""
    for model in pair.replica.models:
        flip(model.norm.weight.data, pair.version % model.norm.weight.numel())
    pair.assert_installed(answers := pair.next())
    assert_in_full(answers, "what lies in norm.weight is not what was installed")


def test_a_flipped_byte_that_no_change_touches_is_found_by_the_scrub_and_mended_in_full(tmp_path: Path) -> None:
    checkpoint = Checkpoint(TensorParallel(0, 2, **SHAPE).checkpoint(), 1)
    with relay_memory() as relay:
        world = World(checkpoint, Replica(checkpoint, tmp_path / "engine", 2, scrub_seconds=0.5, **SHAPE), relay)
        world.next()
        norms = [model.norm.weight.data for model in world.replica.models]
        for norm in norms:  # `next` changes one element of it, or a few
            flip(norm, 20)
        answers = world.next(0.0)
        for worker, answer in zip(world.replica.workers, answers, strict=True):
            if answer.report.by_changes:  # else the scrub was first
                eventually("the scrub closes it", 60, lambda slot=worker.slot: slot.state == DIRTY)  # type: ignore[misc]
        world.assert_installed(mended := world.install())
        for first, second in zip(answers, mended, strict=True):
            in_full = second.report.in_full if first.report.by_changes else first.report.in_full
            assert "holds no version that it has proved" in in_full
        assert_by_changes(world.next())
        for worker in world.replica.workers:
            worker.installer.close()


def test_a_relay_that_answers_late_keeps_its_readers(pair: World) -> None:
    """Its tables come when it is asked the next question, and are not taken for that one's answer."""
    honest, late, prompt = ArenaDoor._answer, dict[int, tuple[Any, ...]](), set[ArenaDoor]()

    def answer(self: ArenaDoor, reader: _DoorReader, kind: int, *rest: Any) -> None:
        if kind == CHANGES and self not in prompt:
            late[id(reader)] = (reader, kind, *rest)
            return
        if kind == HOLD and (question := late.pop(id(reader), None)) is not None:
            honest(self, *question)
        honest(self, reader, kind, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ArenaDoor, "_answer", answer)
        patch.setattr(changes, "ASK_SECONDS", 0.05)
        pair.assert_installed(answers := pair.next())
        assert_in_full(answers, "did not answer within 0.05 s")
        assert len(late) == pair.relay.readers == len(answers)
        prompt.add(pair.relay._ways._door)
        descriptors = len(os.listdir("/proc/self/fd"))
        pair.assert_installed(pair.install())
        assert not late
        assert len(os.listdir("/proc/self/fd")) <= descriptors
    pair.assert_installed(answers := pair.next())
    assert_by_changes(answers)


def test_a_lease_that_ends_while_changes_are_asked_for_ends_the_install_before_it_writes(
    pair: World,
) -> None:
    honest, before = ArenaDoor._answer, dict(pair.checkpoint.weights)

    def answer(self: ArenaDoor, reader: _DoorReader, kind: int, *rest: Any) -> None:
        if kind == CHANGES:
            raise OSError("the relay hangs up")
        honest(self, reader, kind, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ArenaDoor, "_answer", answer)
        for worker, model, given in zip(pair.replica.workers, pair.replica.models, pair.next(), strict=True):
            assert given.report.problem.code == Problem.CODE_UNAVAILABLE, given.report
            assert worker.slot.state == manager_pb2.WORKER_STATE_CLEAN
            like = TensorParallel(pair.replica.models.index(model), len(pair.replica.models), **SHAPE)
            like.load_weights(before.items())
            assert_same(state(model), state(like))
    pair.assert_installed(pair.install())


def test_versions_are_compared_only_for_workers_that_can_use_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And only while there is time enough."""
    checkpoint = Checkpoint(TensorParallel(0, 2, **SHAPE).checkpoint(), 1)
    with relay_memory() as relay:
        world = World(checkpoint, Replica(checkpoint, tmp_path / "engine", 2, **SHAPE), relay)
        with monkeypatch.context() as patch:
            patch.setattr(relay_slots, "changes_of", lambda *_: pytest.fail("it compares"))
            world.fill()
            world.fill()  # nothing has read it yet
            patch.setattr(changes, "_alone", lambda *_: [])  # as on a GPU
            for _ in range(2):
                world.assert_installed(answers := world.next())
                assert_in_full(answers, "")
        for worker in world.replica.workers:
            worker.installer.release()  # so that plans are laid out again
        world.install()
        world.assert_installed(answers := world.install())
        assert_in_full(answers, "no worker of this host could use changes when the last version came")
        with monkeypatch.context() as patch:
            patch.setattr(relay_slots, "_COMPARE_SHARE", 0.0)
            world.assert_installed(answers := world.next())
            assert_in_full(answers, "could not be compared in time")
        world.assert_installed(answers := world.next())
        assert_by_changes(answers)


def test_a_filling_that_fails_leaves_the_table_or_a_true_reason(pair: World, monkeypatch: pytest.MonkeyPatch) -> None:
    pair.train()
    wanted = wish(seal(pair.checkpoint, [pair.replica]), 3, tables(pair.checkpoint), [pair.replica])
    wrong = Identity(lineage="run", version=3, root=bytes(32))
    with pytest.raises(CkptEngineError, match="the record hashes to"):  # before a slot is given up
        pair.relay.fill(1, replace(wanted, identity=wrong), 60)
    assert_by_changes(pair.install(1))

    def run(*_: object) -> None:
        raise unavailable("its source is gone")

    monkeypatch.setattr(ChunkFilling, "run", run)
    with pytest.raises(CkptEngineError, match="its source is gone"):
        pair.relay.fill(1, wanted, 60)
    assert_in_full(pair.install(2), "its last filling failed: its source is gone")


def _left_out(found: AtomChanges) -> AtomChanges:
    size = found.words[0].nbytes // len(found.places)
    return AtomChanges(found.places[1:], (found.words[0][size:], found.words[1][size:]))


def _other_word(found: AtomChanges) -> AtomChanges:
    one, other = found.words[0], found.words[1].copy()
    other[0] ^= 4
    return AtomChanges(found.places, (one, other))


def _other_word_of_both(found: AtomChanges) -> AtomChanges:
    one, other = (each.copy() for each in found.words)
    one[0] ^= 4
    other[0] ^= 4
    return AtomChanges(found.places, (one, other))


def _twice(found: AtomChanges) -> AtomChanges:
    places = found.places.copy()
    places[-1] = places[0]
    return AtomChanges(places, found.words)


LIES: dict[str, tuple[Callable[[AtomChanges], AtomChanges], str]] = {
    "a change is left out": (_left_out, "what changed does not add up"),
    "another word": (_other_word, ""),
    "another word in both versions": (_other_word_of_both, "is not what was installed"),
    "a place comes twice": (_twice, "cannot have changed"),
}


def lie(monkeypatch: pytest.MonkeyPatch, spoil: Callable[[AtomChanges], AtomChanges]) -> None:
    """Spoils what a relay says of each atom of three elements or more in which something has changed."""
    honest = ChangeTable.of_atom

    def of_atom(self: ChangeTable, offset: int, elements: int, width: int) -> AtomChanges | None:
        found = honest(self, offset, elements, width)
        return found if found is None or len(found.places) < 2 else spoil(found)

    monkeypatch.setattr(ChangeTable, "of_atom", of_atom)


@pytest.mark.parametrize("which", sorted(LIES))
def test_a_wrong_table_costs_time_and_nothing_else(pair: World, which: str) -> None:
    spoil, why = LIES[which]
    with pytest.MonkeyPatch.context() as patch:
        lie(patch, spoil)
        pair.assert_installed(answers := pair.next())
        assert_in_full(answers, why)
        for answer in answers:  # what was read in vain is not counted
            assert answer.report.bytes == sum(edge.bytes for edge in answer.edges)
    pair.assert_installed(answers := pair.next())
    assert_by_changes(answers)


def test_without_the_proof_a_wrong_table_would_be_believed(pair: World, monkeypatch: pytest.MonkeyPatch) -> None:
    lie(monkeypatch, _left_out)
    monkeypatch.setattr(ChangedInstall, "mismatches", lambda *_: [])
    answers = pair.next()
    assert_by_changes(answers)
    with pytest.raises(AssertionError):
        pair.assert_installed(answers)


class Shared(nn.Module):
    """Two tensors of the checkpoint are loaded to one parameter, as a tied head is."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(6, 8, dtype=torch.bfloat16), requires_grad=False)
        self.other = nn.Parameter(torch.zeros(5, dtype=torch.bfloat16), requires_grad=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, weight in weights:
            (self.other if name == "other" else self.weight).data.copy_(weight)


@pytest.mark.parametrize("is_looked_for", [True, False])
def test_two_needs_of_one_place_are_proved_in_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_looked_for: bool
) -> None:
    """One of two tied tensors changes and the other one does not: each adds up by itself, and one of them is wrong."""
    monkeypatch.setattr(table, "MOST_SHARE", 8)
    if not is_looked_for:
        monkeypatch.setattr(changes, "overlapping", lambda views, targets: set())
    weight = torch.randn(6, 8).bfloat16()
    checkpoint = Checkpoint({"embed": weight, "head": weight.clone(), "other": torch.randn(5).bfloat16()})
    with relay_memory() as relay:
        replica = Replica(checkpoint, tmp_path / "engine", 1, models=[Shared()])
        world = World(checkpoint, replica, relay)
        for _ in range(2):
            checkpoint.weights["other"] = torch.randn(5).bfloat16()
            world.fill()
            (answer,) = world.install()
            assert not answer.report.HasField("problem"), answer.report.problem.message
        assert answer.report.by_changes == (1 if is_looked_for else 3), answer.report.in_full
        checkpoint.weights["embed"] = weight.clone()
        checkpoint.weights["embed"][2, 3] += 1
        world.fill()
        (answer,) = world.install()
        assert answer.report.HasField("problem") == is_looked_for
        [word] = replica.workers[0].page.read()
        assert (word.state == manager_pb2.WORKER_STATE_CLEAN) != is_looked_for


def shared(*views: torch.Tensor, targets: Iterable[int] | None = None) -> set[int]:
    return overlapping(views, range(len(views)) if targets is None else {*targets})


def test_views_that_share_an_element_are_found() -> None:
    memory = torch.zeros(10, 12, dtype=torch.int16)
    left, right = memory[:, :5], memory[:, 5:]
    assert shared(left, right, torch.zeros(3)) == set()
    assert shared(left, memory[3:4, 4:9], right[5:]) == {0, 1}
    assert shared(memory, memory) == {0, 1}
    assert shared(memory.view(torch.int8)[:3, :1], right[5:]) == set()
    assert shared(memory.view(torch.int8)[:, 10:11], right) == {0, 1}
    assert shared(torch.zeros(1).expand(4)) == {0}
    assert shared(memory, left, memory) == {0, 1, 2}


def test_what_the_engine_waits_for_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = torch.zeros(3, 10, 12, dtype=torch.int16)
    cut = [part for each in memory for part in (each[:, :5], each[:, 5:])]
    monkeypatch.setattr(changes, "_MOST_PAINTED", 250)  # enough for two
    assert shared(*cut) == {4, 5}
    assert shared(*cut, targets=[3, 4]) == set()  # the first ones are left out
    monkeypatch.setattr(changes, "_painted", lambda *_: pytest.fail("it is known without looking at each element"))
    assert shared(memory, memory) == {0, 1}
    assert shared(*cut, targets=[]) == set()
