"""Copies, fills and digests of a model's tensors: checked and prepared once, then replayed at each update.

It decides how they are prepared and run, and what is compiled before a pause. It does not decide which there are
(`resolve.py`), nor what follows from a digest that differs (`installer.py`). Used on the engine's thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from ckpt_engine.copy.copying import TensorCopy
from ckpt_engine.core.boxes import Box
from ckpt_engine.digest import host as digest_host
from ckpt_engine.digest import placed
from ckpt_engine.digest.factors import widened
from ckpt_engine.digest.prepared import prepare_digests
from ckpt_engine.install.resolve import Bound, Destination
from ckpt_engine.record.recording import Recording
from ckpt_engine.transport.base import OpenedRegions

log = logging.getLogger(__name__)

_CHECKS_AT_ONCE = 256
"""Checks that a CPU digests together; a GPU digests all at once."""

_POLL_SECONDS = 20e-6

Landed = Mapping[tuple[int, Box], torch.Tensor]
"""Memory for what a collective brings of tensors without resident memory, by tensor of the manifest and box."""

Check = tuple[int, torch.Tensor, tuple[int, ...], bool]
"""(need, view in global axis order, its first coordinate, whether the model keeps it widened)"""


class Ready:
    """Copies, fills and digests of some tensors. Making it checks every move and changes no tensor."""

    def __init__(self, opened: Mapping[str, OpenedRegions], bound: Bound, landed: Landed | None = None) -> None:
        """landed: memory into which a collective has brought the arrivals; None: it writes them to the tensors."""
        copies = {name: opened[name].prepare(moves) for name, moves in bound.moves.items()}
        early = [TensorCopy(bound.early)] if bound.early else []
        self._copies = [*early, *copies.values()]
        self.arrivals = bound.arrivals if landed is None else []  # that a collective is to write to these tensors
        self._landed = (
            None
            if landed is None
            else TensorCopy([(view, landed[tensor, box]) for tensor, box, view in bound.arrivals])
        )
        # By transport, what is slower than it could be, and why.
        self.notes = {name: copy.notes for name, copy in copies.items() if copy.notes}
        self._zeros = [destination for destination, value in bound.fills if value == 0]
        self._fills = [(destination, value) for destination, value in bound.fills if value != 0]
        self._digests = [
            (
                [(need, (start, tuple(view.shape)) if wide else None) for need, view, start, wide in checks],
                prepare_digests([(view, start) for _, view, start, _ in checks]),
            )
            for checks in _groups(bound.checks)
        ]
        self.checks: Sequence[Check] = bound.checks  # what is digested
        self.needs = {need for need, *_ in bound.checks}

    def copy(self, on_bytes: Callable[[int], None]) -> None:
        """Writes all loaded bytes and waits until they have arrived. Raises what `on_bytes` raises."""
        for copy in self._copies:
            copy.run(on_bytes)
        if self._landed is not None:
            self._landed.run()

    def fill(self, in_time: Callable[[], None]) -> None:
        """Writes the values that the loader sets without weights, such as padding."""
        if not self._zeros and not self._fills:
            return
        with torch.inference_mode():
            if self._zeros:
                torch._foreach_zero_(self._zeros)
            for destination, value in self._fills:
                destination.fill_(value)
        await_device(in_time)

    def mismatches(self, expected: Sequence[int], in_time: Callable[[], None]) -> list[int]:
        """Digests the needs' bytes as they are now. Returns the needs with a digest that differs from `expected`."""
        mismatches = []
        for needs, digests in self._digests:
            values = digests.run()
            mismatches += [
                need
                for (need, wide), value in zip(needs, values, strict=True)
                if value != (widened(expected[need], *wide) if wide else expected[need])
            ]
            in_time()
        return mismatches


def await_device(in_time: Callable[[], None]) -> None:
    """Waits until the GPU has finished the work of its current stream, so that each stage is charged its own time. Does
    not wait for other streams; calls `in_time` meanwhile."""
    if not torch.cuda.is_initialized():
        return
    event = torch.cuda.Event()
    event.record()
    while not event.query():
        in_time()
        time.sleep(_POLL_SECONDS)


def warm_up(recording: Recording, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Compiles the kernels for copying to and digesting these tensors, before any pause. The first time on a host it
    takes seconds. Never raises: a kernel that is not compiled here is compiled when it is needed."""
    all_tensors = list(tensors)
    if near := {tensor.dtype for _, tensor in all_tensors if tensor.device.type == "cpu"}:
        digest_host.warm_up()
        placed.warm_up(near)
    present = {name: tensor.detach() for name, tensor in all_tensors if tensor.device.type == "cuda"}
    if not present:
        return
    # Imported here, since it loads triton, which a process without a GPU does not need.
    from ckpt_engine.copy import copy_kernel

    try:
        for device in {tensor.device for tensor in present.values()}:
            with torch.cuda.device(device):
                copy_kernel.warm_up(device, {tensor.dtype for tensor in present.values() if tensor.device == device})
        boxes = [(recording.needs[copy.need].box, copy) for copy in recording.copies if copy.tensor in present]
        prepare_digests(
            [
                (Destination(copy.offset, box.shape, copy.stride).of(present[copy.tensor]), box.start)
                for box, copy in boxes
            ]
        )
    except Exception:
        log.warning("ckpt-engine: kernels could not be compiled ahead", exc_info=True)


def _groups(checks: Sequence[Check]) -> list[Sequence[Check]]:
    near = [check for check in checks if check[1].device.type != "cuda"]
    far = [check for check in checks if check[1].device.type == "cuda"]
    groups: list[Sequence[Check]] = [near[i : i + _CHECKS_AT_ONCE] for i in range(0, len(near), _CHECKS_AT_ONCE)]
    return [far, *groups] if far else groups
