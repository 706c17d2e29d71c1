"""Runs the engine's own loader on real values and checks that it writes what it must.

Only for what a recording could not turn into copies (`Handover`). The loader gets whole checkpoint tensors one at a
time, so only a few of them are in memory at once; the caller verifies each before it is handed over. Every write to the
model is watched. A loader that leaves out a part of what it wrote when it was recorded fails the install; the worker is
DIRTY by then and stays so.

Runs on the engine's thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ckpt_engine.core.boxes import remainder
from ckpt_engine.core.problems import CkptEngineError, internal
from ckpt_engine.engine.target import LoadTarget, Weights
from ckpt_engine.record.coverage import Owners, StorageSlice
from ckpt_engine.record.origins import Watching, is_composite, written_by
from ckpt_engine.record.recording import Handover
from ckpt_engine.record.views import Undecodable
from ckpt_engine.torch_storages import storage_key


def load(handover: Handover, target: LoadTarget, weights: Weights, tensors: Mapping[str, torch.Tensor]) -> None:
    """Hands `weights` to the target's loader, which writes to `tensors` (the model's, by name, as they lie now).

    weights: what it raises is raised here, also if the loader swallows it.
    Raises CkptEngineError: INTERNAL if the loader raises, does not take every tensor, does not write all of the
    handover's boxes, or replaces a tensor instead of writing to it.
    """
    tensors_watched = {name: tensors[name].detach() for name in handover.owners}
    owners = Owners(tensors_watched.items())
    watch = _WriteWatch(owners)
    weight_feed = _WeightFeed(weights)
    inference = torch.is_inference_mode_enabled() or any(tensor.is_inference() for tensor in tensors_watched.values())
    try:
        with torch.no_grad(), torch.inference_mode(inference), watch:
            target.load_weights(weight_feed.hand_out())
    except CkptEngineError:
        raise
    except Exception as error:
        if weight_feed.error is None:
            text = f"{type(error).__name__}: {error}"
            raise internal(
                f"the engine's loader failed on weights that it computes on: {text}", [weight_feed.last]
            ) from error
    if weight_feed.error is not None:
        raise weight_feed.error
    if not weight_feed.exhausted:
        raise internal(
            f"the engine's loader stopped after {weight_feed.last}; when it was recorded, it went on",
            [weight_feed.last],
        )
    tensors_now = dict(target.named_tensors())
    for name, boxes in handover.owners.items():
        if name not in tensors_now or StorageSlice.of(tensors_now[name]) != owners.slices[name]:
            raise internal(
                f"the engine's loader replaced the model's tensor {name}, and did not when it was recorded", [name]
            )
        unwritten = remainder(boxes, watch.boxes(name))
        if unwritten:
            raise internal(
                f"the engine's loader wrote less of the model's tensor {name} than when it was recorded", [name]
            )


class _WeightFeed:
    """An iterator over weights that remembers its position, and what it raised."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self.last = ""
        self.exhausted = False
        self.error: Exception | None = None

    def hand_out(self) -> Iterator[tuple[str, torch.Tensor]]:
        try:
            weights = iter(self._weights)
            while True:
                with _disable_current_modes():  # do not watch reading and hashing
                    item = next(weights, None)
                if item is None:
                    break
                self.last = item[0]
                yield item
        except Exception as error:
            self.error = error
            raise
        self.exhausted = True


class _WriteWatch(Watching):
    """Notes which boxes of the model are written to."""

    def __init__(self, owners: Owners) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._owners = owners

    def boxes(self, name: str) -> list[Any]:
        return [box for box, _ in self._owners.by_name[name].loaded]

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if is_composite(func):
            with self:
                return func.decompose(*args, **kwargs)
        result = func(*args, **kwargs)
        for tensor in written_by(func, args, kwargs):
            if storage_key(tensor) in self._owners:
                try:
                    found = self._owners.find(tensor)
                except Undecodable:
                    continue  # not counted: boxes that are written in no other way count as unwritten
                if found is not None:
                    found[0].loaded += ((box, "") for box in found[1])
        return result
