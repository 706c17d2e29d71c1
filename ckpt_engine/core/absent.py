"""Groups the tensors of a version that a model has no module for, by how their names begin. Pure.

It does not decide which tensors those are (a worker's adapter does), nor whether an update may leave them
(`complete.py` does).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod

from ckpt_engine.core.dtypes import itemsize
from ckpt_engine.v1.manager_pb2 import AbsentTensors
from ckpt_engine.v1.weights_pb2 import Manifest


def absent_rows(manifest: Manifest, reasons: Mapping[int, str]) -> tuple[AbsentTensors, ...]:
    """One row for each outermost prefix that only absent tensors have, in the order of the manifest.

    reasons: why each of them is absent, by its index in the manifest.
    """
    present = {
        prefix for index, spec in enumerate(manifest.tensors) if index not in reasons for prefix in _prefixes(spec.name)
    }
    rows: dict[str, AbsentTensors] = {}
    for index, reason in sorted(reasons.items()):
        spec = manifest.tensors[index]
        prefix = next((each for each in _prefixes(spec.name) if each not in present), spec.name)
        row = rows.setdefault(prefix, AbsentTensors(prefix=prefix, reason=reason))
        row.tensors += 1
        row.bytes += prod(spec.shape) * itemsize(spec.dtype)
    return tuple(rows.values())


def absent_in_all(workers: Sequence[Sequence[AbsentTensors]]) -> tuple[AbsentTensors, ...]:
    """The rows that every worker of a replica has. workers: the rows of each."""
    first, *others = workers or ((),)
    return tuple(row for row in first if all(_has(each, row) for each in others))


def _has(rows: Sequence[AbsentTensors], row: AbsentTensors) -> bool:
    return any((each.prefix, each.tensors) == (row.prefix, row.tensors) for each in rows)


def _prefixes(name: str) -> Iterator[str]:
    """ "a.", "a.b." of "a.b.c"."""
    at = name.find(".")
    while at >= 0:
        yield name[: at + 1]
        at = name.find(".", at + 1)
