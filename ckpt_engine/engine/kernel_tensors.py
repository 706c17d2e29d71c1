"""Tensors that a layer's kernels keep in attributes and objects, beside the layer's parameters and buffers.

It finds them, and copies what processing made of new weights to where they lie; it processes no weights, and leaves
parameters and buffers to the adapter. Engines make the kernels of quantised layers each time they process weights,
while a captured CUDA graph goes on reading the memory of the first ones.

Runs in the worker, on the engine's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ckpt_engine.core.problems import CkptEngineError, internal

DEPTH = 6
"""How many objects below a layer are looked into; those of experts have their scales in the sixth."""

_MODULES_OWN = frozenset(vars(nn.Module()))


@dataclass(frozen=True, slots=True)
class _Edge:
    """One step on the way from the layer to a tensor, or to a number."""

    path: str  # of the value, for people and to find the same one in other objects
    holder: Any  # the object or container with the value
    key: Any  # under which it has it
    value: Any


class KernelTensors:
    """What one layer's kernels hold at the time of creation, while they are those with which the engine computes."""

    def __init__(
        self, layer: nn.Module, looked_into: Callable[[object], bool], results: Collection[str] | None = None
    ) -> None:
        """looked_into: whether an object may have tensors of kernels, or objects that do. results: paths of what
        processing makes, as they were when the model had just been loaded; None: all. What kernels have besides, since
        they have computed something, stays as it is."""
        self._layer, self._looked_into = layer, looked_into
        self._edges = list(self._walk())
        parameters = (*layer._parameters.values(), *layer._buffers.values())
        self._memory = {address(tensor) for tensor in parameters if tensor is not None} - {0}
        self._results = self.paths if results is None else results

    @property
    def paths(self) -> frozenset[str]:
        """The paths of all tensors and numbers."""
        return frozenset(edge.path for edge in self._edges if isinstance(edge.value, Tensor | float))

    @property
    def tensors(self) -> dict[str, Tensor]:
        """By path, those that show no memory of the layer's parameters and buffers."""
        found = {edge.path: edge.value for edge in self._edges if isinstance(edge.value, Tensor)}
        own = {path: tensor for path, tensor in found.items() if address(tensor) not in self._memory}
        return {path: tensor for path, tensor in own.items() if path in self._results}

    def take_over(self) -> None:
        """Copies the values that the layer's kernels hold now into the tensors of before, and puts these back.

        What shows a parameter's memory has its new values with the parameter. Raises INTERNAL, and has copied nothing,
        if the kernels of now have other tensors than before, of another form, or another number.
        """
        now = {edge.path: edge.value for edge in self._walk()}
        pairs = []
        for path, own in self.tensors.items():
            new = now.get(path)
            if not isinstance(new, Tensor) or not _same_form(own, new):
                raise self._differs(path, own, new)
            pairs.append((own, new))
        for edge in self._edges:
            if isinstance(edge.value, float) and edge.path in self._results and now.get(edge.path) != edge.value:
                raise self._differs(edge.path, edge.value, now.get(edge.path))
        with torch.inference_mode():
            for own, new in pairs:
                if own is not new:
                    own.copy_(new)
        self.put_back()

    def put_back(self) -> None:
        """Gives the layer the objects and tensors back that it had at the time of creation."""
        for edge in self._edges:
            _set(edge)

    def _walk(self) -> Iterator[_Edge]:
        """The steps to everything that is found, each after those above it."""
        yield from self._below(self._layer, "", 0, {})

    def _below(self, holder: object, path: str, depth: int, visits: dict[int, bool]) -> Iterator[_Edge]:
        """visits: whether there is something below an object, by its id; each is looked into once."""
        for key, value in _items(holder):
            edge = _Edge(f"{path}.{key}" if path else str(key), holder, key, value)
            if isinstance(value, Tensor | float):
                yield edge
            elif depth < DEPTH and self._open(value):
                below: list[_Edge] = []
                if id(value) not in visits:
                    visits[id(value)] = False
                    below = list(self._below(value, edge.path, depth + 1, visits))
                    visits[id(value)] = bool(below)
                if visits[id(value)]:
                    yield edge
                    yield from below

    def _open(self, value: object) -> bool:
        if isinstance(value, list | tuple | dict):
            return bool(value)
        return not isinstance(value, nn.Module | type) and self._looked_into(value)

    def _differs(self, path: str, own: object, new: object) -> CkptEngineError:
        return internal(
            f"the engine has made {_text(new)} of the new weights where it had made {_text(own)} at start: {path} of a "
            f"{type(self._layer).__name__}, which its kernels read",
            [path],
        )


def address(tensor: Tensor) -> int:
    """The address of a tensor's memory; 0 if it has none of its own, as tensors of packed classes."""
    try:
        return int(tensor.untyped_storage().data_ptr())
    except (RuntimeError, NotImplementedError):
        return 0


def parts(tensor: Tensor) -> list[Tensor]:
    """The plain tensors that a packed one consists of; of a plain one, itself."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return [tensor]
    packed = [getattr(tensor, name) for name in flatten()[0]]
    return [part for each in packed if isinstance(each, Tensor) for part in parts(each)]


def _items(holder: object) -> list[tuple[Any, Any]]:
    if isinstance(holder, dict):
        return list(holder.items())
    if isinstance(holder, list | tuple):
        return list(enumerate(holder))
    values = dict(getattr(holder, "__dict__", {}))
    if isinstance(holder, nn.Module):
        return [(name, value) for name, value in values.items() if name not in _MODULES_OWN]
    for kind in type(holder).__mro__:
        for name in getattr(kind, "__slots__", ()):
            if hasattr(holder, name):
                values[name] = getattr(holder, name)
    return list(values.items())


def _set(edge: _Edge) -> None:
    """Puts a value back at its place, if something else is there."""
    holder, key, value = edge.holder, edge.key, edge.value
    if dict(_items(holder)).get(key) is value:
        return
    if isinstance(holder, list | dict):
        holder[key] = value
    elif hasattr(holder, "__dict__"):
        holder.__dict__[key] = value  # also of frozen dataclasses, and of modules without their checks
    else:
        object.__setattr__(holder, key, value)


def _same_form(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and one.device == other.device


def _text(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)} on {value.device}"
    return "nothing" if value is None else str(value)
