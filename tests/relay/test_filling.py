"""Filling a slot: what is not as it was sealed is read elsewhere or left out by name, and memory is counted."""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ckpt_engine.core import chunks as core_chunks
from ckpt_engine.core.manifest import blob_digest, canonical
from ckpt_engine.core.problems import CkptEngineError, unavailable
from ckpt_engine.core.sealed_record import ProvenRecord
from ckpt_engine.core.transports import GPU_MEMORY
from ckpt_engine.digest.boxes import digest_box
from ckpt_engine.host import numa
from ckpt_engine.host.facts import this_host
from ckpt_engine.relay import arena as relay_arena
from ckpt_engine.relay import batches as relay_batches
from ckpt_engine.relay import sources as relay_sources
from ckpt_engine.relay.arena import Arena, free_huge_pages
from ckpt_engine.relay.batches import PieceBatch, Words
from ckpt_engine.relay.fill import SlotFilling
from ckpt_engine.relay.slots import FillWish, Slots, SlotVersion, Want
from ckpt_engine.relay.sources import Reading
from ckpt_engine.source.directory import directory_source
from ckpt_engine.transport.base import Network
from ckpt_engine.transport.file.files import FileTransport
from ckpt_engine.transport.registry import all_transports
from ckpt_engine.transport.relay_memory.reader import RelayMemoryTransport
from ckpt_engine.transport.shared_memory.memory import SharedMemoryTransport
from ckpt_engine.v1.weights_pb2 import Atom, Atoms, Problem, SourceTable
from tests.install.install_models import TensorParallel
from tests.install.install_world import Checkpoint
from tests.relay.relay_reader import regions_of
from tests.relay.relay_world import seal, tables, wish

MEMORY = 32 << 20


def slots_of(name: str = "a", memory: int = MEMORY, grace: float = 5.0) -> Slots:
    transports = {each.name: each for each in (SharedMemoryTransport(), FileTransport(), RelayMemoryTransport())}
    return Slots(name, this_host(), memory, transports, grace)


@pytest.fixture
def slots() -> Iterator[Slots]:
    found = slots_of()
    yield found
    found.close()


def checkpoint_of(seed: int | None = None) -> tuple[Checkpoint, ProvenRecord]:
    checkpoint = Checkpoint(TensorParallel(0, 1).checkpoint(), seed)
    return checkpoint, seal(checkpoint, [])


def all_of(recorded: ProvenRecord, sources: list[SourceTable], version: int = 1) -> FillWish:
    return wish(recorded, version, sources, everything=True)


def assert_holds(held: SlotVersion, checkpoint: Checkpoint) -> None:
    """A reader finds all of it, in shards that its table describes."""
    opened = RelayMemoryTransport().open(regions := regions_of(held.table))
    by_id = {region.id: region for region in regions}
    size = 0
    for shard in held.table.shards:
        spec = held.table.tensors[shard.tensor]
        shape = [stop - start for start, stop in zip(shard.start, shard.stop, strict=True)]
        found = opened.view(by_id[shard.region], shard.offset, shape, list(shard.stride), spec.dtype)
        part = tuple(slice(start, stop) for start, stop in zip(shard.start, shard.stop, strict=True))
        assert torch.equal(found, checkpoint.weights[spec.name][part])
        size += found.nbytes
    assert size == sum(weight.nbytes for weight in checkpoint.weights.values())
    opened.close()


def test_what_a_source_damaged_is_read_from_another_holder(slots: Slots) -> None:
    checkpoint, recorded = checkpoint_of(7)
    copy = Checkpoint(checkpoint.weights, 8)
    checkpoint.flip("layers.0.down", (1, 1))
    checkpoint.flip("embed_tokens.weight", (0, 0))
    held = slots.fill(0, all_of(recorded, [*tables(checkpoint), *tables(copy, "copy")]), 60.0)
    assert (held.filled.missing, held.filled.again) == ((), 2)
    assert {fault.tensors[0] for fault in held.filled.faults} == {"layers.0.down", "embed_tokens.weight"}
    assert all("at rank" in fault.message for fault in held.filled.faults)
    assert {source.split()[0] for source in held.filled.bytes_by_source} == {"rank", "copy"}
    assert sum(held.filled.bytes_by_source.values()) == held.layout.bytes, "what was read in vain counts for nothing"
    assert_holds(held, checkpoint)


