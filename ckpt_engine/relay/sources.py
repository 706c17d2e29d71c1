"""The holders of a version, as a relay reads them: which of them it reaches, and in which order it asks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import mul

import torch

from ckpt_engine.core.boxes import Box
from ckpt_engine.core.dtypes import itemsize
from ckpt_engine.core.offers import by_transport, label
from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.core.publication import PartHolder, Place, Publication, join_sources
from ckpt_engine.core.sealed_record import ProvenRecord
from ckpt_engine.core.topology import Choice, choose_transport
from ckpt_engine.core.transports import GPU_MEMORY, memory_of
from ckpt_engine.relay.gpus import TrainersGpus
from ckpt_engine.torch_dtypes import torch_dtype
from ckpt_engine.transport.base import Leased, Move, OpenedRegions, Transport, Viewable
from ckpt_engine.v1.weights_pb2 import Host, Problem, Region, SourceTable


@dataclass(frozen=True, slots=True)
class Reading:
    """A shard of one source, as it is read."""

    source: str
    opened: OpenedRegions
    region: Region
    placed: Place
    first: tuple[int, ...]  # of the shard, global coordinates
    dtype: str
    nearness: tuple[int, int]  # distance, then its place among the tables; the lowest is asked first
    is_plain: bool  # in memory of the host and of the served dtype, so it is digested while it is copied
    gpu: int | None = None  # the ordinal of the GPU that reads it, if it lies on one

    def offset(self, box: Box) -> int:
        """Offset of a box's first element, bytes from the start of the region."""
        width = itemsize(self.placed.stored or self.dtype)
        inside = (coordinate - first for coordinate, first in zip(box.start, self.first, strict=True))
        return self.placed.offset + width * int(sum(map(mul, inside, self.placed.stride)))

    def view(self, box: Box) -> torch.Tensor:
        """A box where it lies."""
        assert isinstance(self.opened, Viewable)
        return self.opened.view(self.region, self.offset(box), box.shape, self.placed.stride, self.dtype)

    def move(self, box: Box, destination: torch.Tensor) -> Move:
        """The move of a box."""
        offset, stride, stored = self.offset(box), self.placed.stride, self.placed.stored
        return Move(self.region, offset, box.shape, stride, self.dtype, destination, stored)

    def place(self, box: Box) -> tuple[str, int, int]:
        """Where a box lies: the order in which boxes are read."""
        return self.source, self.region.id, self.offset(box)


