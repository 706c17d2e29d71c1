"""Hashes again, between installs, what lies in a worker's parameters, and compares it with what was sealed.

It decides when that is done, what a difference does to the worker's state word, and how far it has come. It does not
decide what can be compared (scrub_share.py), how fast it goes (core/scrub.py), or what follows for the replica (its
agent and the manager do).

A thread of its own goes over the needs, one piece at a time, and never pauses the engine. Before each piece it takes a
lock that the engine's thread holds while it installs, discards or ends; so no piece is hashed while something writes.
A need that an install came between is begun again, against what that install brought; the pass goes on where it was.
Memory that an engine gives up is not read from before a sleep until its agent's mark says that all of it is back.

A difference is looked at twice, since a wrong read is not a wrong weight. Then the worker is marked DIRTY, which closes
the gate, and only then it is told. A worker that is DIRTY is not hashed: the next install proves all of it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch

from ckpt_engine.copy.background import in_background
from ckpt_engine.core.scrub import difference_words, rest_seconds
from ckpt_engine.cuda.driver import driver
from ckpt_engine.digest.factors import MASK, widened
from ckpt_engine.digest.host import checked_box
from ckpt_engine.digest.prepared import PreparedDigests, prepare_digests
from ckpt_engine.gate.page import CLEAN, WorkerSlot
from ckpt_engine.install.ready import Check
from ckpt_engine.install.standing import Standing
from ckpt_engine.record.recording import Recording
from ckpt_engine.trace import trace
from ckpt_engine.v1 import manager_pb2, weights_pb2

log = logging.getLogger(__name__)

Tell = Callable[[manager_pb2.WorkerScrub], None]
"""Tells the agent how far it is. On the scrub's thread; may lose it."""

HOST_PIECE_BYTES = (2 << 20) - 1
"""Most bytes of a piece in the host's memory: 0.2 ms of one thread, and too few for several to share."""

DEVICE_PIECE_BYTES = 64 << 20
"""Most bytes of a piece on a GPU: 25 µs of an H100's bandwidth."""

PIECE_BOXES = 32
"""Most boxes of a piece: laying them out takes the interpreter's lock."""

TELL_SECONDS = 5.0
"""Seconds after which the same is told again: a message may be lost, or the agent may be another one."""

TELL_LEAST_SECONDS = 0.5
"""Least seconds between two messages that tell of no difference."""

LOOK_SECONDS = 0.2
"""Seconds between two looks whether there is something to hash."""

ASLEEP = "it rests while the engine sleeps"
AWAITS_UPDATE = "it rests until the next update, since the engine gave memory up without its agent"
NOT_CLEAN = "it rests until the worker holds a whole version"
MOVED = "it rests until the next update, since tensors of the model have moved"


@dataclass(frozen=True)
class Installed:
    """What an install has brought, to be compared from now on."""

    epoch: int
    identity: weights_pb2.Identity
    recording: Recording
    checks: Sequence[Check]  # the needs that lie in resident tensors, in the order of the plan
    standing: Standing  # where these tensors were
    expected: Sequence[int]  # digests of the needs, by number
    unscrubbed: Sequence[manager_pb2.Unscrubbed]


_Part = tuple[int, torch.Tensor, tuple[int, ...]]  # index of a check, a view of a part of it, its first coordinate


@dataclass
class _Piece:
    """Parts that are hashed together."""

    parts: list[_Part]
    digests: PreparedDigests | None = None  # kept for GPUs, whose tables take long to make

    def prepared(self) -> PreparedDigests:
        """What hashes them."""
        found = self.digests or prepare_digests([(view, start) for _, view, start in self.parts])
        if self.parts[0][1].device.type == "cuda":
            self.digests = found
        return found


