"""What a relay would hold of a version, and from which sources its bytes would come. Pure.

A slot is laid out as core/relay_layout.py does it, kind by kind: atoms begin at multiples of 64 bytes, and atoms with
the same readers lie together in groups that begin at multiples of 2 MiB.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from ckpt_engine.core.partition import Partition
from ckpt_engine.core.relay_layout import ATOM_BYTES, GROUP_BYTES, cut_pieces
from ckpt_engine.planning.offered import PlannedOffer


@dataclass(frozen=True)
class Slot:
    """What a relay's memory would hold of one version."""

    bytes: int  # of weights
    size: int  # gaps included
    cells: Mapping[tuple[int, int], int]  # bytes by kind and by number of the publication's part


def slot_of(
    offer: PlannedOffer, workers: Sequence[int], everything: bool = False, within: Collection[str] = ()
) -> Slot:
    """The slot of a relay that these workers of a replica read. everything: it holds the whole model. within: ids of
    sources, if it holds only these sources' boxes; none: no limit."""
    readers = list(dict.fromkeys(offer.needed_boxes[worker] for worker in workers))
    groups: Counter[tuple[int, ...]] = Counter()
    cells: Counter[tuple[int, int]] = Counter()
    total = 0
    for kind, record in enumerate(offer.record):
        width, count = offer.width(kind), offer.kinds[kind].many
        needs = [(number, box) for number, boxes in enumerate(readers) for tensor, box in boxes if tensor == kind]
        part_of = [offer.publication.partitions[kind].hits(box)[0].part for box in record.boxes]
        for piece in cut_pieces(record, needs, everything, _held_by(offer, kind, within) if within else None):
            size = piece.volume * width
            groups[piece.readers] += -(-size // ATOM_BYTES) * ATOM_BYTES * count
            cells[kind, part_of[piece.cell]] += size * count
            total += size * count
    return Slot(total, sum(-(-size // GROUP_BYTES) * GROUP_BYTES for size in groups.values()), cells)


def _held_by(offer: PlannedOffer, kind: int, sources: Collection[str]) -> Partition:
    publication = offer.publication
    names = [table.id for table in publication.tables]
    parts = (part for part in publication.parts[kind] if any(names[each.source] in sources for each in part.holders))
    return Partition(tuple(part.box for part in parts))


Distance = Callable[[str], int | None]
"""How far a source is from a relay, by the source's id; None: it is out of reach."""


def bytes_by_source(
    offer: PlannedOffer, slot: Slot, distance: Distance
) -> tuple[Counter[str], Counter[frozenset[str]]]:
    """Bytes that a relay reads from each source itself; and by their holders, the bytes that it does not reach."""
    near: Counter[str] = Counter()
    far: Counter[frozenset[str]] = Counter()
    publication = offer.publication
    for (kind, part), size in slot.cells.items():
        names = [publication.tables[holder.source].id for holder in publication.parts[kind][part].holders]
        reached = [(way, place) for place, name in enumerate(names) if (way := distance(name)) is not None]
        if reached:
            near[names[min(reached)[1]]] += size
        else:
            far[frozenset(names)] += size
    return near, far
