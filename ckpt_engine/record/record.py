"""Records what a worker needs by running the engine's own weight loader once, on tensors that have no memory.

The loader gets one torch meta tensor for every checkpoint tensor. All views that it takes share the tensor's (empty)
storage, so when a view ends in a ``copy_``, its offset, sizes and strides tell the box that it shows. The copy itself
is not done: the model stays as it was. Clones and copies to another device are followed, since loaders do
``weight.t().contiguous()``. Fills of the model's tensors (padding) are noted.

What a loader computes on values (arithmetic, casts, ``cat``, ``.item()``) cannot be replayed as copies. The checkpoint
tensors concerned are needed whole, and are handed to the engine's own loader at every install (`handovers.py`). The
bytes that it must write count as loaded all the same, so that missing ones are found here and not in the middle of an
install. Handing only some tensors over is rehearsed; if the loader then writes other things, it gets all of them.

Decides what each copy means, and whether the loader accounts for every byte. Does not decide where bytes come from.
A loader that replaces parameters, or cannot be followed without values, raises NotRecordable.

A tensor that is loaded twice to the same place is allowed: both needs are recorded, and as each is verified against
the same place after installing, the update succeeds only if both have equal content.

Runs on the engine's thread. Takes some ten microseconds a tensor operation; no weight is read or written.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from ckpt_engine.core.absent import absent_rows
from ckpt_engine.core.boxes import Box, remainder, whole
from ckpt_engine.core.kept import kept_dtypes
from ckpt_engine.core.manifest import blob_digest, canonical
from ckpt_engine.core.names import some
from ckpt_engine.core.parts import part_of
from ckpt_engine.core.problems import CkptEngineError, invalid
from ckpt_engine.engine.parts import parts_of
from ckpt_engine.engine.target import LoadTarget
from ckpt_engine.record.coverage import Owners, StorageSlice, account
from ckpt_engine.record.handovers import everything, handovers, owner_names, written_boxes
from ckpt_engine.record.origins import NotRecordable
from ckpt_engine.record.recorder import Recorder
from ckpt_engine.record.recording import Copy, Fill, Handover, NeedBox, Recording, TensorLayout, handover_name
from ckpt_engine.torch_dtypes import torch_dtype
from ckpt_engine.v1 import weights_pb2

__all__ = ["NotRecordable", "record"]


def record(
    manifest: weights_pb2.Manifest, target: LoadTarget, stop_at: float = float("inf"), digest: bytes = b""
) -> Recording:
    """Runs the target's loader over ``manifest``.

    digest: of the manifest's blob; computed if it is not given.
    stop_at: time.monotonic() after which no further tensor is handed to the loader.

    Raises CkptEngineError: NotRecordable; INVALID_ARGUMENT for a tensor that the model does not take, a tensor of the
    model that is not accounted for, a dtype that differs, or an exception of the loader; DEADLINE_EXCEEDED.
    """
    with target.recording(), torch.no_grad():
        inference = torch.is_inference_mode_enabled() or any(
            tensor.is_inference() for _, tensor in target.named_tensors()
        )
        with torch.inference_mode(inference):  # tensors that were made in it can only be written to in it
            run = _run(manifest, target, stop_at)
            found = _handovers(run, manifest, target, stop_at)
    return _recording(manifest, digest or blob_digest(canonical(manifest)), run, found)


@dataclass(frozen=True, slots=True)
class _RecordRun:
    """The results of one run of the loader over the whole manifest."""

    recorder: Recorder
    owners: Owners
    accounted: list[weights_pb2.Accounted]
    fills: list[Fill]
    elsewhere: list[int]  # indices of tensors that other workers load
    absent: dict[int, str]  # why the model has no module for tensors, by their index
    absent_parts: list[str]  # parts of the manifest that the target has no model for
    unfilled_parts: list[str]  # parts of the target that the manifest has nothing for


def _run(manifest: weights_pb2.Manifest, target: LoadTarget, stop_at: float) -> _RecordRun:
    """Runs the loader. One that decides on values gets False for all of them; if that fails, True in a second run."""
    parts = {part_of(spec.name) for spec in manifest.tensors} - {""}
    absent_parts = sorted(parts - parts_of(target).keys())
    only = [index for index, spec in enumerate(manifest.tensors) if part_of(spec.name) not in absent_parts]
    for answer in (False, True):
        owners = Owners(target.named_tensors())
        recorder = Recorder(manifest, owners, stop_at, answer, only)
        try:
            _load(recorder, owners, target)
            elsewhere, absent = _check_used(recorder, target, manifest, only)
            names = [spec.name for spec in manifest.tensors]
            unfilled = sorted(part for part in parts_of(target).keys() - parts if not _writes(owners, part))
            accounted, fills = account(owners, target.derived(), target.constant(), names, unfilled)
            return _RecordRun(recorder, owners, accounted, fills, elsewhere, absent, absent_parts, unfilled)
        except CkptEngineError:
            if answer or not recorder.decided:
                raise
    raise AssertionError("unreachable")


def _writes(owners: Owners, part: str) -> bool:
    """Whether the loader wrote to a tensor of this part that is not the target's too."""
    return any(owner.loaded or owner.filled for name, owner in owners.by_name.items() if part_of(name) == part)


