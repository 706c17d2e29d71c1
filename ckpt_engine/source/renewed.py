"""A source of tensors that a callable yields again at each update: gathered, merged, renamed or fused ones.

It decides where each yielded tensor is put, and refuses walks that yield other tensors than the first one. The callable
decides what is yielded, and whether all ranks walk together.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import torch

from ckpt_engine.copy.copying import TensorCopy
from ckpt_engine.core.problems import invalid, precondition
from ckpt_engine.source.held import HeldBox, held, plain_values
from ckpt_engine.source.memory import MemorySource
from ckpt_engine.source.named import checked_pair
from ckpt_engine.source.names import strip_wrappers
from ckpt_engine.source.ways import PublishWish
from ckpt_engine.v1.weights_pb2 import Host

Pairs = Iterable[tuple[str, torch.Tensor]] | Mapping[str, torch.Tensor]

WHY = "is yielded anew at each update"


class RenewedSource(MemorySource):
    """Offers what `walk` yields, in memory of its own: one copy of all that this rank yields.

    walk: returns (name, tensor) pairs, or a mapping; called when the source is opened, to learn names, shapes and
        dtypes, and once at each seal, on the thread that seals. Each tensor is copied (and cast, if another dtype is
        served) before the next one is asked for, and may be freed or written then. On a GPU the copy lies there if
        half of its free memory has room for it, else in shared memory. The walk may be a collective: every rank walks
        to its end, unless its own walk raises.

    Each later walk must yield the same names, shapes and dtypes, in any order, so that plans stay valid.
    Raises INVALID_ARGUMENT as MemorySource does, and whatever `walk` raises.
    """

    def __init__(
        self, walk: Callable[[], Pairs], *, host: Host, rank: int = 0, wish: PublishWish | None = None
    ) -> None:
        self._walk = walk
        self._rank = rank
        found = self._learn()
        super().__init__(
            lambda: found, host=host, rank=rank, wish=wish, kind="renewed tensors", may_be_empty=self._may_be_empty
        )

    def check(self) -> None:
        """Checks nothing: nothing can be told before the walk."""

    def close(self) -> None:
        """Closes as MemorySource does, and forgets the callable."""
        super().close()
        self._walk = list

    def _look(self) -> list[HeldBox]:
        return self._published

    def _copy(self, boxes: list[HeldBox]) -> list[torch.Tensor | None]:
        """Walks and copies. If that raises, nothing is sealed until the next update, and replicas are unchanged."""
        places = {box.name: index for index, box in enumerate(boxes)}
        missing = set(places)
        with self._walk_pairs() as pairs:
            for raw, tensor in pairs:
                name = self._names.get(raw)
                if name is None:
                    raise self._walk_differs(f"{raw!r} was not among what was yielded when it was published", raw)
                for box in held([(name, tensor)]):
                    first_box = boxes[places[name]] if name in places else None
                    if first_box is None or _describe(box) != _describe(first_box):
                        raise self._walk_differs(
                            f"{raw!r} is {_describe(box)} now, and was {_describe(first_box)}", raw
                        )
                    if name not in missing:
                        raise self._walk_differs(f"{raw!r} was yielded twice", raw)
                    TensorCopy([(self._sealed[places[name]], plain_values(box.tensor))]).run()
                    missing.discard(name)
        if missing:
            names = sorted(missing)
            raise self._walk_differs(
                f"the walk ended without {len(names)} tensors: {', '.join(names[:4])}", *names[:16]
            )
        return []

    def _learn(self) -> list[HeldBox]:
        """What the first walk yields, each with a stand-in that has its shape and dtype, and no memory."""
        shards: dict[str, list[HeldBox]] = {}
        with self._walk_pairs() as pairs:
            for raw, tensor in pairs:
                if raw in shards:
                    raise invalid(f"{raw!r} was yielded twice", tensors=[raw])
                shards[raw] = [
                    replace(box, tensor=_stand_in(box.tensor), must_copy=WHY, twins=()) for box in held([(raw, tensor)])
                ]
        self._names = dict(zip(shards, strip_wrappers(list(shards)), strict=True))
        self._may_be_empty = any(not boxes for boxes in shards.values())
        if len(set(self._names.values())) < len(shards):
            raise invalid("two of the yielded tensors have one name once wrappers are stripped", tensors=[*shards][:16])
        return [replace(box, name=self._names[raw]) for raw, boxes in shards.items() for box in boxes]

    @contextmanager
    def _walk_pairs(self) -> Iterator[Iterator[tuple[str, torch.Tensor]]]:
        """The pairs of one walk. A generator is always closed before this returns, so that its `finally` (taking a
        merged adapter out again) has run before training goes on."""
        pairs = self._walk()
        if not isinstance(pairs, Iterable):
            raise invalid(f"the callable returned a {type(pairs).__name__}, not (name, tensor) pairs or a mapping")
        try:
            with torch.no_grad():
                yield (checked_pair(item) for item in (pairs.items() if isinstance(pairs, Mapping) else pairs))
        finally:
            if isinstance(pairs, Generator):
                pairs.close()

    def _walk_differs(self, change: str, *names: str) -> Exception:
        return precondition(
            f"{change}: each walk must yield what the first one did, else publish again",
            tensors=list(names),
            ranks=[self._rank],
        )


def _stand_in(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.numel():
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return torch.empty((), dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)


def _describe(box: HeldBox | None) -> str:
    if box is None:
        return "no part of this rank's"
    part = "" if tuple(box.tensor.shape) == box.shape else f" (from {list(box.start)} of {list(box.shape)})"
    return f"{box.tensor.dtype} {list(box.tensor.shape)} on {box.tensor.device}{part}"
