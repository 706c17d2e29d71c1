"""What an engine must offer so that weights can be installed in it.

The plain case is a model whose loader writes each weight where the model will read it: `ModuleTarget(model)` is all
that it takes. Its tensors are *resident*: they are there all the time, weights are copied straight into them, and what
they hold is read back to verify it.

Some engines do not keep weights in the form that their loader writes: vLLM on a CPU repacks every linear layer for
oneDNN, quantised layers are transformed. Their tensors are *staged*: the loader's form of a layer exists only for a
moment during an install. The Installer asks for staged tensors layer by layer:

    with target.staging() as layers:            # put the engine in its reload state; undo it on any exception
        for layer in layers:                    # each step materialises one layer in the loader's form
            copy, fill, digest layer.tensors    # (Installer) this is the last time these bytes can be read
            layer.finish()                      # post-process, move to where the kernels read, release

so one layer at a time needs memory, and its digest says which bytes its loader was given, not which bytes it holds now.
Some loaders compute on values. They write these by themselves (`load_weights`, on real tensors) before `finish`. Where
such a computation needs several layers, a layer is finished only after the next ones were materialised. While the
loader is recorded (`recording()`), staged tensors stand as torch meta tensors of the loader's shapes, strides and
dtypes; nothing is written, so they need no memory. A target may mix resident and staged tensors.

Everything runs on the engine's own thread, the one that calls EngineWorker.prepare() and install().
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from ckpt_engine.core.names import full_name
from ckpt_engine.engine.stray_tensors import stray_tensors_kept

Weights = Iterable[tuple[str, Tensor]]


@dataclass(frozen=True, slots=True)
class StagedLayer:
    """Tensors in the loader's form that exist until `finish` has run.

    tensors: by the names that `named_tensors()` gave while recording; same shapes, strides and dtypes, real memory.
        What they hold at first does not matter. Until `finish` they stand in the model, where its loader finds them.
    finish: brings what they hold now to where the engine computes with it. Called once, after verification.
    """

    tensors: Mapping[str, Tensor]
    finish: Callable[[], None]


class LoadTarget(Protocol):
    """One worker's model, seen from outside. Exceptions of any method become a Problem, never leave our code."""

    @property
    def root(self) -> nn.Module:
        """The module whose parameters and buffers `named_tensors` names. Each install looks there whether they still
        stand where they stood. Weights that are loaded into other tensors are laid out anew each time."""
        ...

    def named_tensors(self) -> Iterable[tuple[str, Tensor]]:
        """Every parameter and buffer that this worker computes with, each name once.

        Inside `recording()`: as the loader sees them. Outside: only resident ones need to be there. Tensors that share
        storage (tied weights) are recognised by it.
        """
        ...

    def load_weights(self, weights: Weights) -> object:
        """The engine's own loader, given checkpoint names and global tensors: all of them, on the meta device, while it
        is recorded; at each install those that it computes on, in CPU memory (see record/record.py)."""
        ...

    def recording(self) -> AbstractContextManager[None]:
        """Entered around one recording. On leaving, also by an exception, the model is as it was before."""
        ...

    def derived(self) -> Mapping[str, str]:
        """Names of tensors that `post_load` recomputes from loaded ones, each with how."""
        ...

    def constant(self) -> Mapping[str, str]:
        """Names of tensors that do not depend on weights, each with why."""
        ...

    def ignored(self, name: str) -> str | None:
        """Why no worker of this engine loads the checkpoint tensor `name` ("tied to embed_tokens"); None: some do."""
        ...

    def elsewhere(self, name: str) -> str | None:
        """Why another worker of this engine loads the checkpoint tensor `name` and this one does not ("another pipeline
        stage"); None: this worker knows of none. The manager refuses an update of which a tensor is needed by no worker
        of an engine."""
        ...

    def staged(self) -> Collection[str]:
        """Names among `named_tensors()` that `staging` gives at install time; empty for a plain model."""
        ...

    def staging(self) -> AbstractContextManager[Iterator[StagedLayer]]:
        """See the module's docstring. Entered once an install, after DIRTY; not entered if nothing is staged."""
        ...

    def reload(self, weights: Weights) -> None:
        """Brings a whole checkpoint in as the engine does without us, from its first call to its last: what installs
        are compared with in a self-check. Leaves the model in the form in which the engine computes."""
        ...

    def post_load(self) -> None:
        """Recomputes what is derived. Runs once, after every byte is in place and before resident bytes are verified;
        so it must leave loaded tensors as they are."""
        ...


class ModuleTarget:
    """An nn.Module whose loader writes straight into its parameters and buffers. All of its tensors are resident.

    Buffers that are not persistent are constant unless the loader fills them: no checkpoint holds them.
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
        post_load: Callable[[], object] | None = None,
    ) -> None:
        """load_weights: default `model.load_weights`. The mappings go from name to reason, as in LoadTarget."""
        self._model = model
        self._load_weights: Callable[[Weights], object] = load_weights or getattr(model, "load_weights")  # noqa: B009
        self._derived = dict(derived or {})
        self._constant = dict(constant or {})
        self._elsewhere = elsewhere
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
        """Puts back tensors that a loader replaced instead of writing to them."""
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
        found = {}
        for prefix, module in self._model.named_modules(remove_duplicate=False):
            for name in module._non_persistent_buffers_set:
                found[full_name(prefix, name)] = "a buffer that is not persistent"
        return found | self._constant

    def ignored(self, name: str) -> str | None:
        return self._ignored(name)

    def elsewhere(self, name: str) -> str | None:
        return None if self._elsewhere is None else self._elsewhere(name)

    def staged(self) -> Collection[str]:
        return ()

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
