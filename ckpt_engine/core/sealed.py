"""Combines the digests that sources sealed: whether replicas agree, the root, and what each worker must find. Pure.

It works on index arrays that the plan made once, so each update costs milliseconds even for 50,000 tensors. All sums
are modulo 2^64. Runs in the manager.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ckpt_engine.core.cells import Cells
from ckpt_engine.core.offers import label, ranks_of
from ckpt_engine.core.plan import Plans
from ckpt_engine.core.problems import internal, invalid, precondition
from ckpt_engine.core.publication import Publication
from ckpt_engine.v1.weights_pb2 import Digests

Words = npt.NDArray[np.uint64]
_NAMED = 16


@dataclass(frozen=True)
class Sealed:
    """The digest of every cell, on which all its holders agree."""

    publication: Publication
    cells: Cells
    values: Words
    known: npt.NDArray[np.bool_]  # which cells some source has digested

    def root(self) -> bytes:
        """The root of everything, 32 bytes; see `core.manifest.RootHasher`. Raises FAILED_PRECONDITION if a cell
        was not digested, or if the sources together do not hold everything."""
        return self.publication.root_hasher.root(self._tensors().astype("<u8").tobytes())

    def _tensors(self) -> Words:
        self._require(self.known, self.cells.tensor)
        if self.publication.incomplete:
            names = _names(self.publication, np.array(sorted(self.publication.incomplete)))
            raise precondition(f"the sources do not hold all of {', '.join(names[:_NAMED])}", names)
        return _sums(self.cells.tensor, self.values, len(self.publication.parts))

    def _require(self, known: npt.NDArray[np.bool_], tensors: npt.NDArray[np.int64]) -> None:
        if not known.all():
            names = _names(self.publication, tensors[~known])
            raise precondition(
                f"no source has digested all of {', '.join(names)}; all that hold it have to seal", names
            )


def check_replicas(plans: Plans, digests: Mapping[int, Digests]) -> Sealed:
    """Combines the digests of all sources. digests: by source index, in the order of its atoms.

    Raises INVALID_ARGUMENT if a source answered with another number of digests than it has atoms, and
    FAILED_PRECONDITION, naming tensors and ranks, if two sources that hold the same box hold different bytes.
    """
    cells, tables = plans.cells, plans.publication.tables
    values = np.zeros(len(cells), dtype=np.uint64)
    holder = np.full(len(cells), -1, dtype=np.int64)
    for source in sorted(digests):
        table = tables[source]
        atoms = cells.of_atom.get(source)
        own = _array(digests[source])
        if atoms is None or len(own) != len(atoms):
            raise invalid(
                f"{label(table)} answered with {len(own)} digests for {0 if atoms is None else len(atoms)} atoms; "
                "it has to seal again",
                ranks=ranks_of([table]),
            )
        new = holder[atoms] < 0
        values[atoms[new]] = own[new]
        holder[atoms[new]] = source
        wrong = atoms[values[atoms] != own]
        if len(wrong):
            names = _names(plans.publication, cells.tensor[wrong])
            cell = int(wrong[0])
            both = [tables[int(holder[cell])], table]
            more = f" (and {len(names) - 1} more tensors)" if len(names) > 1 else ""
            raise precondition(
                f"{label(both[0])} and {label(table)} both hold {cells.box(cell)} of tensor {names[0]}{more}, but "
                "different bytes; all holders of a box must hold the same: check that all ranks made the same "
                "optimizer step",
                names,
                ranks_of(both),
            )
    return Sealed(plans.publication, cells, values, holder >= 0)


def expected_blob(plans: Plans, key: Hashable, sealed: Sealed) -> bytes:
    """What a worker must find in its needs once it has read them: Digests as a blob, in the order of the needs.

    Raises FAILED_PRECONDITION, naming tensors, if a cell that it needs was not digested.
    """
    if plans.cells is not sealed.cells:
        raise internal("these digests are of other atoms than the plan's")
    found = plans.maps[key]
    sealed._require(sealed.known[found.cells], sealed.cells.tensor[found.cells])
    sums = _sums(found.needs, sealed.values[found.cells], found.count)
    return packed(Digests.VALUES_FIELD_NUMBER, sums)


def packed(field: int, values: Words) -> bytes:
    """Encodes a message with one packed field of fixed64, as protobuf does: tag, length, eight bytes a value. Building
    the message object takes ten times as long."""
    return delimited(field, values.astype("<u8").tobytes()) if len(values) else b""


def delimited(field: int, content: bytes) -> bytes:
    """Encodes one field of bytes, or of a message, as protobuf does."""
    size, head = len(content), bytearray([field << 3 | 2])
    while size > 127:
        head.append(size & 127 | 128)
        size >>= 7
    head.append(size)
    return bytes(head) + content


def _sums(index: npt.NDArray[np.int64], values: Words, count: int) -> Words:
    sums = np.zeros(count, dtype=np.uint64)
    np.add.at(sums, index, values)
    return sums


def _array(digests: Digests) -> Words:
    return np.fromiter(digests.values, dtype=np.uint64, count=len(digests.values))


def _names(publication: Publication, tensors: npt.NDArray[np.int64]) -> list[str]:
    return [publication.manifest.tensors[int(tensor)].name for tensor in np.unique(tensors)]
