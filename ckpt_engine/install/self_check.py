"""Loads weights generated from a seed into the model: by our install, or by the engine's own loader.

It decides the values, and how each way runs. The agent decides whether both ways give the same model
(machines/agent/check.py): it asks the engine for log-probabilities after each. Nothing is transferred: every worker of
an engine generates the same values from a tensor's name and coordinates. It runs on the engine's thread while the
worker holds no version. The worker's state word does not change, so the gate stays closed.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path
from statistics import median

import torch

from ckpt_engine.copy.copying import TensorCopy
from ckpt_engine.core.problems import invalid, precondition
from ckpt_engine.core.strides import contiguous
from ckpt_engine.digest.boxes import digest_boxes
from ckpt_engine.engine.target import LoadTarget
from ckpt_engine.gate.page import EnginePage, WorkerSlot
from ckpt_engine.install.installer import Installer, problem_of
from ckpt_engine.record.recording import Recording
from ckpt_engine.torch_dtypes import torch_dtype
from ckpt_engine.transport.base import OPEN_SECONDS, Availability, Move
from ckpt_engine.v1 import weights_pb2, worker_pb2

TRANSPORT = "seeded"
"""The transport of generated weights in the plans below. No manager knows it."""

_SHIFTS = 4194301  # a prime: where a tensor's values begin in its buffer
_SLICE = 1 << 24  # elements that are generated at a time


class SeededWeights:
    """The weights of one seed: views of one buffer for each dtype and kind. A tensor's name decides where its values
    begin, so that a box at a wrong place, or in a wrong tensor, has other values.

    Matrices are drawn from [-a, a] with a = 2 / sqrt(columns), so that every layer's output matters to the logits;
    vectors (norms, biases) from [0.5, 1.5].
    """

    def __init__(self, manifest: weights_pb2.Manifest, seed: int, device: torch.device) -> None:
        self._tensors = manifest.tensors
        columns = [spec.shape[-1] for spec in manifest.tensors if len(spec.shape) > 1]
        self._spread = 2.0 / max(1.0, float(median(columns)) if columns else 1.0) ** 0.5
        self._seed, self._device = seed, device
        self._buffers: dict[tuple[str, bool], torch.Tensor] = {}
        self._longest: dict[tuple[str, bool], int] = {}
        for spec in manifest.tensors:
            key = spec.dtype, len(spec.shape) > 1
            self._longest[key] = max(self._longest.get(key, 0), prod(spec.shape))

    def view(self, tensor: int, offset: int, shape: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
        """A view of a part of one tensor of the manifest. offset, stride: in elements of the whole tensor."""
        spec = self._tensors[tensor]
        key = spec.dtype, len(spec.shape) > 1
        if key not in self._buffers:
            self._buffers[key] = self._new_buffer(torch_dtype(spec.dtype), key[1], self._longest[key] + _SHIFTS)
        shift = int.from_bytes(hashlib.sha256(spec.name.encode()).digest()[:8], "little") % _SHIFTS
        return self._buffers[key].as_strided(tuple(shape), tuple(stride), shift + offset)

    def named(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor of the manifest, whole."""
        for index, spec in enumerate(self._tensors):
            yield spec.name, self.view(index, 0, spec.shape, contiguous(spec.shape))

    def _new_buffer(self, dtype: torch.dtype, matrix: bool, length: int) -> torch.Tensor:
        generator = torch.Generator(device=self._device).manual_seed(self._seed)
        buffer = torch.empty(length, dtype=dtype, device=self._device)
        low, high = (-self._spread, self._spread) if matrix else (0.5, 1.5)
        for first in range(0, length, _SLICE):
            part = buffer[first : first + _SLICE]
            if dtype.is_floating_point or dtype.is_complex:
                values = torch.empty(part.shape, dtype=torch.float32, device=self._device)
                part.copy_(values.uniform_(low, high, generator=generator))
            else:
                part.copy_(torch.randint(0, 2, part.shape, device=self._device, generator=generator))
        return buffer