class Scrub:
    """The scrub of one worker. Its methods are for the engine's thread."""

    def __init__(self, slot: WorkerSlot, seconds: float, tell: Tell, asleep: Callable[[], bool]) -> None:
        """seconds: within which all is hashed; 0: never. asleep: whether the agent's mark says that memory is given
        up."""
        self._slot = slot
        self._seconds = seconds
        self._tell = tell
        self._asleep = asleep
        self._lock = threading.RLock()
        self._waiters = 0  # how often the engine's thread waits for the lock
        self._changed = threading.Event()
        self._closed = False
        self._thread: threading.Thread | None = None
        self._installed: Installed | None = None
        self._gave_up = False  # the engine gave memory up, and is not known to have all of it back
        self._marked = False  # its agent's mark said so when it did
        self._moved = False  # tensors of the model are not where they were installed
        self._round: _ScrubPass | None = None
        self._streams: dict[int, torch.cuda.Stream] = {}
        self._state = manager_pb2.WorkerScrub(rank=slot.rank, boot_id=slot.boot_id, interval_seconds=seconds)
        self._report = manager_pb2.WorkerScrub()
        self._report_at = 0.0

    @property
    def is_on(self) -> bool:
        """Whether there is a scrub at all."""
        return self._seconds > 0

    @contextmanager
    def halted(self) -> Iterator[None]:
        """Has nothing hashed within the block. Waits for the piece that is being hashed, a millisecond at most."""
        if not self.is_on:
            yield
            return
        self._waiters += 1
        try:
            with self._lock:
                yield
        finally:
            self._waiters -= 1

    def follow(self, installed: Installed) -> None:
        """Compares with what an install has brought from now on; the first time, starts the thread."""
        if not self.is_on:
            return
        with self.halted():
            self._installed, self._gave_up, self._moved = installed, False, False
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._run, name="ckpt-engine scrub", daemon=True)
                self._thread.start()
        self._changed.set()

    def give_up(self) -> None:
        """Reads no parameter any more until the agent's mark says that the engine has all of its memory back, or until
        the next install. Called before an engine gives memory up."""
        with self.halted():
            self._gave_up, self._marked = True, self._asleep()

    def forget(self) -> None:
        """Lets go of the model's tensors until the next install."""
        with self.halted():
            self._installed = self._round = None

    def close(self) -> None:
        """Ends the thread, and waits for that."""
        with self.halted():
            self._closed = True
        self._changed.set()
        if self._thread is not None:
            self._thread.join(timeout=10)

    # -- the thread

    def _run(self) -> None:
        with in_background(), torch.inference_mode():
            while not self._closed:
                try:
                    rest = self._step()
                except Exception:  # a scrub that fails must not end the engine
                    log.exception("ckpt-engine: the scrub of worker %d failed; it goes on", self._slot.rank)
                    self._round = None
                    rest = self._seconds
                self._tell_news()
                if rest > 0:
                    self._changed.wait(rest)
                    self._changed.clear()

    def _step(self) -> float:
        """Hashes one piece, if there is one to hash now. Returns the seconds to rest."""
        if self._waiters:
            return 1e-3
        with self._lock:
            self._state.idle = self._hindrance()
            installed = self._installed
            if self._state.idle or installed is None:
                if self._round is not None:
                    self._round.idle(LOOK_SECONDS)
                return LOOK_SECONDS
            current = self._round
            if current is None or not current.goes_on(installed):
                current = self._round = _ScrubPass(installed, current)
                self._state.bytes = current.bytes
                del self._state.unscrubbed[:]
                self._state.unscrubbed.extend(installed.unscrubbed)
            if not current.bytes:
                return LOOK_SECONDS
            if current.begins and not installed.standing.holds():
                self._has_moved()
                return LOOK_SECONDS
            started = time.monotonic()
            check = self._hash(current)
            if check is not None:
                self._differs(installed, check)
            now = time.monotonic()
            rest = rest_seconds(self._seconds, current.done, current.bytes, now - current.began, now - started)
            if current.ended:
                self._state.passes += 1
                self._state.passed_at, self._state.pass_seconds = time.time(), now - current.began
                current.restart()
            return rest

    def _hindrance(self) -> str:
        """Why nothing may be hashed now; empty: something may."""
        if self._gave_up and self._marked and not self._asleep():
            self._gave_up = False
        if self._asleep() or (self._gave_up and self._marked):
            return ASLEEP
        if self._gave_up:
            return AWAITS_UPDATE
        installed = self._installed
        if installed is None:
            return MOVED if self._moved else NOT_CLEAN
        return "" if self._slot.state == CLEAN and self._slot.epoch == installed.epoch else NOT_CLEAN

    def _hash(self, current: _ScrubPass) -> int | None:
        """Hashes the next piece; returns the index of a check that differs, twice; None: there is none."""
        with self._on_device(current.device):
            for check in current.advance():
                if current.differs(check):
                    return check
                log.warning(
                    "ckpt-engine: the scrub of worker %d read %s wrong, and right the second time: see to its memory",
                    self._slot.rank,
                    current.name(check),
                )
        return None

    def _differs(self, installed: Installed, check: int) -> None:
        """Marks the worker DIRTY, unless the engine has moved the tensor; then notes what was found."""
        if not installed.standing.holds():
            self._has_moved()
            return
        self._slot.dirty(installed.epoch)
        trace("worker.scrub", "dirty")
        box = installed.recording.needs[installed.checks[check][0]].box
        self._state.last.CopyFrom(
            manager_pb2.ScrubDifference(
                rank=self._slot.rank,
                tensor=installed.recording.name(installed.checks[check][0]),
                start=box.start,
                stop=box.stop,
                identity=installed.identity,
                epoch=installed.epoch,
                at=time.time(),
            )
        )
        self._state.differences += 1
        self._state.idle = NOT_CLEAN
        log.error("ckpt-engine: worker %d is closed: %s", self._slot.rank, difference_words(self._state.last))

    def _has_moved(self) -> None:
        self._moved, self._state.idle = True, MOVED
        self._installed = self._round = None

    def _tell_news(self) -> None:
        """Tells how far it is: a difference at once, what is new soon, and all of it again from time to time."""
        now, age = time.monotonic(), time.monotonic() - self._report_at
        urgent = self._state.differences != self._report.differences
        if urgent or age >= TELL_SECONDS or (age >= TELL_LEAST_SECONDS and self._state != self._report):
            self._report_at = now
            self._report.CopyFrom(self._state)
            self._tell(self._report)

    @contextmanager
    def _on_device(self, device: torch.device) -> Iterator[None]:
        """On a GPU, has the thread work beside the engine's: in the device's context, on a stream of its own, of the
        lowest priority that there is."""
        with ExitStack() as stack:
            if device.type == "cuda":
                if device.index not in self._streams:
                    self._streams[device.index] = torch.cuda.Stream(device, priority=0)
                stack.enter_context(driver().on(device.index))
                stack.enter_context(torch.cuda.device(device))
                stack.enter_context(torch.cuda.stream(self._streams[device.index]))
            yield


