"""Deltas of chunks between relays, against the version in a relay's other slot.

A relay that is asked makes one (`DeltaMaker`) if it holds the base that the asker names; the asker applies it to its
own copy of the base (`DeltaTaker`) and compares every cell with the sealed record afterwards, as it does with a chunk
that came in full. So a wrong delta costs a question, and is never passed on. It decides what is a base and whether a
delta is sent; neither how one is coded (`delta/coding.py`) nor which relay is asked.

A base is named by its root, and a part of it by the tensor and the box that a cell of the new version has: chunks of
two versions may be cut differently. A box counts if it is the union of cells that the base's slot holds verified.

The body of a delta is the base's root and then, for each cell of the chunk in its order, the cell's blocks.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from typing import Literal

import torch

from ckpt_engine.core.chunks import Chunk
from ckpt_engine.core.dtypes import itemsize
from ckpt_engine.core.problems import data_loss, internal
from ckpt_engine.delta.choice import DeltaCosts
from ckpt_engine.delta.coding import Bits, Places, blocks, changed_places, decode_block, encode_block, whole_block
from ckpt_engine.digest.changes import changed_digest
from ckpt_engine.digest.factors import MASK
from ckpt_engine.relay.cell_memory import BoxBits, CellMemory, bits_of
from ckpt_engine.relay.delta_figures import DeltaFigures
from ckpt_engine.transport.base import DeltaAnswer

log = logging.getLogger("ckpt_engine.relay")

ROOT_BYTES = 32

SHARE = 32
"""Deltas of a version that wait for further askers take at most one of so many parts of its bytes."""

MOST_BYTES = 1 << 30
"""Nor do they take more than this: they lie beside the relay's slots, in memory that `--memory` does not count."""

DeltaUse = Literal["auto", "always", "never"]
"""auto: a delta is sent where it is with its reader sooner, by what was measured. always: wherever it has fewer bytes.
never: none is sent, and none asked for, nor are the two versions of the slots compared for workers of this host."""


class DeltaBase:
    """A version that a slot holds, as the base of deltas.

    cells: those of its record that were verified. is_held: whether the slot still holds it: what was read before that
    is what was sealed.
    """

    def __init__(self, memory: CellMemory, cells: frozenset[int], is_held: Callable[[], bool]) -> None:
        self.root = memory.recorded.root
        self.is_held = is_held
        self._memory = memory
        self._cells = cells

    def box(self, other: CellMemory, cell: int) -> BoxBits | None:
        """The base's elements of the box that a cell of another version has; None: it has none that count."""
        cells = self._cells_of(other, cell)
        return None if cells is None else self._memory.union(cells, other.place(cell)[1])

    def has(self, other: CellMemory, cell: int) -> bool:
        """Whether `box` has elements."""
        return self._cells_of(other, cell) is not None

    def _cells_of(self, other: CellMemory, cell: int) -> tuple[int, ...] | None:
        found = self._memory.cells_of(*other.place(cell))
        return None if found is None or not self._cells.issuperset(found) else found


