"""Ready plans: their regions are open, and their reads and checks are laid out on the model's memory and compiled.

The served plan and the next one are kept, so that going from one to the other opens nothing. A plan decides which
memory is read; the installer decides when. Used on the engine's thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from google.protobuf.message import DecodeError

from ckpt_engine.core.boxes import Box
from ckpt_engine.core.manifest import blob_digest
from ckpt_engine.core.offers import another_way, unopened
from ckpt_engine.core.problems import invalid, precondition
from ckpt_engine.core.sizes import in_words
from ckpt_engine.core.transports import is_collective
from ckpt_engine.engine.parts import roots_of
from ckpt_engine.engine.target import LoadTarget
from ckpt_engine.install.changes import ChangeLayout
from ckpt_engine.install.early_copy import EarlyLayout
from ckpt_engine.install.ready import Ready
from ckpt_engine.install.resolve import NOTHING_EARLY, Resolved, bind, resolve
from ckpt_engine.install.standing import Standing
from ckpt_engine.record.recording import Recording
from ckpt_engine.torch_dtypes import torch_dtype
from ckpt_engine.trace import span
from ckpt_engine.transport.base import CannotOpenError, Comparable, Leased, OpenedRegions, Transport
from ckpt_engine.v1 import manager_pb2, weights_pb2

log = logging.getLogger(__name__)


@dataclass(slots=True)
class ReadyPlan:
    """One ready plan."""

    digest: bytes  # of the serialised plan
    resolved: Resolved
    opened: dict[str, OpenedRegions]  # by transport
    staged: frozenset[str]  # names of the model's staged tensors
    resident: Ready | None = None  # the work on resident tensors
    standing: Standing | None = None  # where these were when `resident` was made
    changes: ChangeLayout | None = None  # how what changed reaches these; None: not made, or no relay is read
    # Room for what a collective brings of tensors without resident memory, by tensor of the manifest and box.
    landed: dict[tuple[int, Box], torch.Tensor] | None = None
    unopened: tuple[weights_pb2.Unopened, ...] = ()  # regions that could not be opened and are read another way
    device: torch.device | None = None  # of `landed`
    early: EarlyLayout | None = None  # what of it may be brought into stage memory, and where to
    places: Mapping[int, torch.Tensor] = field(
        default_factory=lambda: NOTHING_EARLY
    )  # by need: what the install copies from stage memory
    laid: Mapping[int, torch.Tensor] = field(
        default_factory=lambda: NOTHING_EARLY
    )  # the `places` with which `resident` was made

    def lay_out(self, target: LoadTarget) -> Ready:
        """Makes the work on resident tensors, again only if one of them has moved, or if what it copies from stage
        memory is another. Checks every move."""
        stands = self.standing is not None and self.standing.holds() and self.laid is self.places
        if self.resident is None or not stands:
            tensors = dict(target.named_tensors())
            names = [name for name in self.resolved.work if name not in self.staged]
            with span("worker.ready", "layout"):
                self.resident = Ready(self.opened, bind(self.resolved, names, tensors, self.places))
            self.standing = Standing(roots_of(target), {name: tensors[name] for name in names})
            self.laid, self.changes = self.places, None
        return self.resident

    def lay_out_changes(self, target: LoadTarget) -> None:
        """Lays out how what changed reaches the resident tensors, after `lay_out`, if a relay is read."""
        if self.changes is not None or self.resolved.collective:
            return
        if any(isinstance(regions, Comparable) for regions in self.opened.values()):
            names = [name for name in self.resolved.work if name not in self.staged]
            try:
                with span("worker.ready", "changes"):
                    self.changes = ChangeLayout(self.resolved, self.opened, dict(target.named_tensors()), names)
            except Exception:  # the install in full is laid out, and needs none of this
                log.warning("ckpt-engine: what changes cannot be laid out; this plan goes in full", exc_info=True)

    def copies_early(self, layout: EarlyLayout | None) -> None:
        """Has the install copy from stage memory what lies there by `layout`; None: nothing does."""
        self.places = NOTHING_EARLY if layout is None else layout.places

    def forget_early(self) -> None:
        """Forgets stage memory, which is about to be freed."""
        if self.laid is not NOTHING_EARLY:
            self.resident = self.standing = self.changes = None
        self.early, self.places, self.laid = None, NOTHING_EARLY, NOTHING_EARLY

    def make_room(self, device: torch.device) -> None:
        """Makes `landed`, on the device that a collective unpacks on, unless it exists. It takes memory only for
        tensors that engines transform or that their loaders compute on."""
        if self.landed is not None and self.device == device:
            return
        room: dict[tuple[int, Box], torch.Tensor] = {}
        staged_work = [work for name, work in self.resolved.work.items() if name in self.staged]
        for work in (*staged_work, *self.resolved.handed.values()):
            for read in work.reads:
                if is_collective(read.transport) and (read.tensor, read.box) not in room:
                    dtype = torch_dtype(read.dtype)
                    room[read.tensor, read.box] = torch.empty(read.box.shape, dtype=dtype, device=device)
        self.landed, self.device = room, device

    def arrivals(self, target: LoadTarget) -> list[tuple[int, Box, torch.Tensor]]:
        """All that a collective is to bring, with its destination: (tensor of the manifest, box, memory)."""
        landed = [(tensor, box, memory) for (tensor, box), memory in (self.landed or {}).items()]
        return [*self.lay_out(target).arrivals, *landed]

    @property
    def buffers(self) -> int:
        """Bytes of `landed`."""
        return sum(memory.nbytes for memory in (self.landed or {}).values())

    def edges(self, memory: int = 0, joined: float = 0.0, early_note: str = "") -> Iterator[manager_pb2.EdgeReport]:
        """Reports each edge of the plan, with the transport's notes. memory: bytes of a collective member's buffers.
        joined: seconds that the engine computed nothing while it joined, before the pause. early_note: why less than
        could be lay in stage memory."""
        notes = self.resident.notes if self.resident is not None else {}
        buffers = f"{(memory + self.buffers) / (1 << 20):.1f} MiB of buffers, kept on the worker's side"
        if joined:
            buffers += f"; the engine computed nothing for {joined:.2f} s while it joined, before the pause"
        for edge in self.resolved.edges:
            report = manager_pb2.EdgeReport()
            report.CopyFrom(edge)
            own = [buffers] if is_collective(edge.transport) else list(notes.get(edge.transport, ()))
            if self.early is not None and self.places and (size := self.early.by_transport.get(edge.transport)):
                own.append(f"{in_words(size)} over {edge.transport} lay in stage memory before the pause")
            own += [early_note] if early_note and not is_collective(edge.transport) else []
            report.reason = "; ".join([edge.reason, *own])
            yield report

    def rest(self) -> None:
        """Ends reading until the next `check`: owners that wait for their readers may write to their memory."""
        for regions in self.opened.values():
            if isinstance(regions, Leased):
                regions.rest()

    def close(self) -> None:
        """Releases the sources' memory."""
        self.forget_early()
        self.resident = self.landed = self.standing = self.changes = None
        for regions in self.opened.values():
            regions.close()


