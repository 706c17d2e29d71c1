"""The LoadTarget of a worker with more than one model: the target, and a draft that guesses tokens for it.

It decides which model each name belongs to, and what an install leaves alone; each model's own LoadTarget decides how
that model is loaded. Models may share tensors, and whole layers: these belong to the target, and the draft's names for
them are aliases, found by storage like any other tied weights.

Without a draft a worker has the target's LoadTarget itself; `parts_of` tells the two apart.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import groupby, tee
from typing import TypeVar

from torch import Tensor, nn

from ckpt_engine.core.parts import in_part, own_name, part_of
from ckpt_engine.engine.target import LoadTarget, Quantised, StagedLayer, Weights

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PartTarget:
    """A model of a worker beside its target."""

    target: LoadTarget
    description: str  # for people: "method eagle, model /models/draft"
    # Its loader takes names of the target's checkpoint, as those of multi-token prediction do; else names of its own
    # part only.
    of_target_checkpoint: bool = False


class PartsTarget:
    """See LoadTarget. Names of a part's tensors are in its namespace (`core/parts.py`)."""

    def __init__(self, target: LoadTarget, parts: Mapping[str, PartTarget]) -> None:
        """parts: by name (`core.parts.PARTS`)."""
        self._target = target
        self.parts = dict(parts)
        self._models = {"": target, **{name: part.target for name, part in parts.items()}}

    def without(self, names: Collection[str]) -> LoadTarget:
        """What an install works on that leaves some parts as they are."""
        remaining = {name: part for name, part in self.parts.items() if name not in names}
        return PartsTarget(self._target, remaining) if remaining else self._target

    @property
    def root(self) -> nn.Module:
        """The target's module. A part's is its own target's."""
        return self._target.root

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The target's tensors first, so that what a part shares with it is the target's."""
        for part, model in self._models.items():
            for name, tensor in model.named_tensors():
                yield in_part(part, name), tensor

    def load_weights(self, weights: Weights) -> object:
        """Hands each model's loader its names, the target's first. weights: those of one part without a gap."""
        self._each(weights, lambda model, own: model.load_weights(own))
        return None

    def reload(self, weights: Weights) -> None:
        """Reloads each model that has weights."""
        in_order = sorted(weights, key=lambda weight: part_of(weight[0]))
        self._each(in_order, lambda model, own: model.reload(own))

    def _each(self, weights: Weights, load: Callable[[LoadTarget, Weights], object]) -> None:
        for name, group in groupby(weights, key=lambda weight: part_of(weight[0])):
            own = ((own_name(each), tensor) for each, tensor in group)
            readers = self._readers(name)
            copies = tee(own, len(readers)) if len(readers) > 1 else (own,)
            for model, weights_of in zip(readers, copies, strict=False):
                load(model, weights_of)
            if next(iter(copies[-1]), None) is not None:
                return  # the loader has stopped early: what follows is not handed out, and so found missing

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Enters the target's, then those of the parts."""
        with ExitStack() as stack:
            for model in self._models.values():
                stack.enter_context(model.recording())
            yield

    def derived(self) -> Mapping[str, str]:
        """The derived tensors of all models."""
        return self._joined(lambda model: model.derived())

    def constant(self) -> Mapping[str, str]:
        """The constant tensors of all models."""
        return self._joined(lambda model: model.constant())

    def quantised(self) -> Mapping[str, Quantised]:
        """The quantised tensors of all models."""
        return self._joined(lambda model: model.quantised())

    def staged(self) -> Collection[str]:
        """The staged tensors of all models."""
        return {in_part(part, name) for part, model in self._models.items() for name in model.staged()}

    def ignored(self, name: str) -> str | None:
        """See LoadTarget; asked of the models that read this name."""
        return self._first(name, lambda model, own: model.ignored(own))

    def elsewhere(self, name: str) -> str | None:
        """See LoadTarget; asked of the models that read this name."""
        return self._first(name, lambda model, own: model.elsewhere(own))

    def absent(self, name: str) -> str | None:
        """See LoadTarget; asked of the models that read this name."""
        return self._first(name, lambda model, own: model.absent(own))

    @contextmanager
    def staging(self) -> Iterator[Iterator[StagedLayer]]:
        """Stages the target's layers first: a part's layer that shares a tensor with the target comes after it."""
        with ExitStack() as stack:
            entered = [(part, stack.enter_context(model.staging())) for part, model in self._models.items()]
            yield (
                StagedLayer({in_part(part, name): tensor for name, tensor in layer.tensors.items()}, layer.finish)
                for part, layers in entered
                for layer in layers
            )

    def post_load(self) -> None:
        """Has each model do what follows a load."""
        for model in self._models.values():
            model.post_load()

    def _readers(self, part: str) -> list[LoadTarget]:
        """The models whose loaders get the names of a part."""
        found = [self._models[part]] if part in self._models else []
        return found if part else found + [each.target for each in self.parts.values() if each.of_target_checkpoint]

    def _joined(self, of: Callable[[LoadTarget], Mapping[str, T]]) -> Mapping[str, T]:
        return {in_part(part, name): each for part, model in self._models.items() for name, each in of(model).items()}

    def _first(self, name: str, ask: Callable[[LoadTarget, str], str | None]) -> str | None:
        models = self._readers(part_of(name))
        return next((answer for model in models if (answer := ask(model, own_name(name))) is not None), None)


def parts_of(target: LoadTarget) -> Mapping[str, PartTarget]:
    """The parts of a worker's target, by name; empty: it has one model only."""
    return target.parts if isinstance(target, PartsTarget) else {}


def roots_of(target: LoadTarget) -> Mapping[str, nn.Module]:
    """The modules of a worker's models, by part."""
    return {"": target.root, **{name: part.target.root for name, part in parts_of(target).items()}}


def leaving(target: LoadTarget, names: Collection[str]) -> LoadTarget:
    """The target without the parts that an install leaves as they are."""
    return target.without(names) if names and isinstance(target, PartsTarget) else target
