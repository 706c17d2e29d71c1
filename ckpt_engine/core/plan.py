"""The plan compiler: which worker reads which box from where, and what each source digests. Pure.

It intersects what each worker needs with the parts that sources hold, takes one of several replicas for each piece, and
cuts every shard into atoms that all needs are unions of. It moves nothing and knows no digest (core/sealed.py does).
Runs in the manager, once for each set of tables and needs; workers with equal needs, host and transports share a plan.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ckpt_engine.core.boxes import Box, intersect
from ckpt_engine.core.cells import Cells, NeedMap, Overlap, cut
from ckpt_engine.core.dtypes import itemsize
from ckpt_engine.core.manifest import Part, Publication, blob_digest, canonical
from ckpt_engine.core.problems import CkptEngineError, error, internal, invalid, precondition
from ckpt_engine.core.topology import choose_transport, same_host
from ckpt_engine.v1.weights_pb2 import Atoms, Host, Piece, PlanSource, Region, WorkerNeeds, WorkerPlan

Choose = Callable[[Host, str, Host, Sequence[str]], tuple[str, str]]
"""(source's host, its region's transport, worker's host, transports available there) to (transport, reason)."""


@dataclass(frozen=True)
class PlanRequest:
    """A worker to plan for. key: the caller's name for it, e.g. (replica, rank). transports: available on its host."""

    key: Hashable
    needs: WorkerNeeds
    host: Host
    transports: Sequence[str]


@dataclass(frozen=True)
class Plans:
    """What was compiled. workers: by the key of their request. cells: see core/cells.py."""

    publication: Publication
    workers: Mapping[Hashable, WorkerPlan]
    cells: Cells
    maps: Mapping[Hashable, NeedMap]

    @property
    def atoms(self) -> Mapping[int, Atoms]:
        """What each source digests, by its index in the publication's tables."""
        return self.cells.atoms


def compile_plans(
    publication: Publication,
    table_digests: Sequence[bytes],
    workers: Sequence[PlanRequest],
    choose: Choose = choose_transport,
) -> Plans:
    """Plans for all workers of an update, and the atoms of every source.

    Raises INVALID_ARGUMENT for a need that does not fit the manifest, FAILED_PRECONDITION for needs of another manifest
    or tables that are not the publication's, and what `choose` raises if no holder of a needed part can be reached.
    """
    if tuple(table_digests) != publication.table_digests:
        raise precondition("the tables have changed since they were merged; merge them again")
    everyone = range(len(publication.tables))
    compiled = _compile(publication, workers, everyone, choose)
    cells = cut(publication, (overlap for each in compiled for overlap in each.overlaps), everyone)
    return _plans(publication, compiled, cells)


def compile_late(
    sealed: Plans, workers: Sequence[PlanRequest], sources: Collection[int], choose: Choose = choose_transport
) -> Plans:
    """Plans for workers that join an update which others have already installed, reading only from `sources`.

    If the sealed atoms are fine enough, the result has the same `cells` (`result.cells is sealed.cells`): their digests
    serve, and nothing is digested anew. Else it has cells of its own, and atoms of `sources` only; once they are
    digested, `core.sealed.check_unchanged` tells whether the bytes are those that were sealed. Raises as
    `compile_plans`.
    """
    compiled = _compile(sealed.publication, workers, sources, choose)
    if all(each.map_on(sealed.cells) is not None for each in compiled):
        return _plans(sealed.publication, compiled, sealed.cells)
    cells = cut(sealed.publication, (overlap for each in compiled for overlap in each.overlaps), sources)
    return _plans(sealed.publication, compiled, cells)


@dataclass(frozen=True)
class _Compiled:
    """One plan, and the workers that share it."""

    keys: list[Hashable]
    overlaps: list[Overlap]
    count: int
    plan: WorkerPlan

    def map_on(self, cells: Cells) -> NeedMap | None:
        return cells.map(self.overlaps, self.count)


def _plans(publication: Publication, compiled: list[_Compiled], cells: Cells) -> Plans:
    workers: dict[Hashable, WorkerPlan] = {}
    maps: dict[Hashable, NeedMap] = {}
    for each in compiled:
        found = each.map_on(cells)
        if found is None:
            raise internal("the cells of a plan are not cut along its needs")
        for key in each.keys:
            workers[key] = each.plan
            maps[key] = found
    return Plans(publication, workers, cells, maps)


def _compile(
    publication: Publication, workers: Sequence[PlanRequest], sources: Collection[int], choose: Choose
) -> list[_Compiled]:
    needed: dict[bytes, list[Overlap]] = {}
    compiled: dict[tuple[bytes, bytes, tuple[str, ...]], _Compiled] = {}
    finder = _Finder(publication)
    keys: set[Hashable] = set()
    for worker in workers:
        if worker.key in keys:
            raise invalid(f"worker {worker.key} is to be planned for twice")
        keys.add(worker.key)
        needs_digest = blob_digest(canonical(worker.needs))
        same = (needs_digest, canonical(worker.host), tuple(worker.transports))
        if same in compiled:
            compiled[same].keys.append(worker.key)
            continue
        if needs_digest not in needed:
            needed[needs_digest] = finder.overlaps(worker)
        overlaps = needed[needs_digest]
        reader = _Reader(publication, worker, frozenset(sources), choose, spread=len(compiled))
        plan = reader.plan(overlaps, needs_digest)
        compiled[same] = _Compiled([worker.key], overlaps, len(worker.needs.needs), plan)
    return list(compiled.values())


class _Finder:
    """Finds the parts that a need overlaps. Tensors of many parts are searched by bisection."""

    _MANY = 8

    def __init__(self, publication: Publication) -> None:
        self._publication = publication
        self._sorted: dict[int, tuple[int, list[int], list[int]] | None] = {}

    def overlaps(self, worker: PlanRequest) -> list[Overlap]:
        """Of all needs of a worker, in their order."""
        publication = self._publication
        if worker.needs.manifest_digest != publication.manifest_digest:
            raise precondition(
                f"worker {worker.key} prepared for manifest {worker.needs.manifest_digest.hex()[:16]}, but "
                f"{publication.manifest_digest.hex()[:16]} is published; it has to prepare again"
            )
        shapes = [tuple(spec.shape) for spec in publication.manifest.tensors]
        found: list[Overlap] = []
        for index, need in enumerate(worker.needs.needs):
            tensor = need.tensor
            box = Box(tuple(need.start), tuple(need.stop))
            if tensor >= len(shapes) or not _fits(box, shapes[tensor]):
                raise self._unfit(worker, index, tensor, box)
            for number, part in self._near(tensor, box):
                common = intersect(box, part.box)
                if common is not None:
                    found.append(Overlap(index, tensor, number, common))
        return found

    def _near(self, tensor: int, box: Box) -> Iterator[tuple[int, Part]]:
        parts = self._publication.parts[tensor]
        if len(parts) < self._MANY:
            yield from enumerate(parts)
            return
        if tensor not in self._sorted:
            self._sorted[tensor] = _monotone(parts)
        order = self._sorted[tensor]
        first, end = 0, len(parts)
        if order is not None:
            axis, starts, stops = order
            first, end = bisect_right(stops, box.start[axis]), bisect_left(starts, box.stop[axis])
        for number in range(first, end):
            yield number, parts[number]

    def _unfit(self, worker: PlanRequest, index: int, tensor: int, box: Box) -> CkptEngineError:
        specs = self._publication.manifest.tensors
        if tensor >= len(specs):
            return invalid(
                f"need {index} of worker {worker.key} is of tensor {tensor}, but the manifest has {len(specs)}; "
                "it has to prepare again"
            )
        spec = specs[tensor]
        return invalid(
            f"need {index} of worker {worker.key} is {list(box.start)} to {list(box.stop)} of tensor {spec.name}, "
            f"whose shape is {list(spec.shape)}; it has to prepare again",
            [spec.name],
        )


def _fits(box: Box, shape: tuple[int, ...]) -> bool:
    if not len(box.start) == len(box.stop) == len(shape):
        return False
    return all(0 <= start <= stop <= size for start, stop, size in zip(box.start, box.stop, shape, strict=True))


def _monotone(parts: Sequence[Part]) -> tuple[int, list[int], list[int]] | None:
    """An axis along which both starts and stops of sorted parts rise, with them; None if there is none."""
    for axis in range(parts[0].box.rank):
        starts = [part.box.start[axis] for part in parts]
        if starts[0] != starts[-1]:
            stops = [part.box.stop[axis] for part in parts]
            rising = all(a <= b for a, b in pairwise(starts)) and all(a <= b for a, b in pairwise(stops))
            return (axis, starts, stops) if rising else None
    return None


class _Reader:
    """Chooses, for one worker, where each piece comes from."""

    def __init__(
        self, publication: Publication, worker: PlanRequest, sources: frozenset[int], choose: Choose, spread: int
    ) -> None:
        self._publication = publication
        self._worker = worker
        self._sources = sources
        self._choose = choose
        self._spread = spread
        self._near = {source: same_host(table.host, worker.host) for source, table in enumerate(publication.tables)}
        self._regions = [{region.id: region for region in table.regions} for table in publication.tables]
        self._edges: dict[tuple[int, str], tuple[str, str] | CkptEngineError] = {}

    def plan(self, overlaps: Sequence[Overlap], needs_digest: bytes) -> WorkerPlan:
        publication = self._publication
        widths = [itemsize(spec.dtype) for spec in publication.manifest.tensors]
        pieces: list[tuple[int, int, int, Overlap, tuple[int, ...], str]] = []
        total = 0
        for overlap in overlaps:
            part = publication.parts[overlap.tensor][overlap.part]
            source, shard_index, transport = self._holder(overlap, part)
            shard = publication.tables[source].shards[shard_index]
            stride = tuple(shard.stride)
            width = widths[overlap.tensor]
            offset = shard.offset
            if overlap.box != part.box:
                offset += width * sum(
                    (inner - outer) * step
                    for inner, outer, step in zip(overlap.box.start, part.box.start, stride, strict=True)
                )
            total += overlap.box.volume * width
            pieces.append((source, shard.region, offset, overlap, stride, transport))
        pieces.sort()  # as they lie in memory
        edges: dict[tuple[int, str], tuple[int, set[int]]] = {}
        for source, region, _, _, _, transport in pieces:
            edges.setdefault((source, transport), (len(edges), set()))[1].add(region)
        return WorkerPlan(
            manifest_digest=publication.manifest_digest,
            needs_digest=needs_digest,
            sources=[self._source(source, offered, regions) for (source, offered), (_, regions) in edges.items()],
            pieces=[
                Piece(
                    need=overlap.need,
                    source=edges[source, transport][0],
                    region=region,
                    offset=offset,
                    start=overlap.box.start,
                    stop=overlap.box.stop,
                    stride=stride,
                )
                for source, region, offset, overlap, stride, transport in pieces
            ],
            bytes=total,
        )

    def _holder(self, overlap: Overlap, part: Part) -> tuple[int, int, str]:
        """(source, shard, transport that its region offers): near ones first, then another one for each worker."""
        reached: list[tuple[int, int, str]] = []
        problems: dict[int, CkptEngineError] = {}
        for source, shard in part.holders:
            if source not in self._sources:
                continue
            transport = self._region(source, shard).transport
            edge = self._edge(source, transport)
            if isinstance(edge, CkptEngineError):
                problems[source] = edge
            else:
                reached.append((source, shard, transport))
        if len(reached) == 1:
            return reached[0]
        if not reached:
            raise self._unreachable(overlap, part, problems)
        near = [holder for holder in reached if self._near[holder[0]]] or reached
        return near[self._spread % len(near)]

    def _region(self, source: int, shard: int) -> Region:
        return self._regions[source][self._publication.tables[source].shards[shard].region]

    def _edge(self, source: int, transport: str) -> tuple[str, str] | CkptEngineError:
        key = source, transport
        if key not in self._edges:
            host = self._publication.tables[source].host
            try:
                self._edges[key] = self._choose(host, transport, self._worker.host, self._worker.transports)
            except CkptEngineError as problem:
                self._edges[key] = problem
        return self._edges[key]

    def _source(self, source: int, offered: str, regions: Collection[int]) -> PlanSource:
        edge = self._edge(source, offered)
        if isinstance(edge, CkptEngineError):
            raise edge
        table = self._publication.tables[source]
        return PlanSource(
            rank=table.rank,
            host=table.host,
            transport=edge[0],
            reason=edge[1],
            regions=[self._regions[source][id] for id in sorted(regions)],
        )

    def _unreachable(self, overlap: Overlap, part: Part, problems: Mapping[int, CkptEngineError]) -> CkptEngineError:
        name = self._publication.manifest.tensors[overlap.tensor].name
        ranks = sorted({self._publication.tables[source].rank for source, _ in part.holders})
        where = f"worker {self._worker.key} cannot read {overlap.box} of tensor {name}"
        if not problems:
            return precondition(
                f"{where}: ranks {ranks}, which hold it, do not keep it sealed; it is served by the next update",
                [name],
                ranks,
            )
        first = next(iter(problems.values())).problem
        return error(first.code, f"{where} from ranks {ranks}: {first.message}", [name], ranks)
