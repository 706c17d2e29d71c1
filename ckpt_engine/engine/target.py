"""What an engine must offer so that weights can be installed in it.

The plain case is a model with a loader that writes each weight where the model reads it: `ModuleTarget(model)` is
enough. Its tensors are *resident*: they always exist, weights are copied straight into them, and their bytes are read
back to verify them.

Some engines keep weights in another form than their loader writes: vLLM on a CPU repacks every linear layer for oneDNN,
quantised layers are transformed. Their tensors are *staged*: the loader's form of a layer exists only for a moment
during an install. The Installer asks for staged tensors layer by layer:

    with target.staging() as layers:            # put the engine in its reload state; undo it on any exception
        for layer in layers:                    # each step materialises one layer in the loader's form
            copy, fill, digest layer.tensors    # (Installer) this is the last time these bytes can be read
            layer.finish()                      # post-process, move to where the kernels read, release

So only one layer at a time needs memory, and its digest is reported "as handed to its loader". Where the loader
computes on values, it writes them itself (`load_weights`, on real tensors) before `finish`. If several layers depend on
each other in that, a layer is finished only after the others were materialised. While the loader is recorded
(`recording()`), staged tensors are torch meta tensors of the loader's shapes, strides and dtypes: nothing is written,
so they need no memory. A target may have both resident and staged tensors.

Everything runs on the engine's own thread, the one that calls EngineWorker.prepare() and install().
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from ckpt_engine.core.names import full_name
from ckpt_engine.engine.stray_tensors import stray_tensors_kept
from ckpt_engine.v1 import weights_pb2

Weights = Iterable[tuple[str, Tensor]]


@dataclass(frozen=True, slots=True)
class StagedLayer:
    """Tensors in the loader's form that exist until `finish` has run."""

    # By the names of `named_tensors()` while recording; same shapes, strides and dtypes, real memory, any first values.
    # Until `finish` they are in the model, where its loader finds them.
    tensors: Mapping[str, Tensor]
    # Transforms them into the form with which the engine computes. Called once, after verification.
    finish: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Quantised:
    """How one layer comes to the quantised form that its kernels read."""

    published: bool  # quantised as published, with scales; else the engine quantises it after loading
    method: str  # the name of the engine's class that quantises or takes it


class LoadTarget(Protocol):
    """One worker's model, for our code. Exceptions of its methods become a Problem and never leave our code."""

    @property
    def root(self) -> nn.Module:
        """The module with the parameters and buffers of `named_tensors`. Each install checks whether these are still
        where they were. Work on any other tensor is laid out again each time."""
        ...

    def named_tensors(self) -> Iterable[tuple[str, Tensor]]:
        """Every parameter and buffer that this worker computes with, each name once.

        Inside `recording()` they are as the loader sees them; outside only resident ones must exist. Tensors that share
        storage (tied weights) are recognised by that.
        """
        ...

    def load_weights(self, weights: Weights) -> object:
        """Runs the engine's own loader on checkpoint names and global tensors. While it is recorded it gets all of
        them, on the meta device; at each install those that it computes on, in CPU memory (see record/record.py)."""
        ...

    def recording(self) -> AbstractContextManager[None]:
        """Entered around one recording. On exit, also by an exception, the model is as it was before."""
        ...

    def derived(self) -> Mapping[str, str]:
        """Names of tensors that `post_load` recomputes from loaded ones, each with how."""
        ...

    def constant(self) -> Mapping[str, str]:
        """Names of tensors that do not depend on weights, each with why."""
        ...

    def ignored(self, name: str) -> str | None:
        """Why no worker of this engine loads the checkpoint tensor `name` ("tied to embed_tokens"); None: some may."""
        ...

    def elsewhere(self, name: str) -> str | None:
        """Why another worker of this engine loads the checkpoint tensor `name` instead of this one ("another pipeline
        stage"); None: unknown. The manager refuses an update with a tensor that no worker of an engine needs, unless
        it is absent in all of them."""
        ...

    def absent(self, name: str) -> str | None:
        """Why this worker's model has no module for the checkpoint tensor `name`: the end of a sentence that begins
        with the model ("was made without its vision tower"). None: it has one, or another worker is to load it."""
        ...

    def staged(self) -> Collection[str]:
        """Names of `named_tensors()` that `staging` materialises during an install; empty for a plain model."""
        ...

    def quantised(self) -> Mapping[str, Quantised]:
        """The quantised layers by name; for reports."""
        ...

    def staging(self) -> AbstractContextManager[Iterator[StagedLayer]]:
        """Iterates over staged layers: see the module's docstring. Entered after DIRTY, unless nothing is staged:
        once an install, or, where what changed does not add up, again after `post_load`, for all of the version."""
        ...

    def reload(self, weights: Weights) -> None:
        """Loads a whole checkpoint as the engine does without us, from its first call to its last; a self-check
        compares installs with this. Leaves the model in the form in which the engine computes."""
        ...

    def post_load(self) -> None:
        """Recomputes derived tensors. Runs after every byte is in place and before resident bytes are verified, so it
        must not change loaded tensors. Once an install, or a second time if these do not verify as what changed and
        are brought again, all of them."""
        ...


