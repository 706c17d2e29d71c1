"""What a relay holds: two slots of one arena, filled, lent and taken back. Decides nothing about when.

The machine (`machines/relay/machine.py`) says which slot is filled with what. A filling that fails leaves the other
slot, and every replica, as they were. One filling at a time; `count`, `fill` and `let_go` block the calling thread, all
else is quick.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch

from ckpt_engine.core.chunk_places import ChunkPlaces
from ckpt_engine.core.chunks import Chunk, chunks_of
from ckpt_engine.core.manifest import blob_digest, canonical
from ckpt_engine.core.problems import CkptEngineError, aborted, deadline, precondition
from ckpt_engine.core.publication import join_sources
from ckpt_engine.core.rates import Rate
from ckpt_engine.core.relay_layout import SLOTS, SlotLayout, lay_out, needed_boxes
from ckpt_engine.core.sealed_record import ProvenRecord, read_record
from ckpt_engine.core.transports import carrier_kinds, make
from ckpt_engine.cuda.driver import CudaDriverError
from ckpt_engine.delta.coding import missing
from ckpt_engine.relay.arena import Arena
from ckpt_engine.relay.cell_memory import CellMemory
from ckpt_engine.relay.chunk_fill import ChunkFilling, SlotMemory
from ckpt_engine.relay.chunk_search import ChunkTable
from ckpt_engine.relay.contents import Contents, contents_of
from ckpt_engine.relay.deltas import DeltaBase, DeltaMaker, DeltaTaker, DeltaUse
from ckpt_engine.relay.fill import FillResult, FillStop, Progress
from ckpt_engine.relay.gpus import TrainersGpus
from ckpt_engine.relay.slot_changes import ComparedVersion, changes_of
from ckpt_engine.relay.sources import Sources
from ckpt_engine.relay.ways import Ways
from ckpt_engine.source.digests import digest_atoms
from ckpt_engine.transport.askers import KeptAskers
from ckpt_engine.transport.base import ChunkLending, LentChunks, Network, Transport
from ckpt_engine.v1.manager_pb2 import WantTable
from ckpt_engine.v1.weights_pb2 import (
    Atoms,
    Host,
    Identity,
    OfferedRegion,
    SealedRecord,
    SourceTable,
    WorkerNeeds,
)

log = logging.getLogger("ckpt_engine.relay")

_COMPARE_SHARE = 0.25
"""Of the seconds that a filling has left when its slot is lent: how long versions may be compared for workers."""

CLOSE_SECONDS = 10.0
"""Seconds for a stopped filling to end: it checks after each batch."""


@dataclass(frozen=True)
class Want:
    """What a relay is to hold of a version."""

    needs: Sequence[WorkerNeeds] = ()  # of the workers of its host
    everything: bool = False  # hold all of it
    within: Sequence[SourceTable] = ()  # hold only what these tables offer; empty: no limit

    def layout(self, recorded: ProvenRecord, chunks: Sequence[Chunk]) -> SlotLayout:
        """How it lies in a slot. Raises as `needed_boxes`."""
        within = join_sources(recorded.record.manifest, self.within).partitions if self.within else None
        needed = [needed_boxes(needs, recorded) for needs in self.needs]
        return lay_out(recorded, needed, self.everything, within, chunks)

    def key(self) -> tuple[object, ...]:
        """All that it depends on."""
        return (
            tuple(canonical(needs) for needs in self.needs),
            self.everything,
            tuple(canonical(table) for table in self.within),
        )


@dataclass(frozen=True)
class FillWish:
    """A version to bring."""

    identity: Identity
    record: SealedRecord  # hashes to identity.root, or it is refused
    tables: Sequence[SourceTable]  # of its holders, in the order in which equally near ones are asked
    want: Want = field(default_factory=Want)
    table: WantTable | None = None  # relays of other hosts to ask for chunks; None: tables alone are read
    sets: Sequence[Want] = ()  # the table's `wants`
    passed: Callable[[Rate], None] = lambda rate: None  # called on any thread when others have read; how fast


@dataclass(frozen=True)
class SlotVersion:
    """A version in a slot, compared with its record."""

    identity: Identity
    record: SealedRecord
    table: SourceTable
    layout: SlotLayout
    filled: FillResult
    overruled: int  # readers of the former version that did not finish within `slot_grace`
    waited: float  # seconds that the filling waited for readers of the former version
    recorded: ProvenRecord  # `record`, read
    sealed: Sequence[torch.Tensor]  # the memory of each shard of its table

    @property
    def cells(self) -> frozenset[int]:
        """The cells of the record that the slot has."""
        return frozenset(atom.cell for atom in self.layout.atoms) - {each.cell for each in self.filled.missing}

    def digest(self, atoms: Atoms) -> list[int]:
        """Digests of pieces finer than the record's cells, for workers that need them. Raises as `Source.digest`."""
        return digest_atoms(self.table, self.sealed, atoms)


