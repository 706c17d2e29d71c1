"""A member's part on a CPU: while Gloo moves a bucket, the next one is packed and the last one is unpacked.

Made when a plan is prepared: slots are allocated and peers are connected; `bind` prepares copies. `run` may be
repeated as long as members and plan stay the same, and other memory can be bound. After an error it is broken, and
all members make a new one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ckpt_engine.copy.copying import TensorCopy
from ckpt_engine.core.collective import Exchange, ExchangeStep, Schedule
from ckpt_engine.core.problems import precondition
from ckpt_engine.transport.collective.gloo import GlooGroup
from ckpt_engine.transport.collective.meeting import Attendance
from ckpt_engine.transport.collective.part import MemberPart, Places
from ckpt_engine.transport.collective.watch import Watch

LATE_SECONDS = 5.0
"""Beyond the deadline: the watch is to report the late member first, and ends all waits of Gloo then."""


class HostMember:
    """One member on a CPU. bytes: what one run unpacks, or packs. memory: bytes of its slots. Used from one thread at a
    time.

    places: where its memory is; none: it is bound later. Raises INVALID_ARGUMENT (memory that does not fit the
    schedule) and what `GlooGroup` raises.
    """

    def __init__(
        self,
        schedule: Schedule,
        member: int,
        attendance: Attendance,
        places: Places | None,
        dtypes: Sequence[torch.dtype],
        address: str,
        seconds: float,
    ) -> None:
        slots = [torch.empty(schedule.slot_bytes, dtype=torch.uint8) for _ in range(schedule.slots[member])]
        self._part = MemberPart(schedule, member, slots, dtypes)
        self._attendance = attendance
        self.memory = schedule.memory(member)
        self.bytes = 0
        self._packs: dict[int, TensorCopy] = {}
        self._unpacks: dict[int, TensorCopy] = {}
        self._broken = ""
        self.bind(places)
        self._group = GlooGroup(attendance, [each.name for each in schedule.members], member, address, seconds)

    def bind(self, places: Places | None) -> None:
        """Prepares the copies for the next runs; None: forgets the memory that was bound. Raises INVALID_ARGUMENT for
        memory that does not fit the schedule."""
        self._packs, self._unpacks, self.bytes = {}, {}, 0
        self._bound = places is not None
        if places is not None:
            self._packs, self._unpacks, self.bytes = self._part.copies(TensorCopy, places)

    def run(self, seconds: float, on_bytes: Callable[[int], None] | None = None) -> int:
        """Sends, passes on and unpacks everything; returns the bytes unpacked, or packed. Every destination may have
        been written if it raises.

        on_bytes: called in this thread after each bucket; what it raises ends the collective. Raises UNAVAILABLE or
        DEADLINE_EXCEEDED, naming the member that is to blame, by the deadline; FAILED_PRECONDITION if it is broken.
        """
        if self._broken:
            raise precondition(f"this collective has ended ({self._broken}); its members have to make a new one")
        if not self._bound:
            raise precondition("no memory is bound to this member of a collective")
        try:
            with Watch(self._attendance, seconds, self._group.abort) as watch:
                _GlooRun(self._part, self._group, watch, self._packs, self._unpacks, on_bytes).run()
        except BaseException as error:
            self._broken = str(error)
            self._group.abort()
            raise
        return self.bytes

    def close(self) -> None:
        """Lets go of peers and buffers."""
        self._broken = self._broken or "it was closed"
        self._group.close()
        self.bind(None)
        self._part.slots = []


class _GlooRun:
    def __init__(
        self,
        part: MemberPart,
        group: GlooGroup,
        watch: Watch,
        packs: dict[int, TensorCopy],
        unpacks: dict[int, TensorCopy],
        on_bytes: Callable[[int], None] | None,
    ) -> None:
        self._part, self._group, self._watch = part, group, watch
        self._packs, self._unpacks = packs, unpacks
        self._tell = on_bytes
        self._packed: set[int] = set()  # rounds
        self._full: dict[int, int] = {}  # slots that are to be unpacked: their round

    def run(self) -> None:
        steps = self._part.steps
        for step, after in zip(steps, (*steps[1:], None), strict=True):
            self._watch.check()
            self._pack(step)
            if step.receive is not None and step.receive.slot in self._full:
                self._unpack(step.receive.slot)
            exchanges = self._group.start(self._side(step.send), self._side(step.receive))
            peers = {each.peer for each in (step.send, step.receive) if each is not None}
            self._watch.waits_for = " and ".join(self._part.name(peer) for peer in sorted(peers))
            for slot in list(self._full):
                self._unpack(slot)
            if after is not None and after.send is not None and after.send.slot not in _slots_of(step):
                self._pack(after)
            self._group.finish(exchanges, self._watch.remaining + LATE_SECONDS)
            if step.receive is not None:
                self._full[step.receive.slot] = step.round
        for slot in list(self._full):
            self._unpack(slot)

    def _side(self, exchange: Exchange | None) -> tuple[int, torch.Tensor] | None:
        return None if exchange is None else (exchange.peer, self._part.view(exchange))

    def _pack(self, step: ExchangeStep) -> None:
        copy = self._packs.get(step.round)
        if copy is not None and step.round not in self._packed:
            self._packed.add(step.round)
            self._report(copy.run())

    def _unpack(self, slot: int) -> None:
        self._report(self._unpacks[self._full.pop(slot)].run())

    def _report(self, size: int) -> None:
        self._watch.check()
        if self._tell is not None:
            self._tell(size)


def _slots_of(step: ExchangeStep) -> set[int]:
    return {each.slot for each in (step.send, step.receive) if each is not None}
