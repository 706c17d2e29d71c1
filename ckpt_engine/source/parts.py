"""A source of a version with more than one part: the target's source and the draft's, offered as one.

It decides how two tables become one, and which source each atom is of. It does not decide how either source offers its
tensors; each has regions of its own, and both are sealed one after the other in one call.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from itertools import accumulate

import torch

from ckpt_engine.core.kept import Kept
from ckpt_engine.core.manifest import blob_digest, canonical
from ckpt_engine.core.parts import in_part, own_name, part_of
from ckpt_engine.core.problems import invalid
from ckpt_engine.source.base import Source
from ckpt_engine.source.ways import NAMED_MOST
from ckpt_engine.v1.weights_pb2 import Atoms, SourceTable


class PartsSource:
    """The sources of a version's parts. See Source; they are of one rank of one process."""

    def __init__(self, sources: Mapping[str, Source]) -> None:
        """sources: by part, the target's (empty name) first; no two regions of them have one number. It closes them.

        Raises INVALID_ARGUMENT if the target's weights have names of a part.
        """
        self._sources = dict(sources)
        taken = [each.name for each in sources[""].table().tensors if part_of(each.name)]
        if taken:
            raise invalid(
                f"{taken[0]!r} is the name of a {part_of(taken[0])}'s tensor, which has its own argument", taken
            )
        self._table = _joined({part: source.table() for part, source in sources.items()})
        self._own_digests = [blob_digest(canonical(source.table())) for source in sources.values()]
        # For each source the number of the shard behind its last one.
        self._ends = list(accumulate(len(source.table().shards) for source in sources.values()))
        self._split: tuple[Atoms, list[Atoms]] | None = None  # of the last digest: sources know their atoms again

    def table(self) -> SourceTable:
        """What all of them offer."""
        return self._table

    def check(self) -> None:
        """Checks each of them."""
        for source in self._sources.values():
            source.check()

    def seal(self, keep: bool = False) -> float:
        """Seals each of them."""
        return sum([source.seal(keep) for source in self._sources.values()])

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What they have sealed, in the order of the table's shards."""
        for part, source in self._sources.items():
            for name, tensor in source.tensors():
                yield in_part(part, name), tensor

    def digest(self, atoms: Atoms) -> list[int]:
        """The digest of each atom, in their order, by the source of its shard."""
        if self._split is None or self._split[0] is not atoms:
            self._split = atoms, self._atoms_of_each(atoms)
        digests = [iter(source.digest(own)) for source, own in zip(self._sources.values(), self._split[1], strict=True)]
        return [next(digests[bisect_right(self._ends, atom.shard)]) for atom in atoms.atoms]

    def not_finite(self) -> list[str]:
        """Names of the tensors in which the last `digest` found NaN or infinity."""
        return [in_part(part, name) for part, source in self._sources.items() for name in source.not_finite()]

    def withdraw(self, seconds: float) -> None:
        """Withdraws each of them."""
        for source in self._sources.values():
            source.withdraw(seconds)

    def close(self) -> None:
        """Closes each of them."""
        with ExitStack() as stack:
            for source in self._sources.values():
                stack.callback(source.close)
        self._split = None

    def _atoms_of_each(self, atoms: Atoms) -> list[Atoms]:
        """The atoms of each source, with its own numbers of shards."""
        ends = self._ends
        split = [Atoms(table_digest=digest) for digest in self._own_digests]
        for atom in atoms.atoms:
            if atom.shard >= ends[-1]:
                raise invalid(f"an atom is of shard {atom.shard}, and {ends[-1]} are published")
            index = bisect_right(ends, atom.shard)
            own = split[index].atoms.add()
            own.CopyFrom(atom)
            own.shard -= ends[index - 1] if index else 0
        return split


def first_region_behind(source: Source) -> int:
    """The lowest number that a region of the next part may have."""
    return 1 + max((region.id for region in source.table().regions), default=-1)


def kept_in(part: str, dtypes: Kept) -> dict[str, str]:
    """Those dtypes that are of this part, by the names that it has itself (core/kept.py)."""
    return {own_name(kind): dtype for kind, dtype in dtypes.items() if part_of(kind) == part}


def _joined(tables: Mapping[str, SourceTable]) -> SourceTable:
    """One table of several, each in its part. Shards keep their order, the target's first."""
    first = tables[""]
    joined = SourceTable(host=first.host, id=first.id, stays_sealed=all(each.stays_sealed for each in tables.values()))
    if first.HasField("rank"):
        joined.rank = first.rank
    joined.source_copies = max(each.source_copies for each in tables.values())
    joined.description = "; ".join(
        f"{part}: {table.description}" if part else table.description for part, table in tables.items()
    )
    named = sorted(
        (in_part(part, spec.name), part, index)
        for part, table in tables.items()
        for index, spec in enumerate(table.tensors)
    )
    numbers = {(part, index): number for number, (_, part, index) in enumerate(named)}
    for name, part, index in named:
        joined.tensors.add().CopyFrom(tables[part].tensors[index])
        joined.tensors[-1].name = name
    for part, table in tables.items():
        joined.regions.extend(table.regions)
        for shard in table.shards:
            joined.shards.add().CopyFrom(shard)
            joined.shards[-1].tensor = numbers[part, shard.tensor]
        for copied in table.copied:
            total = next((each for each in joined.copied if each.reason == copied.reason), None)
            if total is None:
                total = joined.copied.add(reason=copied.reason, rank=copied.rank, ranks=copied.ranks)
            total.tensors += copied.tensors
            total.bytes += copied.bytes
            names = [*total.names, *(in_part(part, name) for name in copied.names)]
            total.names[:] = names[:NAMED_MOST]
        joined.warnings.extend(f"{part}: {warning}" if part else warning for warning in table.warnings)
    return joined