class ReadyPlans:
    """The plans that one worker keeps ready. Used from one thread at a time."""

    def __init__(
        self,
        target: LoadTarget,
        rank: int,
        transports: Mapping[str, Transport],
        recorded: Callable[[bytes], Recording | None],
    ) -> None:
        """recorded: finds the recording for a manifest's digest."""
        self._target = target
        self._rank = rank
        self._transports = transports
        self._recorded = recorded
        self._plans: dict[bytes, ReadyPlan] = {}
        self._served = b""
        # Regions of the plan that `open` got last that could not be opened here, whether or not another way was found.
        self.unopened: list[weights_pb2.Unopened] = []

    @property
    def digests(self) -> list[bytes]:
        """Digests of the kept plans that are laid out."""
        return [digest for digest, plan in self._plans.items() if plan.resident is not None]

    def open(self, plan_bytes: bytes, seconds: float, unread: bool = False) -> ReadyPlan:
        """Opens a plan's regions, or checks that open ones are still the published ones. Changes no weight.

        Then it closes other plans, except the served one if that can still be read. seconds: how long sources may take
        to answer. unread: nothing will be read from sources, so open ones are not asked. Raises INVALID_ARGUMENT,
        FAILED_PRECONDITION (plan and model do not fit) and what transports raise.
        """
        digest = blob_digest(plan_bytes)
        plan = self._plans.get(digest)
        self.unopened = []
        if plan is None or self._recorded(plan.resolved.recording.manifest_digest) is not plan.resolved.recording:
            plan = self._opened(digest, plan_bytes, seconds)
            before = self._plans.get(digest)
            self._plans[digest] = plan
            if before is not None:
                before.close()
        else:
            try:
                for regions in () if unread else plan.opened.values():
                    regions.check()
            except BaseException:
                self._plans.pop(digest).close()  # so that the next attempt opens it again
                raise
            self.unopened = list(plan.unopened)  # the answer that reported it may have been lost
        for other in [each for each in self._plans if each != digest]:
            still = other == self._served and all(each.offered() for each in self._plans[other].opened.values())
            if not still:
                self._plans.pop(other).close()
        return plan

    def forget_early(self) -> None:
        """Forgets stage memory in all plans."""
        for plan in self._plans.values():
            plan.forget_early()

    def serve(self, plan: ReadyPlan) -> None:
        """Notes that this plan's weights were installed."""
        self._served = plan.digest

    def release(self) -> None:
        """Closes all plans."""
        while self._plans:
            self._plans.popitem()[1].close()

    def _opened(self, digest: bytes, plan_bytes: bytes, seconds: float) -> ReadyPlan:
        try:
            plan = weights_pb2.WorkerPlan.FromString(plan_bytes)
        except DecodeError as error:
            raise invalid(f"the plan cannot be read: {error}") from error
        recording = self._recorded(plan.manifest_digest)
        if recording is None:
            raise precondition(f"worker {self._rank} has not prepared the manifest of this plan")
        stop_at = time.monotonic() + seconds
        while True:
            try:
                ready = self._open_all(digest, plan, recording, stop_at - time.monotonic())
            except CannotOpenError as refused:
                why = refused.problem.message
                self.unopened.append(unopened(self._rank, refused.region, plan, why))
                other = another_way(plan, refused.region, why)
                if other is None or time.monotonic() >= stop_at:
                    raise
                log.warning("ckpt-engine: worker %d takes another way: %s", self._rank, why)
                plan = other
            else:
                ready.unopened = tuple(self.unopened)
                return ready

    def _open_all(self, digest: bytes, plan: weights_pb2.WorkerPlan, recording: Recording, seconds: float) -> ReadyPlan:
        resolved = resolve(plan, recording, self._rank)
        fresh = ReadyPlan(digest, resolved, {}, frozenset(self._target.staged()))
        try:
            for name, regions in resolved.regions.items():
                if name not in self._transports:
                    have = ", ".join(sorted(self._transports)) or "none"
                    raise invalid(f"worker {self._rank} has no transport {name} (it has {have})")
                with span("worker.ready", f"open_{name}"):
                    fresh.opened[name] = self._transports[name].open(regions, seconds)
        except BaseException:
            fresh.close()
            raise
        return fresh
