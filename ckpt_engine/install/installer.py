"""Brings one worker's model from one weight version to the next, and proves it.

`prepare` records what the model needs of a manifest and changes nothing. `ready` opens, maps and compiles what a plan
needs, before the engine pauses, and begins to bring it into stage memory, where there is some (early_copy.py).
`install` follows a plan that is ready, in two steps:

- *Bring*: check all that can be checked, mark the worker DIRTY, read the bytes into the model. In a collective
  (part.py) the worker votes before it is DIRTY.
- *Commit*: recompute derived tensors, digest every box in place and compare it with what its source sealed. Only then
  mark the worker CLEAN.

All of them answer with a message and raise nothing: an exception inside an engine would leave its other workers
waiting. They run on the engine's thread. Python work per tensor is kept from one update to the next as long as plan and
memory stay the same (plans.py).
"""

from __future__ import annotations

import logging
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from google.protobuf.message import DecodeError

from ckpt_engine.core.manifest import DIGEST_FORMAT, blob_digest, check_spec
from ckpt_engine.core.names import some
from ckpt_engine.core.problems import CkptEngineError, aborted, data_loss, deadline, internal, invalid, precondition
from ckpt_engine.core.stage_memory import NONE
from ckpt_engine.engine.parts import leaving, parts_of
from ckpt_engine.engine.target import LoadTarget, Quantised, StagedLayer, VersionTarget
from ckpt_engine.gate.page import CLEAN, LINEAGE_BYTES, WorkerSlot
from ckpt_engine.host.facts import this_host
from ckpt_engine.install.changes import FULL_EVERY, Base, ChangedInstall
from ckpt_engine.install.constants import Constants
from ckpt_engine.install.early_copy import EarlyCopies, EarlyVersion, Tell
from ckpt_engine.install.part import InstallPart
from ckpt_engine.install.parts import check_parts, check_twins, part_reports
from ckpt_engine.install.plans import ReadyPlan, ReadyPlans
from ckpt_engine.install.ready import Ready, await_device, warm_up
from ckpt_engine.install.resolve import bind
from ckpt_engine.install.scrub import Installed, Scrub
from ckpt_engine.install.scrub_share import unscrubbed
from ckpt_engine.install.stage_memory import StageMemory
from ckpt_engine.record.loading import load
from ckpt_engine.record.record import record
from ckpt_engine.record.recording import Handover, Recording, TensorLayout, handover_name
from ckpt_engine.trace import trace
from ckpt_engine.transport.base import Transport
from ckpt_engine.v1 import manager_pb2, weights_pb2, worker_pb2

log = logging.getLogger(__name__)

OnProgress = Callable[[manager_pb2.Stage, int, int], None]
"""Called on the installing thread with (stage, bytes done, bytes in total), every few milliseconds of work."""

_MOST_RECORDINGS = 4
_MOST_NAMES = 16