def _load(recorder: Recorder, owners: Owners, target: LoadTarget) -> None:
    try:
        with recorder:
            target.load_weights(recorder.hand_out())
    except CkptEngineError:
        if recorder.problem is None:
            raise
    except Exception as error:
        # A bug of the loader and a tensor that it rightly refuses look alike: the error repeats the loader's text.
        recorder.problem = recorder.problem or _loader_failed(recorder, target, error)
    if recorder.problem is not None:  # also when the loader has swallowed it
        raise recorder.problem
    casts = [cast[1:] for cast in recorder.casts if cast[0] not in recorder.computed and not recorder.decided]
    if casts:
        raise _other_dtypes(casts)
    _check_unchanged(owners, target)


def _handovers(run: _RecordRun, manifest: weights_pb2.Manifest, target: LoadTarget, stop_at: float) -> list[Handover]:
    """The handovers, rehearsed: a loader that is given only some tensors may do other things."""
    found = handovers(run.recorder, run.owners)
    for handover in found:
        if not handover.everything and not _rehearse(handover, manifest, target, stop_at):
            why = "the loader does other things when it is given only some of the tensors"
            return [everything(run.recorder, run.owners, why)]
    return found


def _rehearse(handover: Handover, manifest: weights_pb2.Manifest, target: LoadTarget, stop_at: float) -> bool:
    owners = Owners(target.named_tensors())
    recorder = Recorder(manifest, owners, stop_at, only=handover.tensors)
    try:
        _load(recorder, owners, target)
    except CkptEngineError as error:
        if error.problem.code == weights_pb2.Problem.CODE_DEADLINE_EXCEEDED:
            raise
        return False
    if set(owner_names(recorder, owners)) != handover.owners.keys() or recorder.decided:
        return False
    return all(_same_boxes(written_boxes(owners, name), boxes) for name, boxes in handover.owners.items())


def _same_boxes(some: Collection[Box], others: Collection[Box]) -> bool:
    return not remainder(some, others) and not remainder(others, some)


def _recording(manifest: weights_pb2.Manifest, digest: bytes, run: _RecordRun, found: list[Handover]) -> Recording:
    """Makes the recording. Its needs are those of plain copies, then one for each tensor that is handed over."""
    why = {name: reason for handover in found for name, reason in handover.why.items()}
    fills = tuple(fill for fill in run.fills if fill.tensor not in why)
    needs: dict[NeedBox, int] = {}
    copies = []
    for copy in run.recorder.copies:
        if copy.tensor not in why:
            need = needs.setdefault(run.recorder.needs[copy.need], len(needs))
            copies.append(Copy(need, copy.tensor, copy.offset, copy.stride))
    written_to = {copy.tensor for copy in copies} | {fill.tensor for fill in fills} | why.keys()
    layouts = {name: run.owners.by_name[name].layout for name in sorted(written_to)}
    for index in (index for handover in found for index in handover.tensors):
        spec = manifest.tensors[index]
        layout = TensorLayout.of(torch.empty(tuple(spec.shape), dtype=torch_dtype(spec.dtype), device="meta"))
        need = needs.setdefault(NeedBox(index, whole(layout.shape)), len(needs))
        copies.append(Copy(need, handover_name(spec.name), 0, layout.stride))
        layouts[handover_name(spec.name)] = layout
    for row in run.accounted:
        if row.name in why:
            row.note = f"by the engine's own loader, from whole tensors: {why[row.name]}"
    message = weights_pb2.WorkerNeeds(
        manifest_digest=digest,
        accounted=run.accounted,
        elsewhere=run.elsewhere,
        absent=run.absent,
        absent_parts=run.absent_parts,
        unfilled_parts=run.unfilled_parts,
    )
    for each in needs:
        message.needs.add(tensor=each.tensor, start=each.box.start, stop=each.box.stop)
    needs_bytes = canonical(message)
    return Recording(
        manifest=manifest,
        manifest_digest=digest,
        needs=tuple(needs),
        copies=tuple(copies),
        fills=fills,
        handovers=tuple(found),
        absent=absent_rows(manifest, run.absent),
        layouts=layouts,
        needs_bytes=needs_bytes,
        needs_digest=blob_digest(needs_bytes),
        absent_parts=frozenset(run.absent_parts),
        unfilled_parts=frozenset(run.unfilled_parts),
        twins=_twins(manifest, list(needs), copies),
        shared=_shared(run.owners),
    )


