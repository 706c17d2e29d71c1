"""One adapter's shelf in a vLLM worker: installs each version beside those that requests still use.

It decides which versions there are, and what the shelf's state word says. It does not decide in which place one is kept
(gate/shelf.py, for all workers together), how vLLM computes with it (adapter_slots.py) or which one a request gets (the
gate).

A version is read into fresh memory of the host, where it is verified; then it goes into a slot of vLLM, is compared
there, and only then its place's word says that this worker holds it. The newest version before it stays as it is, and
so does each that requests use: after a failure the shelf's word says again what it said before. But where each place
had a version, the oldest that no request uses goes as soon as a first worker needs its place. It is lost even if this
worker, or another one that has not begun, fails then; the next try takes the same place.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from ckpt_engine.core.adapters import FACTS, AdapterFacts, factor_of, served_name
from ckpt_engine.core.problems import invalid, precondition
from ckpt_engine.engine.target import Quantised, StagedLayer, Weights
from ckpt_engine.gate.page import CLEAN, DIRTY, WorkerSlot
from ckpt_engine.gate.shelf import ShelfPlace, choose_place, shelf_directory
from ckpt_engine.install.worker import EngineWorker
from ckpt_engine.v1 import weights_pb2
from ckpt_engine_adapters.vllm.adapter_slots import AdapterSlots, AdapterVersion


class AdapterTarget:
    """The VersionTarget of a shelf: an adapter's tensors, as they are published, in the dtype of the slots."""

    def __init__(self, shelf: AdapterShelf, slots: AdapterSlots) -> None:
        self._shelf = shelf
        self._slots = slots
        self._recorded: dict[str, Tensor] = {}  # on meta, while a loader is recorded
        self._recording = False
        self._names: set[str] = set()  # of all manifests so far
        self._coming: weights_pb2.Manifest | None = None
        self._root = nn.Module()

    @property
    def root(self) -> nn.Module:
        return self._root

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self._recorded.items() if self._recording else ())

    def expect(self, manifest: weights_pb2.Manifest) -> None:
        """Checks whether this server can serve such an adapter. See VersionTarget."""
        shapes: dict[str, dict[str, tuple[int, ...]]] = {}
        for spec in manifest.tensors:
            if spec.name != FACTS:
                module, factor = factor_of(spec.name)
                shapes.setdefault(module, {})[factor] = tuple(spec.shape)
        if not shapes or all(spec.name != FACTS for spec in manifest.tensors):
            raise invalid(
                f"the adapter {self._shelf.adapter!r} is to be updated, and what is published is none (it lacks "
                f"{FACTS}): publish ckpt_engine.integrations.adapters.adapter(...)"
            )
        for module, each in shapes.items():
            self._slots.check_module(module, each)
        self._recorded = self._tensors(manifest, "meta")
        self._names.update(self._recorded)

    def _tensors(self, manifest: weights_pb2.Manifest, device: str) -> dict[str, Tensor]:
        return {
            spec.name: torch.empty(
                tuple(spec.shape), dtype=torch.uint8 if spec.name == FACTS else self._slots.dtype, device=device
            )
            for spec in manifest.tensors
        }

    def load_weights(self, weights: Weights) -> object:
        for name, tensor in weights:
            self._recorded[name].copy_(tensor)
        return None

    @contextmanager
    def recording(self) -> Iterator[None]:
        self._recording = True
        try:
            yield
        finally:
            self._recording = False

    def derived(self) -> Mapping[str, str]:
        return {}

    def constant(self) -> Mapping[str, str]:
        return {}

    def ignored(self, name: str) -> str | None:
        return None

    def elsewhere(self, name: str) -> str | None:
        return None

    def absent(self, name: str) -> str | None:
        return None

    def staged(self) -> Collection[str]:
        return self._names

    def quantised(self) -> Mapping[str, Quantised]:
        return {}

    def accept(self, identity: weights_pb2.Identity, epoch: int, manifest: weights_pb2.Manifest) -> None:
        self._shelf.accept(identity, epoch)
        self._coming = manifest

    @contextmanager
    def staging(self) -> Iterator[Iterator[StagedLayer]]:
        assert self._coming is not None
        tensors = self._tensors(self._coming, "cpu")
        yield iter([StagedLayer(tensors, lambda: self._shelf.put(tensors))])

    def reload(self, weights: Weights) -> None:
        raise precondition("an adapter has no loader of the engine's to compare with")

    def post_load(self) -> None:
        return None


