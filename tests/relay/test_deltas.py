"""Relays send each other what has changed since the version in their other slots. What lands is compared as ever: a
delta that is wrong costs a question, and where there is no base, all of the chunk comes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch

from ckpt_engine.core import chunks as core_chunks
from ckpt_engine.core.boxes import Box
from ckpt_engine.core.chunks import chunks_of
from ckpt_engine.core.manifest import RootHasher, manifest_of
from ckpt_engine.core.relay_layout import lay_out
from ckpt_engine.core.sealed_record import ProvenRecord, read_record
from ckpt_engine.digest.boxes import digest_box
from ckpt_engine.host.facts import this_host
from ckpt_engine.relay import narration
from ckpt_engine.relay import slots as relay_slots
from ckpt_engine.relay.cell_memory import CellMemory, bits_of
from ckpt_engine.relay.deltas import DeltaBase, DeltaMaker, DeltaTaker, DeltaUse
from ckpt_engine.relay.slots import FillWish, Slots, SlotVersion, Want
from ckpt_engine.relay.work import filled_report
from ckpt_engine.report import RelayReport
from ckpt_engine.transport.base import Network
from ckpt_engine.transport.registry import all_transports
from ckpt_engine.v1 import manager_pb2
from ckpt_engine.v1.manager_pb2 import WantTable
from ckpt_engine.v1.weights_pb2 import Problem, SealedRecord, SourceTable, TensorSpec
from tests.install.install_world import Checkpoint
from tests.relay.relay_world import seal, tables, wish
from tests.relay.test_asking import World

LOOPBACK = Network("127.0.0.1:0", "127.0.0.1", 5.0)


class Steps(World):
    """A training run whose versions differ in few elements. use: of deltas, by each relay."""

    def __init__(self, use: DeltaUse = "always") -> None:
        torch.manual_seed(7)
        self.step = 1
        self.weights = {f"layer.{number}": torch.randn(300, 11 + number % 5) for number in range(20)}
        self.weights |= {"empty": torch.zeros(0, 3), "scale": torch.ones(())}
        self.checkpoint = Checkpoint(self.weights, 2)
        self.recorded = seal(self.checkpoint, [])
        self.relays = {name: self.relay(name, use) for name in ("near", "far", "third")}

    def close(self) -> None:
        for each in self.relays.values():
            each.close()
        self.checkpoint.close()

    def relay(self, name: str, use: DeltaUse) -> Slots:
        return Slots(name, this_host(), 32 << 20, all_transports(), 5.0, network=LOOPBACK, deltas=use)

    def advance(self, share: float = 0.05) -> None:
        """One step of training, which changes a share of all elements."""
        self.step += 1
        generator = torch.Generator().manual_seed(self.step)
        for weight in self.weights.values():
            weight += (torch.rand(weight.shape, generator=generator) < share) * 0.5
        self.recorded = seal(self.checkpoint, [])

    def wish(self, sources: Sequence[SourceTable] = (), wanted: WantTable | None = None) -> FillWish:
        found = wish(self.recorded, self.step, sources, everything=True)
        return replace(found, table=wanted or self.wanted(), sets=[Want(everything=True)])

    def held(self, name: str = "far", only: tuple[str, ...] = ("near",)) -> SlotVersion:
        """Has a relay brought the present version, by the origin and these relays."""
        table = self.wanted(without=[each for each in self.relays if each not in (*only, name)])
        found = self.relays[name].fill(self.step % 2, self.wish(wanted=table), 60.0)
        assert not found.filled.missing
        self.assert_same(found)
        return found

    def sealed(self) -> SlotVersion:
        """Has the origin brought it."""
        return self.near(self.step % 2)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[Steps]:
    monkeypatch.setattr(core_chunks, "chunk_bytes", lambda model: 1 << 14)
    world = Steps()
    yield world
    world.close()


def first_and_second(steps: Steps, share: float = 0.05) -> SlotVersion:
    """The second version at the far relay, which holds the first."""
    steps.sealed()
    first = steps.held()
    assert first.filled.deltas.base == b""
    assert first.filled.deltas.network_bytes > steps.nbytes
    steps.advance(share)
    steps.sealed()
    return steps.held()


def test_a_version_comes_as_what_has_changed(steps: Steps) -> None:
    steps.sealed()
    base = steps.held()
    before = {name: weight.clone() for name, weight in steps.weights.items()}
    steps.advance()
    steps.sealed()
    held = steps.held()
    figures, report = held.filled.deltas, filled_report(held)
    assert (held.filled.faults, held.filled.again, dict(figures.whole)) == ((), 0, {})
    assert figures.delta_bytes == steps.nbytes == sum(held.filled.bytes_by_source.values())
    assert figures.base == base.identity.root
    changed = {name: int((steps.weights[name] != weight).sum()) for name, weight in before.items()}
    assert {name: count for name, count in figures.tensors.items() if count} == {
        name: count for name, count in changed.items() if count
    }
    assert figures.changed_bytes == 4 * sum(changed.values())
    assert figures.network_bytes < 0.1 * steps.nbytes, "5 % of elements"
    assert (report.network_bytes, report.delta_bytes, report.changed_bytes, report.delta_base) == (
        figures.network_bytes,
        figures.delta_bytes,
        figures.changed_bytes,
        base.identity.root,
    )
    share = f"{figures.changed_bytes / steps.nbytes:.2%} had changed"
    assert f" of it as changes ({share}), " in narration.filled(report)
    shown = RelayReport(manager_pb2.RelayReport(relay="relay far", filled=report))
    assert f" on the network: {share})" in str(shown)
    assert (shown.delta_bytes, shown.network_bytes) == (steps.nbytes, figures.network_bytes)
    assert list(shown.densest) == [each.tensor for each in report.densest]
    densest = report.densest[0]
    assert densest.changed / densest.elements == max(
        count / before[name].numel() for name, count in changed.items() if before[name].numel()
    )


def test_versions_follow_each_other_and_are_passed_on(steps: Steps) -> None:
    """The third relay asks the far one, which passes on what it was sent."""
    for _ in range(4):
        steps.sealed()
        steps.held()
        third = steps.held("third", ("near", "far"))
        if steps.step > 1:
            assert third.filled.deltas.delta_bytes == steps.nbytes
            assert set(third.filled.bytes_by_source) == {"relay far"}
        steps.advance()


def test_nothing_changed_takes_next_to_nothing(steps: Steps) -> None:
    held = first_and_second(steps, share=0.0)
    assert held.filled.deltas.changed_bytes == 0
    assert held.filled.deltas.network_bytes < 0.01 * steps.nbytes, "heads of cells"


def test_all_changed_takes_no_more_than_all(steps: Steps) -> None:
    steps.sealed()
    steps.held()
    torch.manual_seed(9)
    for name, weight in steps.weights.items():
        steps.weights[name] = torch.randn(weight.shape)
    steps.advance(0.0)
    steps.sealed()
    held = steps.held()
    assert held.filled.deltas.network_bytes < 1.02 * steps.nbytes
    assert not held.filled.faults


def test_a_relay_without_the_base_sends_all_and_says_so(steps: Steps) -> None:
    """The far relay holds version 1, the origin 2 and 3: it has missed one."""
    steps.sealed()
    first = steps.held()
    steps.advance()
    steps.sealed()
    steps.advance()
    steps.sealed()
    far = steps.relays["far"].fill(0, steps.wish(wanted=steps.wanted(without=["third"])), 60.0)
    steps.assert_same(far)
    why = f"relay near: it does not hold the base {first.identity.root.hex()[:16]}"
    assert dict(far.filled.deltas.whole) == {why: steps.nbytes}
    assert far.filled.deltas.delta_bytes == 0
    assert f" in full ({why})" in narration.filled(filled_report(far))
    shown = RelayReport(manager_pb2.RelayReport(relay="relay far", filled=filled_report(far)))
    assert f" in full: {why})" in str(shown)
    assert shown.whole == {why: steps.nbytes}
    assert shown.density is None
    (whole,) = filled_report(far).whole
    assert (whole.reason, whole.bytes) == (why, steps.nbytes)
    assert not far.filled.faults


def test_a_relay_that_goes_back_takes_the_way_back_as_a_delta(steps: Steps) -> None:
    """Both hold what is rolled back and what it is rolled back to; a base is any version that both hold."""
    steps.sealed()
    steps.held()
    former, record = {name: weight.clone() for name, weight in steps.weights.items()}, steps.recorded
    steps.advance()
    steps.sealed()
    steps.held()
    steps.advance(0.0)
    steps.weights.update(former)
    steps.checkpoint.seal()
    steps.recorded = record
    near = steps.relays["near"].fill(1, steps.wish(tables(steps.checkpoint)), 60.0)
    assert near.identity.root == record.root
    far = steps.held()
    assert far.filled.deltas.delta_bytes == steps.nbytes


@pytest.mark.parametrize("who", ["near", "far"])
def test_never_is_never(steps: Steps, who: str) -> None:
    steps.relays[who].close()
    steps.relays[who] = steps.relay(who, "never")
    held = first_and_second(steps)
    assert held.filled.deltas.delta_bytes == 0
    assert dict(held.filled.deltas.whole) == ({"relay near: it sends no deltas": steps.nbytes} if who == "near" else {})


def test_without_zstd_versions_come_in_full(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_slots, "missing", lambda: "No module named 'zstandard'; pip install zstandard")
    steps.relays["far"].close()
    steps.relays["far"] = steps.relay("far", "auto")
    assert first_and_second(steps).filled.deltas.delta_bytes == 0


# ------------------------------------------------------------------------------------------- what is wrong is noticed


def test_a_damaged_base_costs_a_question(steps: Steps) -> None:
    """A bit of the far relay's own copy flips between the versions: the delta does not lead to what was sealed."""
    steps.sealed()
    base = steps.held()
    damaged = next(name for name in sorted(steps.weights) if steps.weights[name].numel())
    index = next(number for number, each in enumerate(base.table.tensors) if each.name == damaged)
    shard = next(number for number, each in enumerate(base.table.shards) if each.tensor == index)
    steps.advance()
    steps.sealed()
    base.sealed[shard].view(torch.uint8).view(-1)[0] ^= 1
    held = steps.held()
    (fault,) = held.filled.faults
    assert fault.code == Problem.CODE_DATA_LOSS
    assert fault.message.endswith("as a delta that does not lead to what was sealed: it was asked for in full")
    assert damaged in fault.tensors
    assert held.filled.again > 0
    assert 0 < held.filled.deltas.delta_bytes < steps.nbytes


