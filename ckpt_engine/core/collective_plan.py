"""A collective's plan as it travels: its members and their wants. All members make the same schedule of it. Pure.

The schedule itself does not travel: for a large model it has many times the bytes of the plan, and is made in less than
a second.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from google.protobuf.message import DecodeError

from ckpt_engine.core.boxes import Box
from ckpt_engine.core.collective import SLOTS, CollectiveMember, Schedule, arrange, make_schedule
from ckpt_engine.core.collective_buckets import BUCKET_BYTES, BoxWant
from ckpt_engine.core.dtypes import itemsize
from ckpt_engine.core.manifest import canonical
from ckpt_engine.core.problems import invalid
from ckpt_engine.v1.weights_pb2 import CollectiveMeeting, CollectivePlan, NcclLocator

KEY_BYTES = 32
"""Bytes of the key that every member presents at the meeting."""

LONGEST_HOST = 255
UUID_BYTES = 16

MOST_BUCKET_BYTES = 1 << 30
MOST_SLOTS = 64
MOST_BUCKETS = 1 << 20
"""Far more than any plan needs; a plan with more is refused."""


def collective_plan(
    members: Sequence[CollectiveMember],
    wants: Iterable[BoxWant],
    dtypes: Sequence[str],
    bucket_bytes: int = BUCKET_BYTES,
    slots: int = SLOTS,
) -> bytes:
    """Serialises the plan; the same wants in any order give the same bytes. members: as `arrange` returns them.

    dtypes: of each tensor of the manifest, as it is served.
    """
    workers_by_box: dict[tuple[int, int, Box], set[int]] = {}
    for want in wants:
        workers_by_box.setdefault((want.source, want.tensor, want.box), set()).add(want.worker)
    plan = CollectivePlan(
        members=[
            CollectivePlan.Member(name=each.name, host=each.host, is_source=each.is_source, gpu=each.gpu)
            for each in members
        ],
        wants=[
            CollectivePlan.Want(workers=sorted(workers), source=source, tensor=tensor, start=box.start, stop=box.stop)
            for (source, tensor, box), workers in sorted(workers_by_box.items())
        ],
        dtypes=dtypes,
        bucket_bytes=bucket_bytes,
        slots=slots,
    )
    return canonical(plan)


def read_locator(locator: bytes) -> NcclLocator:
    """Parses a NcclLocator. Raises INVALID_ARGUMENT if it is malformed, or its address or GPU cannot be one."""
    try:
        found = NcclLocator.FromString(locator)
    except DecodeError as error:
        raise invalid(f"the locator of a member of a collective cannot be read: {error}") from error
    if not (found.host.isascii() and found.host.isprintable() and 0 < len(found.host) <= LONGEST_HOST):
        raise invalid(f"a member of a collective is found at {found.host[:LONGEST_HOST]!r}, which is not an address")
    if not 0 < found.port < 1 << 16 or len(found.gpu) not in (0, UUID_BYTES):
        raise invalid(
            f"a collective's member needs a port of 1 to 65535 and 0 or {UUID_BYTES} bytes of a GPU's UUID, got port "
            f"{found.port} and {len(found.gpu)} bytes of a GPU's UUID"
        )
    return found


def meeting_of(locator: bytes, key: bytes) -> bytes:
    """Where a collective meets, as its messages carry it. locator: a NcclLocator of its lead. key: KEY_BYTES, random.

    Raises INVALID_ARGUMENT for a malformed locator.
    """
    lead = read_locator(locator)
    return canonical(CollectiveMeeting(host=lead.host, port=lead.port, key=key))


def read_meeting(data: bytes) -> CollectiveMeeting:
    """Parses where a collective meets. Raises INVALID_ARGUMENT if it is malformed; the error never has the key."""
    try:
        found = CollectiveMeeting.FromString(data)
    except DecodeError:
        raise invalid("where a collective meets cannot be read") from None
    if len(found.key) != KEY_BYTES or not 0 < found.port < 1 << 16:
        raise invalid("where a collective meets is incomplete")
    return found


def read_collective_plan(data: bytes) -> tuple[Schedule, tuple[str, ...]]:
    """The schedule of a plan, and the dtype of each tensor.

    Raises INVALID_ARGUMENT for a plan that is malformed, inconsistent or too large.
    """
    try:
        plan = CollectivePlan.FromString(data)
    except DecodeError as error:
        raise invalid(f"the collective's plan cannot be read: {error}") from error
    if plan.bucket_bytes > MOST_BUCKET_BYTES or plan.slots > MOST_SLOTS:
        raise invalid(
            f"a collective with {plan.slots} slots of {plan.bucket_bytes} bytes a member is too large; the most is "
            f"{MOST_SLOTS} of {MOST_BUCKET_BYTES}"
        )
    members = [CollectiveMember(each.name, each.host, each.is_source, each.gpu) for each in plan.members]
    if arrange(members) != tuple(members):
        raise invalid("the members of a collective's plan are not in the order of their ranks")
    widths = [itemsize(dtype) for dtype in plan.dtypes]
    wants: list[BoxWant] = []
    axes: dict[int, int] = {}
    size = 0
    for each in plan.wants:
        box = Box(tuple(each.start), tuple(each.stop))
        fits = len(box.start) == len(box.stop) == axes.setdefault(each.tensor, len(box.start))
        if not fits or any(not 0 <= first <= last for first, last in zip(box.start, box.stop, strict=True)):
            raise invalid(f"a collective's plan wants {list(box.start)} to {list(box.stop)} of tensor {each.tensor}")
        size += box.volume * len(each.workers) * (widths[each.tensor] if each.tensor < len(widths) else 1)
        wants += [BoxWant(worker, each.source, each.tensor, box) for worker in each.workers]
    if size > MOST_BUCKETS * plan.bucket_bytes:
        raise invalid(f"a collective of {size} bytes in buckets of {plan.bucket_bytes} has more than {MOST_BUCKETS}")
    return make_schedule(members, wants, widths, plan.bucket_bytes, plan.slots), tuple(plan.dtypes)