@runtime_checkable
class VersionTarget(LoadTarget, Protocol):
    """A LoadTarget that keeps several versions, each in memory of its own, so that its tensors follow the manifest."""

    def expect(self, manifest: weights_pb2.Manifest) -> None:
        """Called before each recording: `recording()` then has tensors for this manifest. Raises CkptEngineError if
        this worker can take no such version."""
        ...

    def accept(self, identity: weights_pb2.Identity, epoch: int, manifest: weights_pb2.Manifest) -> None:
        """Called before an install marks the worker DIRTY: `staging()` is for this version then, with the tensors of
        this manifest. Raises CkptEngineError, and the install ends without a trace."""
        ...


class ModuleTarget:
    """An nn.Module with a loader that writes straight into its parameters and buffers. All its tensors are resident.

    Non-persistent buffers, which no checkpoint has, are constant unless the loader fills them.
    """

    def __init__(
        self,
        model: nn.Module,
        load_weights: Callable[[Weights], object] | None = None,
        *,
        derived: Mapping[str, str] | None = None,
        constant: Mapping[str, str] | None = None,
        ignored: Mapping[str, str] | Callable[[str], str | None] | None = None,
        elsewhere: Callable[[str], str | None] | None = None,
        absent: Callable[[str], str | None] | None = None,
        post_load: Callable[[], object] | None = None,
    ) -> None:
        """load_weights: default `model.load_weights`. Mappings are from name to reason, as in LoadTarget."""
        self._model = model
        self._load_weights: Callable[[Weights], object] = load_weights or getattr(model, "load_weights")  # noqa: B009
        self._derived = dict(derived or {})
        self._constant = dict(constant or {})
        self._elsewhere = elsewhere
        self._absent = absent
        self._ignored = ignored if callable(ignored) else dict(ignored or {}).get
        self._post_load = post_load

    @property
    def root(self) -> nn.Module:
        return self._model

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._model.named_parameters(remove_duplicate=False)
        yield from self._model.named_buffers(remove_duplicate=False)

    def load_weights(self, weights: Weights) -> object:
        return self._load_weights(weights)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Restores tensors that a loader replaced instead of writing to them."""
        modules = [
            (module, dict(module._parameters), dict(module._buffers), set(module._non_persistent_buffers_set))
            for module in self._model.modules()
        ]
        memory = [(tensor, tensor.data) for _, tensor in self.named_tensors()]
        try:
            with stray_tensors_kept(self._model):
                yield
        finally:
            for module, parameters, buffers, non_persistent in modules:
                module._parameters.clear()
                module._parameters.update(parameters)
                module._buffers.clear()
                module._buffers.update(buffers)
                module._non_persistent_buffers_set = non_persistent
            for tensor, data in memory:
                if not _same_memory(tensor, data):
                    tensor.data = data

    def derived(self) -> Mapping[str, str]:
        return self._derived

    def constant(self) -> Mapping[str, str]:
        reasons = {}
        for prefix, module in self._model.named_modules(remove_duplicate=False):
            for name in module._non_persistent_buffers_set:
                reasons[full_name(prefix, name)] = "a buffer that is not persistent"
        return reasons | self._constant

    def ignored(self, name: str) -> str | None:
        return self._ignored(name)

    def elsewhere(self, name: str) -> str | None:
        return None if self._elsewhere is None else self._elsewhere(name)

    def absent(self, name: str) -> str | None:
        return None if self._absent is None else self._absent(name)

    def staged(self) -> Collection[str]:
        return ()

    def quantised(self) -> Mapping[str, Quantised]:
        return {}

    def staging(self) -> AbstractContextManager[Iterator[StagedLayer]]:
        return nullcontext(iter(()))

    def reload(self, weights: Weights) -> None:
        self.load_weights(weights)
        self.post_load()

    def post_load(self) -> None:
        if self._post_load is not None:
            with torch.no_grad():
                self._post_load()


def _same_memory(one: Tensor, other: Tensor) -> bool:
    return (
        one.untyped_storage()._cdata == other.untyped_storage()._cdata
        and one.storage_offset() == other.storage_offset()
        and one.shape == other.shape
        and one.stride() == other.stride()
        and one.dtype == other.dtype
    )
