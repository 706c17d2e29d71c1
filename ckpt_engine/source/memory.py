"""A source of tensors in this process's memory: offered where they live, or copied at each seal.

Runs in the trainer, on the thread that trains. Each tensor goes one of these ways, decided once when it is opened:

- live on its GPU: other processes map the allocation that it lies in. Sealing copies nothing; if another dtype is
  served, readers cast on the way.
- re-homed (CPU): it lies in shared memory of this process already, or its memory moves there once, if that is asked for
  and nothing else is known to use it. Sealing copies nothing, and looks whether something wrote to the old memory.
- copied: `seal` copies it, casting if need be, into an arena on its GPU, or into shared memory. It stays sealed until
  the next seal.

Readers of the first two see live weights, so the owner must not step until the update is over.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence

import torch

from ckpt_engine.copy.copying import TensorCopy
from ckpt_engine.core.names import some
from ckpt_engine.core.offers import rank_id
from ckpt_engine.core.problems import CkptEngineError, invalid, precondition
from ckpt_engine.core.transports import HOST_MEMORY
from ckpt_engine.digest.prepared import PreparedDigests
from ckpt_engine.source.device import DeviceOffer
from ckpt_engine.source.digests import changed_since, not_finite, prepare_atoms
from ckpt_engine.source.held import HeldBox, elements_of, plain_values
from ckpt_engine.source.host_memory import HostOffer
from ckpt_engine.source.lending import Lending
from ckpt_engine.source.ways import PublishWish, copy_reasons, may_share, served_dtype, tell_copied
from ckpt_engine.torch_dtypes import dtype_name
from ckpt_engine.transport.base import HostMemory
from ckpt_engine.v1.weights_pb2 import Atoms, Host, Shard, SourceTable, TensorSpec

log = logging.getLogger(__name__)

CLOSE_SECONDS = 5.0
"""Seconds that `close` waits for readers to unmap GPU memory. They do so at once, unless an update runs."""

PREPARED_KEPT = 2
"""Sets of atoms for which digests are kept ready: that of all replicas, and that of a late one."""


class MemorySource:
    """Offers what `find` finds. See Source for which call runs when.

    find: looks the tensors up; called when opened and before every seal, so that a parameter that was replaced is
        noticed (live, re-homed) or followed (copied).

    warnings: logged, and repeated in the report of each update.

    Raises INVALID_ARGUMENT (nothing to publish, dtype not supported, a wish that cannot be fulfilled), UNAVAILABLE (no
    room). The model is unchanged if it raises. While re-homing, both copies exist.
    """

    def __init__(
        self,
        find: Callable[[], list[HeldBox]],
        *,
        host: Host,
        rank: int = 0,
        wish: PublishWish | None = None,
        kind: str = "tensors",
        may_be_empty: bool = False,
        warnings: Sequence[str] = (),
    ) -> None:
        self._wish = wish = wish or PublishWish()
        self._find = find
        boxes = sorted(find(), key=lambda box: box.name)
        if not boxes and not may_be_empty:
            raise invalid(f"nothing to publish: there are no tensors ({kind})", ranks=[rank])
        self._rank = rank
        self._published = boxes
        self._served = [served_dtype(box.name, box.tensor.dtype, wish) for box in boxes]
        self._why = copy_reasons(boxes, self._served, wish)
        self._copied = [bool(why) for why in self._why]
        self._has_seal = False
        self._not_finite: list[str] = []
        self._copied_from: list[torch.Tensor | None] = []  # what was just sealed, until it is known to be unchanged
        self._prepared: list[tuple[Atoms, PreparedDigests]] = []
        self._sealed: list[torch.Tensor] = [torch.empty(0)] * len(boxes)
        self._offsets = [0] * len(boxes)
        self._regions = [0] * len(boxes)
        self._on_gpu = [False] * len(boxes)
        self._lending = Lending(wish.transport, host.address)
        self._device: DeviceOffer | None = None
        self._host: HostOffer | None = None
        try:
            self._offer_devices()
            self._offer_host()
        except BaseException:
            self.close()
            raise
        self._elements = [elements_of(box.tensor) for box in boxes]
        self._dtypes = [box.tensor.dtype for box in boxes]
        self._table = self._make_table(host, kind, warnings)
        for warning in warnings:
            log.warning("ckpt-engine: %s", warning)

    def table(self) -> SourceTable:
        """The table of what is offered."""
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
            self._copied_from = []
            return 0.0
        boxes = self._look()
        self._has_seal, self._copied_from = False, []
        if self._host is not None and (names := self._host.written()):
            raise precondition(
                f"move=True moved {len(names)} tensors, and something wrote to their old memory since: {some(names)}. "
                "It uses an address or a view from before publish(), so neither the model nor a replica gets what it "
                "writes. Make it take the address or view again and publish again, or restart and publish without "
                "move=True",
                tensors=names[:16],
                ranks=[self._rank],
            )
        began = time.perf_counter()
        if self._device is not None:
            self._device.synchronize()
        self._copied_from = self._copy(boxes)
        self._has_seal = True
        return time.perf_counter() - began if any(self._copied) else 0.0

    def _copy(self, boxes: list[HeldBox]) -> list[torch.Tensor | None]:
        """Copies values into `_sealed`. Returns the tensors that were copied from, to be compared with the copies once
        these are digested; empty: nothing was copied."""
        live = [box.tensor if copied else None for box, copied in zip(boxes, self._copied, strict=True)]
        TensorCopy(
            (sealed, plain_values(live_tensor))
            for sealed, live_tensor in zip(self._sealed, live, strict=True)
            if live_tensor is not None
        ).run()
        return live if any(self._copied) else []

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What is offered, as it is now; a live tensor before its readers cast it."""
        yield from zip((box.name for box in self._published), self._sealed, strict=True)

    def digest(self, atoms: Atoms) -> list[int]:
        """Digests of sealed memory, as if cast to what is served; any thread.

        The first time after weights were copied, on the thread that sealed: raises FAILED_PRECONDITION, naming tensors,
        if they have other values by now than their copies. Weights that change meanwhile are copied torn.
        """
        if not self._has_seal:
            raise precondition(f"rank {self._rank} has sealed nothing, or was closed", ranks=[self._rank])
        digests = self._digest(atoms)
        live, self._copied_from = self._copied_from, []
        if live and (names := changed_since(self._table, self._sealed, live, atoms, digests)):
            self._has_seal = False
            raise precondition(
                f"{len(names)} tensors changed while they were copied: {some(names)}; something steps or "
                "loads them during update_weights",
                tensors=names[:16],
                ranks=[self._rank],
            )
        return digests

    def not_finite(self) -> list[str]:
        """Names of the tensors in which the last `digest` found NaN or infinity."""
        return self._not_finite

    def _digest(self, atoms: Atoms) -> list[int]:
        prepared = next((each for old_atoms, each in self._prepared if old_atoms is atoms), None)
        if prepared is None:
            prepared = prepare_atoms(self._table, self._sealed, atoms)
            self._prepared = [*self._prepared[1 - PREPARED_KEPT :], (atoms, prepared)]
        digests = prepared.run()
        self._not_finite = not_finite(self._table, atoms, prepared)
        return digests

    def withdraw(self, seconds: float) -> None:
        """Closes as `close` does, once no reader maps GPU memory. Raises DEADLINE_EXCEEDED if some still do; it is not
        closed then."""
        self._has_seal = False
        self._lending.withdraw(seconds)
        self.close()

    def close(self) -> None:
        """Refuses new readers, and has those of GPU memory let go. A re-homed model stays in its shared memory.

        Holds no tensor afterwards.
        """
        self._has_seal = False
        self._sealed, self._published, self._prepared, self._copied_from, self._find = [], [], [], [], list
        try:
            self._lending.withdraw(CLOSE_SECONDS)
        except CkptEngineError as error:
            log.warning("ckpt-engine: %s", error.problem.message)
        self._lending.close()
        if self._device is not None:
            self._device.close()
        if self._host is not None:
            self._host.close()

    def _offer_devices(self) -> None:
        """Offers GPU tensors on their GPU where that works; the others will be copied to shared memory."""
        indices = [index for index, box in enumerate(self._published) if may_share(box, self._wish)]
        if not indices:
            return
        boxes = [self._published[index] for index in indices]
        self._device = DeviceOffer(
            [box.tensor for box in boxes],
            [self._served[index] for index in indices],
            [self._copied[index] for index in indices],
            self._wish.first_region + 1,
            self._lending,
        )
        for index, place in zip(indices, self._device.places, strict=True):
            if place is None or not place.live:
                self._check_wish(index, on_device=place is not None)
            if (place is None or not place.live) and not self._why[index]:
                self._why[index] = f"cannot be offered where it lies: {self._sharing_problem()}"
            self._copied[index] = bool(self._why[index])
            if place is None:
                continue
            self._on_gpu[index] = True
            self._regions[index] = place.region
            self._offsets[index] = place.offset
            self._sealed[index] = place.memory

    def _check_wish(self, index: int, on_device: bool) -> None:
        """Raises if a GPU tensor has to be copied, on its GPU or to shared memory, and the caller forbade that."""
        box, wish = self._published[index], self._wish
        option = "snapshot=False" if wish.snapshot is False else f"transport={wish.transport!r}"
        stuck = not on_device and not self._lending.takes(HOST_MEMORY)
        if box.tensor.numel() and (wish.snapshot is False or stuck):
            raise invalid(
                f"{box.name!r} cannot be offered where it lies ({self._sharing_problem()}): do not pass {option}",
                [box.name],
            )

    def _sharing_problem(self) -> str:
        """Why GPU memory cannot be shared."""
        return "; ".join(self._lending.reasons) or "its memory cannot be shared"

    def _offer_host(self) -> None:
        """Places all other tensors in shared memory, and moves those that are re-homed."""
        indices = [index for index, on_gpu in enumerate(self._on_gpu) if not on_gpu]
        if not indices:
            return
        boxes = [self._published[index] for index in indices]
        self._host = HostOffer(
            [box.name for box in boxes],
            [box.tensor for box in boxes],
            [self._served[index] for index in indices],
            [self._copied[index] for index in indices],
            [tensor for box in self._published if not box.must_copy for tensor in (box.tensor, *box.twins)],
            self._lend_host,
        )
        for index, region, offset, memory in zip(
            indices, self._host.regions, self._host.offsets, self._host.memory, strict=True
        ):
            self._regions[index] = region
            self._offsets[index] = offset
            self._sealed[index] = memory

    def _lend_host(self, memory: HostMemory) -> int:
        taken = [region.id for region in self._lending.regions]
        id = max(taken) + 1 if self._wish.first_region in taken else self._wish.first_region
        self._lending.must_offer(id, memory)
        return id

    def _make_table(self, host: Host, kind: str, warnings: Sequence[str]) -> SourceTable:
        shards = [
            Shard(
                tensor=index,
                start=box.start,
                stop=[first + extent for first, extent in zip(box.start, box.tensor.shape, strict=True)],
                region=self._regions[index],
                offset=self._offsets[index],
                stride=self._sealed[index].stride(),
                stored_dtype="" if self._sealed[index].dtype == dtype else dtype_name(self._sealed[index].dtype),
            )
            for index, (box, dtype) in enumerate(zip(self._published, self._served, strict=True))
        ]
        return SourceTable(
            host=host,
            id=rank_id(self._rank),
            rank=self._rank,
            tensors=[
                TensorSpec(name=box.name, dtype=dtype_name(dtype), shape=box.shape)
                for box, dtype in zip(self._published, self._served, strict=True)
            ],
            regions=self._lending.regions,
            shards=shards,
            stays_sealed=all(
                copied or not box.tensor.numel() for box, copied in zip(self._published, self._copied, strict=True)
            ),
            source_copies=1 if any(self._copied) else 0,
            description=f"{kind}, {self._manner()}",
            copied=tell_copied(self._rank, self._published, self._served, self._why),
            warnings=warnings,
        )

    def _manner(self) -> str:
        """How the tensors are offered, in words."""
        ways = []
        why = f" ({'; '.join(self._lending.reasons)})" if self._lending.reasons else ""
        for box, on_gpu, copied in zip(self._published, self._on_gpu, self._copied, strict=True):
            if not box.tensor.numel():
                continue
            if on_gpu:
                ways.append("copied on the GPU at each seal" if copied else "live on the GPU")
            elif copied:
                ways.append(f"copied at each seal{why if box.tensor.device.type == 'cuda' else ''}")
            else:
                ways.append("re-homed in shared memory")
        found = sorted(set(ways), key=lambda way: (way.startswith("copied"), way)) or ["copied at each seal"]
        return found[0] if len(found) == 1 else ", ".join(f"partly {way}" for way in found)

    def _look(self) -> list[HeldBox]:
        """The tensors as they are now, in the order of the shards, if they still are what was published."""
        found = {box.name: box for box in self._find()}
        published = {box.name for box in self._published}
        if found.keys() != published:
            names = sorted(found.keys() ^ published)
            raise precondition(
                f"tensors came or went since they were published: {some(names)}; publish again",
                tensors=names[:16],
                ranks=[self._rank],
            )
        boxes = [found[box.name] for box in self._published]
        changed: list[str] = []
        for index, (box, published_box) in enumerate(zip(boxes, self._published, strict=True)):
            same = (
                box.shape == published_box.shape
                and box.start == published_box.start
                and box.tensor.dtype == self._dtypes[index]
            )
            same = same and (self._copied[index] or elements_of(box.tensor) == self._elements[index])
            if not same or box.tensor.shape != self._sealed[index].shape:
                changed.append(box.name)
        if changed:
            raise precondition(
                f"{len(changed)} tensors have other memory, shape, strides or dtype than when they were published, or "
                "became conjugated or negated lazily (something assigned to them, or to their .data): "
                f"{some(changed)}; publish again",
                tensors=changed[:16],
                ranks=[self._rank],
            )
        if not self._lending.unchanged():
            raise precondition(
                "memory of the published tensors was freed (a GPU's to its driver) and allocated again; publish again",
                ranks=[self._rank],
            )
        return boxes
