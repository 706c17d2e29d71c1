"""The sealed record: what a version's bytes hash to, box by box, but not where they lie. Pure.

A record depends on no table and names no process, so it outlives its publisher. Any holder of a version's weights can
keep it, and it proves itself: its cells tile the manifest, and their digests add up to the root. What each worker must
find follows from it without hashing again, unless a need cuts a cell: then a holder digests the finer pieces, and these
must add up to what the record says. It does not decide which process holds what.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ckpt_engine.core.boxes import Box, overlap, uncovered, whole
from ckpt_engine.core.cells import Cells, Indices
from ckpt_engine.core.dtypes import itemsize
from ckpt_engine.core.manifest import RootHasher, canonical, manifest_of
from ckpt_engine.core.partition import Partition
from ckpt_engine.core.plan import Plans
from ckpt_engine.core.problems import data_loss, internal, invalid
from ckpt_engine.core.sealed import Sealed, Words, check_replicas, delimited, packed
from ckpt_engine.v1.weights_pb2 import Atoms, Digests, SealedRecord


@dataclass(frozen=True, eq=False)
class Cutting:
    """The manifest of a record, the cells that tile it and their groups. Records with the same share one Cutting."""

    record: SealedRecord
    boxes: tuple[tuple[Box, ...], ...]  # for each tensor of the manifest its cells, sorted
    first: tuple[int, ...]  # the number of each tensor's first cell
    tensor: Indices  # the number of the tensor, by cell
    hasher: RootHasher  # computes roots for this manifest

    def is_of(self, record: SealedRecord) -> bool:
        """Whether a record has this manifest, these cells and these groups."""
        own = self.record
        return record.manifest == own.manifest and record.cells == own.cells and record.groups == own.groups

    @cached_property
    def digest(self) -> bytes:
        """The digest of manifest, cells and groups."""
        own = self.record
        content = SealedRecord(manifest=own.manifest, cells=own.cells, groups=own.groups)
        return hashlib.sha256(canonical(content)).digest()

    @cached_property
    def sizes(self) -> Indices:
        """Bytes of each cell."""
        volumes_of: dict[tuple[Box, ...], list[int]] = {}
        found: list[int] = []
        for spec, boxes in zip(self.record.manifest.tensors, self.boxes, strict=True):
            if boxes not in volumes_of:
                volumes_of[boxes] = [box.volume for box in boxes]
            width = itemsize(spec.dtype)
            found += [volume * width for volume in volumes_of[boxes]]
        return np.array(found, dtype=np.int64)

    @cached_property
    def partitions(self) -> tuple[Partition, ...]:
        """The partition of each tensor; tensors that are cut alike share one."""
        partition_of: dict[tuple[Box, ...], Partition] = {}
        return tuple(partition_of.setdefault(boxes, Partition(boxes)) for boxes in self.boxes)


@dataclass(frozen=True, eq=False)
class ProvenRecord:
    """A record whose digests add up to its root."""

    record: SealedRecord
    cut: Cutting
    values: Words  # one digest a cell, modulo 2^64
    root: bytes  # 32 bytes

    @property
    def boxes(self) -> tuple[tuple[Box, ...], ...]:
        """The cells of each tensor of the manifest, sorted."""
        return self.cut.boxes

    @property
    def first(self) -> tuple[int, ...]:
        """The number of each tensor's first cell."""
        return self.cut.first

    @property
    def partitions(self) -> tuple[Partition, ...]:
        """The partition of each tensor; tensors that are cut alike share one."""
        return self.cut.partitions

    @property
    def cutting(self) -> bytes:
        """A digest of manifest, cells and groups: versions that were cut alike share it."""
        return self.cut.digest


class RecordWriter:
    """Writes the records of one cutting. Manifest, cells and groups are the same in all of them, so they are encoded
    once."""

    def __init__(self, cells: Cells) -> None:
        self._cells = cells
        order: list[int] = []
        pieces = [canonical(SealedRecord(manifest=cells.publication.manifest))]
        boxes: dict[int, list[tuple[int, bytes]]] = {}  # tensors that are cut alike share one tiling
        for tensor, tiling in enumerate(cells.tilings):
            if id(tiling) not in boxes:
                boxes[id(tiling)] = [
                    (
                        place,
                        canonical(SealedRecord.Cell(start=tiling.boxes[place].start, stop=tiling.boxes[place].stop)),
                    )
                    for place in sorted(range(len(tiling.boxes)), key=tiling.boxes.__getitem__)
                ]
            number = canonical(SealedRecord.Cell(tensor=tensor))
            for place, box in boxes[id(tiling)]:
                order.append(cells.first[tensor] + place)
                pieces.append(delimited(SealedRecord.CELLS_FIELD_NUMBER, number + box))
        self._order = np.array(order, dtype=np.int64)
        self._prefix = b"".join(pieces)
        self._suffix = canonical(SealedRecord(groups=_numbers(cells.groups[self._order])))
        self._hasher = hashlib.sha256(self._prefix)

    def write(self, sealed: Sealed) -> tuple[bytes, bytes]:
        """Writes what an update's sources sealed: a SealedRecord as a blob, and the blob's digest.

        Raises FAILED_PRECONDITION if a cell was not digested or not everything is held.
        """
        if sealed.cells is not self._cells:
            raise internal("these digests are of other cells than this record's")
        sealed.root()
        digests = packed(SealedRecord.DIGESTS_FIELD_NUMBER, sealed.values[self._order])
        hasher = self._hasher.copy()
        hasher.update(digests + self._suffix)
        return self._prefix + digests + self._suffix, hasher.digest()