class _Seeded:
    """Seeded weights as a transport and as its opened regions: a region is a tensor, its id the index."""

    name = TRANSPORT

    def __init__(self, weights: SeededWeights) -> None:
        self._weights = weights

    def availability(self) -> Availability:
        return Availability(True, "")

    def open(self, regions: Sequence[weights_pb2.Region], seconds: float = OPEN_SECONDS) -> _Seeded:
        return self

    def prepare(self, moves: Sequence[Move]) -> TensorCopy:
        pairs = []
        for move in moves:
            width = torch_dtype(move.stored or move.dtype).itemsize
            pairs.append(
                (move.destination, self._weights.view(move.region.id, move.offset // width, move.shape, move.stride))
            )
        return TensorCopy(pairs, keep=self._weights)

    def check(self) -> None:
        return

    def offered(self) -> bool:
        return True

    def close(self) -> None:
        return


class SelfCheck:
    """One worker's part in the check of its engine."""

    def __init__(self, target: LoadTarget, installer: Installer, slot: WorkerSlot, world_size: int) -> None:
        """installer: of the worker; only its recordings are used. slot: of the worker; it is only read."""
        self._target, self._installer = target, installer
        self._slot, self._world_size = slot, world_size
        self._installs = 0

    def load(self, order: worker_pb2.CheckOrder) -> worker_pb2.WorkerChecked:
        """Loads the weights of a seed. A worker that holds a version refuses, or they would be served under its name.
        Raises nothing: a problem is in the answer."""
        checked = worker_pb2.WorkerChecked(fence=order.fence)
        recording = self._installer.recorded(order.manifest_digest)
        try:
            if (identity := self._slot.identity) is not None:
                version = f"version {identity.version} of {identity.lineage}"
                raise precondition(
                    f"worker {self._slot.rank} holds {version}; generated weights would overwrite it: an engine is "
                    "checked before its first update"
                )
            if recording is None:
                raise precondition(f"worker {self._slot.rank} has not recorded this manifest")
            with torch.no_grad():
                self._load(order, recording)
        except Exception as error:
            checked.problem.CopyFrom(problem_of(error, "checking the engine"))
        finally:
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
                torch.cuda.empty_cache()  # the engine expects this memory to be free
        return checked

    def _load(self, order: worker_pb2.CheckOrder, recording: Recording) -> None:
        weights = SeededWeights(recording.manifest, order.seed, _device(self._target))
        if order.by_engine:
            self._target.reload(weights.named())
            return
        self._installs += 1
        with tempfile.TemporaryDirectory(prefix="ckpt-engine-check-") as folder:
            page = EnginePage(Path(folder) / "page")
            try:
                self._install(page.claim(self._slot.rank, self._world_size), order, recording, weights)
            finally:
                page.close()

    def _install(
        self, slot: WorkerSlot, order: worker_pb2.CheckOrder, recording: Recording, weights: SeededWeights
    ) -> None:
        """Runs an ordinary install, with a state word that no gate reads."""
        installer = self._installer.apart(slot, {TRANSPORT: _Seeded(weights)})
        boxes = []
        for need in recording.needs:
            steps = contiguous(recording.manifest.tensors[need.tensor].shape)
            first = _first(recording, need.tensor, need.box.start)
            boxes.append((weights.view(need.tensor, first, need.box.shape, steps), need.box.start))
        expected = digest_boxes(boxes)
        identity = weights_pb2.Identity(lineage="self-check", version=order.seed, root=bytes(32))
        try:
            installed = installer.install(
                worker_pb2.InstallOrder(
                    fence=weights_pb2.Fence(cluster=order.fence.cluster, epoch=self._installs),
                    identity=identity,
                    plan=_plan(recording).SerializeToString(),
                    expected=weights_pb2.Digests(values=expected).SerializeToString(),
                    deadline_seconds=order.deadline_seconds,
                )
            )
        finally:
            installer.close()
        if installed.report.HasField("problem"):
            problem = installed.report.problem
            raise invalid(f"an install of made weights failed: {problem.message}", problem.tensors)


def _plan(recording: Recording) -> weights_pb2.WorkerPlan:
    """A plan that reads each need, as one piece, from the region of its whole tensor."""
    specs = recording.manifest.tensors
    used = sorted({need.tensor for need in recording.needs})
    regions = [
        weights_pb2.Region(id=tensor, transport=TRANSPORT, locator=specs[tensor].name.encode()) for tensor in used
    ]
    pieces = [
        weights_pb2.Piece(
            need=index,
            region=need.tensor,
            offset=_first(recording, need.tensor, need.box.start) * torch_dtype(specs[need.tensor].dtype).itemsize,
            start=need.box.start,
            stop=need.box.stop,
            stride=contiguous(specs[need.tensor].shape),
        )
        for index, need in enumerate(recording.needs)
    ]
    return weights_pb2.WorkerPlan(
        manifest_digest=recording.manifest_digest,
        needs_digest=recording.needs_digest,
        sources=[weights_pb2.PlanSource(transport=TRANSPORT, regions=regions, source="weights made of a seed")],
        pieces=pieces,
    )


def _first(recording: Recording, tensor: int, start: Sequence[int]) -> int:
    """Elements of the whole tensor before the box that begins at `start`."""
    steps = contiguous(recording.manifest.tensors[tensor].shape)
    return sum(step * first for step, first in zip(steps, start, strict=True))


def _device(target: LoadTarget) -> torch.device:
    """The model's device."""
    devices = [tensor.device for _, tensor in target.named_tensors() if tensor.device.type != "meta"]
    return next((device for device in devices if device.type == "cuda"), torch.device("cpu"))
