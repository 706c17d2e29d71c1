"""A source of a checkpoint directory: safetensors files, read where they lie.

Nothing is copied. It stays sealed as long as the files do not change, so late replicas can install from it. With
`snapshot`, or a served dtype that differs, the weights are copied into shared memory at each seal instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from ckpt_engine.core.offers import rank_id
from ckpt_engine.core.problems import invalid, precondition
from ckpt_engine.source.digests import not_finite, prepare_atoms
from ckpt_engine.source.held import HeldBox
from ckpt_engine.source.host_memory import contiguous
from ckpt_engine.source.lending import Lending
from ckpt_engine.source.memory import MemorySource
from ckpt_engine.source.safetensors import FileTensor, read_directory
from ckpt_engine.source.ways import PublishWish, served_dtype
from ckpt_engine.transport.base import FileMemory
from ckpt_engine.transport.file.files import FileTransport, file_region
from ckpt_engine.transport.mapped import MappedRegions
from ckpt_engine.v1.weights_pb2 import Atoms, Host, Region, Shard, SourceTable, TensorSpec


def directory_source(
    path: Path,
    *,
    host: Host,
    rank: int = 0,
    wish: PublishWish | None = None,
) -> DirectorySource | MemorySource:
    """Opens a checkpoint directory, or one safetensors file.

    Raises NOT_FOUND or INVALID_ARGUMENT if the files are not a whole checkpoint (see source/safetensors.py).
    """
    wish = wish or PublishWish()
    lending, regions, tensors = _open(path, wish.first_region)
    views = [tensor.view(regions) for tensor in tensors]
    pairs = zip(tensors, views, strict=True)
    cast = any(served_dtype(tensor.entry.name, view.dtype, wish) != view.dtype for tensor, view in pairs)
    if not cast and not wish.snapshot and wish.transport is None:
        description = f"safetensors {path.name}"
        return DirectorySource(lending, regions, tensors, views, host=host, rank=rank, description=description)
    return MemorySource(
        _finder(regions, tensors, views),
        host=host,
        rank=rank,
        wish=wish,
        kind=f"safetensors {path.name}",
    )


class DirectorySource:
    """Offers files as they are. See Source for which call runs when; any thread may make them."""

    def __init__(
        self,
        lending: Lending,
        regions: MappedRegions,
        tensors: list[_InFile],
        views: list[torch.Tensor],
        *,
        host: Host,
        rank: int,
        description: str,
    ) -> None:
        self._lending = lending
        self._regions = regions
        self._sealed = views
        self._has_seal = False
        self._not_finite: list[str] = []
        self._table = SourceTable(
            host=host,
            id=rank_id(rank),
            rank=rank,
            tensors=[TensorSpec(name=found.name, dtype=found.dtype, shape=found.shape) for found in _entries(tensors)],
            regions=lending.regions,
            shards=[
                Shard(
                    tensor=index,
                    start=[0] * len(tensor.entry.shape),
                    stop=tensor.entry.shape,
                    region=tensor.region.id,
                    offset=tensor.entry.offset,
                    stride=contiguous(tensor.entry.shape),
                )
                for index, tensor in enumerate(tensors)
            ],
            stays_sealed=True,
            source_copies=0,
            description=f"{description}, read in place",
        )

    def table(self) -> SourceTable:
        """What the files hold."""
        return self._table

    def check(self) -> None:
        """Raises DATA_LOSS if a file was changed, UNAVAILABLE if it was removed."""
        self._regions.check()

    def seal(self, keep: bool = False) -> float:
        """Checks that the files are unchanged; copies nothing."""
        self.check()
        self._has_seal = True
        return 0.0

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What the files hold."""
        yield from zip((spec.name for spec in self._table.tensors), self._sealed, strict=True)

    def digest(self, atoms: Atoms) -> list[int]:
        """Digests of what the files hold; reads them once."""
        if not self._has_seal:
            raise precondition("the checkpoint was not sealed, or was closed")
        prepared = prepare_atoms(self._table, self._sealed, atoms)
        digests = prepared.run()
        self._not_finite = not_finite(self._table, atoms, prepared)
        return digests

    def not_finite(self) -> list[str]:
        """Names of the tensors in which the last `digest` found NaN or infinity."""
        return self._not_finite

    def withdraw(self, seconds: float) -> None:
        """Closes as `close` does; readers of files keep no memory, so there is nothing to wait for."""
        self._lending.withdraw(seconds)
        self.close()

    def close(self) -> None:
        """Unmaps the files. Readers can still open them: they are not ours."""
        self._has_seal = False
        self._sealed = []
        self._lending.close()
        self._regions.close()


@dataclass(frozen=True, slots=True)
class _InFile:
    entry: FileTensor
    region: Region

    def view(self, regions: MappedRegions) -> torch.Tensor:
        shape = self.entry.shape
        return regions.view(self.region, self.entry.offset, shape, contiguous(shape), self.entry.dtype)


def _entries(tensors: list[_InFile]) -> list[FileTensor]:
    return [tensor.entry for tensor in tensors]


def _open(path: Path, first_region: int) -> tuple[Lending, MappedRegions, list[_InFile]]:
    """Maps the files of a checkpoint; its tensors sorted by name."""
    lending = Lending()
    tensors = []
    regions = []
    for id, header in enumerate(read_directory(path), start=first_region):
        region = file_region(id, str(header.path), header.data_start, header.data_size)
        regions.append(region)
        lending.must_offer(id, FileMemory(str(header.path), header.data_start, header.data_size))
        tensors += [_InFile(entry, region) for entry in header.tensors]
    if not tensors:
        raise invalid(f"nothing to publish: {path} holds no tensors")
    return lending, FileTransport().open(regions), sorted(tensors, key=lambda tensor: tensor.entry.name)


def _finder(regions: MappedRegions, tensors: list[_InFile], views: list[torch.Tensor]) -> Callable[[], list[HeldBox]]:
    boxes = [
        HeldBox(entry.name, view, entry.shape, (0,) * len(entry.shape), "is in a file")
        for entry, view in zip(_entries(tensors), views, strict=True)
    ]

    def find() -> list[HeldBox]:
        regions.check()
        return boxes

    return find