def read_record(record: SealedRecord, root: bytes, others: Iterable[ProvenRecord] = ()) -> ProvenRecord:
    """Checks a record from elsewhere. root: what the version hashes to, by the ledger. others: records of other
    versions; a record that is cut like one of them shares its checked cutting.

    Raises INVALID_ARGUMENT, naming the tensor, if its cells do not tile its manifest, or if some cells have a group and
    others have none; and DATA_LOSS if its digests add up to another root.
    """
    if len(record.cells) != len(record.digests):
        raise invalid(f"the record has {len(record.cells)} cells and {len(record.digests)} digests")
    if record.groups and len(record.groups) != len(record.cells):
        raise invalid(f"the record has {len(record.cells)} cells and {len(record.groups)} groups: each cell has one")
    cut = next((each.cut for each in others if each.cut.is_of(record)), None) or _cutting_of(record)
    values = np.fromiter(record.digests, dtype=np.uint64, count=len(record.digests))
    sums = np.zeros(len(cut.boxes), dtype=np.uint64)
    np.add.at(sums, cut.tensor, values)
    found = cut.hasher.root(sums.astype("<u8").tobytes())
    if found != root:
        raise data_loss(
            f"the record hashes to {found.hex()[:16]}, and what was sealed to {root.hex()[:16]}: it is of other "
            "weights, or a release of ckpt-engine that makes other digests sealed it"
        )
    return ProvenRecord(record, cut, values, root)


def _numbers(groups: Indices) -> list[int]:
    """The groups of cells as a record has them: small numbers in the order in which groups come; none for one group."""
    _, first, group = np.unique(groups, return_index=True, return_inverse=True)
    return [] if len(first) < 2 else np.argsort(np.argsort(first))[group].tolist()


def _cutting_of(record: SealedRecord) -> Cutting:
    manifest = record.manifest
    if canonical(manifest_of(manifest.tensors)) != canonical(manifest):
        raise invalid("the record's manifest is not sorted by name")
    boxes: list[list[Box]] = [[] for _ in manifest.tensors]
    before: tuple[int, Box] | None = None
    for number, cell in enumerate(record.cells):
        place = cell.tensor, Box(tuple(cell.start), tuple(cell.stop))
        if cell.tensor >= len(boxes) or (before is not None and place <= before):
            raise invalid(f"cell {number} of the record is of tensor {cell.tensor}, out of order or of no tensor")
        boxes[cell.tensor].append(place[1])
        before = place
    checked: set[tuple[tuple[int, ...], tuple[Box, ...]]] = set()
    for spec, cells in zip(manifest.tensors, boxes, strict=True):
        shape = tuple(spec.shape)
        if (shape, tuple(cells)) not in checked:
            _check_tiling(spec.name, shape, cells)
            checked.add((shape, tuple(cells)))
    tensor = np.fromiter((cell.tensor for cell in record.cells), dtype=np.int64, count=len(record.cells))
    first = np.concatenate(([0], np.cumsum([len(cells) for cells in boxes]))).tolist()
    return Cutting(record, tuple(map(tuple, boxes)), tuple(first), tensor, RootHasher(manifest))


def _check_tiling(name: str, shape: tuple[int, ...], cells: Sequence[Box]) -> None:
    everything = whole(shape)
    for box in cells:
        inside = len(box.start) == len(box.stop) == len(shape) and all(
            0 <= start < stop <= size for start, stop, size in zip(box.start, box.stop, shape, strict=True)
        )
        if not inside:
            raise invalid(f"cell {list(box.start)} to {list(box.stop)} of the record is not in tensor {name}", [name])
    both = overlap(cells)
    if both is not None:
        raise invalid(f"cells {cells[both[0]]} and {cells[both[1]]} of tensor {name} overlap", [name])
    missing = uncovered(everything, cells)
    if missing is not None:
        raise invalid(f"no cell of the record has {missing} of tensor {name} (shape {list(shape)})", [name])