def _twins(
    manifest: weights_pb2.Manifest, needs: Sequence[NeedBox], copies: Sequence[Copy]
) -> tuple[tuple[int, int], ...]:
    """Pairs of needs of two parts that are loaded to the same elements, so that a version must have equal values for
    them."""
    first: dict[tuple[object, ...], int] = {}
    pairs = []
    for copy in copies:
        need = needs[copy.need]
        key = (copy.tensor, copy.offset, copy.stride, need.box, manifest.tensors[need.tensor].dtype)
        other = first.setdefault(key, copy.need)
        if _part(manifest, needs[other]) != _part(manifest, needs[copy.need]):
            pairs.append((other, copy.need))
    return tuple(pairs)


def _part(manifest: weights_pb2.Manifest, need: NeedBox) -> str:
    return part_of(manifest.tensors[need.tensor].name)


def _shared(owners: Owners) -> dict[str, tuple[str, ...]]:
    """By part, the names of its tensors that are loaded and that the target has too."""
    found: dict[str, list[str]] = {}
    for owner in owners.by_name.values():
        for alias in owner.aliases if owner.loaded else ():
            if part_of(alias) and part_of(alias) != part_of(owner.name):
                found.setdefault(part_of(alias), []).append(alias)
    return {part: tuple(names) for part, names in found.items()}


def _loader_failed(recorder: Recorder, target: LoadTarget, error: Exception) -> CkptEngineError:
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    name = recorder.suspect(text)
    about = f"loading {name} {recorder.shape_of(name)}" if name else "loading the weights"
    own = next((tensor for other, tensor in target.named_tensors() if other == name), None) if name else None
    if own is not None:
        about += f" into the model's {list(own.shape)}"
    if "meta tensor" in text or "incompatible tensor type" in text or "meta device" in text:
        return NotRecordable(f"{about}: the loader uses values or replaces a parameter's memory ({text})", name)
    return invalid(f"{about}: the engine's loader says {text}", tensors=[name] if name else [])


def _check_unchanged(owners: Owners, target: LoadTarget) -> None:
    """Raises for a loader that assigns (``parameter.data = weight``): it would have to run at every update."""
    tensors_now = dict(target.named_tensors())
    for name, place in owners.slices.items():
        if name not in tensors_now:
            raise NotRecordable(f"the loader removed the model's tensor {name}", name)
        if StorageSlice.of(tensors_now[name]) != place:
            raise NotRecordable(f"the loader replaced the model's tensor {name} instead of writing to it", name)
    new_names = sorted(tensors_now.keys() - owners.slices.keys())
    if new_names:
        raise NotRecordable(f"the loader added the tensor {new_names[0]} to the model", new_names[0])


def _other_dtypes(casts: Sequence[tuple[str, str, str]]) -> CkptEngineError:
    """The error for tensors published in other dtypes. casts: name, published dtype and the model's, of each."""
    pairs: dict[tuple[str, str], list[str]] = {}
    for name, have, want in casts:
        pairs.setdefault((have, want), []).append(name)
    mismatches = [f"{have}, and the model keeps {want}: {some(names)}" for (have, want), names in sorted(pairs.items())]
    dtypes = " or ".join(sorted({f'"{want}"' for _, want in pairs}))
    refusal = invalid(
        f"{len(casts)} tensor{'' if len(casts) == 1 else 's'} published in other dtypes than the model's: "
        f"{'; '.join(mismatches)}. Publish with dtype={dtypes}, or start the engine with the published dtype",
        tensors=[name for name, _, _ in casts],
    )
    refusal.problem.kept.update(kept_dtypes(casts))
    return refusal


def _check_used(
    recorder: Recorder, target: LoadTarget, manifest: weights_pb2.Manifest, candidates: Sequence[int]
) -> tuple[list[int], dict[int, str]]:
    """The tensors that other workers of this engine load, and why the model has no module for others. candidates:
    indices of those that the loader gets. Raises INVALID_ARGUMENT for those that no worker takes."""
    unused = [index for index in candidates if index not in recorder.used]
    absent, elsewhere, unknown = dict[int, str](), [], []
    for index in unused:
        name = manifest.tensors[index].name
        if (why := target.absent(name)) is not None:
            absent[index] = why
        elif target.elsewhere(name) is not None:
            elsewhere.append(index)
        elif target.ignored(name) is None:
            unknown.append(name)
    if unknown:
        more = f" and {len(unknown) - 16} more" if len(unknown) > 16 else ""
        raise invalid(
            f"the model takes no tensor {', '.join(unknown[:16])}{more}; publish the names of this model's checkpoint",
            tensors=unknown[:16],
        )
    return elsewhere, absent
