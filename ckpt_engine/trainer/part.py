"""A trainer rank's part in collectives: it sends what it has sealed, on the thread that waits in `update_weights`.

The first member leads: its process keeps the meeting and the ballot. The rank keeps its communicator and buffers from
update to update, until other weights are published or these are withdrawn. How members agree, move bytes and stop is
decided in `transport/collective`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import torch

from ckpt_engine.core.boxes import Box
from ckpt_engine.core.collective_plan import read_meeting
from ckpt_engine.core.problems import CkptEngineError, aborted, internal, invalid, precondition
from ckpt_engine.machines.events import PartTaken, RunPart
from ckpt_engine.trace import trace
from ckpt_engine.transport.collective.door import door_at
from ckpt_engine.transport.collective.meeting import Meeting
from ckpt_engine.transport.collective.seat import Held, Seat
from ckpt_engine.v1 import weights_pb2, worker_pb2

log = logging.getLogger(__name__)

END_POLL_SECONDS = 0.005


class RankPart:
    """The part of one Trainer in collectives. One thread at a time, but for `begin`."""

    def __init__(self) -> None:
        self._seat = Seat()

    def begin(self, task: RunPart) -> Meeting | None:
        """Opens the ballot if this rank leads, so that members get answers from now on. Does not wait. Raises
        INVALID_ARGUMENT, or FAILED_PRECONDITION if the collective's door was closed."""
        if task.member != 0:
            return None
        meeting = read_meeting(task.collective.meeting)
        door = door_at(meeting.port)
        if door is None:
            raise precondition("what this rank published for a collective was taken back")
        meeting_here = door.meeting(task.collective.communicator, meeting.key)
        meeting_here.open_ballot(task.epoch, list(task.collective.members))
        return meeting_here

    def take(
        self,
        task: RunPart,
        plan: bytes,
        held: Callable[[], Held],
        meeting: Meeting | None,
        stop_at: float,
    ) -> PartTaken:
        """Joins, votes and sends. held: returns what the rank has sealed. meeting: of a rank that leads, which then
        waits until all are done or one has failed. stop_at: monotonic seconds by which all of it has ended. Raises
        only KeyboardInterrupt and the like; a failure is in the result."""
        order = order_of(task, plan)
        problem = None
        try:
            self._send(order, task, held, stop_at)
            if meeting is not None:
                _await_all(meeting, order, task.epoch, stop_at)
        except Exception as error:
            self._seat.leave(order, task.epoch, error)
            problem = (
                error if isinstance(error, CkptEngineError) else internal(f"{type(error).__name__}: {error}")
            ).problem
        except BaseException:
            self._seat.leave(order, task.epoch, aborted("its process was interrupted (Ctrl-C or exit)"))
            self._seat.close()
            raise
        return PartTaken(problem, () if meeting is None else meeting.blamed(task.epoch))

    def refuse(self, task: RunPart, error: CkptEngineError, meeting: Meeting | None) -> PartTaken:
        """Tells the others that this rank does not take part. Waits for some seconds at most; raises nothing."""
        seat = Seat()  # of its own: the rank's thread may use the other one
        seat.leave(order_of(task, b""), task.epoch, error)
        seat.close()
        return PartTaken(error.problem, () if meeting is None else meeting.blamed(task.epoch))

    def broken(self) -> bytes:
        """The name of the kept communicator if it cannot be used again, so that another must be made; else empty. Call
        it on the thread that runs parts; takes some seconds if the lead does not answer."""
        why = self._seat.broken()
        if why:
            log.info("ckpt-engine: a collective's communicator is made again: %s", why)
        return self._seat.communicator if why else b""

    def close(self) -> None:
        """Frees communicator, buffers and every reference to what was sent. May be repeated."""
        self._seat.close()

    def _send(self, order: worker_pb2.CollectiveOrder, task: RunPart, held: Callable[[], Held], stop_at: float) -> None:
        self._seat.join(order, task.epoch, stop_at - time.monotonic())
        memory = held()
        self._seat.bind(_places_of(memory), lambda: memory)
        # A rank pauses nothing; the others must pause before they vote.
        remaining = stop_at - time.monotonic()
        trace("trainer.part", "vote")
        self._seat.vote(task.epoch, remaining / 2, remaining)
        trace("trainer.part", "run")
        self._seat.run(task.epoch, stop_at - time.monotonic())
        trace("trainer.part", "sent")
        self._seat.done(task.epoch)


def order_of(task: RunPart, plan: bytes) -> worker_pb2.CollectiveOrder:
    """A rank's part, in the form of a worker's order."""
    collective = task.collective
    return worker_pb2.CollectiveOrder(
        members=collective.members,
        member=task.member,
        plan=plan,
        meeting=collective.meeting,
        communicator=collective.communicator,
        arm_seconds=collective.arm_seconds,
    )


def held_of(
    manifest: weights_pb2.Manifest, table: weights_pb2.SourceTable, sealed: list[tuple[str, torch.Tensor]]
) -> Held:
    """What a source has sealed, by the manifest's numbers. Raises INVALID_ARGUMENT if they do not fit together."""
    numbers = {spec.name: number for number, spec in enumerate(manifest.tensors)}
    found = []
    if len(table.shards) != len(sealed):
        raise invalid(f"rank {table.rank} has sealed {len(sealed)} tensors and published {len(table.shards)}")
    for shard, (name, memory) in zip(table.shards, sealed, strict=True):
        box = Box(tuple(shard.start), tuple(shard.stop))
        if name not in numbers or tuple(memory.shape) != box.shape:
            raise invalid(f"{name!r} is not what rank {table.rank} published", [name])
        found.append((numbers[name], box, memory.detach()))
    return found


def _places_of(held: Held) -> tuple[tuple[int, tuple[int, ...], tuple[int, ...]], ...]:
    return tuple((memory.data_ptr(), tuple(memory.shape), memory.stride()) for _, _, memory in held)


def _await_all(meeting: Meeting, order: worker_pb2.CollectiveOrder, epoch: int, stop_at: float) -> None:
    while not meeting.is_finished(epoch, time.monotonic()):
        if time.monotonic() > stop_at:
            raise aborted(f"of the collective's members {', '.join(meeting.behind(epoch))} were not done in time")
        time.sleep(END_POLL_SECONDS)
    if why := meeting.failed(epoch):
        raise aborted(f"the collective was ended: {why}")
