"""What a relay decides: which slot is filled with what, in which order, and what it says that it holds.

Its session, and the digests that it is asked for, are those of every holder. Here is only the filling. The rules:

- A fill fence below the highest one is not obeyed, nor an attempt of one fence below its highest; equal ones are a
  repetition and answered as before.
- One filling at a time. A newer command ends the one that goes on, and waits until that has ended: two would write to
  one memory. If it wants the same, what has come stays, and only the rest is brought.
- The slot of the version that replicas are to hold now is never filled.
- Memory is counted before a slot is given up. What is given up is said before the first byte changes.
- What is missing of a version that a slot holds is added to the rest of it, which stays lent.
- A version is said to be held only once it was compared with its sealed record.
- A session's end changes nothing: filling goes on, and the answer goes to the session that repeats the command.

Nothing outlives the process: a relay that was killed comes back with nothing, under another session.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias, cast

from ckpt_engine.core.deadlines import bounded
from ckpt_engine.core.manifest import blob_digest
from ckpt_engine.core.relay_layout import SLOTS
from ckpt_engine.core.version import Fence, Version
from ckpt_engine.machines.clock import ManagersClock
from ckpt_engine.machines.events import Done, Key, Run
from ckpt_engine.machines.relay.tasks import (
    CountSlot,
    FillingProgress,
    FillSlot,
    RelayTask,
    SlotFilled,
    StopFilling,
)
from ckpt_engine.v1.manager_pb2 import BlobRef, FillRelay, RelayFilled, RelayProgress


@dataclass(frozen=True)
class HeldNotice:
    """A version that is announced as held."""

    identity: Version
    table: bytes  # a serialised SourceTable
    record: bytes  # a serialised SealedRecord
    bytes: int  # that it has of the version
    wanted_bytes: int  # of all that it is to hold of it


RelayCommand: TypeAlias = Run | StopFilling

Answer: TypeAlias = RelayFilled | RelayProgress


@dataclass
class _SlotState:
    """One slot. `needs`, `everything` and `within` are of the command that filled it."""

    held: HeldNotice | None = None  # None: it is empty
    answer: RelayFilled | None = None  # to the command that filled it
    needs: frozenset[bytes] = frozenset()  # digests
    everything: bool = False
    within: frozenset[bytes] = frozenset()  # digests
    since: int = 0  # the number of its filling


@dataclass
class _FillWork:
    """A command that is being carried out. Moments are monotonic seconds."""

    command: FillRelay
    came: float
    until: float
    slot: int = -1  # -1: not chosen yet
    more: bool = False  # the slot holds a part of the version already
    step: str = ""  # of the task that runs
    overtaken: bool = False  # a newer command waits for its end
    keeps: bool = False  # that command wants the same, so what has come stays


class RelayFilling:
    """The slots of one relay.

    emit: takes commands. send: sends to the manager, if there is one; the manager repeats its command until the answer
    arrives. hold: announces all that is held, whenever that changes. clock: of the session.
    """

    def __init__(
        self,
        emit: Callable[[RelayCommand], None],
        send: Callable[[Answer], None],
        hold: Callable[[tuple[HeldNotice, ...]], None],
        clock: ManagersClock,
    ) -> None:
        self._emit = emit
        self._send = send
        self._hold = hold
        self._clock = clock
        self._slots = [_SlotState() for _ in range(SLOTS)]
        self._work: _FillWork | None = None
        self._next: _FillWork | None = None  # waits until `_work`, which it overtook, has ended
        self._answer: RelayFilled | None = None
        self._count = 0
        self._obeyed = (0, 0)  # epoch and attempt

    @property
    def epoch(self) -> int:
        """The highest epoch that it has obeyed."""
        return self._obeyed[0]

    def is_newer(self, body: FillRelay) -> bool:
        """Whether a command comes after all that it has obeyed."""
        return _turn(body) > self._obeyed

    @property
    def held(self) -> tuple[HeldNotice, ...]:
        """The versions held, each once, the last filled first."""
        notices: dict[Version, HeldNotice] = {}
        for slot in sorted(self._slots, key=lambda slot: -slot.since):
            if slot.held is not None:
                notices.setdefault(slot.held.identity, slot.held)
        return tuple(notices.values())

    def message(self, body: FillRelay, cluster: str, now: float) -> None:
        """Takes a command of the manager of `cluster`."""
        if body.fence.cluster != cluster or _turn(body) < self._obeyed:
            return
        if not self.is_newer(body):
            if self._answer is not None and Fence.of(self._answer.fence) == Fence.of(body.fence):
                self._send(self._answer)
            return
        self._obeyed = _turn(body)
        self._answer = None
        self._next = _FillWork(body, now, now + bounded(body.deadline_seconds))
        if self._work is None:
            self._begin(now)
        else:
            self._overtake(self._work, _want_the_same(self._work.command, body))

    def done(self, done: Done, now: float) -> bool:
        """Takes the end of a task. Returns whether it was one of this machine's."""
        match done.key:
            case ("relay", str(), int() as count):
                if count == self._count and self._work is not None:
                    self._ended(self._work, done, now)
                return True
        return False

    def progress(self, report: FillingProgress) -> None:
        """Passes progress on to the manager, unless its filling was overtaken."""
        work = self._work
        if work is not None and not work.overtaken and Fence.of(work.command.fence) == Fence.of(report.fence):
            self._send(
                RelayProgress(
                    fence=report.fence,
                    bytes_done=report.bytes_done,
                    bytes_total=report.bytes_total,
                    identity=work.command.identity,
                )
            )

    def stop(self) -> None:
        """Stops filling, since the process is to end."""
        self._next = None
        if self._work is not None:
            self._overtake(self._work, keep=False)

    def _overtake(self, work: _FillWork, keep: bool) -> None:
        if not work.overtaken or (work.keeps and not keep):
            work.overtaken, work.keeps = True, keep
            self._emit(StopFilling(keep))

    def _begin(self, now: float) -> None:
        self._work, self._next = self._next, None
        work = self._work
        if work is None:
            return
        command = work.command
        serving = next((slot for slot in self._slots if _serves(slot, command)), None)
        if serving is not None:
            assert serving.answer is not None
            self._answered(work, serving.answer, now)
            return
        part = next((number for number, slot in enumerate(self._slots) if _has_a_part(slot, command)), None)
        work.slot, work.more = (self._free(command), False) if part is None else (part, True)
        self._run(work, "count", CountSlot(work.slot, command, bounded(work.until - now), work.more))

    def _free(self, command: FillRelay) -> int:
        """The number of the slot to fill: an empty one, else the one that was filled first. Never that of the version
        to keep."""
        keep = Version.or_none(command.keep)
        free = [number for number, slot in enumerate(self._slots) if slot.held is None or slot.held.identity != keep]
        if not free:  # both hold it, for other needs: the one that is read stays, else the fuller one, which came later
            free = [number for number, slot in enumerate(self._slots) if not _is_read(slot, command)]
        return min(free, key=lambda number: (self._slots[number].held is not None, self._slots[number].since))

    def _run(self, work: _FillWork, step: str, task: RelayTask) -> None:
        self._count += 1
        work.step = step
        key: Key = ("relay", step, self._count)
        self._emit(Run(key, task))

    def _ended(self, work: _FillWork, done: Done, now: float) -> None:
        if work.step == "fill" and done.problem is None:
            self._filled(work, cast(SlotFilled, done.result), now)
        elif work.overtaken or done.problem is not None:
            self._answered(work, RelayFilled(problem=done.problem), now)
        else:
            if not work.more:
                self._give_up(work.slot)
            seconds = bounded(work.until - now)
            self._run(work, "fill", FillSlot(work.slot, work.command, seconds, work.more))

    def _filled(self, work: _FillWork, filled: SlotFilled, now: float) -> None:
        command = work.command
        answer = RelayFilled(table=blob_digest(filled.table))
        answer.MergeFrom(filled.answer)
        self._slots[work.slot] = _SlotState(
            held=HeldNotice(
                Version.of(command.identity), filled.table, filled.record, answer.bytes, answer.wanted_bytes
            ),
            answer=answer,
            needs=_digests(command.needs),
            everything=command.everything,
            within=_digests(command.within),
            since=self._count,
        )
        self._hold(self.held)
        self._answered(work, answer, now)

    def _give_up(self, number: int) -> None:
        if self._slots[number].held is not None:
            self._slots[number] = _SlotState()
            self._hold(self.held)

    def _answered(self, work: _FillWork, result: RelayFilled, now: float) -> None:
        self._work = None
        if not work.overtaken:
            answer = RelayFilled()
            answer.CopyFrom(result)
            answer.fence.CopyFrom(work.command.fence)
            answer.identity.CopyFrom(work.command.identity)
            answer.attempt = _turn(work.command)[1]
            answer.span.CopyFrom(self._clock.span(work.came, now))
            self._answer = answer
            self._send(answer)
        self._begin(now)