class Installer:
    """One worker's installer. Used from one thread at a time."""

    def __init__(
        self,
        target: LoadTarget,
        slot: WorkerSlot,
        transports: Mapping[str, Transport],
        stage: StageMemory | None = None,
        tell: Tell = lambda _: True,
        scrub: Scrub | None = None,
    ) -> None:
        """transports: of this process, by name (`transport.registry.all_transports()`). stage: memory for what is
        brought before a pause. tell: takes the news of that. scrub: compares what was installed again afterwards."""
        self._target = target
        self._slot = slot
        self._recordings: OrderedDict[bytes, tuple[Recording, object]] = OrderedDict()
        self._unscrubbed: dict[bytes, Sequence[manager_pb2.Unscrubbed]] = {}  # by the digest of a recording's manifest
        self._plans = ReadyPlans(target, slot.rank, dict(transports), self.recorded)
        self._early = EarlyCopies(stage or StageMemory(NONE, torch.device("cpu")))
        self._tell = tell
        self._scrub = scrub or Scrub(slot, 0.0, lambda _: None, lambda: False)
        self._part = InstallPart(target)
        self._constants = Constants(target)
        self._base: Base | None = None  # what later changes may start from; None: the next install is in full
        self._lost: set[str] = set()  # parts with weights that were discarded, and not installed since
        self._fence = weights_pb2.Fence()
        self._filled = weights_pb2.Fence()
        self._last: worker_pb2.WorkerInstalled | None = None

    def apart(self, slot: WorkerSlot, transports: Mapping[str, Transport]) -> Installer:
        """Makes another installer of the same model, with its own state word and transports, and these recordings."""
        other = Installer(self._target, slot, transports)
        other._recordings = self._recordings
        return other

    def recorded(self, manifest_digest: bytes) -> Recording | None:
        """The recording against a manifest; None: there is none, or it was dropped."""
        entry = self._recordings.get(manifest_digest)
        return None if entry is None else entry[0]

    def prepare(self, order: worker_pb2.PrepareOrder) -> worker_pb2.WorkerPrepared:
        """Records the loader against a manifest, or finds its recording. Changes no weight. Never raises."""
        prepared = worker_pb2.WorkerPrepared(
            fence=order.fence, host=this_host(), digest_format=DIGEST_FORMAT, stage_memory=self._early.words
        )
        stop_at = time.monotonic() + order.deadline_seconds
        try:
            self._check_fill(order.fence)
            prepared.needs = self._recording(order.manifest, stop_at).needs_bytes
        except Exception as error:
            prepared.problem.CopyFrom(problem_of(error, "preparing"))
        return prepared

    def ready(self, order: worker_pb2.ReadyOrder) -> worker_pb2.WorkerReady:
        """Makes a plan ready before the engine pauses. Changes no weight. Never raises.

        The answer names every ready plan: `install` opens, maps and compiles nothing more for it, unless a tensor of
        the model moves or `release` is called before.
        """
        answer = worker_pb2.WorkerReady(fence=order.fence, stages=self._early.stages)
        self._early.stop()
        try:
            self._check_fence(order.fence)
            stop_at = time.monotonic() + order.deadline_seconds
            with self._part.leaving(order):
                plan = self._plans.open(order.plan, order.deadline_seconds)
                try:
                    version = None
                    check_parts(plan.resolved.recording, self._lost)
                    if order.expected:
                        check_twins(plan.resolved.recording, _digests_of(order.expected))
                    if not order.asleep:
                        version = self._early_version(order, plan)
                        plan.lay_out(self._target)
                        plan.lay_out_changes(self._target)
                    self._part.join(order, plan, stop_at - time.monotonic())
                    if order.asleep:
                        answer.plans.append(plan.digest)
                    if version is not None:
                        self._early.begin(order, version, self._tell)  # which rests once it has ended
                        answer.early_bytes = version.layout.bytes
                finally:
                    if not answer.early_bytes:
                        plan.rest()
        except Exception as error:
            answer.problem.CopyFrom(problem_of(error, "getting ready"))
        answer.stage_memory = self._early.words
        answer.unopened.extend(self._plans.unopened)
        answer.plans.extend(digest for digest in self._plans.digests if digest not in answer.plans)
        answer.plans.extend(self._part.communicators)
        return answer

    def install(
        self, order: worker_pb2.InstallOrder, on_progress: OnProgress | None = None
    ) -> worker_pb2.WorkerInstalled:
        """Installs a version. The slot has the outcome, the answer the reason. Never raises.

        An order that was carried out before gets the same answer, and is not repeated.
        """
        if self._last is not None and self._last.fence == order.fence:
            return self._last
        started = time.monotonic()
        run = _InstallRun(self, order, on_progress)
        answer = worker_pb2.WorkerInstalled(fence=order.fence, report=run.report)
        try:
            self._check_fence(order.fence)
            if order.fence.epoch == self._fence.epoch:
                raise aborted(f"worker {self._slot.rank} has already seen epoch {order.fence.epoch}")
            self._fence = weights_pb2.Fence(cluster=order.fence.cluster, epoch=order.fence.epoch)
            with self._scrub.halted(), self._part.leaving(order):
                run.everything()
        except Exception as error:
            run.report.problem.CopyFrom(problem_of(error, "installing"))
        finally:
            if run.plan is not None:
                run.plan.rest()
        answer.report.CopyFrom(run.report)
        if run.plan is not None and not run.report.HasField("problem"):
            answer.edges.extend(run.edges(self._part.memory, self._part.joined(order), self._early.note))
        answer.seconds = time.monotonic() - started
        if answer.fence == self._fence:
            self._last = answer
        return answer

    def _early_version(self, order: worker_pb2.ReadyOrder, plan: ReadyPlan) -> EarlyVersion | None:
        """Decides what of a plan is brought into stage memory, from where the install is to copy it. None: nothing."""
        plan.early = self._early.lay_out(plan.early, plan.resolved, plan.opened) if order.expected else None
        plan.copies_early(plan.early)
        if plan.early is None:
            return None
        values = _digests_of(order.expected)
        _check_count(values, plan.resolved.recording)
        key = plan.digest, order.expected
        return EarlyVersion(key, plan.early, plan.resolved, plan.opened, plan.rest, values)

    def stop_early(self) -> None:
        """Ends what is on its way into stage memory."""
        self._early.stop()

    def give_back(self) -> None:
        """Frees stage memory, with what lies there, until the next plan is made ready, and has no parameter hashed: the
        engine is about to give memory up."""
        self._base = None
        self._scrub.give_up()
        self._early.drop(silent=False)
        self._plans.forget_early()
        self._early.give_back()

    def discarding(self) -> None:
        """Prepares for the engine's discarding of memory: digests the tensors that no update brings, and releases all
        sources' memory.

        A failure to digest is not raised; the next install reports it.
        """
        self.give_back()
        self._lost.update(parts_of(self._target))
        self._constants.note()
        self.release()

    def release(self) -> None:
        """Releases the memory of all sources and of the model; the next install opens it again. The worker stays a
        member of its collective, since the others would not form another one for it alone."""
        self._base = None
        self._scrub.forget()
        self._early.drop()
        self._part.release()
        self._plans.release()

    def close(self) -> None:
        """Releases as `release` does, and leaves the collective."""
        try:
            self._scrub.close()
            self.give_back()
            self.release()
        finally:
            self._part.close()

    def _check_fence(self, fence: weights_pb2.Fence) -> None:
        # Of any cluster: a manager continues above the epochs in the words of the workers that it gets.
        highest = max(self._fence.epoch, self._slot.epoch)
        if fence.epoch < highest:
            raise aborted(f"epoch {fence.epoch} was overtaken by {highest} on worker {self._slot.rank}")

    def _check_fill(self, fence: weights_pb2.Fence) -> None:
        # Fill fences are compared only with each other. They are not in workers' words, so another cluster's may be
        # lower.
        if fence.cluster == self._filled.cluster and fence.epoch < self._filled.epoch:
            raise aborted(f"epoch {fence.epoch} was overtaken by {self._filled.epoch} on worker {self._slot.rank}")
        self._filled = weights_pb2.Fence(cluster=fence.cluster, epoch=fence.epoch)

    def _recording(self, manifest_bytes: bytes, stop_at: float) -> Recording:
        digest = blob_digest(manifest_bytes)
        layout = tuple((name, TensorLayout.of(tensor)) for name, tensor in self._target.named_tensors())
        entry = self._recordings.get(digest)
        if entry is not None and entry[1] == layout:
            self._recordings.move_to_end(digest)
            return entry[0]
        try:
            manifest = weights_pb2.Manifest.FromString(manifest_bytes)
        except DecodeError as error:
            raise invalid(f"the manifest cannot be read: {error}") from error
        for spec in manifest.tensors:
            check_spec(spec)
        if isinstance(self._target, VersionTarget):
            self._target.expect(manifest)
        recording = record(manifest, self._target, stop_at, digest=digest)
        warm_up(recording, self._target.named_tensors())
        self._recordings[digest] = (recording, layout)
        if self._scrub.is_on:
            self._unscrubbed[digest] = unscrubbed(recording, self._target)
        while len(self._recordings) > _MOST_RECORDINGS:
            self._unscrubbed.pop(self._recordings.popitem(last=False)[0], None)
        return recording


