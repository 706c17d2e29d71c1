"""What one install does to each part of a version: the target, and a draft model (`core/parts.py`).

It refuses, before anything is written, a version that the worker's models cannot hold together, and reports what became
of each part. It does not decide which parts a worker has (`engine/parts.py`), nor whether a draft may keep its weights
(`core/complete.py`, in the manager).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from ckpt_engine.core.dtypes import itemsize
from ckpt_engine.core.names import some
from ckpt_engine.core.parts import part_of
from ckpt_engine.core.problems import precondition
from ckpt_engine.install.resolve import Resolved
from ckpt_engine.record.recording import Recording
from ckpt_engine.v1 import manager_pb2

_MOST_NAMES = 16


def check_parts(recording: Recording, lost: Collection[str]) -> None:
    """Raises FAILED_PRECONDITION if a part is to keep weights that it does not have any more.

    lost: parts with weights that were discarded in a sleep, and not installed since.
    """
    for part in sorted(recording.unfilled_parts.intersection(lost)):
        raise precondition(
            f"the weights of this server's {part} were discarded while it slept, and the version has none for it: "
            f"publish them too (publish(..., {part}=MODEL)), or restart the engine"
        )


def check_twins(recording: Recording, expected: Sequence[int]) -> None:
    """Raises FAILED_PRECONDITION, naming the tensors, if a version has two values for what the worker has once.

    Engines share a draft's embedding and head with the target if they are equal when both are loaded. expected: the
    sealed digest of each need.
    """
    differing = [
        (recording.name(one), recording.name(two)) for one, two in recording.twins if expected[one] != expected[two]
    ]
    if not differing:
        return
    pairs = [f"{two} and {one}" if part_of(two) else f"{one} and {two}" for one, two in differing]
    raise precondition(
        f"{some(pairs)}: the version has two values for what is one tensor in this server. An engine shares a draft's "
        "tensors with the target if they are equal when it loads them; publish equal ones, or start the engine with "
        "a draft whose tensors differ",
        tensors=[name for pair in differing for name in pair][:_MOST_NAMES],
    )


def part_reports(
    resolved: Resolved, parts: Collection[str], verified: Collection[int]
) -> Iterator[manager_pb2.PartReport]:
    """What became of each part; nothing if there is only the target. parts: of the worker beside its target.
    verified: needs that hash to what was sealed."""
    recording = resolved.recording
    if not parts and not recording.absent_parts:
        return
    part_by_need = [part_of(recording.name(need)) for need in range(len(recording.needs))]
    for part in ("", *sorted({*parts, *recording.absent_parts})):
        handling = manager_pb2.PartReport.HANDLING_INSTALLED
        if part in recording.absent_parts:
            handling = manager_pb2.PartReport.HANDLING_LEFT
        elif part in recording.unfilled_parts:
            handling = manager_pb2.PartReport.HANDLING_KEPT
        report = manager_pb2.PartReport(part=part, handling=handling)
        own = [need for need, each in enumerate(part_by_need) if each == part]
        report.tensors = len({recording.needs[need].tensor for need in own})
        report.verified = len({*own}.intersection(verified))
        report.bytes = sum(
            read.box.volume * itemsize(read.dtype)
            for work in (*resolved.work.values(), *resolved.handed.values())
            for read in work.reads
            if part_by_need[read.need] == part
        )
        shared = recording.shared.get(part, ())
        report.shared.extend(shared[:_MOST_NAMES])
        if len(shared) > _MOST_NAMES:
            report.shared.append(f"and {len(shared) - _MOST_NAMES} more")
        yield report
