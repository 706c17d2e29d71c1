"""A member's part on a GPU: NCCL moves buckets on one stream, our copy kernel packs and unpacks them on another one.

The streams wait for each other by events, bucket by bucket, and the host only queues, a few rounds ahead. Between two
rounds it looks at NCCL's errors and at what the meeting says. Made when a plan is made ready, and kept, as
`on_host.py`'s is.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

import torch

from ckpt_engine.copy.device_work import DeviceWork
from ckpt_engine.core.collective import ExchangeStep, Schedule
from ckpt_engine.core.problems import CkptEngineError, internal, precondition, unavailable
from ckpt_engine.transport.collective.meeting import Attendance
from ckpt_engine.transport.collective.nccl import Communicator, NcclError, nccl
from ckpt_engine.transport.collective.part import MemberPart, Places
from ckpt_engine.transport.collective.watch import Watch

AHEAD = 6
"""Rounds that are queued at a time: the GPU never waits for the host, and few are left when it is aborted."""

DRAIN_SECONDS = 10.0
"""Seconds for aborted work to end. It takes milliseconds unless a GPU hangs."""

_ID = "nccl id"
_HANDSHAKE_BYTES = 64
_POLL_SECONDS = 20e-6


class GpuMember:
    """One member on a GPU. bytes: what one run unpacks, or packs. memory: bytes of its slots. One thread at a time.

    places: where its memory is; none: it is bound later. Raises INVALID_ARGUMENT (memory that does not fit the
    schedule), DEADLINE_EXCEEDED (naming absent members) and UNAVAILABLE.
    """

    def __init__(
        self,
        schedule: Schedule,
        member: int,
        attendance: Attendance,
        places: Places | None,
        dtypes: Sequence[torch.dtype],
        device: torch.device,
        seconds: float,
    ) -> None:
        self._device = device
        self._attendance = attendance
        self._names = [each.name for each in schedule.members]
        self.memory = schedule.memory(member)
        self.bytes = 0
        self._packs: dict[int, DeviceWork] = {}
        self._unpacks: dict[int, DeviceWork] = {}
        with torch.cuda.device(device):
            slots = [
                torch.empty(schedule.slot_bytes, dtype=torch.uint8, device=device)
                for _ in range(schedule.slots[member])
            ]
            self._part = MemberPart(schedule, member, slots, dtypes)
            # NCCL's blocks go before those of copies, of which there are enough to fill the GPU.
            self._network, self._copies = (torch.cuda.Stream(device, priority=priority) for priority in (-1, 0))
            torch.cuda.current_stream(device).synchronize()
            self._broken = ""
            self.bind(places)
            self._communicator = self._join(member, seconds)

    def bind(self, places: Places | None) -> None:
        """Binds as `HostMember.bind` does. Called between runs, so no copy is in flight."""
        self._packs, self._unpacks, self.bytes = {}, {}, 0
        self._bound = places is not None
        if places is not None:
            with torch.cuda.device(self._device):
                copies = self._part.copies(lambda pairs: DeviceWork(pairs, self._device), places)
            self._packs, self._unpacks, self.bytes = copies

    def run(self, seconds: float, on_bytes: Callable[[int], None] | None = None) -> int:
        """Runs as `HostMember.run` does. Begins after the work that is queued on the current stream; all bytes have
        arrived when it returns."""
        if self._broken:
            raise precondition(f"this collective has ended ({self._broken}); its members have to make a new one")
        if not self._bound:
            raise precondition("no memory is bound to this member of a collective")
        try:
            with torch.cuda.device(self._device), torch.inference_mode():
                with Watch(self._attendance, seconds, self._communicator.abort) as watch:
                    _GpuRun(self, watch, on_bytes).run()
        except BaseException as error:
            self._broken = str(error)
            self._communicator.abort()
            self._drain()
            raise
        return self.bytes

    def close(self) -> None:
        """Gives the communicator up and lets go of the buffers. May be repeated."""
        self._broken = self._broken or "it was closed"
        with torch.cuda.device(self._device):
            self._communicator.abort()
        self.bind(None)
        self._part.slots = []

    def _join(self, member: int, seconds: float) -> Communicator:
        stop_at = time.monotonic() + seconds
        everybody = dict.fromkeys(self._names)
        try:
            if member == 0:
                self._attendance.set(_ID, nccl().unique_id())
            id = self._attendance.wait(_ID, stop_at, everybody)
            heard_at = time.monotonic()

            def check() -> None:
                nonlocal heard_at
                now = time.monotonic()
                if now > stop_at:
                    raise self._attendance.absence(everybody)
                if now - heard_at > 0.1:
                    heard_at = now
                    if why := self._attendance.hear(running=False):
                        raise unavailable(f"the collective was ended: {why}")

            communicator = Communicator(nccl(), id, member, len(self._names), check)
            try:
                self._connect(communicator, check)
            except BaseException:
                communicator.abort()
                raise
            return communicator
        except NcclError as error:
            raise unavailable(f"{self._names[member]} could not join the collective: {error}") from error

    def _connect(self, communicator: Communicator, check: Callable[[], None]) -> None:
        """Exchanges some unused bytes between every pair: NCCL connects two members at their first exchange, which
        should not take the time of an update."""
        steps = self._part.steps
        sends = sorted({step.send.peer for step in steps if step.send is not None})
        receives = sorted({step.receive.peer for step in steps if step.receive is not None})
        nothing = torch.zeros((2, len(self._names), _HANDSHAKE_BYTES), dtype=torch.uint8, device=self._device)
        stream = self._network
        stream.wait_stream(torch.cuda.current_stream())
        communicator.exchange(
            [(peer, nothing[0, peer].data_ptr(), _HANDSHAKE_BYTES) for peer in sends],
            [(peer, nothing[1, peer].data_ptr(), _HANDSHAKE_BYTES) for peer in receives],
            stream.cuda_stream,
        )
        communicator.complete(check)
        event = torch.cuda.Event()
        event.record(stream)
        while not event.query():
            check()
            communicator.look()
            time.sleep(_POLL_SECONDS)

    def _drain(self) -> None:
        """Waits until no transfer or copy of this member is in flight: then its memory may be freed or written."""
        stop_at = time.monotonic() + DRAIN_SECONDS
        with torch.cuda.device(self._device):
            for stream in (self._network, self._copies):
                event = torch.cuda.Event()
                event.record(stream)
                while not event.query():
                    if time.monotonic() > stop_at:
                        raise internal(f"a collective that was ended still runs on its GPU after {DRAIN_SECONDS:g} s")
                    time.sleep(_POLL_SECONDS)


class _GpuRun:
    def __init__(self, member: GpuMember, watch: Watch, on_bytes: Callable[[int], None] | None) -> None:
        self._part = member._part
        self._communicator = member._communicator
        self._packs, self._unpacks = member._packs, member._unpacks
        self._network, self._copies = member._network, member._copies
        self._watch = watch
        self._tell = on_bytes
        self._sent: dict[int, torch.cuda.Event] = {}  # by slot: the network is done with it
        self._emptied: dict[int, torch.cuda.Event] = {}  # by slot: it was unpacked
        self._packed: dict[int, torch.cuda.Event] = {}  # by round: its slot is filled
        self._packed_until = -1
        self._flying: deque[tuple[torch.cuda.Event, int, str]] = deque()

    def run(self) -> None:
        current = torch.cuda.current_stream()
        for stream in (self._network, self._copies):
            stream.wait_stream(current)
        steps = self._part.steps
        for step, after in zip(steps, (*steps[1:], None), strict=True):
            send, receive = step.send, step.receive
            self._pack(step)
            if step.round in self._packed:
                self._network.wait_event(self._packed.pop(step.round))
            if receive is not None:
                self._wait(self._network, self._emptied.get(receive.slot))
            self._exchange(step)
            if after is not None and (send is None or after.send is None or after.send.slot != send.slot):
                self._pack(after)  # while NCCL queues
            self._settle()
            end = self._event(self._network)
            if send is not None:
                self._sent[send.slot] = end
            size = 0 if receive is not None else self._packs[step.round].bytes if step.round in self._packs else 0
            if receive is not None:
                self._copies.wait_event(end)
                self._queue(self._unpacks[step.round])
                end = self._emptied[receive.slot] = self._event(self._copies)
                size = self._unpacks[step.round].bytes
            peers = sorted({each.peer for each in (send, receive) if each is not None})
            self._flying.append((end, size, " and ".join(self._part.name(peer) for peer in peers)))
            self._land(AHEAD)
        self._land(0)
        for stream in (self._network, self._copies):
            current.wait_stream(stream)

    def _pack(self, step: ExchangeStep) -> None:
        """Fills what a step sends, if this member is its source, and not twice."""
        work = self._packs.get(step.round)
        if step.send is None or work is None or step.round <= self._packed_until:
            return
        self._packed_until = step.round
        self._wait(self._copies, self._sent.get(step.send.slot))
        self._queue(work)
        self._packed[step.round] = self._event(self._copies)

    def _exchange(self, step: ExchangeStep) -> None:
        sends, receives = (
            [] if each is None else [(each.peer, self._part.slots[each.slot].data_ptr(), each.bytes)]
            for each in (step.send, step.receive)
        )
        try:
            self._communicator.exchange(sends, receives, self._network.cuda_stream)
        except NcclError as error:
            raise self._failure(error) from error

    def _settle(self) -> None:
        try:
            self._communicator.complete(self._watch.check)
        except NcclError as error:
            raise self._failure(error) from error

    def _land(self, most: int) -> None:
        """Waits until at most so many rounds are in flight; raises for what has failed meanwhile."""
        while len(self._flying) > most:
            event, size, self._watch.waits_for = self._flying[0]
            while not event.query():
                self._watch.check()
                self._look()
                time.sleep(_POLL_SECONDS)
            self._flying.popleft()
            if self._tell is not None:
                self._tell(size)
        self._watch.check()

    def _look(self) -> None:
        try:
            self._communicator.look()
        except NcclError as error:
            raise self._failure(error) from error

    def _failure(self, error: NcclError) -> CkptEngineError:
        self._watch.check()  # if the collective was ended, that reason counts
        return unavailable(f"NCCL failed while it waited for {self._watch.waits_for} ({error})")

    def _queue(self, work: DeviceWork) -> None:
        with torch.cuda.stream(self._copies):
            for segment in work.segments:
                segment.queue(self._copies.cuda_stream)

    def _event(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(stream)
        return event

    def _wait(self, stream: torch.cuda.Stream, event: torch.cuda.Event | None) -> None:
        if event is not None:
            stream.wait_event(event)