def test_what_nobody_has_as_it_was_sealed_is_left_out_and_all_else_is_there(slots: Slots) -> None:
    checkpoint, recorded = checkpoint_of()
    copy = Checkpoint(checkpoint.weights, None)
    for each in (checkpoint, copy):
        each.flip("norm.weight", (2,))
    held = slots.fill(0, all_of(recorded, [*tables(checkpoint), *tables(copy, "copy")]), 60.0)
    (missing,) = held.filled.missing
    assert missing.problem.code == Problem.CODE_DATA_LOSS
    assert list(missing.problem.tensors) == ["norm.weight"]
    assert [fault.message.split(" at ")[1][:6] for fault in held.filled.faults] == ["rank 0", "copy 0"]
    names = {spec.name for spec in held.table.tensors}
    assert names == {*checkpoint.weights} - {"norm.weight"}


def test_a_box_that_nobody_holds_is_named(slots: Slots) -> None:
    checkpoint, recorded = checkpoint_of(9)
    first, _ = tables(checkpoint)
    held = slots.fill(0, all_of(recorded, [first]), 60.0)
    assert held.filled.missing
    for missing in held.filled.missing:
        assert missing.problem.code == Problem.CODE_NOT_FOUND
        assert "(rank 0 was asked)" in missing.problem.message


def test_the_rest_is_brought_beside_what_readers_have_mapped(slots: Slots) -> None:
    checkpoint, recorded = checkpoint_of(9)
    first, second = tables(checkpoint)
    part = slots.fill(0, all_of(recorded, [first]), 60.0)
    regions = regions_of(part.table)
    opened = RelayMemoryTransport().open(regions)
    opened.check()
    checkpoint.arenas[0].tensor(0, (64,), torch.uint8).zero_()  # whoever reads it again finds other bytes
    with pytest.raises(CkptEngineError, match="no source within reach"):
        slots.fill(0, all_of(recorded, []), 60.0, more=True)
    assert slots.held(0) is part
    assert slots.count(0, all_of(recorded, [second]), 60.0, more=True) == part.layout.bytes
    held = slots.fill(0, all_of(recorded, [second]), 60.0, more=True)
    assert (held.filled.missing, held.overruled) == ((), 0)
    assert set(held.filled.bytes_by_source) == {"rank 0", "rank 1"}
    assert sum(held.filled.bytes_by_source.values()) == held.layout.bytes
    assert_holds(held, checkpoint)
    opened.check()
    opened.close()
    other, record = checkpoint_of(10)
    again = slots.fill(0, all_of(record, tables(other), version=2), 60.0, more=True)
    assert_holds(again, other)


