"""What sources offer together: their tables, merged. Pure.

The trainer ranks of one publication are accepted only if it is whole (`merge_tables`): they agree on each tensor's
dtype and shape, their boxes cover it, and two boxes of a tensor are either equal (replicas, of which readers may take
any) or disjoint. Other sources of one identity may hold any boxes of it (`join_sources`). These are cut into their
common refinement, and whether they have what a worker needs is checked when its plan is made. Whether holders of one
part hold equal bytes is checked by digests, at each seal. Runs in the manager, once for each new set of tables.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import sub
from typing import NamedTuple

from ckpt_engine.core.boxes import Box, contains, overlap, refine, uncovered, whole
from ckpt_engine.core.dtypes import CASTABLE, itemsize
from ckpt_engine.core.manifest import RootHasher, blob_digest, canonical, check_spec, manifest_of
from ckpt_engine.core.offers import check_regions, label, ranks_of
from ckpt_engine.core.partition import Partition
from ckpt_engine.core.problems import CkptEngineError, invalid
from ckpt_engine.v1.weights_pb2 import Manifest, SourceTable, TensorSpec


class PartHolder(NamedTuple):
    """A shard that holds a part."""

    source: int  # its index in `Publication.tables`
    shard: int  # its index in the source's table
    delta: tuple[int, ...] = ()  # from the shard's first element to the part's, elements by axis; empty: the same


class Part(NamedTuple):
    """A box of a tensor, and its holders, any of which may be read."""

    box: Box
    holders: tuple[PartHolder, ...]


class Place(NamedTuple):
    """Where a shard's elements lie."""

    region: int  # Region.id
    offset: int  # of the first element, bytes
    stride: tuple[int, ...]  # elements
    stored: str = ""  # their dtype there; empty: the served one


@dataclass(frozen=True, eq=False)
class Publication:
    """Everything that sources offer together. Sources are numbered as `tables` lists them."""

    manifest: Manifest
    manifest_bytes: bytes
    manifest_digest: bytes
    tables: tuple[SourceTable, ...]
    table_digests: tuple[bytes, ...]
    parts: tuple[tuple[Part, ...], ...]  # for each tensor: disjoint boxes that cover what is held of it, sorted
    partitions: tuple[Partition, ...]  # for each tensor: these boxes alone; tensors that are split alike share one
    places: tuple[tuple[Place, ...], ...]  # for each source: where each shard lies
    incomplete: frozenset[int] = frozenset()  # tensors with an element that no source holds; none after `merge_tables`

    @cached_property
    def bytes(self) -> int:
        """Bytes of one copy of the weights."""
        return sum(whole(spec.shape).volume * itemsize(spec.dtype) for spec in self.manifest.tensors)

    @cached_property
    def root_hasher(self) -> RootHasher:
        """Hashes roots of the manifest; made once."""
        return RootHasher(self.manifest)


def merge_tables(tables: Sequence[SourceTable], table_digests: Sequence[bytes] | None = None) -> Publication:
    """Merges what all ranks of a trainer publish. table_digests: of the blobs that the tables came in, if at hand.

    Raises INVALID_ARGUMENT, naming tensors, ranks and values, unless every tensor is whole and agreed on, every shard
    lies in its tensor and in its region, and shards of one tensor are equal or disjoint.
    """
    _check_sources(tables)
    merger = _Merger(tables, manifest_of(_agreed(tables).values()))
    return merger.publication(merger.parts, table_digests)


def join_sources(
    manifest: Manifest, tables: Sequence[SourceTable], table_digests: Sequence[bytes] | None = None
) -> Publication:
    """Joins sources that hold some boxes of one identity with a known manifest. Their boxes may overlap, differ and
    leave elements out.

    Raises INVALID_ARGUMENT, naming source, tensor and values, if a source offers a tensor that the manifest does not
    have, or with another dtype or shape, or if a shard does not lie in its tensor and in its region.
    """
    _check_sources(tables)
    spec_by_name = {spec.name: spec for spec in manifest.tensors}
    for table in tables:
        for spec in table.tensors:
            if spec_by_name.get(spec.name) != spec:
                other = spec_by_name.get(spec.name)
                has = f"{other.dtype} {list(other.shape)}" if other is not None else "no such tensor"
                raise invalid(
                    f"{label(table)} offers {spec.dtype} {list(spec.shape)} as tensor {spec.name}, and the sealed "
                    f"weights have {has}; it holds other weights than it says",
                    [spec.name],
                    ranks_of([table]),
                )
    merger = _Merger(tables, manifest)
    return merger.publication(merger.refined, table_digests)


def _check_sources(tables: Sequence[SourceTable]) -> None:
    """Raises INVALID_ARGUMENT unless each source has an id, and no two have the same id or rank."""
    ids_and_ranks: set[object] = set()
    for table in tables:
        rank = table.rank if table.HasField("rank") else None
        if not table.id:
            raise invalid(f"the source {table.description!r} has no id", ranks=ranks_of([table]))
        if table.id in ids_and_ranks or rank in ids_and_ranks:
            own = "give each its own rank" if rank is not None else "each needs an id of its own"
            raise invalid(f"two sources call themselves {label(table)}; {own}", ranks=ranks_of([table]))
        ids_and_ranks.add(table.id)
        if rank is not None:
            ids_and_ranks.add(rank)