class _ScrubPass:
    """A pass over all checks of one layout, and then the next one."""

    def __init__(self, installed: Installed, before: _ScrubPass | None) -> None:
        """before: the round until now; a pass over the same needs goes on where that was."""
        self._installed = installed
        same = before is not None and before._installed.recording is installed.recording
        self._groups = list(_groups(installed.checks))
        self._pieces: dict[int, list[_Piece]] = {}  # by group, of those on GPUs
        if before is not None and before._installed.checks is installed.checks:
            self._groups, self._pieces = before._groups, before._pieces
        self.bytes = sum(view.nbytes for _, view, _, _ in installed.checks)
        self.began = time.monotonic()
        self._at = 0  # the group that is being hashed
        self._before = 0  # bytes of the groups before that
        if before is not None and same and before._at < len(self._groups):
            self.began, self._at, self._before = before.began, before._at, before._before
        self._queue: list[_Piece] | None = None  # what is left of the group; None: it is not begun
        self._sums: dict[int, int] = {}  # by check of the group
        self.done = self._before

    def goes_on(self, installed: Installed) -> bool:
        """Whether this is about that install."""
        return self._installed is installed

    @property
    def begins(self) -> bool:
        """Whether a pass begins."""
        return self._at == 0 and self._queue is None

    @property
    def ended(self) -> bool:
        """Whether the pass has ended."""
        return self._at == len(self._groups)

    @property
    def device(self) -> torch.device:
        """Where the next piece lies."""
        return self._installed.checks[self._groups[self._at][0]][1].device

    def name(self, check: int) -> str:
        """The checkpoint's name of a check's tensor."""
        return self._installed.recording.name(self._installed.checks[check][0])

    def restart(self) -> None:
        """Begins another pass."""
        self._at = self._before = self.done = 0
        self.began = time.monotonic()

    def idle(self, seconds: float) -> None:
        """Does not count time in which nothing could be hashed, so that it is not made up for afterwards."""
        self.began += seconds

    def advance(self) -> list[int]:
        """Hashes the next piece. Returns the checks that are complete with it and differ."""
        group = self._groups[self._at]
        if self._queue is None:
            self._queue, self._sums, self.done = [*self._pieces_of(self._at)], dict.fromkeys(group, 0), self._before
        piece = self._queue.pop(0)
        for (check, view, _), value in zip(piece.parts, piece.prepared().run(), strict=True):
            self._sums[check] = self._sums[check] + value & MASK
            self.done += view.nbytes
        if self._queue:
            return []
        self._queue = None
        self._at += 1
        self._before = self.done
        return [check for check in group if self._sums[check] != self._expected(check)]

    def differs(self, check: int) -> bool:
        """Hashes a check as a whole; whether it differs."""
        _, view, start, _ = self._installed.checks[check]
        (value,) = prepare_digests([(view, start)]).run()
        return value != self._expected(check)

    def _expected(self, check: int) -> int:
        need, view, start, wide = self._installed.checks[check]
        sealed = self._installed.expected[need]
        return widened(sealed, start, tuple(view.shape)) if wide else sealed

    def _cut(self, check: int) -> Iterator[tuple[torch.Tensor, tuple[int, ...]]]:
        _, view, start, _ = self._installed.checks[check]
        return _cut(checked_box(view, start), start)

    def _pieces_of(self, group: int) -> list[_Piece]:
        if group in self._pieces:
            return self._pieces[group]
        parts = [(check, view, start) for check in self._groups[group] for view, start in self._cut(check)]
        alone = len(self._groups[group]) == 1
        pieces = [_Piece([part]) for part in parts] if alone else [_Piece(parts)]
        if parts and parts[0][1].device.type == "cuda":
            self._pieces[group] = pieces
        return pieces


