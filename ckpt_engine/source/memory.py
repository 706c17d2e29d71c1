"""A source of tensors in this process's memory: re-homed into shared memory, or copied there at each seal.

Runs in the trainer, on the thread that trains. Each tensor goes one of two ways, decided once when it is opened:

- re-homed: its memory moves into the arena. Sealing copies nothing; readers see the live weights, so the owner must not
  step until the update is over.
- copied: `seal` copies it into the arena, casting if a served dtype was asked for. It stays sealed until the next seal.

GPU tensors are always copied.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from ckpt_engine.core.dtypes import UnsupportedDtypeError, dtype_name
from ckpt_engine.core.problems import invalid, precondition
from ckpt_engine.source.digests import digest_atoms
from ckpt_engine.source.held import Held
from ckpt_engine.source.rehome import byte_range, copy_segment, segments
from ckpt_engine.transport.copying import TensorCopy
from ckpt_engine.transport.shared_memory import ALIGNMENT, SharedArena
from ckpt_engine.v1.weights_pb2 import Atoms, Host, Shard, SourceTable, TensorSpec

CASTABLE = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
"""What a served dtype applies to. Integers are counts or indices, and 8-bit floats mean nothing without scales."""


class MemorySource:
    """Offers what `find` finds. See Source for which call runs when.

    find: looks the tensors up; called when opened and before every seal, so that a parameter that was replaced is
        noticed (re-homed) or followed (copied).
    snapshot: True: all are copied. False: none may need it. None: only those that need it (on a GPU, or cast).
    dtype: served dtype of floating-point tensors; None: their own.

    Raises INVALID_ARGUMENT (nothing to publish, dtype not supported, `snapshot=False` for what must be copied),
    UNAVAILABLE (no room). It changes nothing of the model if it raises. While re-homing, both copies exist.
    """

    def __init__(
        self,
        find: Callable[[], list[Held]],
        *,
        host: Host,
        rank: int = 0,
        snapshot: bool | None = None,
        dtype: torch.dtype | None = None,
        kind: str = "tensors",
        may_be_empty: bool = False,
    ) -> None:
        self._find = find
        boxes = sorted(find(), key=lambda box: box.name)
        if not boxes and not may_be_empty:
            raise invalid(f"nothing to publish: the {kind} holds no tensors", ranks=[rank])
        served = [_served(box, dtype) for box in boxes]
        copied = [_copied(box, kept, snapshot) for box, kept in zip(boxes, served, strict=True)]
        self._rank = rank
        self._published = boxes
        self._copied = copied
        self._has_seal = False
        self._sealed: list[torch.Tensor] = []
        offsets, strides = self._lay_out(boxes, served)
        for index, box in enumerate(boxes):
            if not copied[index] and box.tensor.numel():
                for tensor in (box.tensor, *box.twins):
                    tensor.data = self._sealed[index]
        self._addresses = [box.tensor.data_ptr() for box in boxes]
        self._strides = [box.tensor.stride() for box in boxes]
        self._dtypes = [box.tensor.dtype for box in boxes]
        shards = [
            Shard(
                tensor=index,
                start=box.start,
                stop=[first + extent for first, extent in zip(box.start, box.tensor.shape, strict=True)],
                region=0,
                offset=offsets[index],
                stride=strides[index],
            )
            for index, box in enumerate(boxes)
        ]
        self._table = SourceTable(
            host=host,
            rank=rank,
            tensors=[
                TensorSpec(name=box.name, dtype=dtype_name(kept), shape=box.shape)
                for box, kept in zip(boxes, served, strict=True)
            ],
            regions=[self._arena.region(0)] if boxes else [],
            shards=shards,
            stays_sealed=all(copied),
            source_copies=1 if any(copied) else 0,
            description=f"{kind}, {_manner(copied)}",
        )

    def table(self) -> SourceTable:
        """What it offers."""
        return self._table

    def check(self) -> None:
        """Raises FAILED_PRECONDITION if the tensors are not where, or as, they were published."""
        self._look()

    def seal(self, keep: bool = False) -> float:
        """Copies what is copied; see Source. With `keep` it touches nothing, and any thread may call it."""
        if keep:
            if not self._has_seal or not self._table.stays_sealed:
                raise precondition(
                    f"rank {self._rank} has no sealed copy to keep: "
                    + ("nothing was sealed yet" if self._table.stays_sealed else "readers see its live weights"),
                    ranks=[self._rank],
                )
            return 0.0
        boxes = self._look()
        self._has_seal = False
        began = time.perf_counter()
        TensorCopy(
            (sealed, box.tensor)
            for sealed, box, copied in zip(self._sealed, boxes, self._copied, strict=True)
            if copied
        ).run()
        self._has_seal = True
        return time.perf_counter() - began if any(self._copied) else 0.0

    def digest(self, atoms: Atoms) -> list[int]:
        """Digests of sealed memory; any thread."""
        if not self._has_seal:
            raise precondition(f"rank {self._rank} has sealed nothing, or was closed", ranks=[self._rank])
        return digest_atoms(self._table, self._sealed, atoms)

    def close(self) -> None:
        """New readers cannot open the memory. A re-homed model goes on living in it."""
        self._has_seal = False
        self._sealed = []
        self._arena.close()

    def _lay_out(self, boxes: Sequence[Held], served: Sequence[torch.dtype]) -> tuple[list[int], list[tuple[int, ...]]]:
        """Makes the arena and `_sealed`, the memory of each box in it; copies in what is re-homed."""
        moving = [index for index, copied in enumerate(self._copied) if not copied]
        offsets, strides, size = [0] * len(boxes), [contiguous(box.tensor.shape) for box in boxes], 0
        placed = []
        for segment in segments([boxes[index].tensor for index in moving]):
            at = segment.place(size)
            for member in segment.members:
                tensor = boxes[moving[member]].tensor
                offsets[moving[member]] = at + byte_range(tensor)[0] - segment.start
            placed.append((segment, at))
            size = at + segment.stop - segment.start
        for index, box in enumerate(boxes):
            if self._copied[index]:
                offsets[index] = -(-size // ALIGNMENT) * ALIGNMENT
                size = offsets[index] + box.tensor.numel() * served[index].itemsize
            else:
                strides[index] = box.tensor.stride()
        self._arena = SharedArena(max(size, ALIGNMENT))
        for segment, at in placed:
            copy_segment(segment, self._arena, at)
        self._sealed = [
            self._arena.tensor(offset, box.tensor.shape, kept, stride)
            for box, kept, offset, stride in zip(boxes, served, offsets, strides, strict=True)
        ]
        return offsets, strides

    def _look(self) -> list[Held]:
        """The tensors as they are now, in the order of the shards, if they still are what was published."""
        found = {box.name: box for box in self._find()}
        published = {box.name for box in self._published}
        if found.keys() != published:
            names = sorted(found.keys() ^ published)
            raise precondition(
                f"tensors came or went since they were published: {', '.join(names[:4])}; publish again",
                tensors=names[:16],
                ranks=[self._rank],
            )
        boxes = [found[box.name] for box in self._published]
        moved: list[str] = []
        for index, (now, then) in enumerate(zip(boxes, self._published, strict=True)):
            same = now.shape == then.shape and now.start == then.start and now.tensor.dtype == self._dtypes[index]
            if not self._copied[index]:
                same = same and now.tensor.data_ptr() == self._addresses[index]
                same = same and now.tensor.stride() == self._strides[index]
            if not same or now.tensor.shape != self._sealed[index].shape:
                moved.append(now.name)
        if moved:
            raise precondition(
                f"{len(moved)} tensors have other memory, shape, strides or dtype than when they were published "
                f"(something assigned to them, or to their .data): {', '.join(moved[:4])}; publish again",
                tensors=moved[:16],
                ranks=[self._rank],
            )
        return boxes


def _served(box: Held, dtype: torch.dtype | None) -> torch.dtype:
    served = dtype if dtype is not None and box.tensor.dtype in CASTABLE else box.tensor.dtype
    try:
        dtype_name(served)
    except UnsupportedDtypeError as error:
        raise invalid(f"{box.name!r} cannot be published: {error}", tensors=[box.name]) from error
    return served


def _copied(box: Held, served: torch.dtype, snapshot: bool | None) -> bool:
    why = box.must_copy or ("" if served == box.tensor.dtype else f"is {box.tensor.dtype} and served as {served}")
    if why and snapshot is False:
        raise invalid(f"{box.name!r} {why}, so it must be copied at each seal: do not pass snapshot=False", [box.name])
    return bool(why) or snapshot is True


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides, in elements, of a tensor of this shape that lies in one piece."""
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))


def _manner(copied: Sequence[bool]) -> str:
    if all(copied):
        return "copied at each seal"
    return "partly re-homed, partly copied at each seal" if any(copied) else "re-homed in shared memory"