class _InstallRun:
    """One install."""

    def __init__(self, installer: Installer, order: worker_pb2.InstallOrder, on_progress: OnProgress | None) -> None:
        self._installer = installer
        self._target = installer._target
        self._slot = installer._slot
        self._order = order
        self._on_progress = on_progress
        self._stop_at = time.monotonic() + order.deadline_seconds
        self.plan: ReadyPlan | None = None
        self._total = 0
        self._stage: manager_pb2.Stage = manager_pb2.STAGE_TRANSFER
        self._as_loaded: set[int] = set()
        self._verified: set[int] = set()
        self._by_loader: list[str] = []
        self._changed: ChangedInstall | None = None  # None: in full
        self.report = manager_pb2.WorkerReport(rank=installer._slot.rank)

    def everything(self) -> None:
        """Runs the whole install. Raises any error; the worker then stays DIRTY, if it was."""
        expected = self._checked_order()
        plan, resident = self._ready(expected)
        base = self._installer._base
        self._changed = self._by_changes(plan, resident, base)
        self._begin(plan)
        if self._changed is None or not self._prove_changes(plan, self._changed, expected):
            self._bring(plan, resident, expected)
            self._prove(resident, plan.resolved.recording, expected)
        self._commit(plan, resident, expected, base)

    def edges(self, memory: int, joined: float, early_note: str) -> Iterator[manager_pb2.EdgeReport]:
        """Reports each edge of the plan; see `ReadyPlan.edges`. What went by changes is not counted in full."""
        assert self.plan is not None
        for edge in self.plan.edges(memory, joined, early_note):
            if self._changed is not None and edge.transport in self._changed.transports:
                edge.bytes += self._changed.bytes - self._changed.spared_bytes
                edge.reason += "; what changed, and in full what cannot go by that"
            yield edge

    def _by_changes(self, plan: ReadyPlan, resident: Ready, base: Base | None) -> ChangedInstall | None:
        """An install of what has changed, with what lies in its place now; None: it goes in full, and the report says
        why. Writes nothing. Raises UNAVAILABLE if that cannot be read any more either."""
        layout = plan.changes
        if layout is None or plan.places:
            return None
        try:
            self._check_base(plan, base)
            if not layout.atoms:
                raise precondition("no tensor can go by its changes: they lie on a GPU, or not as they are served")
            assert base is not None
            table = layout.changes(self._stop_at - time.monotonic())
            changed = ChangedInstall(layout, resident, table, self._order.identity.root, base)
            started = time.monotonic()
            changed.read()
            self.report.transfer_seconds += time.monotonic() - started
            return changed
        except Exception as error:  # nothing is written yet, and the install in full needs none of this
            self.report.in_full = problem_of(error, "looking at what changed").message
            for regions in plan.opened.values():
                if not regions.offered():  # what is not held any more may be overwritten while it is read
                    regions.check()
            return None

    def _check_base(self, plan: ReadyPlan, base: Base | None) -> None:
        """Raises FAILED_PRECONDITION, saying why, unless this worker holds `base` as it was proved."""
        slot = self._slot
        if base is None or slot.state != CLEAN or slot.identity is None:
            raise precondition("this worker holds no version that it has proved and kept in place since")
        if slot.identity.root != base.root:
            raise precondition("this worker's word names another version than it has proved")
        if plan.resolved.recording is not base.recording:
            raise precondition("the version before was loaded in another way")
        if not base.standing.holds():
            raise precondition("tensors of the model have moved since")
        if base.since_full + 1 >= FULL_EVERY:
            raise precondition(f"{base.since_full} installs went by changes since the last one in full")

    def _prove_changes(self, plan: ReadyPlan, changed: ChangedInstall, expected: Sequence[int]) -> bool:
        """Installs what has changed; whether it adds up to what was sealed. If not, nothing of it counts as read."""
        read = self.report.bytes
        self._bring(plan, changed, expected)
        try:
            self._prove(changed, plan.resolved.recording, expected)
        except CkptEngineError as error:
            if error.problem.code != weights_pb2.Problem.CODE_DATA_LOSS:
                raise
            self.report.in_full = f"what changed does not add up: {error.problem.message}"
            log.warning("ckpt-engine: worker %d installs in full: %s", self._slot.rank, self.report.in_full)
            self._changed = None
            self.report.bytes = read
            self._by_loader.clear()
            self._as_loaded.clear()
            return False
        return True

    def _ready(self, expected: Sequence[int]) -> tuple[ReadyPlan, Ready]:
        """Makes the plan ready, which costs next to nothing if it was made ready before the pause."""
        early = self._installer._early.held((blob_digest(self._order.plan), self._order.expected))
        unread = early is not None and early.whole
        plan = self.plan = self._installer._plans.open(self._order.plan, self._stop_at - time.monotonic(), unread)
        plan.copies_early(early)
        if early is not None:
            self.report.early_bytes, self.report.early_seconds = early.bytes, early.seconds
        recording = plan.resolved.recording
        _check_count(expected, recording)
        check_parts(recording, self._installer._lost)
        check_twins(recording, expected)
        self._target = leaving(self._target, recording.unfilled_parts)
        return plan, plan.lay_out(self._target)

    def _begin(self, plan: ReadyPlan) -> None:
        """Runs the last checks, marks the worker DIRTY, and receives what a collective brings."""
        recording = plan.resolved.recording
        self._total = plan.resolved.bytes
        self._installer._constants.check()
        self._in_time()
        part = self._installer._part
        if isinstance(self._target, VersionTarget):
            self._target.accept(self._order.identity, self._order.fence.epoch, recording.manifest)
        part.vote(self._order, plan, self._in_time, self._stop_at)
        trace("worker.install", "dirty")
        self._installer._base = None
        self._slot.dirty(self._order.fence.epoch)
        trace("worker.install", "transfer")
        started = time.monotonic()
        part.run(self._order, self._stop_at, self._on_bytes)
        self.report.transfer_seconds += time.monotonic() - started

    def _bring(self, plan: ReadyPlan, work: Ready | ChangedInstall, expected: Sequence[int]) -> None:
        """Reads. Staged layers are verified one by one. Runs the engine's steps after loading."""
        recording = plan.resolved.recording
        self._stage = manager_pb2.STAGE_TRANSFER
        self._write(work)
        tensors = dict(self._target.named_tensors()) if recording.handovers else {}
        for handover in recording.handovers:
            if plan.staged.isdisjoint(handover.owners):
                self._hand_over(handover, plan, expected, tensors)
        if plan.staged:
            self._write_staged(plan, expected, tensors)
        trace("worker.install", "install")
        started = time.monotonic()
        self._stage = manager_pb2.STAGE_INSTALL
        self._target.post_load()
        await_device(self._works)
        self.report.install_seconds += time.monotonic() - started
        self._in_time()

    def _prove(self, work: Ready | ChangedInstall, recording: Recording, expected: Sequence[int]) -> None:
        """Verifies the model's tensors. Raises DATA_LOSS."""
        trace("worker.install", "verify")
        self._stage = manager_pb2.STAGE_VERIFY
        self._verified = self._verify(work, recording, expected)

    def _commit(self, plan: ReadyPlan, resident: Ready, expected: Sequence[int], before: Base | None) -> None:
        """Marks the worker CLEAN, and says what was done. before: the base of changes."""
        report, recording, changed = self.report, plan.resolved.recording, self._changed
        more = len(self._by_loader) - _MOST_NAMES
        report.by_loader.extend([*self._by_loader[:_MOST_NAMES], *([f"and {more} more"] if more > 0 else [])])
        report.quantised.extend(_quantised(self._target.quantised()))
        report.absent.extend(recording.absent)
        report.verified_as_loaded = len(self._as_loaded)
        report.verified = len(self._verified - self._as_loaded)
        report.tensors = len({need.tensor for need in recording.needs})
        report.parts.extend(
            part_reports(plan.resolved, parts_of(self._installer._target), self._verified | self._as_loaded)
        )
        if changed is not None and before is not None:
            report.by_changes, report.changed_elements = changed.by_changes, changed.changes
            report.since_full = before.since_full + 1
        report.copies = (2 if report.early_bytes else 1) if report.bytes else 0
        trace("worker.install", "commit")
        self._slot.clean(self._order.fence.epoch, self._order.identity)
        self._installer._lost &= recording.unfilled_parts
        self._installer._plans.serve(plan)
        self._installer._early.drop()
        trace("worker.install", "clean")
        assert plan.standing is not None  # `lay_out` has made it
        self._installer._base = Base(self._order.identity.root, recording, expected, plan.standing, report.since_full)
        unscrubbed = self._installer._unscrubbed.get(recording.manifest_digest, ())
        self._installer._scrub.follow(
            Installed(
                self._order.fence.epoch,
                self._order.identity,
                recording,
                resident.checks,
                plan.standing,
                expected,
                unscrubbed,
            )
        )

    def _checked_order(self) -> Sequence[int]:
        identity = self._order.identity
        if len(identity.root) != 32 or not identity.lineage or len(identity.lineage.encode()) > LINEAGE_BYTES:
            raise invalid(
                f"an identity needs a lineage of 1 to {LINEAGE_BYTES} bytes and a root of 32 bytes, not "
                f"{identity.lineage!r} and {len(identity.root)} bytes"
            )
        return _digests_of(self._order.expected)

    def _write(self, ready: Ready | ChangedInstall) -> None:
        started = time.monotonic()
        ready.copy(self._on_bytes)
        copied = time.monotonic()
        ready.fill(self._works)
        self.report.transfer_seconds += copied - started
        self.report.install_seconds += time.monotonic() - copied

    def _write_staged(self, plan: ReadyPlan, expected: Sequence[int], tensors: dict[str, torch.Tensor]) -> None:
        """Reads and verifies staged layers. tensors: the model's, if there are handovers; staged ones come instead."""
        waiting = {name for name in plan.resolved.work if name in plan.staged}
        recording = plan.resolved.recording
        handovers = [each for each in recording.handovers if not plan.staged.isdisjoint(each.owners)]
        present = {name: tensor for name, tensor in tensors.items() if name not in plan.staged}
        unfinished: list[StagedLayer] = []
        with self._installing(), self._target.staging() as layers:
            for layer in layers:
                names = [name for name in layer.tensors if name in waiting]
                waiting.difference_update(names)
                ready = Ready(plan.opened, bind(plan.resolved, names, layer.tensors, plan.places), plan.landed)
                self._write(ready)
                self._as_loaded |= self._verify(ready, recording, expected)
                unfinished.append(layer)
                present.update(layer.tensors)
                for handover in [each for each in handovers if each.owners.keys() <= present.keys()]:
                    self._hand_over(handover, plan, expected, present)
                    handovers.remove(handover)
                blocked = {name for handover in handovers for name in handover.owners}
                for each in [each for each in unfinished if blocked.isdisjoint(each.tensors)]:
                    each.finish()
                    unfinished.remove(each)
                    for name in each.tensors:
                        del present[name]
                self._in_time()
        if waiting:
            name = min(waiting)
            raise internal(f"the engine's adapter staged no tensor {name} ({len(waiting)} in all)", [name])

    def _hand_over(
        self, handover: Handover, plan: ReadyPlan, expected: Sequence[int], tensors: Mapping[str, torch.Tensor]
    ) -> None:
        """Gives the engine's own loader the tensors that it computes on, each verified before."""
        recording = plan.resolved.recording

        def weights() -> Iterator[tuple[str, torch.Tensor]]:
            for index in handover.tensors:
                name = recording.manifest.tensors[index].name
                layout = recording.layouts[handover_name(name)]
                tensor = torch.empty(layout.shape, dtype=layout.dtype, device="cpu")  # engines may have set a default
                ready = Ready(
                    plan.opened, bind(plan.resolved, [handover_name(name)], {handover_name(name): tensor}), plan.landed
                )
                self._write(ready)
                self._as_loaded |= self._verify(ready, recording, expected)
                yield name, tensor

        with self._installing():
            load(handover, self._target, weights(), tensors)
        self._by_loader += handover.owners

    @contextmanager
    def _installing(self) -> Iterator[None]:
        """Counts the time inside as installing, except what is counted as transfer, verification or installing."""
        report, started = self.report, time.monotonic()
        stage_seconds = report.transfer_seconds + report.verify_seconds + report.install_seconds
        yield
        await_device(self._works)
        stage_seconds = report.transfer_seconds + report.verify_seconds + report.install_seconds - stage_seconds
        report.install_seconds += time.monotonic() - started - stage_seconds

    def _verify(self, ready: Ready | ChangedInstall, recording: Recording, expected: Sequence[int]) -> set[int]:
        """Digests needs and returns those that match; raises DATA_LOSS with the names of those that do not."""
        started = time.monotonic()
        mismatches = ready.mismatches(expected, self._works)
        self.report.verify_seconds += time.monotonic() - started
        if mismatches:
            raise _differs(recording, mismatches)
        return ready.needs

    def _on_bytes(self, count: int) -> None:
        self.report.bytes += count
        self._works()

    def _works(self) -> None:
        """Reports progress, also without new bytes: an install without progress counts as stopped."""
        self._in_time()
        if self._on_progress is not None:
            self._on_progress(self._stage, self.report.bytes, self._total)

    def _in_time(self) -> None:
        if time.monotonic() > self._stop_at:
            raise deadline(
                f"worker {self._slot.rank} had read {self.report.bytes} of {self._total} bytes after "
                f"{self._order.deadline_seconds:g} s"
            )