def _piece_bytes(device: torch.device) -> int:
    return DEVICE_PIECE_BYTES if device.type == "cuda" else HOST_PIECE_BYTES


def _groups(checks: Sequence[Check]) -> Iterator[list[int]]:
    """Checks that are hashed together: small ones of one device, up to a piece; a larger one alone."""
    group: list[int] = []
    size = 0
    for index, (_, view, _, _) in enumerate(checks):
        if not view.nbytes:
            continue
        if group and (
            size + view.nbytes > _piece_bytes(view.device)
            or len(group) == PIECE_BOXES
            or checks[group[0]][1].device != view.device
        ):
            yield group
            group, size = [], 0
        group.append(index)
        size += view.nbytes
    if group:
        yield group


def _cut(view: torch.Tensor, start: tuple[int, ...]) -> Iterator[tuple[torch.Tensor, tuple[int, ...]]]:
    """Cuts a box into boxes of a piece's size at most, across the axis of the longest stride."""
    most = _piece_bytes(view.device)
    axes = [axis for axis in range(view.dim()) if view.shape[axis] > 1]
    if view.nbytes <= most or not axes:
        yield view, start
        return
    axis = max(axes, key=lambda each: (abs(view.stride()[each]), view.shape[each]))
    count = -(-view.nbytes // most)
    length = -(-view.shape[axis] // count) if count < view.shape[axis] else 1
    for at in range(0, view.shape[axis], length):
        part = view.narrow(axis, at, min(length, view.shape[axis] - at))
        yield from _cut(part, (*start[:axis], start[axis] + at, *start[axis + 1 :]))
