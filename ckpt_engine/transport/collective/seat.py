"""One process's place in collectives: its attendance, its communicator and its buffers, kept from update to update.

They are kept under the communicator's name, its plan and its meeting; another communicator replaces them. An order came
over a wire, so it may contain anything. A member that cannot go on says so in the ballot, so that the others need not
wait. One thread at a time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING

import torch

from ckpt_engine.core.boxes import Box
from ckpt_engine.core.collective import Schedule
from ckpt_engine.core.collective_plan import read_collective_plan, read_meeting
from ckpt_engine.core.loopback import is_loopback
from ckpt_engine.core.manifest import blob_digest
from ckpt_engine.core.problems import CkptEngineError, deadline, invalid, precondition, unavailable
from ckpt_engine.cuda.driver import CudaDriverError, driver
from ckpt_engine.host.room import memory_room
from ckpt_engine.torch_dtypes import torch_dtype
from ckpt_engine.transport.collective.door import door_at
from ckpt_engine.transport.collective.meeting import Attendance
from ckpt_engine.transport.collective.part import held_boxes
from ckpt_engine.transport.collective.voting import wait_for_go
from ckpt_engine.v1.weights_pb2 import Problem
from ckpt_engine.v1.worker_pb2 import CollectiveOrder

if TYPE_CHECKING:
    from ckpt_engine.transport.collective.on_gpu import GpuMember
    from ckpt_engine.transport.collective.on_host import HostMember

log = logging.getLogger(__name__)

JOIN_SECONDS = 30.0
"""How long a member waits for the others to come, before anything is paused."""

LEAVE_SECONDS = 3.0
"""How long a member that cannot even join tries to say so."""

_POLL_SECONDS = 0.005

Held = Sequence[tuple[int, Box, torch.Tensor]]
"""What a process holds: (tensor of the manifest, box, memory of the box's shape)."""


class Seat:
    """The place of one process. Raises CkptEngineError, naming members; a member that failed is given up."""

    def __init__(self) -> None:
        self._key: tuple[bytes, ...] = ()
        self._host = ""  # of the lead, as the order has it
        self._attendance: Attendance | None = None
        self._member: HostMember | GpuMember | None = None
        self._bound: Hashable = None
        self._abandoned_epoch = 0  # the last epoch that this member gave up; the others know
        self.device = torch.device("cpu")

    @property
    def communicator(self) -> bytes:
        """The name of this member's communicator; empty: it has none."""
        return self._key[0] if self._member is not None else b""

    @property
    def memory(self) -> int:
        """Bytes of its buffers."""
        return 0 if self._member is None else self._member.memory

    def has(self, order: CollectiveOrder) -> bool:
        """Whether it is the member that an order is for."""
        return self._member is not None and self._key == _key(order)

    def broken(self) -> str:
        """Why this member can begin nothing more with the others; empty: it can, or it is none. Asks the lead."""
        if self._attendance is None:
            return ""
        try:
            return self._attendance.broken()
        except CkptEngineError as error:
            return error.problem.message

    def join(self, order: CollectiveOrder, epoch: int, seconds: float) -> None:
        """Joins the communicator of an order. The others must join at the same time, unless they have joined already.

        Raises INVALID_ARGUMENT for an inconsistent order, FAILED_PRECONDITION (no such device or no room here),
        UNAVAILABLE, and DEADLINE_EXCEEDED, naming absent members. Then the others have been told, if the lead could be
        reached, and the former communicator is given up.
        """
        if self.has(order):
            return
        self.close()
        seconds = min(JOIN_SECONDS, seconds / 2)
        stop_at = time.monotonic() + seconds
        schedule: Schedule | None = None
        try:
            schedule, dtypes = _schedule(order)
            self._attend(order, seconds)
            self._member = self._make_member(schedule, order.member, dtypes, stop_at - time.monotonic())
        except Exception as error:
            self.leave(order, epoch, error, self._missing(schedule, error))
            self.close()
            raise

    def bind(self, key: Hashable, held: Callable[[], Held]) -> None:
        """Binds the memory that the next runs pack from and unpack to. key: if it differs from the last one, memory has
        changed, and `held` is called.

        Raises INVALID_ARGUMENT if it does not fit the schedule or is on another device, FAILED_PRECONDITION if there is
        no member.
        """
        member = self._joined_member()
        if self._bound is None or self._bound != key:
            self._bound = None
            memory = held()
            for tensor, box, each in memory:
                if each.numel() and each.device != self.device:
                    raise invalid(
                        f"{box} of tensor {tensor} lies on {each.device}, and the collective is on {self.device}"
                    )
            member.bind(held_boxes(memory))
            self._bound = key

    def unbind(self) -> None:
        """Forgets the memory that was bound; the communicator stays."""
        self._bound = None
        if self._member is not None:
            self._member.bind(None)

    def vote(self, epoch: int, patience: float, seconds: float) -> None:
        """Returns when all members begin; see `wait_for_go`, which says what it raises."""
        self._joined_member()
        assert self._attendance is not None
        wait_for_go(self._attendance, epoch, patience, seconds)

    def run(self, epoch: int, seconds: float, on_bytes: Callable[[int], None] | None = None) -> int:
        """Runs this member's part, after *go*: see `HostMember.run`. If it raises, the member is given up, and all
        others have been told."""
        member = self._joined_member()
        try:
            return member.run(seconds, on_bytes)
        except BaseException:
            self._abandoned_epoch = epoch
            self.close()
            raise

    def done(self, epoch: int) -> None:
        """Reports that this member has received everything and sent everything. Never raises: a member that has all its
        bytes does not need the lead any more."""
        if self._attendance is not None:
            try:
                self._attendance.ballot(epoch, "done")
            except CkptEngineError as error:
                log.warning("ckpt-engine: %s", error.problem.message)

    def leave(self, order: CollectiveOrder, epoch: int, error: Exception, blamed: Sequence[str] = ()) -> None:
        """Tells the others that this member does not take part, or cannot go on; once an epoch. Never raises."""
        if epoch == self._abandoned_epoch:
            return
        self._abandoned_epoch, why = epoch, _text(error)
        try:
            if self._attendance is None or self._key != _key(order):
                self.close()
                self._attend(order, LEAVE_SECONDS)
            assert self._attendance is not None
            self._attendance.ballot(epoch, "leave", why=f"failed: {why}", blamed=blamed)
            if self._member is None:
                self._attendance.end(f"{self._attendance.name} failed: {why}")  # others may wait for it to join
        except Exception as untold:
            log.warning(
                "ckpt-engine: this member left a collective (%s), and could not tell the other members: %s",
                why,
                _text(untold),
            )

    def close(self) -> None:
        """Gives everything up. May be repeated."""
        member, attendance = self._member, self._attendance
        self._key, self._member, self._attendance, self._bound = (), None, None, None
        try:
            if member is not None:
                member.close()
        finally:
            if attendance is not None:
                attendance.close()

    def _joined_member(self) -> HostMember | GpuMember:
        if self._member is None:
            raise precondition(
                "this process is not a member of the collective: it has not joined, or has left; update again"
            )
        return self._member

    def _attend(self, order: CollectiveOrder, seconds: float) -> None:
        meeting = read_meeting(order.meeting)
        if not order.member < len(order.members):
            raise invalid(f"a collective of {len(order.members)} has no member {order.member}")
        address = meeting.host, meeting.port
        self._host = meeting.host
        if order.member == 0:
            # By its own address: others may reach this host by one that it does not have itself.
            door = door_at(meeting.port)
            if door is None:
                raise precondition("the weights that were published for this collective were withdrawn; publish again")
            address = door.address
        names = order.members
        self._attendance = Attendance(address, meeting.key, names[order.member], names[0], seconds, order.communicator)
        self._key = _key(order)

    def _make_member(
        self, schedule: Schedule, number: int, dtypes: Sequence[str], seconds: float
    ) -> HostMember | GpuMember:
        assert self._attendance is not None
        if seconds <= 0:
            raise deadline("the deadline passed before the collective was made")
        gpu, memory = schedule.members[number].gpu, schedule.memory(number)
        served_dtypes = [torch_dtype(each) for each in dtypes]
        if not gpu:
            self.device = torch.device("cpu")
            if memory > (room := memory_room()):
                raise precondition(
                    f"a collective's buffers need {memory} bytes, and this host has room for {room}: free some, or "
                    "publish without transport='nccl'"
                )
            # Loaded here only, as Gloo is: a process without a collective does not need it.
            from ckpt_engine.transport.collective.on_host import HostMember

            stop_at = time.monotonic() + seconds
            address = self._interface(self._attendance, [each.name for each in schedule.members], stop_at)
            remaining = max(0.001, stop_at - time.monotonic())
            return HostMember(schedule, number, self._attendance, None, served_dtypes, address, remaining)
        from ckpt_engine.transport.collective.on_gpu import GpuMember

        self.device = _device(gpu)
        free, _ = torch.cuda.mem_get_info(self.device)
        free += torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        if memory > free:
            raise precondition(f"a collective's buffers need {memory} bytes, and {self.device} has {free} free")
        return GpuMember(schedule, number, self._attendance, None, served_dtypes, self.device, seconds)

    def _interface(self, attendance: Attendance, names: Sequence[str], stop_at: float) -> str:
        """The address of this host at which the others reach this member.

        If the lead's host does not have the address that the others use, the lead learns it from their connections, so
        it waits until all have come.
        """
        own = attendance.address
        if not is_loopback(own) or is_loopback(self._host):
            return own
        while not set(names) <= (reached := attendance.reached()).keys():
            if why := attendance.hear(running=False):
                raise unavailable(f"the collective was ended: {why}")
            if time.monotonic() > stop_at:
                raise attendance.absence(dict.fromkeys(names))
            time.sleep(_POLL_SECONDS)
        return next((address for address in reached.values() if not is_loopback(address)), own)

    def _missing(self, schedule: Schedule | None, error: Exception) -> list[str]:
        """The absent members, if joining failed because of them."""
        timed_out = isinstance(error, CkptEngineError) and error.problem.code == Problem.CODE_DEADLINE_EXCEEDED
        if schedule is None or self._attendance is None or not timed_out:
            return []
        try:
            attendees = set(self._attendance.attendees())
        except CkptEngineError:
            return []
        return [each.name for each in schedule.members if each.name not in attendees]


def _schedule(order: CollectiveOrder) -> tuple[Schedule, tuple[str, ...]]:
    schedule, dtypes = read_collective_plan(order.plan)
    names = [each.name for each in schedule.members]
    if names != list(order.members) or not order.member < len(names):
        raise invalid(
            f"the plan of this collective is for {', '.join(names)}; its members are {', '.join(order.members)}, of "
            f"which this is number {order.member}"
        )
    if len({bool(each.gpu) for each in schedule.members}) != 1:
        on_gpus = ", ".join(each.name for each in schedule.members if each.gpu)
        raise invalid(f"a collective is between GPUs or between CPUs, and of this one only {on_gpus} are on GPUs")
    return schedule, dtypes


def _device(gpu: bytes) -> torch.device:
    try:
        found = driver().device_of_uuid(gpu)
    except CudaDriverError as error:
        raise precondition(f"this process cannot use the GPU {gpu.hex()} for a collective: {error}") from error
    if found is None:
        raise precondition(
            f"this process does not see GPU {gpu.hex()}, which it needs for a collective: check CUDA_VISIBLE_DEVICES"
        )
    return torch.device("cuda", found)


def _key(order: CollectiveOrder) -> tuple[bytes, ...]:
    return order.communicator, blob_digest(order.plan), blob_digest(order.meeting), str(order.member).encode()


def _text(error: Exception) -> str:
    return error.problem.message if isinstance(error, CkptEngineError) else f"{type(error).__name__}: {error}"