def _digests_of(expected: bytes) -> Sequence[int]:
    """The digests of needs in an order. Raises INVALID_ARGUMENT."""
    try:
        return weights_pb2.Digests.FromString(expected).values
    except DecodeError as error:
        raise invalid(f"the expected digests cannot be read: {error}") from error


def _check_count(expected: Sequence[int], recording: Recording) -> None:
    if len(expected) != len(recording.needs):
        raise invalid(f"{len(expected)} digests are expected for {len(recording.needs)} needs")


def _quantised(layers: Mapping[str, Quantised]) -> Iterator[manager_pb2.QuantisedLayers]:
    """The rows of a report: layers that are quantised alike, by the pattern of their names."""
    alike: dict[Quantised, list[str]] = {}
    for name, how in layers.items():
        alike.setdefault(how, []).append(re.sub(r"\d+", "#", name))
    for how, names in alike.items():
        patterns = [*dict.fromkeys(names)][:_MOST_NAMES]
        yield manager_pb2.QuantisedLayers(published=how.published, method=how.method, layers=len(names), names=patterns)


def _differs(recording: Recording, mismatches: Sequence[int]) -> CkptEngineError:
    names = sorted({recording.name(need) for need in mismatches})
    message = f"what was installed of {some(names)} does not hash to what its source sealed"
    touched = {copy.tensor for copy in recording.copies if copy.need in set(mismatches)}
    others = {recording.name(copy.need) for copy in recording.copies if copy.tensor in touched} - set(names)
    if others:
        message += f" (the same tensors of the model are also loaded from {', '.join(sorted(others)[:4])})"
    return data_loss(message, names)


def problem_of(error: Exception, activity: str) -> weights_pb2.Problem:
    """The Problem for an exception inside an engine. Any but a CkptEngineError is a defect, and logged."""
    if isinstance(error, CkptEngineError):
        return error.problem
    log.exception("ckpt-engine: %s failed", activity)
    return internal(f"{activity} failed inside the engine: {type(error).__name__}: {error}").problem
