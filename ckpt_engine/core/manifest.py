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
from ckpt_engine.core.dtypes import UnsupportedDtypeError, itemsize
from ckpt_engine.core.problems import CkptEngineError, invalid
from ckpt_engine.v1 import weights_pb2
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


@dataclass(frozen=True)
class Publication:
    """Everything that a trainer's ranks offer together. Sources are numbered as `tables` lists them.

    parts: for each tensor of the manifest the boxes that tile it, sorted by start.
    """

    manifest: Manifest
    manifest_bytes: bytes
    manifest_digest: bytes
    tables: tuple[SourceTable, ...]
    table_digests: tuple[bytes, ...]
    parts: tuple[tuple[Part, ...], ...]

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
    tensor_index = {spec.name: index for index, spec in enumerate(manifest.tensors)}
    boxes: list[dict[Box, list[tuple[int, int]]]] = [{} for _ in manifest.tensors]
    for source, table in enumerate(tables):
        _collect(source, table, tensor_index, boxes)
    parts = tuple(_tiling(spec, found, tables) for spec, found in zip(manifest.tensors, boxes, strict=True))
    manifest_bytes = canonical(manifest)
    if table_digests is None:
        table_digests = [blob_digest(canonical(table)) for table in tables]
    return Publication(
        manifest, manifest_bytes, blob_digest(manifest_bytes), tuple(tables), tuple(table_digests), parts
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


def _collect(
    source: int,
    table: SourceTable,
    tensor_index: dict[str, int],
    boxes: list[dict[Box, list[tuple[int, int]]]],
) -> None:
    """Puts every shard of a table where it belongs; checks each by itself."""
    regions = {region.id: region.size for region in table.regions}
    if len(regions) != len(table.regions):
        raise invalid(f"rank {table.rank} gives two regions one id", ranks=[table.rank])
    known = [(boxes[tensor_index[spec.name]], spec, tuple(spec.shape), itemsize(spec.dtype)) for spec in table.tensors]
    for index, shard in enumerate(table.shards):
        if shard.tensor >= len(known):
            raise invalid(
                f"rank {table.rank}: shard {index} is of tensor {shard.tensor}, but its table has {len(known)}",
                ranks=[table.rank],
            )
        found, spec, shape, width = known[shard.tensor]
        box = Box(tuple(shard.start), tuple(shard.stop))
        if not _inside(box, shape):
            raise _shard_error(
                table.rank, spec, f"box {_text(box)} does not lie in its shape {list(shape)}; publish global shapes"
            )
        _check_memory(table.rank, spec, box, shard, regions, width)
        found.setdefault(box, []).append((source, index))


def _inside(box: Box, shape: tuple[int, ...]) -> bool:
    return len(box.start) == len(box.stop) == len(shape) and all(
        0 <= start <= stop <= size for start, stop, size in zip(box.start, box.stop, shape, strict=True)
    )


def _check_memory(
    rank: int, spec: TensorSpec, box: Box, shard: weights_pb2.Shard, regions: dict[int, int], width: int
) -> None:
    """A shard must lie in its region, wholly."""
    size = regions.get(shard.region)
    if size is None:
        raise _shard_error(rank, spec, f"region {shard.region} is not in the table")
    stride = tuple(shard.stride)
    if len(stride) != len(box.start):
        raise _shard_error(rank, spec, f"shard {_text(box)} has strides {list(stride)}; one an axis is needed")
    lowest = highest = 0
    for start, stop, step in zip(box.start, box.stop, stride, strict=True):
        if stop == start:
            return
        reach = (stop - start - 1) * step
        lowest += min(reach, 0)
        highest += max(reach, 0)
    first, end = shard.offset + lowest * width, shard.offset + (highest + 1) * width
    if first < 0 or end > size:
        raise _shard_error(
            rank,
            spec,
            f"shard {_text(box)} takes bytes [{first}, {end}) of region {shard.region}, which has {size}; offsets are "
            "in bytes, strides in elements",
        )


def _shard_error(rank: int, spec: TensorSpec, message: str) -> CkptEngineError:
    return invalid(f"rank {rank}, tensor {spec.name} ({spec.dtype} {list(spec.shape)}): {message}", [spec.name], [rank])


def _text(box: Box) -> str:
    if len(box.start) != len(box.stop):
        return f"{list(box.start)} to {list(box.stop)}"
    return str(box)


def _tiling(
    spec: TensorSpec, found: dict[Box, list[tuple[int, int]]], tables: Sequence[SourceTable]
) -> tuple[Part, ...]:
    """The parts of one tensor, which must tile it."""
    everything = whole(spec.shape)
    parts = tuple(Part(box, tuple(holders)) for box, holders in sorted(found.items()))
    if len(parts) == 1 and parts[0].box == everything:
        return parts
    boxes = [part.box for part in parts]
    both = overlap(boxes)
    if both is not None:
        one, other = parts[both[0]], parts[both[1]]
        ranks = [tables[part.holders[0][0]].rank for part in (one, other)]
        raise invalid(
            f"tensor {spec.name}: rank {ranks[0]} holds {one.box} and rank {ranks[1]} holds {other.box}, which overlap "
            "without being equal; two shards of a tensor must be equal or disjoint",
            [spec.name],
            ranks,
        )
    if sum(box.volume for box in boxes) != everything.volume:
        missing = uncovered(everything, boxes)
        ranks = sorted({tables[source].rank for part in parts for source, _ in part.holders})
        raise invalid(
            f"missing part {missing} of tensor {spec.name} (shape {list(spec.shape)}): no rank publishes it. "
            f"Its other parts come from ranks {ranks}; did every rank publish?",
            [spec.name],
            ranks,
        )
    return parts


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