def finer_atoms(plans: Plans, recorded: ProvenRecord) -> Mapping[int, Atoms]:
    """The atoms that sources must digest beyond the record: those smaller than its cells, because a need cuts them.
    Sources without any are left out. plans: cut along the record (`compile_plans(…, along=recorded.boxes)`).

    Raises INVALID_ARGUMENT if the plans are of another manifest.
    """
    _check_manifest(plans, recorded)
    finer = ~_equal(plans.cells, recorded)[1]
    found = {}
    for source, atoms in plans.atoms.items():
        own = finer[plans.cells.of_atom[source]]
        if own.any():
            pieces = [atom for atom, is_finer in zip(atoms.atoms, own.tolist(), strict=True) if is_finer]
            found[source] = Atoms(table_digest=atoms.table_digest, atoms=pieces)
    return found


def seal_from_record(plans: Plans, recorded: ProvenRecord, digests: Mapping[int, Digests]) -> Sealed:
    """The digests of all cells, from a record and the sources' digests of `finer_atoms`, by source index.

    Raises INVALID_ARGUMENT for a wrong number of digests, FAILED_PRECONDITION if two sources hold different bytes, and
    DATA_LOSS, naming tensors, if the finer pieces do not add up to the record.
    """
    _check_manifest(plans, recorded)
    cells = plans.cells
    number, equal = _equal(cells, recorded)
    if equal.all():
        return Sealed(plans.publication, cells, recorded.values[number], equal)
    whole_answers = {}
    for source, atoms in finer_atoms(plans, recorded).items():
        answer = digests.get(source)
        if answer is None:
            continue
        if len(answer.values) != len(atoms.atoms):
            name = plans.publication.tables[source].id
            raise invalid(f"{name} answered with {len(answer.values)} digests for {len(atoms.atoms)} finer atoms")
        of_atom = cells.of_atom[source]
        values = np.where(equal[of_atom], recorded.values[number[of_atom]], np.uint64(0))
        values[~equal[of_atom]] = np.fromiter(answer.values, dtype=np.uint64, count=len(answer.values))
        whole_answers[source] = Digests(values=values.tolist())
    sealed = check_replicas(plans, whole_answers)
    values = np.where(equal, recorded.values[number], sealed.values)
    proven = _check_sums(plans, recorded, number, values, equal | sealed.known)
    return Sealed(plans.publication, cells, values, proven)


def _check_manifest(plans: Plans, recorded: ProvenRecord) -> None:
    if canonical(recorded.record.manifest) != plans.publication.manifest_bytes:
        raise invalid("the record is of another manifest than the plans")


def _check_sums(
    plans: Plans, recorded: ProvenRecord, number: Indices, values: Words, known: np.typing.NDArray[np.bool_]
) -> np.typing.NDArray[np.bool_]:
    """Raises DATA_LOSS unless the finer pieces of each recorded cell add up to its digest. Returns which cells that
    proves: none of a recorded cell with a missing piece."""
    cells = plans.cells
    sums = np.zeros(len(recorded.values), dtype=np.uint64)
    np.add.at(sums, number[known], values[known])
    covered = np.zeros(len(recorded.values), dtype=np.int64)
    volumes = np.fromiter((cells.box(cell).volume for cell in range(len(cells))), dtype=np.int64, count=len(cells))
    np.add.at(covered, number[known], volumes[known])
    recorded_volumes = np.fromiter(
        (box.volume for boxes in recorded.boxes for box in boxes), dtype=np.int64, count=len(recorded.values)
    )
    whole_cells = covered == recorded_volumes
    wrong = np.flatnonzero(whole_cells & (sums != recorded.values))
    if len(wrong):
        tensors = sorted({int(np.searchsorted(recorded.first, cell, side="right")) - 1 for cell in wrong.tolist()})
        names = [plans.publication.manifest.tensors[tensor].name for tensor in tensors]
        raise data_loss(
            f"what the sources hold of tensor {names[0]} does not add up to what was sealed; they hold other weights "
            "than their version says",
            names[:16],
        )
    proven: np.typing.NDArray[np.bool_] = known & whole_cells[number]
    return proven


def _equal(cells: Cells, recorded: ProvenRecord) -> tuple[Indices, np.typing.NDArray[np.bool_]]:
    """The number of the recorded cell that each cell lies in, and whether it is equal to that."""
    number = np.zeros(len(cells), dtype=np.int64)
    equal = np.zeros(len(cells), dtype=np.bool_)
    cache: dict[tuple[int, int], tuple[list[int], list[bool]]] = {}
    for tensor, tiling in enumerate(cells.tilings):
        partition = recorded.partitions[tensor]
        key = id(tiling), id(partition)
        if key not in cache:
            hits = [partition.hits(box) for box in tiling.boxes]
            if any(len(hit) != 1 for hit in hits):
                raise internal("the cells of these plans are not cut along the record")
            cache[key] = (
                [hit[0].part for hit in hits],
                [partition.boxes[hit[0].part] == box for hit, box in zip(hits, tiling.boxes, strict=True)],
            )
        parts, same = cache[key]
        begin, end = cells.first[tensor], cells.first[tensor] + len(parts)
        number[begin:end] = np.array(parts, dtype=np.int64) + recorded.first[tensor]
        equal[begin:end] = same
    return number, equal