def _turn(body: FillRelay) -> tuple[int, int]:
    """What orders commands: epoch and attempt."""
    return body.fence.epoch, body.attempt


def _digests(refs: object) -> frozenset[bytes]:
    return frozenset(ref.digest for ref in cast(tuple[BlobRef, ...], refs))


def _want_the_same(one: FillRelay, other: FillRelay) -> bool:
    """Whether two commands want the same version, laid out alike."""
    return (
        Version.of(one.identity) == Version.of(other.identity)
        and one.everything == other.everything
        and _digests(one.needs) == _digests(other.needs)
        and _digests(one.within) == _digests(other.within)
    )


def _is_read(slot: _SlotState, command: FillRelay) -> bool:
    return slot.answer is not None and slot.answer.table == command.keep_table != b""


def _has_a_part(slot: _SlotState, command: FillRelay) -> bool:
    """Whether a slot holds some of the version, laid out as this command would have it."""
    if slot.held is None or slot.answer is None or slot.held.identity != Version.of(command.identity):
        return False
    same = slot.needs == _digests(command.needs) and slot.everything == command.everything
    return same and slot.within == _digests(command.within) and bool(slot.answer.missing_cells)


def _serves(slot: _SlotState, command: FillRelay) -> bool:
    """Whether a slot holds all that a command asks for."""
    if slot.held is None or slot.answer is None or slot.held.identity != Version.of(command.identity):
        return False
    if slot.answer.missing_cells or (slot.within and not (command.within and _digests(command.within) <= slot.within)):
        return False
    return slot.everything or (not command.everything and _digests(command.needs) <= slot.needs)
