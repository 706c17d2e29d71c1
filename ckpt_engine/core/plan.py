"""The plan compiler: which worker reads which box from where, and what each source digests. Pure.

It intersects each worker's needs with the parts that sources hold, chooses one holder for each piece, and cuts every
shard into atoms such that all needs are unions of atoms. It moves nothing and knows no digest (core/sealed.py does).
Runs in the manager, once for each set of tables and needs; workers with equal needs, host and transports share a plan.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from operator import mul

import numpy as np

from ckpt_engine.core.boxes import Box, uncovered
from ckpt_engine.core.cells import Cells, NeededBoxes, NeedMap, cut
from ckpt_engine.core.chunk_sizes import chunk_bytes
from ckpt_engine.core.dtypes import itemsize
from ckpt_engine.core.manifest import blob_digest, canonical
from ckpt_engine.core.offers import Shut, by_transport, label, labels, ranks_of, ways_shut
from ckpt_engine.core.problems import CkptEngineError, error, internal, invalid, precondition
from ckpt_engine.core.publication import Part, PartHolder, Place, Publication
from ckpt_engine.core.topology import Choice, choose_transport
from ckpt_engine.core.transports import is_collective
from ckpt_engine.v1.weights_pb2 import (
    Atoms,
    Host,
    OtherWay,
    Piece,
    PlanSource,
    SourceTable,
    WorkerNeeds,
    WorkerPlan,
)

RelayPlace = tuple[str, str]
"""Boot id of a host and the directory of its relay: workers with the same read one relay."""

Choose = Callable[[Host, str, Host, Sequence[str]], Choice]
"""(source's host, its region's transport, worker's host, transports available there) to a choice."""


@dataclass(frozen=True)
class PlanRequest:
    """A worker to plan for."""

    key: Hashable  # the caller's name for it, such as (replica, rank)
    needs: WorkerNeeds
    host: Host
    transports: Sequence[str]  # available on its host
    collective: bool = False  # it gets all that it needs in a collective; False: it reads over no collective
    shut: tuple[Shut, ...] = ()  # regions that it could not open, so they are read another way


@dataclass(frozen=True)
class Plans:
    """Compiled plans. Mappings are by the key of the worker's request."""

    publication: Publication
    workers: Mapping[Hashable, WorkerPlan]
    cells: Cells
    maps: Mapping[Hashable, NeedMap]
    distances: Mapping[Hashable, int]  # of the farthest source that each worker reads

    @property
    def atoms(self) -> Mapping[int, Atoms]:
        """What each source digests, by its index in the publication's tables."""
        return self.cells.atoms


def compile_plans(
    publication: Publication,
    table_digests: Sequence[bytes],
    workers: Sequence[PlanRequest],
    choose: Choose = choose_transport,
    along: Sequence[Sequence[Box]] = (),
    refused: dict[Hashable, CkptEngineError] | None = None,
) -> Plans:
    """Compiles plans for all workers of an update, and the atoms of every source.

    along: for each tensor, boxes that cells are cut along too (those of a sealed record). refused: is filled with the
    workers that cannot be planned for, by key, while the others are planned for; None: the first such error is raised.
    Without `along`, cells are also cut along the needs of refused workers: relays of their hosts bring whole cells, and
    so no more than what is needed there.

    Raises INVALID_ARGUMENT for a need that does not fit the manifest, FAILED_PRECONDITION for needs of another manifest
    or for tables other than the publication's, and what `choose` raises if no holder of a needed part can be reached.
    """
    if tuple(table_digests) != publication.table_digests:
        raise precondition("the tables have changed since they were merged; merge them again")
    needs_by_digest: dict[bytes, NeededBoxes] = {}
    needs_by_host: dict[RelayPlace, set[bytes]] = {}
    compiled = _compile(publication, workers, choose, refused, needs_by_digest, needs_by_host)
    boxes = [(tensor, box) for tensor, boxes in enumerate(along) for box in boxes]
    needed = [each.needs for each in compiled] if along else needs_by_digest.values()
    # A version that was sealed in larger cells has no digests of smaller ones.
    readers = [] if along else _readers(needs_by_host, needs_by_digest)
    cells = cut(publication, [*needed, boxes], 0 if along else chunk_bytes(publication.bytes), readers)
    return _plans(publication, compiled, cells)


def _readers(
    needs_by_host: Mapping[RelayPlace, Collection[bytes]], needs_by_digest: Mapping[bytes, NeededBoxes]
) -> list[list[NeededBoxes]]:
    """What the workers of a host need, of each kind of host once."""
    kinds = {tuple(sorted(digests)) for digests in needs_by_host.values()}
    return [[needs_by_digest[digest] for digest in kind] for kind in sorted(kinds)]


@dataclass(frozen=True)
class _SharedPlan:
    """One plan, and the workers that share it."""

    keys: list[Hashable]
    needs: NeededBoxes
    plan: WorkerPlan
    distance: int


def _plans(publication: Publication, compiled: list[_SharedPlan], cells: Cells) -> Plans:
    workers: dict[Hashable, WorkerPlan] = {}
    maps: dict[Hashable, NeedMap] = {}
    map_of: dict[int, NeedMap | None] = {}  # by identity: equal needs are one object
    for each in compiled:
        if id(each.needs) not in map_of:
            map_of[id(each.needs)] = cells.map(each.needs)
        found = map_of[id(each.needs)]
        if found is None:
            raise internal("the cells of a plan are not cut along its needs")
        for key in each.keys:
            workers[key] = each.plan
            maps[key] = found
    distances = {key: each.distance for each in compiled for key in each.keys}
    return Plans(publication, workers, cells, maps, distances)


def _relay_place(host: Host) -> RelayPlace:
    return host.boot_id, host.relay_directory


def _compile(
    publication: Publication,
    workers: Sequence[PlanRequest],
    choose: Choose,
    refused: dict[Hashable, CkptEngineError] | None,
    needs_by_digest: dict[bytes, NeededBoxes],
    needs_by_host: dict[RelayPlace, set[bytes]],
) -> list[_SharedPlan]:
    """Compiles one plan for workers that can share it. needs_by_digest, needs_by_host: are filled with the needs of all
    workers, and with their digests by the place of the relay that each reads."""
    compiled: dict[tuple[bytes, bytes, tuple[str, ...], bool, tuple[Shut, ...]], _SharedPlan] = {}
    keys: set[Hashable] = set()
    for worker in workers:
        if worker.key in keys:
            raise invalid(f"worker {worker.key} is in the request twice")
        keys.add(worker.key)
        needs_digest = blob_digest(canonical(worker.needs))
        same = (needs_digest, canonical(worker.host), tuple(worker.transports), worker.collective, worker.shut)
        if same in compiled:
            compiled[same].keys.append(worker.key)
            continue
        try:
            if needs_digest not in needs_by_digest:
                needs_by_digest[needs_digest] = _checked_needs(publication, worker)
            needs_by_host.setdefault(_relay_place(worker.host), set()).add(needs_digest)
            reader = _PlanReader(publication, worker, choose, spread=len(compiled))
            plan = reader.plan(needs_by_digest[needs_digest], needs_digest)
        except CkptEngineError as problem:
            if refused is None:
                raise
            refused[worker.key] = problem
            continue
        compiled[same] = _SharedPlan([worker.key], needs_by_digest[needs_digest], plan, reader.distance)
    return list(compiled.values())


def _checked_needs(publication: Publication, worker: PlanRequest) -> NeededBoxes:
    """A worker's needs. Raises FAILED_PRECONDITION or INVALID_ARGUMENT unless they fit the manifest."""
    if worker.needs.manifest_digest != publication.manifest_digest:
        raise precondition(
            f"worker {worker.key} prepared for manifest {worker.needs.manifest_digest.hex()[:16]}, but "
            f"{publication.manifest_digest.hex()[:16]} is published; it has to prepare again"
        )
    specs = publication.manifest.tensors
    shapes = [tuple(spec.shape) for spec in specs]
    fits_by_box: dict[tuple[Box, tuple[int, ...]], bool] = {}
    needed: list[tuple[int, Box]] = []
    for index, need in enumerate(worker.needs.needs):
        tensor = need.tensor
        box = Box(tuple(need.start), tuple(need.stop))
        if tensor >= len(shapes):
            raise invalid(
                f"need {index} of worker {worker.key} is of tensor {tensor}, but the manifest has {len(specs)}; "
                "it has to prepare again"
            )
        shape = shapes[tensor]
        fits = fits_by_box.get((box, shape))
        if fits is None:
            fits = fits_by_box[box, shape] = _fits(box, shape)
        if not fits:
            name = specs[tensor].name
            raise invalid(
                f"need {index} of worker {worker.key} is {list(box.start)} to {list(box.stop)} of tensor {name}, whose "
                f"shape is {list(shape)}; it has to prepare again",
                [name],
            )
        needed.append((tensor, box))
    return needed


def _fits(box: Box, shape: tuple[int, ...]) -> bool:
    if not len(box.start) == len(box.stop) == len(shape):
        return False
    return all(0 <= start <= stop <= size for start, stop, size in zip(box.start, box.stop, shape, strict=True))


class _PlanReader:
    """Chooses, for one worker, where each piece comes from."""

    def __init__(self, publication: Publication, worker: PlanRequest, choose: Choose, spread: int) -> None:
        self._publication = publication
        self._worker = worker
        self._choose = choose
        self._spread = spread
        self.distance = 0  # of the farthest source that is read
        self._regions = [
            {region.id: by_transport(region, label(table)) for region in table.regions} for table in publication.tables
        ]
        self._edges: dict[tuple[int, str], Choice | CkptEngineError] = {}
        self._ways: dict[tuple[int, int], Choice | CkptEngineError] = {}  # by source and region

    def plan(self, needed: NeededBoxes, needs_digest: bytes) -> WorkerPlan:
        publication = self._publication
        widths = [itemsize(spec.dtype) for spec in publication.manifest.tensors]
        total = 0
        pieces: list[tuple[int, int, Box]] = []  # need, source, box
        places: list[Place] = []
        for need, (tensor, box) in enumerate(needed):
            parts = publication.parts[tensor]
            width = widths[tensor]
            hits = publication.partitions[tensor].hits(box)
            if tensor in publication.incomplete:
                self._check_held(tensor, box, [hit.box for hit in hits])
            for hit in hits:
                source, shard, holder_delta = self._holder(tensor, hit.box, parts[hit.part])
                place = publication.places[source][shard]
                step = itemsize(place.stored) if place.stored else width
                for delta in filter(None, (hit.delta, holder_delta)):
                    offset = place.offset + step * sum(map(mul, delta, place.stride))
                    place = Place(place.region, offset, place.stride, place.stored)
                total += hit.volume * width
                pieces.append((need, source, hit.box))
                places.append(place)
        # As they lie in memory: by source, region, offset.
        order = np.lexsort(
            (
                np.array([place.offset for place in places], dtype=np.uint64),
                np.array([place.region for place in places], dtype=np.int64),
                np.array([source for _, source, _ in pieces], dtype=np.int64),
            )
        ).tolist()
        plan_sources, source_index = self._plan_sources(
            sorted({(source, place.region) for (_, source, _), place in zip(pieces, places, strict=True)})
        )
        return WorkerPlan(
            manifest_digest=publication.manifest_digest,
            needs_digest=needs_digest,
            sources=plan_sources,
            pieces=[self._piece(pieces[index], places[index], source_index) for index in order],
            bytes=total,
        )

    def _piece(
        self,
        piece: tuple[int, int, Box],
        place: Place,
        source_index: Mapping[tuple[int, int], int],
    ) -> Piece:
        need, source, (start, stop) = piece
        return Piece(
            need=need,
            source=source_index[source, place.region],
            region=place.region,
            offset=place.offset,
            start=start,
            stop=stop,
            stride=place.stride,
            stored_dtype=place.stored,
        )

    def _plan_sources(self, regions: Sequence[tuple[int, int]]) -> tuple[list[PlanSource], dict[tuple[int, int], int]]:
        """Lists the plan's edges, and by (source, region) the edge that has it. A source that is read over two
        transports is two edges."""
        found: dict[tuple[int, str], PlanSource] = {}
        index: dict[tuple[int, int], int] = {}
        for source, region in regions:
            way = self._way(source, region)
            key = source, way.transport
            self.distance = max(self.distance, way.distance)
            if key not in found:
                table = self._publication.tables[source]
                rank = table.rank if table.HasField("rank") else None
                reason = "; ".join([way.reason, *self._shut(source).values()])
                found[key] = PlanSource(
                    rank=rank, source=table.id, host=table.host, transport=way.transport, reason=reason
                )
            found[key].regions.append(self._regions[source][region][way.transport])
            index[source, region] = list(found).index(key)
        for (source, transport), edge in found.items():
            edge.others.extend(self._others(source, transport, [region.id for region in edge.regions]))
        return list(found.values()), index

    def _others(self, source: int, transport: str, regions: Sequence[int]) -> list[OtherWay]:
        """The other ways in which the worker can open all of these regions, nearest first."""
        offers = [self._regions[source][region] for region in regions]
        names = [name for name in offers[0] if name != transport and all(name in ways for ways in offers)]
        ways = [way for way in (self._edge(source, name) for name in names) if not isinstance(way, CkptEngineError)]
        return [
            OtherWay(transport=way.transport, reason=way.reason, regions=[each[way.transport] for each in offers])
            for way in sorted(ways, key=lambda way: way.distance)
            if not is_collective(way.transport)
        ]

    def _holder(self, tensor: int, box: Box, part: Part) -> PartHolder:
        """Chooses one of the nearest holders, another one for each worker. Raises if none can be reached."""
        distances = [self._distance(holder) for holder in part.holders]
        reached = [distance for distance in distances if distance is not None]
        if not reached:
            raise self._unreachable(tensor, box, part)
        nearest = min(reached)
        near = [holder for holder, distance in zip(part.holders, distances, strict=True) if distance == nearest]
        return near[self._spread % len(near)]

    def _region(self, holder: PartHolder) -> int:
        return self._publication.places[holder.source][holder.shard].region

    def _distance(self, holder: PartHolder) -> int | None:
        """How far a holder is; None: out of reach."""
        way = self._look(holder.source, self._region(holder))
        return None if isinstance(way, CkptEngineError) else way.distance

    def _way(self, source: int, region: int) -> Choice:
        """The nearest way into a region that reaches the worker. Raises if none does."""
        way = self._look(source, region)
        if isinstance(way, CkptEngineError):
            raise way
        return way

    def _look(self, source: int, region: int) -> Choice | CkptEngineError:
        key = source, region
        if key not in self._ways:
            edges = [self._edge(source, transport) for transport in self._regions[source][region]]
            ways = [edge for edge in edges if not isinstance(edge, CkptEngineError)]
            self._ways[key] = min(ways, key=lambda way: way.distance) if ways else _worst(edges)
        return self._ways[key]

    def _edge(self, source: int, transport: str) -> Choice | CkptEngineError:
        key = source, transport
        if key not in self._edges:
            host = self._publication.tables[source].host
            try:
                self._check_collective(self._publication.tables[source], transport)
                if transport in self._shut(source):
                    raise precondition(f"{self._shut(source)[transport]}; the next update tries it again")
                self._edges[key] = self._choose(host, transport, self._worker.host, self._worker.transports)
            except CkptEngineError as problem:
                self._edges[key] = problem
        return self._edges[key]

    def _shut(self, source: int) -> Mapping[str, str]:
        """Why the worker could not open a source, by transport, as a sentence."""
        name = label(self._publication.tables[source])
        found = ways_shut(self._worker.shut, self._regions[source].values())
        return {way: f"it could not open {name} over {way}: {why}" for way, why in found.items()}

    def _check_collective(self, table: SourceTable, transport: str) -> None:
        """Raises FAILED_PRECONDITION unless this worker may use the transport at all."""
        if is_collective(transport) and not self._worker.collective:
            raise precondition(
                f"{label(table)} publishes for collectives ({transport}), in which replicas take part together: none "
                "reads over it alone"
            )
        if self._worker.collective and not is_collective(transport):
            raise precondition(f"it takes part in a collective, and {label(table)} offers this over {transport}")

    def _check_held(self, tensor: int, box: Box, boxes: Sequence[Box]) -> None:
        """Raises FAILED_PRECONDITION, naming what is missing, unless sources hold all of a box."""
        missing = uncovered(box, boxes)
        if missing is not None:
            name = self._publication.manifest.tensors[tensor].name
            raise precondition(
                f"worker {self._worker.key} needs {box} of tensor {name}, and no source holds {missing} of it any more "
                f"({labels(self._publication.tables) or 'no source'} was asked); the next update of its trainer "
                "brings it up",
                [name],
            )

    def _unreachable(self, tensor: int, box: Box, part: Part) -> CkptEngineError:
        name = self._publication.manifest.tensors[tensor].name
        tables = [self._publication.tables[holder.source] for holder in part.holders]
        where = f"worker {self._worker.key} cannot read {box} of tensor {name} from {labels(tables)}"
        first = part.holders[0]
        failure = self._look(first.source, self._region(first))
        if not isinstance(failure, CkptEngineError):
            return internal(f"{where}, though it is within reach", [name])
        return error(failure.problem.code, f"{where}: {failure.problem.message}", [name], ranks_of(tables))


def _worst(edges: Sequence[Choice | CkptEngineError]) -> CkptEngineError:
    """Why no way leads into a region; with several ways, all their reasons."""
    failures = [edge for edge in edges if isinstance(edge, CkptEngineError)]
    if len(failures) == 1:
        return failures[0]
    code = failures[0].problem.code
    return error(code, "; and ".join(dict.fromkeys(failure.problem.message for failure in failures)))