def test_a_relay_in_between_takes_memory_for_what_it_brings_and_the_next_one_finds_all_of_it(
    slots: Slots, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two steps in between, each with room for what its trainer rank has and not for the model, and who reads both."""
    monkeypatch.setattr(core_chunks, "chunk_bytes", lambda model: 1)
    checkpoint, recorded = checkpoint_of(9)
    parts = tables(checkpoint)
    held: list[SlotVersion] = []
    sizes = [sum(region.size for region in part.regions) for part in parts]
    with ExitStack() as stack:
        for number, part in enumerate(parts):
            small = slots_of(f"step {number}", 16 << 20)
            stack.callback(small.close)
            whole = small.count(0, all_of(recorded, [part]), 60.0)
            asked = replace(all_of(recorded, [part]), want=Want(everything=True, within=[part]))
            assert small.count(1, asked, 60.0) < whole
            held.append(small.fill(1, asked, 60.0))
            assert held[-1].filled.missing == (), "what lies elsewhere is not missed"
            assert held[-1].layout.bytes == sum(held[-1].filled.bytes_by_source.values()) <= sizes[number]
        end = slots.fill(0, all_of(recorded, [each.table for each in held]), 60.0)
        assert end.filled.missing == ()
        assert_holds(end, checkpoint)
        checkpoint.arenas[0].tensor(0, (64,), torch.uint8).fill_(77)
        lacking = stack.enter_context(closing(slots_of("third", 16 << 20)))
        broken = lacking.fill(
            0, replace(all_of(recorded, parts[:1]), want=Want(everything=True, within=parts[:1])), 60.0
        )
        assert broken.filled.missing, "what was to be brought and was not is missed by name"
        assert broken.filled.missing[0].problem.tensors


def test_who_has_nothing_that_is_needed_holds_nothing(slots: Slots) -> None:
    checkpoint, recorded = checkpoint_of(9)
    part = tables(checkpoint)[0]
    held = slots.fill(0, replace(wish(recorded, 1, [part]), want=Want(within=[part])), 60.0)
    assert (held.layout.size, held.filled.missing, len(held.table.shards)) == (0, (), 0)


def test_a_slot_is_not_given_up_for_what_nobody_holds(slots: Slots) -> None:
    checkpoint, recorded = checkpoint_of()
    slots.fill(0, all_of(recorded, tables(checkpoint)), 60.0)
    with pytest.raises(CkptEngineError, match=r"no source within reach holds .* \(no source was asked\)") as caught:
        slots.fill(0, all_of(recorded, []), 60.0)
    assert caught.value.problem.code == Problem.CODE_NOT_FOUND
    held = slots.held(0)
    assert held is not None
    assert_holds(held, checkpoint)


def test_a_source_that_is_gone_or_fits_not_is_left_out_with_its_reason(slots: Slots) -> None:
    checkpoint, recorded = checkpoint_of()
    gone = Checkpoint(checkpoint.weights, None)
    theirs = tables(gone, "gone")
    gone.close()
    misfit = Checkpoint({**checkpoint.weights, "norm.weight": torch.zeros(3)}, None)
    other = tables(misfit, "other")
    held = slots.fill(0, all_of(recorded, [*theirs, *other, *tables(checkpoint)]), 60.0)
    assert held.filled.missing == ()
    told = [fault.message for fault in held.filled.faults]
    assert any("gone" in each for each in told), told
    assert any("source other 0" in each and "norm.weight" in each for each in told), told
    assert set(held.filled.bytes_by_source) == {"rank 0"}


def test_a_file_that_was_cut_off_is_not_read(slots: Slots, tmp_path: Path) -> None:
    """Reading it would end the relay with a bus error."""
    checkpoint, recorded = checkpoint_of()
    path = tmp_path / "model.safetensors"
    norm = {"norm.weight": checkpoint.weights["norm.weight"]}
    save_file({name: weight for name, weight in checkpoint.weights.items() if name not in norm}, path)
    source = directory_source(path, host=this_host())
    elsewhere = Checkpoint(norm, None)
    from_file = all_of(recorded, [source.table(), *tables(elsewhere, "norm")])
    assert slots.fill(0, from_file, 60.0).filled.missing == ()
    with path.open("r+b") as file:
        file.truncate(64)
    held = slots.fill(0, from_file, 60.0)
    assert len(held.filled.missing) == len(recorded.values) - 1
    assert all("changed since it was published" in each.problem.message for each in held.filled.missing)
    assert [spec.name for spec in held.table.tensors] == ["norm.weight"], "what lies elsewhere was read along with it"
    source.close()
    elsewhere.close()


def test_a_relay_fills_itself_from_another_one(slots: Slots) -> None:
    checkpoint, recorded = checkpoint_of(3)
    first = slots_of("first")
    table = first.fill(0, all_of(recorded, tables(checkpoint)), 60.0).table
    checkpoint.close()
    held = slots.fill(1, all_of(recorded, [table]), 60.0)
    assert held.filled.bytes_by_source == {"relay first": held.layout.bytes}
    assert_holds(held, checkpoint)
    assert first._ways.retire(0) == 0, "who has filled himself holds nothing any more"
    first.close()


def test_a_record_that_is_of_other_weights_touches_no_slot(slots: Slots) -> None:
    checkpoint, recorded = checkpoint_of()
    slots.fill(0, all_of(recorded, tables(checkpoint)), 60.0)
    wrong = all_of(recorded, tables(checkpoint))
    wrong.identity.root = bytes(32)
    with pytest.raises(CkptEngineError, match="it is of other weights") as caught:
        slots.fill(0, wrong, 60.0)
    assert caught.value.problem.code == Problem.CODE_DATA_LOSS
    held = slots.held(0)
    assert held is not None
    assert_holds(held, checkpoint)


def test_memory_is_counted_before_a_slot_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, recorded = checkpoint_of()
    small = slots_of("small", 4 << 20)
    big = Checkpoint({"w": torch.zeros(3 << 20, dtype=torch.uint8)}, None)
    too_big = all_of(seal(big, []), tables(big))
    with pytest.raises(CkptEngineError, match=r"version 1 of run takes \d+ bytes .* slot has 2097152") as caught:
        small.fill(0, too_big, 60.0)
    assert caught.value.problem.code == Problem.CODE_FAILED_PRECONDITION
    held = small.fill(0, all_of(recorded, tables(checkpoint)), 60.0)
    monkeypatch.setattr(relay_arena, "memory_room", lambda: 1000)
    with pytest.raises(CkptEngineError, match=r"takes 2097152 more bytes of memory, .* has 1000 left"):
        small.fill(1, all_of(recorded, tables(checkpoint)), 60.0)
    again = small.fill(0, all_of(recorded, tables(checkpoint)), 60.0)
    assert again.table == held.table, "memory that it has is not counted twice"
    assert small.reserved == held.layout.size
    small.close()
    with pytest.raises(CkptEngineError, match=r"needs 4194304 bytes of memory or more, and 1000 were given"):
        slots_of("tiny", 1000)


def test_a_filling_ends_at_its_deadline_and_when_it_is_overtaken(slots: Slots, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither leaves anything that could be read."""
    monkeypatch.setattr(relay_batches, "BATCH_BYTES", 1024)
    checkpoint, recorded = checkpoint_of()
    all = all_of(recorded, tables(checkpoint))
    slots.fill(0, all, 60.0)
    with pytest.raises(CkptEngineError, match="before its deadline") as caught:
        slots.fill(0, all, -1.0)
    assert caught.value.problem.code == Problem.CODE_DEADLINE_EXCEEDED
    assert slots.held(0) is None
    original = PieceBatch.digest

    def digest(self: PieceBatch) -> Words:
        slots.stop()
        return original(self)

    with monkeypatch.context() as patch:
        patch.setattr(PieceBatch, "digest", digest)
        with pytest.raises(CkptEngineError, match="newer command replaced") as caught:
            slots.fill(1, all, 60.0)
    assert caught.value.problem.code == Problem.CODE_ABORTED
    assert slots.held(1) is None
    assert_holds(slots.fill(1, all, 60.0), checkpoint)


def test_a_filling_that_is_to_keep_what_has_come_holds_and_lends_it(
    copied_first: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a network, where others may have asked for it already; what is brought next is the rest."""
    slots = Slots("keeps", this_host(), 32 << 20, all_transports(), network=Network("127.0.0.1:0", "127.0.0.1", 5.0))
    checkpoint, recorded = checkpoint_of()
    all = all_of(recorded, tables(checkpoint))
    bring = PieceBatch.bring
    brought: list[PieceBatch] = []
    part = slots.fill(0, all, 60.0, lambda done, total: slots.stop(keep=True) if done > total / 2 else None)
    assert 0 < len(part.cells) < len(recorded.values)
    size = sum(part.filled.bytes_by_source.values())
    assert size == sum(shard.nbytes for shard in part.sealed)
    brought.clear()
    with monkeypatch.context() as patch:
        patch.setattr(PieceBatch, "bring", lambda self, carry_on: (brought.append(self), bring(self, carry_on))[1])
        whole = slots.fill(0, all, 60.0, more=True)
    assert part.cells.isdisjoint(int(cell) for batch in brought for cell in batch.cells)
    assert_holds(whole, checkpoint)
    slots.close()


def test_a_filling_that_is_overtaken_when_all_has_come_holds_and_lends_nothing(slots: Slots) -> None:
    checkpoint, recorded = checkpoint_of()
    all = all_of(recorded, tables(checkpoint))
    before = slots.fill(0, all, 60.0)

    def overtake(done: int, total: int) -> None:
        if done == total:
            slots.stop()

    with pytest.raises(CkptEngineError, match="newer command replaced"):
        slots.fill(0, all, 60.0, overtake)
    assert slots.held(0) is None
    with pytest.raises(CkptEngineError):
        RelayMemoryTransport().open(regions_of(before.table)).check()
    assert_holds(slots.fill(0, all, 60.0), checkpoint)


def test_what_was_given_up_while_it_was_digested_is_not_answered_for(
    slots: Slots, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slot gets the next version while pieces of this one are digested: who asked must not get a mixture."""
    checkpoint, recorded = checkpoint_of(3)
    held = slots.fill(0, all_of(recorded, tables(checkpoint)), 60.0)
    other, next_record = checkpoint_of(4)
    shard = held.table.shards[0]
    atom = Atom(shard=0, start=shard.start, stop=shard.stop)
    atoms = Atoms(table_digest=blob_digest(canonical(held.table)), atoms=[atom])
    assert slots.digest(atoms, 1) == held.digest(atoms)
    digest = SlotVersion.digest

    def overwritten(self: SlotVersion, atoms: Atoms) -> list[int]:
        monkeypatch.setattr(SlotVersion, "digest", digest)
        slots.fill(0, all_of(next_record, tables(other), 2), 60.0)
        return self.digest(atoms)

    monkeypatch.setattr(SlotVersion, "digest", overwritten)
    with pytest.raises(CkptEngineError, match="does not hold version 1 any more") as caught:
        slots.digest(atoms, 1)
    assert caught.value.problem.code == Problem.CODE_FAILED_PRECONDITION


def test_a_source_that_could_not_be_read_is_read_by_the_next_filling(slots: Slots, tmp_path: Path) -> None:
    """Its file was away, as on a disk that was not mounted; nothing else has changed by the next filling."""
    checkpoint, recorded = checkpoint_of()
    path = tmp_path / "model.safetensors"
    save_file(checkpoint.weights, path)
    source = directory_source(path, host=this_host())
    elsewhere = Checkpoint({"norm.weight": checkpoint.weights["norm.weight"]}, None)
    all = all_of(recorded, [source.table(), *tables(elsewhere, "norm")])
    path.rename(tmp_path / "away")
    first = slots.fill(0, all, 60.0)
    assert [spec.name for spec in first.table.tensors] == ["norm.weight"]
    (tmp_path / "away").rename(path)
    second = slots.fill(0, all, 60.0)
    assert (second.filled.missing, second.filled.faults) == ((), ())
    assert_holds(second, checkpoint)
    source.close()
    elsewhere.close()


def test_pieces_larger_than_a_batch_are_cut_and_add_up(slots: Slots, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_batches, "BATCH_BYTES", 100)
    checkpoint, recorded = checkpoint_of(5)
    held = slots.fill(0, all_of(recorded, tables(checkpoint)), 60.0)
    assert (held.filled.missing, held.filled.again) == ((), 0)
    assert_holds(held, checkpoint)


@pytest.fixture
def copied_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory of this host is read as if it lay on a GPU: copied, then digested; in many small batches."""
    monkeypatch.setattr(relay_sources, "memory_of", lambda transport: frozenset({GPU_MEMORY}))
    monkeypatch.setattr(relay_batches, "BATCH_BYTES", 4096)


@pytest.fixture
def arriving(copied_first: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same, as if a GPU brought it: digested by threads that take what has arrived."""

    def on_a_gpu(**fields: Any) -> relay_sources.Reading:
        return Reading(**{**fields, "gpu": 0})

    monkeypatch.setattr(relay_sources, "Reading", on_a_gpu)
    monkeypatch.setattr(relay_batches, "READ_BACK", 0)
    monkeypatch.setattr(relay_batches, "GPU_BATCH_BYTES", 4096)


def test_what_arrives_is_digested_as_it_lies_in_the_slot(
    arriving: None, slots: Slots, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was damaged after it was brought is read again, and counted once; nothing is digested batch by batch."""
    checkpoint, recorded = checkpoint_of(13)
    digested, told = [], []
    bring, digest = PieceBatch.bring, PieceBatch.digest
    with monkeypatch.context() as patch:
        patch.setattr(PieceBatch, "digest", lambda self: digested.append(self) or digest(self))
        held = slots.fill(0, all_of(recorded, tables(checkpoint)), 60.0, lambda done, total: told.append((done, total)))
        assert (held.filled.missing, held.filled.again, digested) == ((), 0, [])
        assert told[-1] == (held.layout.bytes, held.layout.bytes)
        assert len(told) > 4
        assert_holds(held, checkpoint)
        damaged: list[PieceBatch] = []

        def damage(self: PieceBatch, carry_on: Callable[[], None]) -> None:
            bring(self, carry_on)
            if not damaged:
                self.pieces[0].destination.view(torch.uint8).view(-1)[1] ^= 4
                damaged.append(self)

        patch.setattr(PieceBatch, "bring", damage)
        held = slots.fill(1, all_of(recorded, [*tables(checkpoint), *tables(checkpoint, "second")]), 60.0)
    assert damaged
    assert digested
    assert (held.filled.missing, held.filled.again) == ((), 1)
    assert sum(held.filled.bytes_by_source.values()) == held.layout.bytes
    assert_holds(held, checkpoint)


def test_what_arrives_ends_at_its_deadline(arriving: None, slots: Slots) -> None:
    checkpoint, recorded = checkpoint_of(13)
    with pytest.raises(CkptEngineError, match="before its deadline"):
        slots.fill(0, all_of(recorded, tables(checkpoint)), -1.0)
    assert slots.held(0) is None
    assert_holds(slots.fill(0, all_of(recorded, tables(checkpoint)), 60.0), checkpoint)


def test_the_next_batch_is_copied_while_one_is_digested(
    copied_first: None, slots: Slots, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, recorded = checkpoint_of(11)
    bring, digest = PieceBatch.bring, PieceBatch.digest
    copied: list[PieceBatch] = []
    second = threading.Event()

    def counted(self: PieceBatch, carry_on: Callable[[], None]) -> None:
        copied.append(self)
        bring(self, carry_on)
        if len(copied) == 2:
            second.set()

    def waiting(self: PieceBatch) -> Words:
        assert self in copied, "it is digested before it was copied"
        assert second.wait(60), "nothing is copied meanwhile"
        return digest(self)

    monkeypatch.setattr(PieceBatch, "bring", counted)
    monkeypatch.setattr(PieceBatch, "digest", waiting)
    held = slots.fill(0, all_of(recorded, tables(checkpoint)), 60.0)
    assert len(copied) == len(set(copied)) == batches_of(slots) > 4, "each is copied once"
    assert_holds(held, checkpoint)


def batches_of(slots: Slots) -> int:
    (ready,) = [each for each in slots._ready if each is not None]
    (reading,) = ready.filling._prepared.values()
    return len(reading._batches)


def test_a_batch_that_cannot_be_copied_leaves_the_others_as_they_are(
    copied_first: None, slots: Slots, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, recorded = checkpoint_of(12)
    bring = PieceBatch.bring
    names = sorted(checkpoint.weights)
    broken = [spec.name for spec in recorded.record.manifest.tensors].index("norm.weight")

    def fails(self: PieceBatch, carry_on: Callable[[], None]) -> None:
        if any(piece.tensor == broken for piece in self.pieces):
            raise unavailable("the trainer has gone")
        bring(self, carry_on)

    monkeypatch.setattr(PieceBatch, "bring", fails)
    held = slots.fill(0, all_of(recorded, tables(checkpoint)), 60.0)
    assert {missing.problem.message for missing in held.filled.missing} == {"the trainer has gone"}
    assert sorted(spec.name for spec in held.table.tensors) == [name for name in names if name != "norm.weight"]
    monkeypatch.setattr(PieceBatch, "bring", bring)
    assert_holds(slots.fill(0, all_of(recorded, tables(checkpoint)), 60.0), checkpoint)


@pytest.mark.parametrize("comes", [0, 1], ids=["nothing comes", "a part comes"])
def test_what_was_not_read_is_missing_though_the_sum_of_what_was_is_right(
    comes: int, copied_first: None, slots: Slots, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sum proves nothing of what is not part of it. The fault is a fake, and the record was made to fit it."""
    monkeypatch.setattr(relay_batches, "BATCH_BYTES", 700)
    checkpoint, recorded = checkpoint_of(14)
    slots.fill(0, all_of(recorded, tables(checkpoint)), 60.0)
    (filling,) = [each.filling for each in slots._ready if each is not None]
    (reading,) = filling._prepared.values()
    pieces = [piece for batch in reading._batches for piece in batch.pieces]
    cell = max((piece.cell for piece in pieces), key=[piece.cell for piece in pieces].count)
    its = [piece for piece in pieces if piece.cell == cell]
    assert len(its) > 2
    there, gone = its[:comes], [piece.box for piece in its[comes:]]
    values = recorded.values.copy()
    values[cell] = sum(digest_box(piece.destination, piece.box.start) for piece in there) % 2**64
    bring = PieceBatch.bring

    def fails(self: PieceBatch, carry_on: Callable[[], None]) -> None:
        if any(piece.cell == cell and piece.box in gone for piece in self.pieces):
            raise unavailable("the trainer has gone")
        bring(self, carry_on)

    monkeypatch.setattr(PieceBatch, "bring", fails)
    arrived: list[int] = []
    filled = reading.run(replace(recorded, values=values), time.monotonic() + 60, arrived=arrived.extend)
    assert [(missing.cell, missing.problem.message) for missing in filled.missing] == [(cell, "the trainer has gone")]
    assert sorted(arrived) == sorted({piece.cell for piece in pieces} - {cell}), "each once, and not what is missing"


def test_what_is_overtaken_writes_nothing_any_more(
    copied_first: None, slots: Slots, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two fillings at once would write to one memory."""
    checkpoint, recorded = checkpoint_of(13)
    bring = PieceBatch.bring
    begun: list[PieceBatch] = []
    ended: list[PieceBatch] = []

    def counted(self: PieceBatch, carry_on: Callable[[], None]) -> None:
        begun.append(self)
        slots.stop()
        time.sleep(0.01)
        bring(self, carry_on)
        ended.append(self)

    monkeypatch.setattr(PieceBatch, "bring", counted)
    with pytest.raises(CkptEngineError, match="newer command replaced"):
        slots.fill(0, all_of(recorded, tables(checkpoint)), 60.0)
    assert begun == ended, "a copy goes on after the filling has ended"
    assert len(begun) < batches_of(slots)
    assert slots.held(0) is None


def test_an_update_of_the_same_shapes_lays_out_nothing(slots: Slots, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, recorded = checkpoint_of()
    first = slots.fill(0, all_of(recorded, tables(checkpoint)), 60.0)
    checkpoint.weights = {name: weight + 1 for name, weight in checkpoint.weights.items()}
    later = seal(checkpoint, [])
    monkeypatch.delattr(SlotFilling, "__init__")
    held = slots.fill(0, all_of(later, tables(checkpoint), 2), 60.0)
    assert held.table == first.table
    assert_holds(held, checkpoint)


def test_pieces_finer_than_the_record_are_digested_where_they_lie(slots: Slots) -> None:
    checkpoint, recorded = checkpoint_of()
    held = slots.fill(0, all_of(recorded, tables(checkpoint)), 60.0)
    (index,) = [
        number
        for number, shard in enumerate(held.table.shards)
        if held.table.tensors[shard.tensor].name == "layers.0.down"
    ]
    finer = Atoms(atoms=[Atom(shard=index, start=[3, 8], stop=[9, 24])])
    part = checkpoint.weights["layers.0.down"][3:9, 8:24]
    assert held.digest(finer) == [digest_box(part, (3, 8))]


def test_a_relay_that_is_stopped_brings_nothing_more(slots: Slots) -> None:
    checkpoint, recorded = checkpoint_of()
    slots.fill(0, all_of(recorded, tables(checkpoint)), 60.0)
    slots.close()
    with pytest.raises(CkptEngineError, match="being stopped"):
        slots.fill(0, all_of(recorded, tables(checkpoint)), 60.0)
    with pytest.raises(CkptEngineError, match="was closed"):
        slots.count(0, all_of(recorded, tables(checkpoint)), 60.0)


def test_memory_that_its_owner_takes_back_is_unmapped_and_what_was_brought_stays(slots: Slots) -> None:
    checkpoint, recorded = checkpoint_of()
    sources = tables(checkpoint)
    held = slots.fill(0, all_of(recorded, sources), 60.0)
    mapped = _mapped_files()
    slots.let_go([b"another table"], 1.0)
    assert _mapped_files() == mapped
    slots.let_go([blob_digest(canonical(sources[0]))], 1.0)
    assert _mapped_files() < mapped
    assert_holds(held, checkpoint)
    assert_holds(slots.fill(0, all_of(recorded, sources, 2), 60.0), checkpoint)


def _mapped_files() -> int:
    return Path("/proc/self/maps").read_text().count("memfd")


def test_closing_ends_a_filling_that_waits_for_a_reader(slots: Slots) -> None:
    patient = slots_of("patient", grace=3600.0)
    checkpoint, recorded = checkpoint_of()
    held = patient.fill(0, all_of(recorded, tables(checkpoint)), 60.0)
    opened = RelayMemoryTransport().open(regions_of(held.table))
    found: list[str] = []

    def fill() -> None:
        try:
            patient.fill(0, all_of(recorded, tables(checkpoint)), 60.0)
        except CkptEngineError as error:
            found.append(error.problem.message)

    thread = threading.Thread(target=fill)
    thread.start()
    while patient.held(0) is not None:
        time.sleep(0.01)
    patient.close()
    thread.join(timeout=60)
    assert found
    opened.close()


# --------------------------------------------------------------------------------------------------------- the arena


def test_huge_pages_are_counted(tmp_path: Path) -> None:
    assert free_huge_pages(tmp_path) == 0
    (tmp_path / "free_hugepages").write_text("7\n")
    (tmp_path / "resv_hugepages").write_text("3\n")
    assert free_huge_pages(tmp_path) == 4
    arena = Arena(4 << 20)
    assert "no 2 MiB pages are reserved" in arena.pages or arena.pages == "2 MiB pages"
    arena.close()


def test_memory_is_spread_over_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked of the kernel for nodes that a file names; a node that does not exist is refused in its words."""
    nodes = tmp_path / "has_memory"
    for text, expected in (("0", [0]), ("0-3,8", [0, 1, 2, 3, 8]), ("", [])):
        nodes.write_text(f"{text}\n")
        assert numa.memory_nodes(nodes) == expected
    assert numa.memory_nodes(tmp_path / "none") == []
    memory = mmap.mmap(-1, 1 << 20)
    address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    nodes.write_text("0,5000\n")
    assert numa.spread(address, 1 << 20, nodes) == []
    if numa.memory_nodes():
        assert numa.interleave(address, 1 << 20, numa.memory_nodes()) == ""
        assert " interleave" in policy_of(address)


def policy_of(address: int) -> str:
    lines = Path("/proc/self/numa_maps").read_text().splitlines()
    areas = [line for line in lines if int(line.split()[0], 16) <= address]
    return max(areas, key=lambda line: int(line.split()[0], 16))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this host has a driver: see tests/gpu/test_relay_gpu.py")
def test_a_slot_that_cannot_be_pinned_is_told_and_filled(
    copied_first: None, slots: Slots, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(relay_sources.Sources, "reading_gpus", [0])
    checkpoint, recorded = checkpoint_of()
    assert_holds(slots.fill(0, all_of(recorded, tables(checkpoint)), 60.0), checkpoint)
    assert "slot 0 cannot be pinned" in caplog.text


@pytest.mark.skipif(
    free_huge_pages(Path("/sys/kernel/mm/hugepages/hugepages-2048kB")) < 16, reason="no huge pages are reserved here"
)
def test_an_arena_of_huge_pages_is_filled_and_read(slots: Slots) -> None:
    assert slots.pages == "2 MiB pages"
    checkpoint, recorded = checkpoint_of()
    assert_holds(slots.fill(0, all_of(recorded, tables(checkpoint)), 60.0), checkpoint)