class Sources:
    """The opened tables of one version's holders. A source that is out of reach or does not fit is left out.

    tables: in the order in which equally near ones are asked. host: of this process. gpus: with which it reads GPUs.
    faults: why sources are left out.
    """

    def __init__(
        self,
        recorded: ProvenRecord,
        tables: Sequence[SourceTable],
        transports: Mapping[str, Transport],
        host: Host,
        gpus: TrainersGpus | None = None,
    ) -> None:
        self.faults: list[Problem] = []
        self._recorded = recorded
        self._specs = recorded.record.manifest.tensors
        self._transports = transports
        self._host = host
        self._gpus = gpus or TrainersGpus()
        self._publication = self._join(list(tables))
        self._opened: dict[tuple[int, int], tuple[OpenedRegions, Region, int, int | None]] = {}
        self._lost: dict[int, Problem] = {}  # by id of OpenedRegions: why they cannot be read in this filling
        for number, table in enumerate(self._publication.tables):
            self._open(number, table)
        self._readings: dict[tuple[int, int], Reading] = {}

    @property
    def reading_gpus(self) -> list[int]:
        """Ordinals of the GPUs with which it reads GPU memory."""
        return sorted({gpu for *_, gpu in self._opened.values() if gpu is not None})

    def dtype(self, tensor: int) -> torch.dtype:
        """The dtype as which a tensor of the record is served."""
        return torch_dtype(self._specs[tensor].dtype)

    def holders(self, tensor: int, box: Box) -> Iterator[tuple[Box, tuple[Reading, ...]]]:
        """Disjoint parts of a box, each with its holders within reach, the nearest first."""
        publication = self._publication
        for hit in publication.partitions[tensor].hits(box):
            found = [self._reading(tensor, holder) for holder in publication.parts[tensor][hit.part].holders]
            near = sorted((each for each in found if each is not None), key=lambda each: each.nearness)
            yield hit.box, tuple(near)

    def why_not(self, tensor: int, box: Box) -> Problem:
        """Why no source within reach holds all of a box."""
        name = self._specs[tensor].name
        why = "; ".join(dict.fromkeys(fault.message for fault in self.faults))
        labels = ", ".join(label(table) for table in self._publication.tables) or "no source"
        return Problem(
            code=Problem.CODE_NOT_FOUND,
            message=f"no source within reach holds {box} of tensor {name} "
            f"({labels} was asked{f': {why}' if why else ''})",
            tensors=[name],
        )

    def begin(self) -> None:
        """Checks that the sources are unchanged, and asks them to stay so for now. Called before each filling."""
        self._lost.clear()
        for opened in self._each():
            try:
                opened.check()
            except CkptEngineError as error:
                self._lost[id(opened)] = error.problem

    def lost(self, readings: Iterable[Reading]) -> Problem | None:
        """Why some of these cannot be read in this filling (a truncated file would end this process); None: all can."""
        return next((self._lost[id(each.opened)] for each in readings if id(each.opened) in self._lost), None)

    def end(self) -> None:
        """Tells the sources that nothing is read for now. Called after each filling."""
        for opened in self._each():
            if isinstance(opened, Leased):
                opened.rest()

    def close(self) -> None:
        """Closes all that was opened. Never raises."""
        for opened in self._each():
            opened.close()
        self._opened, self._readings = {}, {}

    def _each(self) -> list[OpenedRegions]:
        return list({id(opened): opened for opened, *_ in self._opened.values()}.values())

    def _join(self, tables: list[SourceTable]) -> Publication:
        manifest = self._recorded.record.manifest
        try:
            return join_sources(manifest, tables)
        except CkptEngineError:
            fitting = []
            for table in tables:
                try:
                    join_sources(manifest, [table])
                    fitting.append(table)
                except CkptEngineError as error:
                    self.faults.append(error.problem)
            return join_sources(manifest, fitting)

    def _open(self, number: int, table: SourceTable) -> None:
        """Opens each region over the nearest transport that reaches it, or over the next one if that fails. Regions of
        one transport are opened together."""
        host = self._gpus.seen_from(table, self._host)
        untried: dict[int, list[tuple[Choice, Region]]] = {}
        for region in table.regions:
            ways: list[tuple[Choice, Region]] = []
            faults: list[Problem] = []
            for transport, way in by_transport(region, label(table)).items():
                try:
                    ways.append((choose_transport(table.host, transport, host, list(self._transports)), way))
                except CkptEngineError as error:
                    faults.append(error.problem)
            untried[region.id] = sorted(ways, key=lambda each: each[0].distance)
            if not ways:
                self.faults += faults
        while untried := {id: ways for id, ways in untried.items() if ways}:
            chosen: dict[str, tuple[Choice, list[Region]]] = {}
            for choice, way in (ways.pop(0) for ways in untried.values()):
                chosen.setdefault(choice.transport, (choice, []))[1].append(way)
            for transport, (choice, regions) in chosen.items():
                try:
                    with self._gpus.on(table, self._host) as gpu:
                        opened = self._transports[transport].open(regions)
                except CkptEngineError as error:
                    self.faults.append(error.problem)
                    continue
                for each in regions:
                    on_gpu = gpu if GPU_MEMORY in memory_of(each.transport) else None
                    self._opened[number, each.id] = opened, each, choice.distance, on_gpu
                    del untried[each.id]

    def _reading(self, tensor: int, holder: PartHolder) -> Reading | None:
        key = holder.source, holder.shard
        if key not in self._readings:
            place = self._publication.places[holder.source][holder.shard]
            if (holder.source, place.region) not in self._opened:
                return None
            opened, region, distance, gpu = self._opened[holder.source, place.region]
            table = self._publication.tables[holder.source]
            shard = table.shards[holder.shard]
            plain = not place.stored and GPU_MEMORY not in memory_of(region.transport) and isinstance(opened, Viewable)
            self._readings[key] = Reading(
                source=table.id,
                opened=opened,
                region=region,
                placed=place,
                first=tuple(shard.start),
                dtype=self._specs[tensor].dtype,
                nearness=(distance, holder.source),
                is_plain=plain,
                gpu=gpu,
            )
        return self._readings[key]
