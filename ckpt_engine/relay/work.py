"""Carries out the tasks of the relay's machine on its slots. Blocks; the shell calls it on a thread of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from ckpt_engine.core.manifest import canonical
from ckpt_engine.core.problems import invalid
from ckpt_engine.core.rates import Rate
from ckpt_engine.machines.relay.tasks import CountSlot, FillSlot, LetGoOf, RelayTask, SlotFilled
from ckpt_engine.relay.fill import NAMED, FillStop, Progress
from ckpt_engine.relay.slots import FillWish, Slots, SlotVersion, Want
from ckpt_engine.v1 import manager_pb2
from ckpt_engine.v1.manager_pb2 import BlobRef, FillRelay, RelayFilled, WantTable
from ckpt_engine.v1.weights_pb2 import SealedRecord, SourceTable, WorkerNeeds

MessageT = TypeVar("MessageT", bound=Message)

Fetch = Callable[[Sequence[BlobRef], float], Sequence[bytes]]
"""Fetches blobs within some seconds: (blobs, seconds) to their bytes, in order. Raises CkptEngineError."""


class RelayWork:
    """Carries out one task at a time. fetch: gets blobs from the manager. passed: see FillWish; with the command."""

    def __init__(
        self, slots: Slots, fetch: Fetch, passed: Callable[[FillRelay, Rate], None] = lambda command, rate: None
    ) -> None:
        self._slots = slots
        self._fetch = fetch
        self._passed = passed
        self._fetched: tuple[FillRelay, FillWish] | None = None
        self._stop = FillStop()

    def begin(self) -> None:
        """Makes `stop` mean the next filling, which `perform` may begin on another thread later."""
        self._stop = FillStop()

    def perform(self, task: RelayTask, progress: Progress = lambda done, total: None) -> object:
        """Carries out a task; returns its result, as machines/relay/tasks.py has it. progress: of filling. Raises
        CkptEngineError."""
        if isinstance(task, CountSlot):
            return self._slots.count(task.slot, self._wish(task.command, task.seconds), task.seconds, task.more)
        if isinstance(task, FillSlot):
            wish = self._wish(task.command, task.seconds)
            held = self._slots.fill(task.slot, wish, task.seconds, progress, task.more, self._stop)
            self._fetched = None
            return SlotFilled(canonical(held.table), canonical(held.record), filled_report(held))
        assert isinstance(task, LetGoOf)
        self._slots.let_go(task.tables, task.seconds)
        return None

    def stop(self, keep: bool = False) -> None:
        """Stops the filling that has begun last. keep: see StopFilling."""
        self._stop.ask(keep)

    def _wish(self, command: FillRelay, seconds: float) -> FillWish:
        """The version that a command asks for. Its blobs are fetched once for counting and filling."""
        if self._fetched is None or self._fetched[0] != command:
            table = command.want_table if command.HasField("want_table") else None
            own = WantTable.Wants(needs=command.needs, everything=command.everything, within=command.within)
            sets = [own, *(table.wants if table is not None else ())]
            refs = [command.record, *command.tables]
            refs += [ref for each in sets for ref in (*each.needs, *each.within)]
            by_digest = dict(zip((ref.digest for ref in refs), self._fetch(refs, seconds), strict=True))
            wants = [
                Want(
                    [_read(WorkerNeeds, by_digest[ref.digest]) for ref in each.needs],
                    each.everything,
                    [_read(SourceTable, by_digest[ref.digest]) for ref in each.within],
                )
                for each in sets
            ]
            wish = FillWish(
                command.identity,
                _read(SealedRecord, by_digest[command.record.digest]),
                [_read(SourceTable, by_digest[ref.digest]) for ref in command.tables],
                wants[0],
                table,
                wants[1:],
                partial(self._passed, command),
            )
            self._fetched = command, wish
        return self._fetched[1]


def filled_report(held: SlotVersion) -> RelayFilled:
    """The report of a filling, without fence and identity."""
    filled = held.filled
    return RelayFilled(
        bytes=sum(shard.nbytes for shard in held.sealed),
        wanted_bytes=held.layout.bytes,
        missing=[each.problem for each in filled.missing[:NAMED]],
        missing_cells=len(filled.missing),
        faults=filled.faults,
        brought=[
            RelayFilled.Brought(source=source, bytes=size) for source, size in sorted(filled.bytes_by_source.items())
        ],
        again=filled.again,
        overruled=held.overruled,
        wait_seconds=held.waited,
        fill_seconds=filled.seconds,
        sent=_rate(filled.sent),
        received=_rate(filled.received),
        network_bytes=filled.deltas.network_bytes,
        delta_bytes=filled.deltas.delta_bytes,
        changed_bytes=filled.deltas.changed_bytes,
        delta_base=filled.deltas.base,
        whole=[RelayFilled.Whole(reason=why, bytes=size) for why, size in filled.deltas.whole.most_common(NAMED)],
        densest=[
            RelayFilled.Density(tensor=name, changed=changed, elements=elements)
            for name, changed, elements in filled.deltas.densest(NAMED)
        ],
    )


def _rate(rate: Rate | None) -> manager_pb2.Rate | None:
    return None if rate is None else manager_pb2.Rate(bytes_per_second=rate.per_second, seconds=rate.seconds)


def _read(kind: type[MessageT], data: bytes) -> MessageT:
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise invalid(f"a {kind.DESCRIPTOR.name} of {len(data)} bytes cannot be read: {error}") from error
