"""An install of what has changed since the version that a worker holds, and the proof that it came out whole.

It decides which tensors go by their changes and which in full, and whether what lies there afterwards adds up. It does
not decide whether a worker has a base (installer.py), nor what differs between two versions: a table of the host's
relay says so (`delta/table.py`), and is not believed.

A digest is a sum over elements, so for each recorded destination of a need

    sealed(new) - sealed(base) = sum over changed elements (what lies there after - what lay there before) * factor

modulo 2^64. What lay there is read for all needs before the first element is written, and what lies there is read after
the engine's last step, where the digest looks for it. The right side is what the digest of that memory gained. So if
the memory hashed to sealed(base) before, it hashes to sealed(new) now: exactly, and however many versions were
installed in this way before, since each is compared with sealed digests, and none with the sum before it.

That holds only if nothing else writes to a need's memory. So a tensor goes in full if another need, or what the
engine's own loader computes, lies in the same memory; and if its elements are cast, staged, or cut otherwise than in
the relay. What changes in memory without an install is found by the scrub, or by the next install in full.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from ckpt_engine.core.boxes import Box, inside
from ckpt_engine.core.names import some
from ckpt_engine.core.problems import data_loss, precondition
from ckpt_engine.core.strides import contiguous, span
from ckpt_engine.delta.table import ChangeTable
from ckpt_engine.digest.factors import MASK
from ckpt_engine.digest.host import Item, Result, in_threads
from ckpt_engine.digest.placed import Elements, PlacedBox, Places, placed_box
from ckpt_engine.install.ready import Ready
from ckpt_engine.install.resolve import PieceRead, Resolved, TensorWork, bind
from ckpt_engine.install.standing import Standing
from ckpt_engine.record.recording import Recording
from ckpt_engine.transport.base import Comparable, OpenedRegions

FULL_EVERY = 50
"""After so many installs by changes, one is in full."""

ASK_SECONDS = 1.0
"""How long a relay may take to answer in the pause; after that the install goes in full."""

ON_GPUS = False
"""Whether tensors on a GPU go by their changes. They could; that this is faster than in full was not measured yet."""

_AT_ONCE = 1 << 15
"""Most changes that a thread takes at once."""

_MOST_PAINTED = 1 << 24
"""Elements of memory, of all groups of interleaved needs together, that shared ones are looked for in; needs of further
groups go in full. The engine waits for it."""


@dataclass(frozen=True, slots=True)
class Base:
    """The version that a worker holds, as it was proved."""

    root: bytes
    recording: Recording
    expected: Sequence[int]  # digests of the needs, by number
    standing: Standing  # where the tensors were
    since_full: int  # installs since the last one in full


class _AtomPlace(NamedTuple):
    """An atom of the relay, and one place in the model where it belongs."""

    check: int
    offset: int  # of the atom in the relay's slot, bytes; of a region in `region`
    region: int
    elements: int
    width: int
    written: PlacedBox  # where a read of the plan is written to
    digested: PlacedBox  # where the digest of its need looks for it


class _Check(NamedTuple):
    """A destination of a need."""

    need: int
    name: str  # of the model's tensor


class ChangeLayout:
    """How the changes of one plan reach a model's resident tensors. Made before a pause; changes no tensor."""

    def __init__(
        self,
        resolved: Resolved,
        opened: Mapping[str, OpenedRegions],
        tensors: Mapping[str, torch.Tensor],
        names: Sequence[str],
    ) -> None:
        """tensors: of the model. names: the resident ones of them that the plan brings. Raises as `bind`."""
        self.resolved = resolved
        self._compared = {name: regions for name, regions in opened.items() if isinstance(regions, Comparable)}
        computed = {owner for handover in resolved.recording.handovers for owner in handover.owners}
        lone = [
            name
            for name in names
            if (ON_GPUS or tensors[name].device.type == "cpu")
            and name not in computed
            and self._is_plain(resolved.work[name])
        ]
        lone = _alone(lone, names, computed, resolved, tensors)
        self.checks: list[_Check] = []
        self.atoms: list[_AtomPlace] = []
        self._regions = [region for name in self._compared for region in resolved.regions[name]]
        by_changes = [name for name in lone if self._add(name, resolved.work[name], tensors[name])]
        self.needs = {check.need for check in self.checks}
        self._on_host = all(tensors[name].device.type == "cpu" for name in by_changes)
        chosen = frozenset(by_changes)
        rest = [name for name in names if name not in chosen]
        self.rest = Ready(opened, bind(resolved, rest, tensors)) if rest and self.atoms else None
        self.spared_bytes = sum(atom.elements * atom.width for atom in self.atoms)
        for regions in self._compared.values() if self.atoms else ():
            regions.use_changes()

    @property
    def transports(self) -> frozenset[str]:
        """That changes come over."""
        return frozenset(self._compared)

    def changes(self, seconds: float) -> ChangeTable:
        """What differs between the versions of the relay. seconds: for its answer, at most ASK_SECONDS. Raises
        UNAVAILABLE, saying why there is none; DATA_LOSS."""
        return self._first().changes(min(ASK_SECONDS, seconds))

    def offsets(self, slot_bytes: int) -> list[int]:
        """Where each region begins in its slot, in the order of `_AtomPlace.region`."""
        first = self._first()
        return [first.slot_offset(region, slot_bytes) for region in self._regions]

    def each(self, work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
        """Does this work for each item: on several threads, or on the engine's own for its GPU."""
        return in_threads(work, items) if self._on_host else [work(item) for item in items]

    def _first(self) -> Comparable:
        return next(iter(self._compared.values()))

    def _is_plain(self, work: TensorWork) -> bool:
        """Whether all of a tensor comes from the relay as it is served, atom by atom."""
        return (
            bool(work.reads)
            and not any(check.widened for check in work.checks)
            and all(
                read.transport in self._compared
                and not read.stored
                and not read.widened
                and read.box.rank > 0
                and read.stride == contiguous(read.box.shape)
                for read in work.reads
            )
        )

    def _add(self, name: str, work: TensorWork, tensor: torch.Tensor) -> bool:
        """Adds the atoms of a tensor; False: it has to go in full."""
        tensor = tensor.detach().as_subclass(torch.Tensor)
        checks: list[_Check] = []
        atoms: list[_AtomPlace] = []
        for check in work.checks:
            box = self.resolved.recording.needs[check.need].box
            view, volume = check.destination.of(tensor), 0
            for read in _reads_of(work, check.need, check.destination.offset, box):
                volume += read.box.volume
                part = view[inside(read.box, box)]
                digested = placed_box(part, read.box.start)
                written = placed_box(read.destination.of(tensor), read.box.start)
                if digested is None or written is None:
                    return False
                region = self._regions.index(read.region)
                number = len(self.checks) + len(checks)
                atoms.append(
                    _AtomPlace(number, read.offset, region, read.box.volume, tensor.itemsize, written, digested)
                )
            if volume != box.volume:
                return False
            checks.append(_Check(check.need, name))
        self.checks += checks
        self.atoms += atoms
        return True


def _reads_of(work: TensorWork, need: int, offset: int, box: Box) -> Iterator[PieceRead]:
    """The reads that fill one destination of a need, which begins at an offset of the tensor."""
    for read in work.reads:
        if read.need == need:
            ahead = sum(
                (at - first) * step
                for at, first, step in zip(read.box.start, box.start, read.destination.stride, strict=True)
            )
            if read.destination.offset - ahead == offset:
                yield read


def _alone(
    lone: Sequence[str],
    names: Iterable[str],
    computed: Iterable[str],
    resolved: Resolved,
    tensors: Mapping[str, torch.Tensor],
) -> list[str]:
    """Those of `lone` whose needs share memory with nothing else that an install writes."""
    if not lone:
        return []
    views: list[tuple[str, torch.Tensor]] = [(name, tensors[name].detach()) for name in computed if name in tensors]
    for name in names:
        tensor = tensors[name].detach()
        views += [(name, check.destination.of(tensor)) for check in resolved.work[name].checks]
    candidates = frozenset(lone)
    targets = {number for number, (name, _) in enumerate(views) if name in candidates}
    shared = {views[number][0] for number in overlapping([view for _, view in views], targets)}
    return [name for name in lone if name not in shared]


def overlapping(views: Sequence[torch.Tensor], targets: Collection[int]) -> set[int]:
    """The numbers of the views that have an element in common with another one, or twice; where looking for that would
    take too long, those of all that may. targets: the numbers that matter; others may be left out."""
    found: set[int] = set()
    alike: dict[object, int] = {}
    by_device: dict[torch.device, list[tuple[int, int, int]]] = {}
    for number, view in enumerate(views):
        if not view.numel():
            continue
        if any(step == 0 and length > 1 for length, step in zip(view.shape, view.stride(), strict=True)):
            found.add(number)
        start, size = view.data_ptr(), span(view.shape, view.stride()) * view.itemsize
        first = alike.setdefault((view.device, start, view.shape, view.stride(), view.itemsize), number)
        if first == number:
            by_device.setdefault(view.device, []).append((start, start + size, number))
        else:
            found |= {first, number}
    most = _MOST_PAINTED
    for ranges in by_device.values():
        for group in _crossing(ranges):
            if any(number in targets and number not in found for number in group):
                shared, size = _painted(views, group, most)
                found |= shared
                most -= size
    return found


def _crossing(ranges: list[tuple[int, int, int]]) -> Iterator[list[int]]:
    """The numbers of ranges of memory that cross another one, in groups that have none in common. ranges: begin, end,
    number."""
    group: list[int] = []
    stop = 0
    for first, end, number in [*sorted(ranges), (1 << 64, 0, -1)]:
        if first >= stop:
            if len(group) > 1:
                yield group
            group = []
        group.append(number)
        stop = max(stop, end)


def _painted(views: Sequence[torch.Tensor], group: Sequence[int], most: int) -> tuple[set[int], int]:
    """The numbers of those of a group that share an element; their ranges of memory do. And over how many elements that
    was looked for: at most so many, else all are said to."""
    start = views[group[0]].data_ptr()
    widths = {views[number].itemsize for number in group}
    width = widths.pop()
    places = [divmod(views[number].data_ptr() - start, width) for number in group]
    size = max(
        place + span(views[number].shape, views[number].stride())
        for number, (place, _) in zip(group, places, strict=True)
    )
    if widths or any(rest for _, rest in places) or size > most:
        return set(group), 0
    paint = torch.zeros(size, dtype=torch.uint8, device="cpu")
    painted = [
        paint.as_strided(views[number].shape, views[number].stride(), place)
        for number, (place, _) in zip(group, places, strict=True)
    ]
    for each in painted:
        each += each < 2  # two are as many as more
    return {number for number, each in zip(group, painted, strict=True) if bool((each > 1).any())}, size


class _PlaceChanges(NamedTuple):
    """Changes of one atom that a thread takes at once."""

    atom: _AtomPlace
    places: Places
    base: Elements  # as the relay has them
    new: Elements


class ChangedInstall:
    """One install by changes: to the installer what `Ready` is. Steps in their order: `read`, `copy`, `fill`,
    `mismatches`."""

    def __init__(self, layout: ChangeLayout, resident: Ready, table: ChangeTable, root: bytes, base: Base) -> None:
        """resident: the same install in full. root: of the new version. Raises FAILED_PRECONDITION if the table does
        not lead from the base to it, or has other atoms; DATA_LOSS if it contradicts itself."""
        if {*table.roots} != {base.root, root}:
            raise precondition(
                f"the relay has compared {' and '.join(each.hex()[:8] for each in table.roots)}, and this worker is to "
                f"go from {base.root.hex()[:8]} to {root.hex()[:8]}"
            )
        self._layout = layout
        self._resident = resident
        self._base = base
        self.needs = resident.needs
        self.changes = 0
        self.bytes = 0  # of these changes, as they are read
        self._parts: list[_PlaceChanges] = []
        self._before: list[Elements] = []
        side = table.roots.index(root)
        offsets = layout.offsets(table.slot_bytes)
        for atom in layout.atoms:
            found = table.of_atom(offsets[atom.region] + atom.offset, atom.elements, atom.width)
            if found is None:
                name = layout.checks[atom.check].name
                raise precondition(
                    f"the relay has compared other pieces of tensor {name} than this worker reads", [name]
                )
            words = [each.view(f"u{atom.width}") for each in found.words]
            for first in range(0, len(found.places), _AT_ONCE):
                part = slice(first, first + _AT_ONCE)
                self._parts.append(_PlaceChanges(atom, found.places[part], words[1 - side][part], words[side][part]))
            self.changes += len(found.places)
            self.bytes += found.places.nbytes + sum(each.nbytes for each in words)

    @property
    def by_changes(self) -> int:
        """Needs that go by their changes."""
        return len(self._layout.needs)

    @property
    def transports(self) -> frozenset[str]:
        """That their changes come over."""
        return self._layout.transports

    @property
    def spared_bytes(self) -> int:
        """Of these needs in full."""
        return self._layout.spared_bytes

    def read(self) -> None:
        """Reads what lies in the model where it is to change, before anything is written. Raises DATA_LOSS if that is
        not what the relay has of the base."""
        self._before = self._layout.each(_read, self._parts)
        wrong = {
            self._layout.checks[part.atom.check].name
            for part, before in zip(self._parts, self._before, strict=True)
            if not np.array_equal(before, part.base)
        }
        if wrong:
            raise data_loss(f"what lies in {some(sorted(wrong))} is not what was installed", sorted(wrong))

    def copy(self, on_bytes: Callable[[int], None]) -> None:
        """Writes the changes, and in full what does not go by changes. Raises what `on_bytes` raises."""
        if self._layout.rest is not None:
            self._layout.rest.copy(on_bytes)
        self._layout.each(_write, self._parts)
        on_bytes(self.bytes)

    def fill(self, in_time: Callable[[], None]) -> None:
        """Writes the values that the loader sets without weights."""
        self._resident.fill(in_time)

    def mismatches(self, expected: Sequence[int], in_time: Callable[[], None]) -> list[int]:
        """Reads what lies there now. Returns the needs that do not add up to what was sealed."""
        rest = self._layout.rest
        wrong = rest.mismatches(expected, in_time) if rest is not None else []
        gains = [0] * len(self._layout.checks)
        pairs = [*zip(self._parts, self._before, strict=True)]
        for (part, _), gain in zip(pairs, self._layout.each(_gain, pairs), strict=True):
            gains[part.atom.check] += gain
        in_time()
        return wrong + [
            check.need
            for check, gain in zip(self._layout.checks, gains, strict=True)
            if (expected[check.need] - self._base.expected[check.need] - gain) & MASK
        ]


def _read(part: _PlaceChanges) -> Elements:
    return part.atom.digested.read(part.places)


def _write(part: _PlaceChanges) -> None:
    part.atom.written.write(part.places, part.new)


def _gain(pair: tuple[_PlaceChanges, Elements]) -> int:
    part, before = pair
    return part.atom.digested.gain(part.places, before)