def _agreed(tables: Sequence[SourceTable]) -> dict[str, TensorSpec]:
    """Every tensor once, by name. Raises INVALID_ARGUMENT if two ranks disagree on one."""
    specs: dict[str, TensorSpec] = {}
    first: dict[str, SourceTable] = {}
    for table in tables:
        for spec in table.tensors:
            name = spec.name
            first_spec = specs.get(name)
            if first_spec is None:
                check_spec(spec, ranks_of([table]))
                specs[name] = spec
                first[name] = table
            elif first_spec != spec and first[name] is not table:
                raise invalid(
                    f"ranks disagree on tensor {name}: {label(first[name])} has {first_spec.dtype} "
                    f"{list(first_spec.shape)}, {label(table)} has {spec.dtype} {list(spec.shape)}; publish the global "
                    "shape and the served dtype on every rank",
                    [name],
                    ranks_of([first[name], table]),
                )
    return specs


class _Merger:
    """Merges shards, tensor by tensor. Tensors that are split alike are checked once."""

    def __init__(self, tables: Sequence[SourceTable], manifest: Manifest) -> None:
        self._tables = tables
        self._manifest = manifest
        self._specs = list(manifest.tensors)
        self._index = {spec.name: index for index, spec in enumerate(self._specs)}
        self._shapes = [tuple(spec.shape) for spec in self._specs]
        self._widths = [itemsize(spec.dtype) for spec in self._specs]
        self._found: list[dict[Box, list[PartHolder]]] = [{} for _ in self._specs]
        self._partitions: dict[tuple[tuple[int, ...], tuple[Box, ...]], Partition] = {}
        self._extents: dict[tuple[tuple[int, ...], ...], tuple[Box, int, int]] = {}

    def publication(
        self, merge: Callable[[int], tuple[tuple[Part, ...], Partition]], table_digests: Sequence[bytes] | None
    ) -> Publication:
        """Makes the publication. merge: returns a tensor's parts, once all tables were read."""
        places = tuple(self._collect(source) for source in range(len(self._tables)))
        found = [merge(tensor) for tensor in range(len(self._specs))]
        manifest_bytes = canonical(self._manifest)
        if table_digests is None:
            table_digests = [blob_digest(canonical(table)) for table in self._tables]
        return Publication(
            manifest=self._manifest,
            manifest_bytes=manifest_bytes,
            manifest_digest=blob_digest(manifest_bytes),
            tables=tuple(self._tables),
            table_digests=tuple(table_digests),
            parts=tuple(parts for parts, _ in found),
            partitions=tuple(partition for _, partition in found),
            places=places,
            incomplete=frozenset(
                tensor
                for tensor, (parts, _) in enumerate(found)
                if sum(part.box.volume for part in parts) != whole(self._shapes[tensor]).volume
            ),
        )

    def _collect(self, source: int) -> tuple[Place, ...]:
        """Reads where the shards of one source lie. Raises INVALID_ARGUMENT unless each lies in its tensor and its
        region."""
        table = self._tables[source]
        ranks = ranks_of([table])
        names = [spec.name for spec in table.tensors]
        if len(set(names)) != len(names):
            duplicate = sorted(name for name, count in Counter(names).items() if count > 1)[0]
            raise invalid(f"{label(table)} publishes two tensors called {duplicate!r}", [duplicate], ranks)
        regions = check_regions(table)
        tensors = [self._index[name] for name in names]
        places = []
        for index, shard in enumerate(table.shards):
            if shard.tensor >= len(tensors):
                raise invalid(
                    f"{label(table)}: shard {index} is of tensor {shard.tensor}, but its table has {len(tensors)}",
                    ranks=ranks,
                )
            tensor = tensors[shard.tensor]
            if shard.encoding:
                raise self._error(table, tensor, f"its encoding {shard.encoding!r} is not known here")
            if shard.HasField("unchanged_since"):
                since = f"version {shard.unchanged_since.version} of lineage {shard.unchanged_since.lineage!r}"
                raise self._error(
                    table, tensor, f"shard {index} is unchanged since {since}, which is not supported yet"
                )
            stride = tuple(shard.stride)
            key = tuple(shard.start), tuple(shard.stop), stride, self._shapes[tensor]
            extent = self._extents.get(key)
            if extent is None:
                extent = self._extents[key] = self._extent(table, tensor, *key)
            box, lowest, end = extent
            stored = "" if shard.stored_dtype == self._specs[tensor].dtype else shard.stored_dtype
            place = Place(shard.region, shard.offset, stride, stored)
            size = regions.get(place.region)
            if size is None:
                raise self._error(table, tensor, f"region {place.region} is not in the table")
            width = self._stored_width(table, tensor, stored)
            if lowest < end and not 0 <= place.offset + lowest * width < place.offset + end * width <= size:
                raise self._error(
                    table,
                    tensor,
                    f"shard {box} takes bytes [{place.offset + lowest * width}, {place.offset + end * width}) of "
                    f"region {place.region}, which has {size}; offsets are in bytes, strides in elements",
                )
            places.append(place)
            self._found[tensor].setdefault(box, []).append(PartHolder(source, index))
        return tuple(places)

    def parts(self, tensor: int) -> tuple[tuple[Part, ...], Partition]:
        """The boxes of a tensor and their holders. Raises INVALID_ARGUMENT unless the boxes tile it."""
        found = self._found[tensor]
        parts = tuple(Part(box, tuple(found[box])) for box in sorted(found))
        key = self._shapes[tensor], tuple(part.box for part in parts)
        partition = self._partitions.get(key)
        if partition is None:
            self._check_tiling(tensor, parts)
            partition = self._partitions[key] = Partition(key[1])
        return parts, partition

    def refined(self, tensor: int) -> tuple[tuple[Part, ...], Partition]:
        """The common refinement of all boxes of a tensor, and the holders of each part."""
        found = {box: holders for box, holders in self._found[tensor].items() if box.volume}
        boxes = tuple(sorted(found))
        key = self._shapes[tensor], boxes
        partition = self._partitions.get(key)
        if partition is None:
            partition = self._partitions[key] = Partition(boxes if overlap(boxes) is None else tuple(refine(boxes)))
        if partition.boxes == boxes:
            return tuple(Part(box, tuple(found[box])) for box in boxes), partition
        parts = tuple(
            Part(
                part,
                tuple(
                    PartHolder(source, shard, delta if any(delta) else ())
                    for box in boxes
                    if contains(box, part)
                    for delta in [tuple(map(sub, part.start, box.start))]
                    for source, shard, _ in found[box]
                ),
            )
            for part in partition.boxes
        )
        return parts, partition

    def _stored_width(self, table: SourceTable, tensor: int, stored: str) -> int:
        """Bytes of an element where a shard lies. Raises INVALID_ARGUMENT unless readers can cast it to the served
        dtype."""
        served = self._specs[tensor].dtype
        if not stored:
            return self._widths[tensor]
        if stored not in CASTABLE or served not in CASTABLE:
            raise self._error(table, tensor, f"it is stored as {stored}, which readers cannot cast to {served}")
        return itemsize(stored)

    def _extent(
        self,
        table: SourceTable,
        tensor: int,
        start: tuple[int, ...],
        stop: tuple[int, ...],
        stride: tuple[int, ...],
        shape: tuple[int, ...],
    ) -> tuple[Box, int, int]:
        """The box, and the range [lowest, end) of its elements, counted in elements from the first."""
        inside = len(start) == len(stop) == len(shape) and all(
            0 <= first <= last <= size for first, last, size in zip(start, stop, shape, strict=True)
        )
        if not inside:
            raise self._error(
                table,
                tensor,
                f"box {list(start)} to {list(stop)} does not lie in the tensor; publish global coordinates",
            )
        box = Box(start, stop)
        if len(stride) != len(shape):
            raise self._error(table, tensor, f"shard {box} has strides {list(stride)}; one an axis is needed")
        if not box.volume:
            return box, 0, 0
        reach = [(length - 1) * step for length, step in zip(box.shape, stride, strict=True)]
        return box, sum(min(each, 0) for each in reach), sum(max(each, 0) for each in reach) + 1

    def _check_tiling(self, tensor: int, parts: Sequence[Part]) -> None:
        spec, everything = self._specs[tensor], whole(self._shapes[tensor])
        boxes = [part.box for part in parts]
        both = overlap(boxes)
        if both is not None:
            one, other = parts[both[0]], parts[both[1]]
            holding = [self._tables[part.holders[0].source] for part in (one, other)]
            raise invalid(
                f"tensor {spec.name}: {label(holding[0])} holds {one.box} and {label(holding[1])} holds {other.box}, "
                "which overlap without being equal; two shards of a tensor must be equal or disjoint",
                [spec.name],
                ranks_of(holding),
            )
        if sum(box.volume for box in boxes) != everything.volume:
            ranks = ranks_of(self._tables[holder.source] for part in parts for holder in part.holders)
            others = f"its other parts come from ranks {ranks}" if ranks else "nor any other part of it"
            raise invalid(
                f"missing part {uncovered(everything, boxes)} of tensor {spec.name} (shape {list(spec.shape)}): no "
                f"rank publishes it, {others}; did every rank publish?",
                [spec.name],
                ranks,
            )

    def _error(self, table: SourceTable, tensor: int, message: str) -> CkptEngineError:
        spec = self._specs[tensor]
        return invalid(
            f"{label(table)}, tensor {spec.name} ({spec.dtype} {list(spec.shape)}): {message}",
            [spec.name],
            ranks_of([table]),
        )
