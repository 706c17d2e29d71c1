"""Buckets from CPU to CPU: Gloo's process group as an object of ours, which touches no default group of the process.

Peers find each other through words of the meeting, and connect when the group is made. A wait of Gloo cannot be
cancelled; but a wait that times out closes every connection of its group, which ends all other waits. So `abort` waits
a millisecond for a message that no peer sends. Nothing lands in memory after it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import distributed
from torch._C import _distributed_c10d as c10d

from ckpt_engine.core.problems import CkptEngineError, unavailable
from ckpt_engine.core.transports import Availability
from ckpt_engine.transport.collective.meeting import Attendance

_BUCKETS, _ABORT = 1, 2  # tags


def gloo_availability() -> Availability:
    """Whether this process has Gloo."""
    if distributed.is_available() and distributed.is_gloo_available():
        return Availability(True, "torch has Gloo")
    return Availability(False, f"this torch ({torch.__version__}) is built without Gloo")


class _MeetingStore(c10d.Store):
    """The meeting's words as a store of torch."""

    def __init__(self, attendance: Attendance, members: Sequence[str], stop_at: float) -> None:
        super().__init__()
        self._attendance = attendance
        self._members = dict.fromkeys(members)
        self._stop_at = stop_at
        self.problem: CkptEngineError | None = None

    def set(self, key: str, value: str | bytes) -> None:
        self._attendance.set(key, value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        try:
            return self._attendance.wait(key, self._stop_at, self._members)
        except CkptEngineError as error:
            self.problem = error  # through Gloo it would come as its text alone
            raise

    def check(self, keys: Sequence[str]) -> bool:
        return all(self._attendance.get(key) is not None for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self.get(key)


class GlooGroup:
    """The communicator of one member. rank: its number. Made by all members at once.

    address: of the interface at which peers reach this process. Raises DEADLINE_EXCEEDED, naming absent members, and
    UNAVAILABLE.
    """

    def __init__(self, attendance: Attendance, members: Sequence[str], rank: int, address: str, seconds: float) -> None:
        stop_at = time.monotonic() + seconds
        self._rank, self._members = rank, members
        words = _MeetingStore(attendance, members, stop_at)
        options: Any = c10d.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [c10d.ProcessGroupGloo.create_device(hostname=address, lazy_init=False)]
        options._timeout = timedelta(seconds=max(0.001, seconds))
        options._threads = 2
        try:
            # Through a prefix, as Gloo's keys are not ours to know.
            store = c10d.PrefixStore("gloo", words)
            self._group: Any = c10d.ProcessGroupGloo(store, rank, len(members), options)
        except (RuntimeError, CkptEngineError) as error:
            if words.problem is not None:
                raise words.problem from None
            if time.monotonic() >= stop_at:
                raise attendance.absence(dict.fromkeys(members)) from error
            raise unavailable(f"{members[rank]} could not join the collective: {error}") from error

    def start(
        self, send: tuple[int, torch.Tensor] | None, receive: tuple[int, torch.Tensor] | None
    ) -> list[tuple[int, Any]]:
        """Begins both exchanges of a step: (peer, bytes). Does not wait. Returns them by peer, for `finish`."""
        exchanges = []
        for peer, ask in ((receive, self._group.recv), (send, self._group.send)):
            if peer is None:
                continue
            try:
                exchanges.append((peer[0], ask([peer[1]], peer[0], _BUCKETS)))
            except RuntimeError as error:
                raise self._loss(peer[0], error) from error
        return exchanges

    def finish(self, exchanges: Sequence[tuple[int, Any]], seconds: float) -> None:
        """Waits for these exchanges. Raises UNAVAILABLE, naming the peer; then the group is broken."""
        for peer, work in exchanges:
            try:
                work.wait(timedelta(seconds=seconds))
            except RuntimeError as error:
                raise self._loss(peer, error) from error

    def abort(self) -> None:
        """Ends every wait of this group, on any thread here and at its peers. Never raises."""
        nothing = torch.empty(1, dtype=torch.uint8)
        try:
            peer = (self._rank + 1) % len(self._members)
            self._group.recv([nothing], peer, _ABORT).wait(timedelta(milliseconds=1))
        except RuntimeError:
            return  # which is what closes the connections

    def close(self) -> None:
        """Lets go of the connections. May be repeated."""
        self._group = None

    def _loss(self, peer: int, error: RuntimeError) -> CkptEngineError:
        return unavailable(f"{self._members[peer]} was lost ({str(error).splitlines()[0]})")