@dataclass(eq=False)
class _ReusableFilling:
    """What is reused from one filling of a slot to the next."""

    key: tuple[object, ...]
    tables: frozenset[bytes]  # digests of the tables whose regions are open
    root: bytes
    recorded: ProvenRecord  # of the version with this root
    filling: ChunkFilling
    sources: Sources
    kept_cells: frozenset[int]  # cells that stay as they are
    memory: SlotMemory
    whole: Contents | None = None  # what can be read if no cell is missing


class Slots:
    """The memory of one relay: fills its two slots, and lends them. Callable from any thread."""

    def __init__(
        self,
        name: str,
        host: Host,
        memory: int,
        transports: Mapping[str, Transport],
        slot_grace: float = 30.0,
        users: Collection[int] = (),
        network: Network | None = None,
        deltas: DeltaUse = "auto",
    ) -> None:
        """name: the relay's, which is in the id of its tables. memory: bytes of both slots together. slot_grace: see
        ArenaDoor. users: ids of users that may read, besides this process's own and root. network: where relays of
        other hosts reach it; None: they do not. deltas: when chunks go to them, and come from them, as deltas. Raises
        what Arena and Ways raise."""
        self._id = f"relay {name}"
        self._transports = dict(transports)
        self._lock = threading.Lock()
        kinds = carrier_kinds() if network is not None else []
        self._arena = Arena(
            memory, carriers=[partial(make, kind.carrier) for kind in kinds if kind.carrier is not None]
        )
        self._askers = KeptAskers(self._id)
        try:
            self._ways = Ways(self._arena, slot_grace, users, network)
        except BaseException:
            self._arena.close()
            raise
        self._gpus = TrainersGpus()
        self._host = Host()
        self._host.CopyFrom(host)
        self._host.relay_directory = self._ways.directory
        if network is not None:
            self._host.address = network.address
        self._held: list[SlotVersion | None] = [None] * SLOTS
        self._ready: list[_ReusableFilling | None] = [None] * SLOTS
        self._lent: list[ChunkLending | None] = [None] * SLOTS  # to relays of other hosts
        self._deltas: DeltaUse = deltas
        self._compares = deltas != "never"  # for workers of this host
        if deltas != "never" and network is not None and (why := missing()):
            log.warning("versions go to other relays, and come from them, in full only: %s", why)
            self._deltas = "never"
        self._writing = threading.Lock()
        self._stop = FillStop()  # of the newest filling
        self._closed = False
        self._keyed: tuple[FillWish, tuple[object, ...]] | None = None
        self._wants: tuple[tuple[bytes, bytes], ChunkTable] | None = None  # the last one, by table and cutting

    @property
    def lends(self) -> tuple[str, ...]:
        """The transports over which it is read."""
        return self._ways.names

    @property
    def chunks(self) -> OfferedRegion | None:
        """Where relays of other hosts ask for chunks of what the slots hold; None: they cannot."""
        return self._ways.chunks

    @property
    def host(self) -> Host:
        """This host, as the relay's tables describe it."""
        return self._host

    @property
    def slot_bytes(self) -> int:
        """Bytes that a version may take."""
        return self._arena.slot_bytes

    @property
    def reserved(self) -> int:
        """Bytes taken of the host's memory."""
        return self._arena.reserved

    @property
    def pages(self) -> str:
        """The size of its pages, for people."""
        return self._arena.pages

    @property
    def gpu_context_bytes(self) -> int:
        """GPU memory that it has taken for reading GPUs: contexts, and stages of what is read back."""
        return self._gpus.taken_bytes

    @property
    def readers(self) -> int:
        """Processes that map it now, and connections of other relays."""
        return self._ways.readers

    def held(self, slot: int) -> SlotVersion | None:
        """The version that can be read in a slot."""
        return self._held[slot]

    def digest(self, atoms: Atoms, version: int) -> list[int]:
        """Digests of pieces finer than the record's cells, for workers that need them, from the slot whose table the
        atoms name. Runs beside a filling of the other slot.

        Raises FAILED_PRECONDITION if no slot holds that any more, also if it was given up meanwhile; else as
        `Source.digest`.
        """
        for slot in range(SLOTS):
            held = self._held[slot]
            if held is None or held.identity.version != version:
                continue
            if blob_digest(canonical(held.table)) == atoms.table_digest:
                found = held.digest(atoms)
                if self._held[slot] is held:
                    return found
        raise precondition(f"this relay does not hold version {version} any more, as the atoms have it")

    def stop(self, keep: bool = False) -> None:
        """Stops the current filling, if any, at its next check. keep: the slot holds what has come, if anything has,
        and `fill` returns without the rest; otherwise it raises ABORTED."""
        with self._lock:
            self._stop.ask(keep)

    def count(self, slot: int, wish: FillWish, seconds: float, more: bool = False) -> int:
        """Lays a version out, takes memory for it and opens its sources; returns its bytes. The slot still holds what
        it held. more: see `fill`.

        Raises INVALID_ARGUMENT or DATA_LOSS (a record that differs from what was sealed, needs that do not fit it),
        FAILED_PRECONDITION or UNAVAILABLE (no memory, with both numbers), NOT_FOUND (no source within reach holds any
        of it), DEADLINE_EXCEEDED.
        """
        with self._writes(seconds):
            return self._count(slot, wish, more).filling.layout.bytes

    def fill(
        self,
        slot: int,
        wish: FillWish,
        seconds: float,
        progress: Progress = lambda done, total: None,
        more: bool = False,
        stop: FillStop | None = None,
    ) -> SlotVersion:
        """Brings a version into a slot and lends it. The former version is gone once counting has succeeded.

        progress: called on this thread. more: cells that the slot holds of this version, for equal needs, stay as they
        are and lent; only the others are brought. stop: ends this filling, as `Slots.stop`; may be asked before it.

        Raises as `count`, and DEADLINE_EXCEEDED or ABORTED (`stop`, `close`); the slot holds nothing then. Cells that
        could not be brought are not an error: they are in `SlotVersion.filled.missing` and not in the table. A second
        filling waits until the first has ended.
        """
        stop_at = time.monotonic() + seconds
        with self._lock:
            if self._closed:
                raise aborted("this relay is being stopped")
            self._stop.ask(keep=False)
            self._stop = stop = stop or FillStop()
            stop.check()
        with self._writes(seconds):
            ready = self._count(slot, wish, more)
            self._ways.lend_changes("another version is brought into it")
            try:
                held = self._fill(slot, wish, ready, stop_at, stop, progress)
            except BaseException as error:
                self._ways.lend_changes(f"its last filling failed: {_words(error)}")
                raise
            self._ways.lend_changes(self._changes(_COMPARE_SHARE * (stop_at - time.monotonic()), stop))
            return held

    @contextmanager
    def _writes(self, seconds: float) -> Iterator[None]:
        """Holds the right to fill: two fillings would write to one memory."""
        if not self._writing.acquire(timeout=max(0.0, seconds)):
            raise deadline("another version was still being brought into this relay")
        try:
            yield
        finally:
            self._writing.release()

    def _count(self, slot: int, wish: FillWish, more: bool) -> _ReusableFilling:
        for number, lent in enumerate(self._lent):  # a filling that was stopped to be gone on with
            if lent is not None and not (more and number == slot):
                lent.finish()
        try:
            return self._prepare(slot, wish, more)
        except BaseException:
            if (lent := self._lent[slot]) is not None:
                lent.finish()
            raise

    def _prepare(self, slot: int, wish: FillWish, more: bool) -> _ReusableFilling:
        before = self._held[slot] if more else None
        kept_cells = frozenset[int]() if before is None or before.identity != wish.identity else before.cells
        key = (*self._key(wish), kept_cells)
        ready = self._ready[slot]
        if ready is None or ready.key != key:
            recorded = read_record(wish.record, wish.identity.root)
            chunks = chunks_of(recorded)
            layout = wish.want.layout(recorded, chunks)
            if kept_cells and before is not None and before.layout.atoms != layout.atoms:
                raise precondition("what this slot holds of the version is laid out for other needs")
            self._arena.reserve(slot, layout.size, f"version {wish.identity.version} of {wish.identity.lineage}")
            memory = SlotMemory(
                slot,
                partial(self._arena.tensor, slot),
                self._arena.tensor(slot, 0, (layout.size,), torch.uint8).numpy().data,
            )
            sources = Sources(recorded, wish.tables, self._transports, self._host, self._gpus)
            try:
                self._pin(slot, sources)
                filling = ChunkFilling(layout, chunks, memory, sources, kept_cells)
                if wish.table is None:
                    filling.check()
            except BaseException:
                sources.close()
                raise
            self._forget(slot)
            tables = frozenset(blob_digest(canonical(table)) for table in wish.tables)
            ready = self._ready[slot] = _ReusableFilling(
                key, tables, wish.identity.root, recorded, filling, sources, kept_cells, memory
            )
        elif ready.root != wish.identity.root:
            ready.recorded = read_record(wish.record, wish.identity.root, [ready.recorded])
            ready.root = wish.identity.root
        return ready

    def _pin(self, slot: int, sources: Sources) -> None:
        """Pins the slot, once, if GPUs are read."""
        for gpu in sources.reading_gpus[:1]:
            try:
                self._arena.pin(slot, gpu)
            except CudaDriverError as error:
                log.warning("slot %d cannot be pinned, so GPUs are read at a fraction of the speed: %s", slot, error)

    def _fill(
        self,
        slot: int,
        wish: FillWish,
        ready: _ReusableFilling,
        stop_at: float,
        stop: FillStop,
        progress: Progress,
    ) -> SlotVersion:
        began = time.monotonic()
        before = self._held[slot] if ready.kept_cells else None
        overruled = 0
        if before is None:
            self._held[slot] = None
            overruled = self._ways.retire(slot)
            self._lent[slot] = None
        waited, layout = time.monotonic() - began, ready.filling.layout
        maker: DeltaMaker | None = None
        taker: DeltaTaker | None = None
        if self._deltas != "never":
            memory, base = CellMemory(ready.recorded, layout, ready.memory.at), self._base(slot)
            maker = DeltaMaker(self._deltas, memory, ready.filling.chunks, base, layout.bytes)
            if base is not None:
                taker = DeltaTaker(memory, ready.filling.chunks, base, maker.keep)
        lending = self._lend(slot, wish, ready, maker, before is not None)
        try:
            filled = ready.filling.run(
                ready.recorded, stop_at, stop, progress, self._table(wish, ready), self._askers, lending, taker
            )
        except BaseException as error:
            if lending is not None and before is None:
                lending.end(f"it does not hold the version: {_words(error)}")
            if lending is not None:
                lending.finish()
            raise
        if lending is not None and not stop.ends:  # else what is missing may still come
            lending.finish()
        if filled.faults:  # a source may be reached in another way by the next time
            self._forget(slot)
        filled = filled if before is None else filled.after(before.filled)
        missing = {each.cell for each in filled.missing}
        contents = ready.whole if not missing else None
        if contents is None:
            about = f"relay, slot {slot}"
            source = SourceTable(host=self._host, id=self._id, stays_sealed=True, source_copies=0, description=about)
            contents = contents_of(source, ready.recorded, layout, missing, ready.memory.at)
        if not missing:
            ready.whole = contents
        table = contents.table(self._ways.regions(slot, layout.groups))
        held = SlotVersion(
            wish.identity, wish.record, table, layout, filled, overruled, waited, ready.recorded, contents.sealed
        )
        with self._lock:
            if not stop.keeps:
                stop.check()
            self._held[slot] = held
            if before is None:
                self._ways.lend(slot)
        return held

    def _changes(self, seconds: float, stop: FillStop) -> int | str:
        """What differs between the slots, or why workers are not told; see `changes_of`. Never raises: what was filled
        is held all the same. seconds: that this may take."""
        stop_at = time.monotonic() + seconds
        if not self._compares:
            return "it was started with --deltas never"

        def carry_on() -> None:
            stop.check()
            if time.monotonic() >= stop_at:
                raise deadline("its versions could not be compared in time")

        try:
            whole = [
                ComparedVersion(held.identity, held.layout, partial(self._arena.tensor, slot))
                for slot, held in enumerate(self._held)
                if held is not None and not held.filled.missing
            ]
            if len(whole) != SLOTS:
                return "it does not hold two whole versions"
            if not self._ways.uses_changes:
                return "no worker of this host could use changes when the last version came, so none were looked for"
            one, other = whole
            return changes_of(one, other, self._arena.slot_bytes, carry_on)
        except CkptEngineError as error:
            return error.problem.message
        except Exception as error:
            log.exception("the versions in both slots could not be compared; workers install in full")
            return f"its versions could not be compared: {type(error).__name__}: {error}"

    def _base(self, slot: int) -> DeltaBase | None:
        """The version in the other slot, as the base of deltas of what is brought into this one."""
        other = next(number for number in range(SLOTS) if number != slot)
        held = self._held[other]
        cells = frozenset[int]() if held is None else held.cells
        if held is None or not cells:
            return None
        memory = CellMemory(held.recorded, held.layout, partial(self._arena.tensor, other))
        return DeltaBase(memory, cells, lambda: self._held[other] is held)

    def _lend(
        self, slot: int, wish: FillWish, ready: _ReusableFilling, maker: DeltaMaker | None, more: bool
    ) -> ChunkLending | None:
        """Lends the slot to relays of other hosts while it is filled. more: it is lent already."""
        filling, lent = ready.filling, self._lent[slot]
        if more and lent is not None:
            lent.resume()
            return lent
        key = filling.key(ready.recorded)
        make = None if maker is None else maker.make
        chunks = LentChunks(slot, key, filling.places.runs, filling.places.held, wish.passed, make)
        lent = self._lent[slot] = self._ways.lend_chunks(chunks)
        return lent

    def _table(self, wish: FillWish, ready: _ReusableFilling) -> ChunkTable | None:
        """The relays to ask, with the chunks that each wants; None: there are none."""
        if wish.table is None:
            return None
        key = wish.table.SerializeToString(deterministic=True), ready.recorded.cutting
        if self._wants is None or self._wants[0] != key:
            chunks = ready.filling.chunks
            sets = [ChunkPlaces(want.layout(ready.recorded, chunks), chunks).held for want in wish.sets]
            table = ChunkTable(self._id, [chunk.bytes for chunk in chunks], [frozenset(s) for s in sets], wish.table)
            self._wants = key, table
        return self._wants[1]

    def let_go(self, tables: Collection[bytes], seconds: float) -> None:
        """Unmaps what the tables with these digests offer, when no filling runs; versions in the slots stay. The next
        filling opens its sources again. Raises DEADLINE_EXCEEDED."""
        with self._writes(seconds):
            for slot in range(SLOTS):
                ready = self._ready[slot]
                if ready is not None and not ready.tables.isdisjoint(tables):
                    self._forget(slot)

    def close(self) -> None:
        """Ends all leases and closes all sources. A current filling raises ABORTED. May be repeated."""
        with self._lock:
            self._closed = True
            self._stop.ask(keep=False)
        self._ways.close()
        self._askers.close()
        ended = self._writing.acquire(timeout=CLOSE_SECONDS)  # what reads sources must not find them closed
        for slot in range(SLOTS):
            self._held[slot] = None
            self._forget(slot)
        self._arena.close()
        if ended:
            self._writing.release()

    def _forget(self, slot: int) -> None:
        ready, self._ready[slot] = self._ready[slot], None
        if ready is not None:
            ready.sources.close()

    def _key(self, wish: FillWish) -> tuple[object, ...]:
        """All that a layout and its reading depend on, which is not the weights; equal for counting and filling."""
        if self._keyed is None or self._keyed[0] is not wish:
            self._keyed = wish, self._make_key(wish)
        return self._keyed[1]

    def _make_key(self, wish: FillWish) -> tuple[object, ...]:
        content = SealedRecord(cells=wish.record.cells, groups=wish.record.groups)
        return (
            canonical(wish.record.manifest),
            blob_digest(canonical(content)),
            tuple(canonical(table) for table in wish.tables),
            wish.want.key(),
        )


def _words(error: BaseException) -> str:
    return error.problem.message if isinstance(error, CkptEngineError) else "its filling has failed"