class AdapterShelf:
    """The shelf of one adapter in one worker. Used on the engine's thread. Nothing of it raises in `prepare`,
    `install` and `follow_base`."""

    def __init__(
        self, engine: Path, adapter: str, versions: int, rank: int, workers: int, base: WorkerSlot, slots: AdapterSlots
    ) -> None:
        """Claims this worker's words. engine: path of the engine's runtime directory. versions: how many it keeps.
        rank: of this worker, of `workers`. base: the worker's own word, which says what base it holds."""
        self.adapter = adapter
        self._base = base
        self._slots = slots
        directory = shelf_directory(engine, adapter)
        self._directory = directory.path
        self._identities: dict[int, weights_pb2.Identity] = {}  # what this worker has in memory, by number of its place
        self._places: list[tuple[ShelfPlace, WorkerSlot]] = []
        for number in range(versions):
            place = ShelfPlace(directory.path, number)
            self._places.append((place, place.page.claim(rank, workers)))
        self._coming: tuple[weights_pb2.Identity, int] | None = None  # a version and its epoch
        self._worker = EngineWorker(
            directory, rank, workers, AdapterTarget(self, slots), stage_memory="0", scrub_seconds="0"
        )

    def prepare(self) -> None:
        """Carries out the agent's order to prepare."""
        self._worker.prepare()

    def install(self, epoch: int) -> None:
        """Carries out the agent's order to install. If it fails after its first byte, the shelf's word says what the
        shelf still holds."""
        if not self._worker.install(epoch) and self._worker.slot.state == DIRTY:
            self.follow_base()
        self._coming = None

    def follow_base(self) -> None:
        """Has the shelf's word name the version that was put here last of those that all workers hold and that are for
        this worker's base; none: it holds none."""
        slot, base = self._worker.slot, self._base.identity
        whole = [(place.order, place, identity) for place, _ in self._places if (identity := place.holds_now())]
        fitting = [each for each in whole if base is not None and each[1].base_of(each[2]) == base.root]
        if not fitting:
            slot.none()
            return
        _, _, newest = max(fitting, key=lambda each: each[0])
        if slot.state != CLEAN or slot.identity != newest:
            slot.clean(slot.epoch, newest)

    def close(self) -> None:
        """Ends it: it holds nothing any more."""
        for place, word in self._places:
            word.none()
            place.close()
        self._worker.close()

    def accept(self, identity: weights_pb2.Identity, epoch: int) -> None:
        """Takes note of the version that comes. Raises INVALID_ARGUMENT for one of another lineage."""
        self._coming = None
        if identity.lineage != self.adapter:
            raise invalid(
                f"these are the slots of the adapter {self.adapter!r}, whose versions are of the lineage of that name, "
                f"and not of {identity.lineage!r}"
            )
        self._coming = identity, epoch

    def put(self, tensors: Mapping[str, Tensor]) -> None:
        """Puts the verified tensors of the version that was accepted into its place and a slot of vLLM. Raises
        CkptEngineError."""
        assert self._coming is not None
        identity, epoch = self._coming
        facts = AdapterFacts.from_bytes(tensors[FACTS].numpy().tobytes())
        if {factor_of(name)[0] for name in tensors if name != FACTS} != facts.scaling.keys():
            raise invalid(f"{FACTS} names other modules than there are tensors of", [FACTS])
        base = self._base.identity
        if base is None or base.root != facts.base_root:
            held = (
                "no version" if base is None else f"version {base.version} of {base.lineage} ({base.root.hex()[:12]})"
            )
            raise precondition(
                f"{served_name(identity)} is for the base with root {facts.base_root.hex()[:12]}, and this replica "
                f"holds {held}: bring that base first, or publish an adapter of this one"
            )
        number = choose_place(self._directory, self._places, identity, epoch)
        if number is None:
            names = ", ".join(served_name(held) for held in self._identities.values())
            raise precondition(
                f"requests still use all older versions ({names} are here): start the agent with --adapter "
                f"{self.adapter}={len(self._places) + 1}, or end the oldest requests"
            )
        place, word = self._places[number]
        if word.state != CLEAN or word.identity != identity:
            word.dirty(epoch)
            if (oldest := self._identities.pop(number, None)) is not None:
                self._slots.drop(oldest)
            factors = {name: tensor for name, tensor in tensors.items() if name != FACTS}
            try:
                self._slots.add(AdapterVersion(identity, facts, factors))
                place.note_base(identity, facts.base_root)
            except BaseException:
                word.none()
                raise
            self._identities[number] = identity
        word.clean(epoch, identity)
