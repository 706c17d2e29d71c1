"""Work on tensors of a model, checked and made ready: replayed at each update with as little as can be left to do then.

It decides how copies, fills and digests are prepared and run, and what is compiled ahead of a pause; not which there
are (`resolve.py`), nor what follows from a digest that differs (`installer.py`). The engine's thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from ckpt_engine.copy.copying import TensorCopy
from ckpt_engine.core.boxes import Box
from ckpt_engine.digest import host as digest_host
from ckpt_engine.digest.factors import widened
from ckpt_engine.digest.prepared import prepare_digests
from ckpt_engine.install.resolve import Bound, Destination
from ckpt_engine.record.recording import Recording
from ckpt_engine.transport.base import OpenedRegions

log = logging.getLogger(__name__)

_CHECKS_AT_ONCE = 256
"""How many digests a CPU computes before `in_time` is called; a GPU computes all of them together."""

_POLL_SECONDS = 20e-6

Landed = Mapping[tuple[int, Box], torch.Tensor]
"""What a collective brings that has no memory in the model before an install: by tensor of the manifest and box."""

_Check = tuple[int, torch.Tensor, tuple[int, ...], bool]


class Ready:
    """Prepared copies, fills and digests of some tensors. Its constructor checks every move and changes no tensor."""

    def __init__(self, opened: Mapping[str, OpenedRegions], bound: Bound, landed: Landed | None = None) -> None:
        """landed: memory from which to copy what a collective brought; None: it writes to the tensors themselves."""
        copies = {name: opened[name].prepare(moves) for name, moves in bound.moves.items()}
        self._copies = list(copies.values())
        self.arrivals = bound.arrivals if landed is None else []  # what a collective is to write to these tensors
        self._landed = (
            None
            if landed is None
            else TensorCopy([(view, landed[tensor, box]) for tensor, box, view in bound.arrivals])
        )
        # By transport, which copies are slower than they could be, and why.
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
        self.needs = {need for need, *_ in bound.checks}  # the needs that are digested

    def copy(self, on_bytes: Callable[[int], None]) -> None:
        """Copies what is loaded, and returns when all of it has arrived. Raises what `on_bytes` raises."""
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

    def wrong(self, expected: Sequence[int], in_time: Callable[[], None]) -> list[int]:
        """The needs whose present bytes have another digest than expected. expected: by need."""
        found = []
        for needs, digests in self._digests:
            values = digests.run()
            found += [
                need
                for (need, wide), value in zip(needs, values, strict=True)
                if value != (widened(expected[need], *wide) if wide else expected[need])
            ]
            in_time()
        return found


def await_device(in_time: Callable[[], None]) -> None:
    """Waits until the current stream of the GPU is empty, so that a stage's time does not include earlier work.

    Does not wait for other streams. Calls `in_time` while it waits."""
    if not torch.cuda.is_initialized():
        return
    event = torch.cuda.Event()
    event.record()
    while not event.query():
        in_time()
        time.sleep(_POLL_SECONDS)


def warm_up(recording: Recording, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Compiles, before any pause, the kernels that copy to and digest these tensors.

    Takes seconds the first time on a host. Never raises: what is not compiled here is compiled when it is needed."""
    held = list(tensors)
    if any(tensor.device.type == "cpu" for _, tensor in held):
        digest_host.warm_up()
    present = {name: tensor.detach() for name, tensor in held if tensor.device.type == "cuda"}
    if not present:
        return
    # Here, since it loads triton, which a process without a GPU does not need.
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


def _groups(checks: Sequence[_Check]) -> list[Sequence[_Check]]:
    near = [check for check in checks if check[1].device.type != "cuda"]
    far = [check for check in checks if check[1].device.type == "cuda"]
    groups: list[Sequence[_Check]] = [near[i : i + _CHECKS_AT_ONCE] for i in range(0, len(near), _CHECKS_AT_ONCE)]
    return [far, *groups] if far else groups