class DeltaMaker:
    """Makes deltas of one version's chunks. Any thread.

    memory: of the version, whose chunks are verified before they are asked for. base: None: there is none but the
    version itself, which an asker may hold under another number.
    """

    def __init__(
        self, use: DeltaUse, memory: CellMemory, chunks: Sequence[Chunk], base: DeltaBase | None, size: int
    ) -> None:
        """size: bytes of the version."""
        self._use = use
        self._memory = memory
        self._chunks = chunks
        itself = DeltaBase(memory, frozenset(cell for chunk in chunks for cell in chunk.cells), lambda: True)
        self._bases = {each.root: each for each in (itself, base) if each is not None}
        self._room = min(size // SHARE, MOST_BYTES)
        self._lock = threading.Lock()
        self._costs = DeltaCosts()
        # By chunk and root of the base; the one that was asked for last is at the end.
        self._bodies: OrderedDict[tuple[int, bytes], bytes] = OrderedDict()
        self._body_bytes = 0

    def make(self, number: int, root: bytes, rate: float | None) -> DeltaAnswer:
        """A chunk as a delta against the version `root`, or why it is to be sent in full.

        rate: bytes a second that the way to the asker carries; None: unknown.
        """
        base, key = self._bases.get(root), (number, root)
        if base is None:
            return DeltaAnswer(why=f"it does not hold the base {root.hex()[:16]}")
        with self._lock:
            if (body := self._bodies.get(key)) is not None:
                self._bodies.move_to_end(key)
                return DeltaAnswer(body)
            if self._use == "auto" and not self._costs.pays(rate):
                return DeltaAnswer(why="over this network it is there sooner in full")
        began = time.monotonic()
        size = self._chunks[number].bytes
        body = self._encode(number, base)
        if not base.is_held():
            return DeltaAnswer(why=f"it holds another version in the place of the base {root.hex()[:16]} by now")
        if body is None:
            return DeltaAnswer(why="its memory has changed since it was verified")
        with self._lock:
            self._costs.add(size, len(body), time.monotonic() - began)
        if len(body) >= size:
            return DeltaAnswer(why="too much has changed: a delta has no fewer bytes")
        self.keep(number, body)
        return DeltaAnswer(body)

    def keep(self, number: int, body: bytes) -> None:
        """Keeps a delta for further askers; one that came from elsewhere was applied to the same base and verified."""
        key = number, body[:ROOT_BYTES]
        with self._lock:
            if key in self._bodies or len(body) > self._room:
                return
            self._bodies[key] = body
            self._body_bytes += len(body)
            while self._body_bytes > self._room:
                self._body_bytes -= len(self._bodies.popitem(last=False)[1])

    def _encode(self, number: int, base: DeltaBase) -> bytes | None:
        """The body of a chunk's delta; None if it does not lead from what was sealed to what was sealed: this relay's
        memory has changed since it was verified."""
        found = [base.root]
        for cell in self._chunks[number].cells:
            new, old = bits_of(self._memory.read(cell)), base.box(self._memory, cell)
            if old is None:
                found += [whole_block(new[part]) for part in blocks(len(new))]
                continue
            change = 0
            for part in blocks(len(new)):
                places = changed_places(old.bits[part], new[part])
                found.append(encode_block(old.bits[part], new[part], places))
                change += self._change(cell, part.start, places, old.bits[part], new[part])
            if (int(self._memory.recorded.values[cell]) - old.digest - change) & MASK and base.is_held():
                name = self._memory.place(cell)[0].name
                log.warning(
                    "chunk %d is sent in full: memory of tensor %s has changed since it was verified", number, name
                )
                return None
        return b"".join(found)

    def _change(self, cell: int, first: int, places: Places, old: Bits, new: Bits) -> int:
        """What is added to a cell's digest by what changed in one of its blocks. first: the block's first element."""
        _, box = self._memory.place(cell)
        before, after = (torch.from_numpy(each[places]) for each in (old, new))
        return changed_digest(box.start, box.shape, torch.from_numpy(places + first), before, after)


class DeltaTaker:
    """Applies deltas to what the other slot holds, for one filling. Several threads, each with chunks of its own.

    memory: of the slot that is filled. keep: see DeltaMaker.keep.
    """

    def __init__(
        self, memory: CellMemory, chunks: Sequence[Chunk], base: DeltaBase, keep: Callable[[int, bytes], None]
    ) -> None:
        self.root = base.root
        self._memory = memory
        self._chunks = chunks
        self._base = base
        self._keep = keep
        self._lock = threading.Lock()
        self._applied: dict[int, tuple[bytes, Counter[str]]] = {}  # by chunk, until it is compared: its changes

    def has(self, number: int) -> bool:
        """Whether the base has every box of a chunk."""
        return all(self._base.has(self._memory, cell) for cell in self._chunks[number].cells)

    def apply(self, number: int, body: bytes) -> None:
        """Writes a chunk into the slot: the base's elements with what a delta changes. Raises DATA_LOSS if it is of
        another base or cannot be read; what lies in the slot is then neither."""
        if body[:ROOT_BYTES] != self.root:
            raise data_loss(f"it leads from {body[:8].hex()}, and this relay holds {self.root[:8].hex()}")
        rest = memoryview(body)[ROOT_BYTES:]
        changed: Counter[str] = Counter()
        for cell in self._chunks[number].cells:
            old = self._base.box(self._memory, cell)
            if old is None:
                raise internal("a chunk was asked for as a delta of what is not held")
            elements = self._memory.room(cell)
            bits = bits_of(elements)
            bits[:] = old.bits
            for part in blocks(len(bits)):
                rest, changes = decode_block(rest, bits[part])
                changed[self._memory.place(cell)[0].name] += changes
            self._memory.write(cell, elements)
        if rest:
            raise data_loss(f"{len(rest)} bytes follow its last block")
        with self._lock:
            self._applied[number] = body, changed

    def settle(self, number: int, is_right: bool, figures: DeltaFigures) -> None:
        """Takes whether an applied chunk is what was sealed; counts and keeps it if so."""
        with self._lock:
            body, changed = self._applied.pop(number)
        if not is_right:
            return
        self._keep(number, body)
        figures.delta_bytes += self._chunks[number].bytes
        for cell in self._chunks[number].cells:
            spec, box = self._memory.place(cell)
            figures.elements[spec.name] += box.volume
            count = changed.pop(spec.name, 0)  # of all cells of this tensor in the chunk
            figures.tensors[spec.name] += count
            figures.changed_bytes += count * itemsize(spec.dtype)
