"""What is published: the tables of all ranks of a trainer, merged into one manifest. Pure.

A publication is accepted only if it is whole: ranks agree on each tensor's dtype and shape, their boxes cover it, and
two boxes of a tensor are either the same (replicas, of which readers may take any) or disjoint. Whether replicas hold
equal bytes is told by digests, at each seal. Runs in the manager, once for each new set of tables.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from google.protobuf.message import Message

from ckpt_engine.core.boxes import Box, overlap, uncovered, whole
from ckpt_engine.core.dtypes import CASTABLE, UnsupportedDtypeError, itemsize
from ckpt_engine.core.layout import Layout
from ckpt_engine.core.problems import CkptEngineError, invalid
from ckpt_engine.v1.weights_pb2 import Manifest, SourceTable, TensorSpec


def blob_digest(data: bytes) -> bytes:
    """What names a blob: SHA-256, 32 bytes."""
    return hashlib.sha256(data).digest()


def canonical(message: Message) -> bytes:
    """The one serialisation of a message that blobs are made of."""
    return message.SerializeToString(deterministic=True)


class Part(NamedTuple):
    """A box of a tensor, and who holds it: indices of a source (in `Publication.tables`) and of a shard of its table.

    More than one holder means replicas: any of them may be read.
    """

    box: Box
    holders: tuple[tuple[int, int], ...]


class Place(NamedTuple):
    """Where a shard's elements lie: Region.id, offset of the first (bytes), strides (elements).

    stored: their dtype there, if it is not the served one.
    """

    region: int
    offset: int
    stride: tuple[int, ...]
    stored: str = ""


@dataclass(frozen=True, eq=False)
class Publication:
    """Everything that a trainer's ranks offer together. Sources are numbered as `tables` lists them.

    parts: for each tensor of the manifest the boxes that tile it, sorted. layouts: for each tensor these boxes alone;
    tensors that are split alike have the same one. places: for each source and shard where it lies.
    """

    manifest: Manifest
    manifest_bytes: bytes
    manifest_digest: bytes
    tables: tuple[SourceTable, ...]
    table_digests: tuple[bytes, ...]
    parts: tuple[tuple[Part, ...], ...]
    layouts: tuple[Layout, ...]
    places: tuple[tuple[Place, ...], ...]

    @cached_property
    def holders(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """For each tensor of the manifest, (source, shard) of everything that holds a part of it."""
        return tuple(tuple(holder for part in parts for holder in part.holders) for parts in self.parts)

    @cached_property
    def bytes(self) -> int:
        """Of one copy of the weights."""
        return sum(whole(spec.shape).volume * itemsize(spec.dtype) for spec in self.manifest.tensors)

    @cached_property
    def root_hasher(self) -> RootHasher:
        """Of the manifest; made once."""
        return RootHasher(self.manifest)


def manifest_of(specs: Iterable[TensorSpec]) -> Manifest:
    """The manifest of these tensors, sorted by name.

    Raises INVALID_ARGUMENT if there are none, a name is empty or occurs twice, a dtype is not supported or a dimension
    is negative.
    """
    found: dict[str, TensorSpec] = {}
    for spec in specs:
        check_spec(spec)
        if spec.name in found:
            raise invalid(f"two tensors are called {spec.name!r}; publish each tensor under one name", [spec.name])
        found[spec.name] = spec
    if not found:
        raise invalid("nothing to publish: no rank offers a tensor")
    return Manifest(tensors=[found[name] for name in sorted(found)])


def check_spec(spec: TensorSpec, ranks: Sequence[int] = ()) -> None:
    """Raises INVALID_ARGUMENT, naming the tensor, if it has no name, an unsupported dtype or a negative dimension."""
    if not spec.name:
        raise invalid("a tensor has no name; publish it under its checkpoint name", ranks=ranks)
    if any(size < 0 for size in spec.shape):
        raise invalid(
            f"tensor {spec.name} has shape {list(spec.shape)}; no dimension can be negative", [spec.name], ranks
        )
    try:
        itemsize(spec.dtype)
    except UnsupportedDtypeError as error:
        raise invalid(f"tensor {spec.name}: {error.problem.message}", [spec.name], ranks) from None


def merge_tables(tables: Sequence[SourceTable], table_digests: Sequence[bytes] | None = None) -> Publication:
    """Merges what all ranks offer. `table_digests`: of the blobs that the tables came in, if at hand.

    Raises INVALID_ARGUMENT, naming tensors, ranks and values, unless every tensor is whole and agreed on, every shard
    lies in its tensor and in its region, and shards of one tensor are equal or disjoint.
    """
    _check_ranks(tables)
    specs = _agreed(tables)
    manifest = manifest_of(specs.values())
    merger = _Merger(tables, manifest)
    places = tuple(merger.collect(source) for source in range(len(tables)))
    merged = [merger.parts(tensor) for tensor in range(len(manifest.tensors))]
    manifest_bytes = canonical(manifest)
    if table_digests is None:
        table_digests = [blob_digest(canonical(table)) for table in tables]
    return Publication(
        manifest=manifest,
        manifest_bytes=manifest_bytes,
        manifest_digest=blob_digest(manifest_bytes),
        tables=tuple(tables),
        table_digests=tuple(table_digests),
        parts=tuple(parts for parts, _ in merged),
        layouts=tuple(layout for _, layout in merged),
        places=places,
    )


def _check_ranks(tables: Sequence[SourceTable]) -> None:
    seen: set[int] = set()
    for table in tables:
        if table.rank in seen:
            raise invalid(f"two sources call themselves rank {table.rank}; give each its own rank", ranks=[table.rank])
        seen.add(table.rank)


def _agreed(tables: Sequence[SourceTable]) -> dict[str, TensorSpec]:
    """Every tensor, once, by name."""
    specs: dict[str, TensorSpec] = {}
    first: dict[str, int] = {}
    for table in tables:
        own: set[str] = set()
        for spec in table.tensors:
            name = spec.name
            if name in own:
                raise invalid(f"rank {table.rank} publishes two tensors called {name!r}", [name], [table.rank])
            own.add(name)
            known = specs.get(name)
            if known is None:
                check_spec(spec, [table.rank])
                specs[name] = spec
                first[name] = table.rank
            elif known != spec:
                raise invalid(
                    f"ranks disagree on tensor {name}: rank {first[name]} has {known.dtype} {list(known.shape)}, "
                    f"rank {table.rank} has {spec.dtype} {list(spec.shape)}; publish the global shape and the served "
                    "dtype on every rank",
                    [name],
                    [first[name], table.rank],
                )
    return specs


class _Merger:
    """Puts shards together, tensor by tensor. What was checked once is not checked again for tensors split alike."""

    def __init__(self, tables: Sequence[SourceTable], manifest: Manifest) -> None:
        self._tables = tables
        self._specs = list(manifest.tensors)
        self._index = {spec.name: index for index, spec in enumerate(self._specs)}
        self._shapes = [tuple(spec.shape) for spec in self._specs]
        self._widths = [itemsize(spec.dtype) for spec in self._specs]
        self._found: list[dict[Box, list[tuple[int, int]]]] = [{} for _ in self._specs]
        self._layouts: dict[tuple[tuple[int, ...], tuple[Box, ...]], Layout] = {}
        self._extents: dict[tuple[tuple[int, ...], ...], tuple[Box, int, int]] = {}

    def collect(self, source: int) -> tuple[Place, ...]:
        """Where the shards of one source lie; raises unless each lies in its tensor and its region."""
        table = self._tables[source]
        regions = {region.id: region.size for region in table.regions}
        if len(regions) != len(table.regions):
            raise invalid(f"rank {table.rank} gives two regions one id", ranks=[table.rank])
        tensors = [self._index[spec.name] for spec in table.tensors]
        places = []
        for index, shard in enumerate(table.shards):
            if shard.tensor >= len(tensors):
                raise invalid(
                    f"rank {table.rank}: shard {index} is of tensor {shard.tensor}, but its table has {len(tensors)}",
                    ranks=[table.rank],
                )
            tensor = tensors[shard.tensor]
            stride = tuple(shard.stride)
            key = tuple(shard.start), tuple(shard.stop), stride, self._shapes[tensor]
            extent = self._extents.get(key)
            if extent is None:
                extent = self._extents[key] = self._extent(table.rank, tensor, *key)
            box, lowest, end = extent
            stored = "" if shard.stored_dtype == self._specs[tensor].dtype else shard.stored_dtype
            place = Place(shard.region, shard.offset, stride, stored)
            size = regions.get(place.region)
            if size is None:
                raise self._error(table.rank, tensor, f"region {place.region} is not in the table")
            width = self._stored_width(table.rank, tensor, stored)
            if lowest < end and not 0 <= place.offset + lowest * width < place.offset + end * width <= size:
                raise self._error(
                    table.rank,
                    tensor,
                    f"shard {box} takes bytes [{place.offset + lowest * width}, {place.offset + end * width}) of "
                    f"region {place.region}, which has {size}; offsets are in bytes, strides in elements",
                )
            places.append(place)
            self._found[tensor].setdefault(box, []).append((source, index))
        return tuple(places)

    def parts(self, tensor: int) -> tuple[tuple[Part, ...], Layout]:
        """Who holds which box of a tensor; raises unless the boxes tile it."""
        found = self._found[tensor]
        parts = tuple(Part(box, tuple(found[box])) for box in sorted(found))
        key = self._shapes[tensor], tuple(part.box for part in parts)
        layout = self._layouts.get(key)
        if layout is None:
            self._check_tiling(tensor, parts)
            layout = self._layouts[key] = Layout(key[1])
        return parts, layout

    def _stored_width(self, rank: int, tensor: int, stored: str) -> int:
        """Bytes of an element where a shard lies; raises unless readers can cast it to the served dtype."""
        served = self._specs[tensor].dtype
        if not stored:
            return self._widths[tensor]
        if stored not in CASTABLE or served not in CASTABLE:
            raise self._error(rank, tensor, f"it is stored as {stored}, which readers cannot cast to {served}")
        return itemsize(stored)

    def _extent(
        self,
        rank: int,
        tensor: int,
        start: tuple[int, ...],
        stop: tuple[int, ...],
        stride: tuple[int, ...],
        shape: tuple[int, ...],
    ) -> tuple[Box, int, int]:
        """The box, and [lowest, end) that its elements reach, in elements from the first."""
        inside = len(start) == len(stop) == len(shape) and all(
            0 <= first <= last <= size for first, last, size in zip(start, stop, shape, strict=True)
        )
        if not inside:
            raise self._error(
                rank,
                tensor,
                f"box {list(start)} to {list(stop)} does not lie in the tensor; publish global coordinates",
            )
        box = Box(start, stop)
        if len(stride) != len(shape):
            raise self._error(rank, tensor, f"shard {box} has strides {list(stride)}; one an axis is needed")
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
            ranks = [self._tables[part.holders[0][0]].rank for part in (one, other)]
            raise invalid(
                f"tensor {spec.name}: rank {ranks[0]} holds {one.box} and rank {ranks[1]} holds {other.box}, which "
                "overlap without being equal; two shards of a tensor must be equal or disjoint",
                [spec.name],
                ranks,
            )
        if sum(box.volume for box in boxes) != everything.volume:
            ranks = sorted({self._tables[source].rank for part in parts for source, _ in part.holders})
            others = f"its other parts come from ranks {ranks}" if ranks else "nor any other part of it"
            raise invalid(
                f"missing part {uncovered(everything, boxes)} of tensor {spec.name} (shape {list(spec.shape)}): no "
                f"rank publishes it, {others}; did every rank publish?",
                [spec.name],
                ranks,
            )

    def _error(self, rank: int, tensor: int, message: str) -> CkptEngineError:
        spec = self._specs[tensor]
        return invalid(
            f"rank {rank}, tensor {spec.name} ({spec.dtype} {list(spec.shape)}): {message}", [spec.name], [rank]
        )


_ROOT_TAG = b"ckpt-engine root 1\n"


class RootHasher:
    """Computes roots of one manifest; names, dtypes and shapes are hashed once, here.

    root = SHA-256 of: the tag "ckpt-engine root 1\\n"; the number of tensors; for each tensor in the manifest's order
    its name and its dtype (each its length in bytes, then UTF-8), its number of dimensions and its dimensions; then
    the digest of each tensor in that order. Every number is 8 bytes, little-endian, unsigned.
    """

    def __init__(self, manifest: Manifest) -> None:
        self._count = len(manifest.tensors)
        pieces = [_ROOT_TAG, _number(self._count)]
        for spec in manifest.tensors:
            for text in (spec.name.encode(), spec.dtype.encode()):
                pieces += (_number(len(text)), text)
            pieces.append(_number(len(spec.shape)))
            pieces += map(_number, spec.shape)
        self._header = hashlib.sha256(b"".join(pieces))

    def root(self, digests: bytes) -> bytes:
        """The root, 32 bytes, given all tensors' digests as 8 little-endian bytes each."""
        if len(digests) != 8 * self._count:
            raise invalid(f"{len(digests) // 8} digests were given for {self._count} tensors")
        hasher = self._header.copy()
        hasher.update(digests)
        return hasher.digest()


def root(manifest: Manifest, tensor_digests: Sequence[int]) -> bytes:
    """Names one content of a manifest: 32 bytes. `tensor_digests`: one 64-bit digest a tensor, in its order."""
    return RootHasher(manifest).root(b"".join(map(_number, tensor_digests)))


def _number(value: int) -> bytes:
    return value.to_bytes(8, "little")