def test_an_origin_whose_base_is_damaged_notices_it_and_sends_all(
    steps: Steps, caplog: pytest.LogCaptureFixture
) -> None:
    base = steps.sealed()
    steps.held()
    steps.advance()
    steps.sealed()
    base.sealed[0].view(torch.uint8).view(-1)[0] ^= 1
    held = steps.held()
    assert not held.filled.faults, "it was never sent"
    assert [why for why in held.filled.deltas.whole if "its memory has changed since it was verified" in why]
    assert "is sent in full: memory of tensor" in caplog.text


def test_a_delta_that_cannot_be_read_costs_a_question(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    make = DeltaMaker.make
    spoilt: list[int] = []

    def spoil(self: DeltaMaker, number: int, root: bytes, rate: float | None) -> object:
        found = make(self, number, root, rate)
        if found.body is not None and number % 3 == 0 and number not in spoilt:
            spoilt.append(number)
            return found._replace(body=found.body[:-1] if number % 2 else bytes(32) + found.body[32:])
        return found

    monkeypatch.setattr(DeltaMaker, "make", spoil)
    held = first_and_second(steps)
    assert len(spoilt) > 2
    messages = {fault.message for fault in held.filled.faults}
    assert any("and a delta cannot be read: " in each for each in messages)
    assert any("and it leads from 0000000000000000, and this relay holds" in each for each in messages)
    assert all(each.endswith(": it was asked for in full") for each in messages)


def test_a_base_that_is_replaced_meanwhile_is_none(steps: Steps) -> None:
    """The origin brings the third version while the far relay still asks for the second: its deltas may be torn."""
    steps.sealed()
    steps.held()
    steps.advance()
    steps.sealed()
    second, asked = steps.recorded, steps.wish(wanted=steps.wanted(without=["third"]))
    slot = steps.step % 2
    expected = {name: weight.clone() for name, weight in steps.weights.items()}
    steps.advance()
    steps.sealed()
    far = steps.relays["far"].fill(slot, asked, 60.0)
    assert far.identity.root == second.root
    assert [why for why in far.filled.deltas.whole if "another version in the place of the base" in why]
    assert far.filled.deltas.delta_bytes == 0
    steps.weights.update(expected)
    steps.assert_same(far)


# -------------------------------------------------------------------------------------------------- boxes of a base


class Slot:
    """Memory that is laid out for readers of some boxes of tensor "w"."""

    def __init__(self, recorded: ProvenRecord, weights: dict[str, torch.Tensor], cuts: list[Box]) -> None:
        self.layout = lay_out(recorded, [[(0, box)] for box in cuts], True, None, chunks_of(recorded))
        self.bytes = torch.zeros(self.layout.size, dtype=torch.uint8)
        self.memory = CellMemory(recorded, self.layout, self.at)
        self.recorded = recorded
        for atom in self.layout.atoms:
            inside = tuple(slice(*each) for each in zip(atom.box.start, atom.box.stop, strict=True))
            self.at(atom.offset, atom.box.shape, torch.float32).copy_(weights["w"][inside])

    def at(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        size = dtype.itemsize * torch.Size(shape).numel()
        return self.bytes[offset : offset + size].view(dtype).view(shape)

    @property
    def cells(self) -> frozenset[int]:
        return frozenset(range(len(self.recorded.values)))


def record_cut(weights: dict[str, torch.Tensor], rows: int) -> ProvenRecord:
    """The record of a tensor that is cut into boxes of so many rows."""
    weight = weights["w"]
    manifest = manifest_of([TensorSpec(name="w", dtype="float32", shape=weight.shape)])
    record, total = SealedRecord(manifest=manifest), 0
    for first in range(0, len(weight), rows):
        part = weight[first : first + rows]
        record.cells.add(start=(first, 0), stop=(first + len(part), weight.shape[1]))
        record.digests.append(digest_box(part, (first, 0)))
        total += record.digests[-1]
    root = RootHasher(manifest).root((total % 2**64).to_bytes(8, "little"))
    return read_record(record, root)


def test_a_base_may_be_cut_and_laid_out_differently(monkeypatch: pytest.MonkeyPatch) -> None:
    """A box counts if it is a union of the base's cells; a delta leads from one layout to another."""
    monkeypatch.setattr(core_chunks, "chunk_bytes", lambda model: 1 << 12)
    torch.manual_seed(3)
    old = {"w": torch.randn(24, 50)}
    new = {"w": old["w"].clone()}
    new["w"][::5, ::7] += 1
    columns = [Box((0, 0), (24, 20)), Box((3, 10), (20, 50))]
    halves, eighths, thirds = (record_cut(old, rows) for rows in (12, 3, 9))
    coarse, fine = record_cut(new, 12), record_cut(new, 3)
    for base_record, cuts in ((halves, columns), (eighths, []), (eighths, columns)):
        for mine, theirs in ((columns, []), ([], columns), (columns, columns)):
            base = Slot(base_record, old, cuts)
            near, far = Slot(coarse, new, mine), Slot(coarse, {"w": torch.zeros(24, 50)}, theirs)
            held = DeltaBase(base.memory, base.cells, lambda: True)
            chunks = chunks_of(coarse)
            maker = DeltaMaker("always", near.memory, chunks, held, 1 << 20)
            taker = DeltaTaker(far.memory, chunks, held, maker.keep)
            for number, chunk in enumerate(chunks):
                assert taker.has(number)
                body = maker.make(number, base_record.root, None).body
                assert body is not None
                assert len(body) < chunk.bytes / 3
                taker.apply(number, body)
                for cell in chunk.cells:
                    assert (bits_of(far.memory.read(cell)) == bits_of(near.memory.read(cell))).all()
    third = Slot(thirds, old, [])
    held = DeltaBase(third.memory, third.cells, lambda: True)
    assert [held.has(near.memory, cell) for cell in range(2)] == [False, False], "no union of the base's cells"
    part = Slot(fine, new, [])
    assert [held.has(part.memory, cell) for cell in range(8)] == [False] * 8, "a base's cell is not cut"
    few = DeltaBase(base.memory, frozenset([0, 1, 2, 3, 5]), lambda: True)
    assert [few.has(near.memory, cell) for cell in range(2)] == [True, False], "what was not verified does not count"
    assert base.memory.cells_of(TensorSpec(name="v", dtype="float32", shape=(24, 50)), Box((0, 0), (24, 50))) is None
    assert base.memory.cells_of(TensorSpec(name="w", dtype="int32", shape=(24, 50)), Box((0, 0), (24, 50))) is None


def test_what_the_maker_lacks_is_sent_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cell without a base among others that have one."""
    monkeypatch.setattr(core_chunks, "chunk_bytes", lambda model: 1 << 20)
    torch.manual_seed(3)
    old = {"w": torch.randn(24, 500)}
    new = {"w": old["w"].clone()}
    new["w"][3, 7] = 5
    base, near = Slot(record_cut(old, 6), old, []), Slot(record_cut(new, 6), new, [])
    (chunk,) = chunks_of(near.recorded)
    partial_base = DeltaBase(base.memory, frozenset([0, 2]), lambda: True)
    body = DeltaMaker("always", near.memory, [chunk], partial_base, 1 << 20).make(0, base.recorded.root, None).body
    assert body is not None
    assert chunk.bytes / 2 < len(body) < 0.51 * chunk.bytes
    far = Slot(near.recorded, {"w": torch.zeros(24, 500)}, [])
    whole_base = DeltaBase(base.memory, base.cells, lambda: True)
    DeltaTaker(far.memory, [chunk], whole_base, lambda number, body: None).apply(0, body)
    assert torch.equal(far.bytes, near.bytes)


def test_deltas_are_kept_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_chunks, "chunk_bytes", lambda model: 1 << 12)
    torch.manual_seed(3)
    old = {"w": torch.randn(240, 50)}
    new = {"w": old["w"] + 0.5}
    base, near = Slot(record_cut(old, 6), old, []), Slot(record_cut(new, 6), new, [])
    chunks = chunks_of(near.recorded)
    held = DeltaBase(base.memory, base.cells, lambda: True)
    maker = DeltaMaker("always", near.memory, chunks, held, 32 * 8000)
    for number in range(len(chunks)):
        maker.make(number, base.recorded.root, None)
    assert 0 < maker._body_bytes == sum(map(len, maker._bodies.values())) <= 8000
    last = len(chunks) - 1
    assert maker.make(last, base.recorded.root, None).body is maker._bodies[last, base.recorded.root]
