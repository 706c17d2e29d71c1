"""A target and a draft that are published as one version: one table, and digests of the right source's memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from ckpt_engine.core.manifest import blob_digest, canonical
from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.digest.boxes import digest_boxes
from ckpt_engine.source.base import Source
from ckpt_engine.source.open import Publishable, open_source
from ckpt_engine.v1.weights_pb2 import Atoms


def tensors(seed: int, width: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(width, 3, generator=generator) for name in ("a.weight", "norm", "z.weight")}


def in_files(path: Path, weights: dict[str, Tensor]) -> Path:
    path.mkdir()
    save_file(weights, path / "model.safetensors")
    return path


def atoms_of(source: Source) -> Atoms:
    """One atom a shard, the last shard first."""
    table = source.table()
    atoms = Atoms(table_digest=blob_digest(canonical(table)))
    for number in reversed(range(len(table.shards))):
        atoms.atoms.add(shard=number, start=table.shards[number].start, stop=table.shards[number].stop)
    return atoms


@pytest.mark.parametrize("target_files", [False, True], ids=["target in memory", "target in files"])
@pytest.mark.parametrize("draft_files", [False, True], ids=["draft in memory", "draft in files"])
def test_both_are_offered_sealed_and_digested(tmp_path: Path, target_files: bool, draft_files: bool) -> None:
    target, draft = tensors(1, 4), tensors(2, 5)
    offered: list[Publishable] = [
        in_files(tmp_path / name, weights) if files else weights
        for name, weights, files in (("target", target, target_files), ("draft", draft, draft_files))
    ]
    source = open_source(offered[0], draft=offered[1])
    table = source.table()
    names = [spec.name for spec in table.tensors]
    everything = target | {f"draft::{name}": tensor for name, tensor in draft.items()}
    assert names == sorted(everything)
    assert len({region.id for region in table.regions}) == len(table.regions) >= 2
    source.seal()
    assert [name for name, _ in source.tensors()] == [table.tensors[shard.tensor].name for shard in table.shards]
    assert all(torch.equal(everything[name], tensor) for name, tensor in source.tensors())
    atoms = atoms_of(source)
    expected = [everything[table.tensors[table.shards[each.shard].tensor].name] for each in atoms.atoms]
    for _ in range(2):  # the second time by what was prepared
        assert source.digest(atoms) == digest_boxes([(tensor, (0, 0)) for tensor in expected])
    if not draft_files:
        draft["norm"][0, 0] = float("nan")
        source.seal()
        source.digest(atoms)
        assert source.not_finite() == ["draft::norm"]
    source.close()


def test_what_is_copied_is_told_once_with_the_names_of_both() -> None:
    source = open_source(tensors(1, 4), draft=tensors(2, 5))
    (copied,) = source.table().copied
    assert (copied.tensors, copied.ranks) == (6, 1)
    assert {"norm", "draft::norm"} <= {*copied.names}
    source.close()


def test_a_target_with_names_of_a_part_is_refused() -> None:
    with pytest.raises(CkptEngineError, match="'draft::norm' is the name of a draft's tensor"):
        open_source(tensors(1, 4) | {"draft::norm": torch.zeros(2)}, draft=tensors(2, 5))


def test_kept_dtypes_are_those_of_each_part() -> None:
    """A draft may keep float32 where the target keeps bfloat16."""
    source = open_source(
        tensors(1, 4), draft=tensors(2, 5), kept_dtypes={"norm": "bfloat16", "draft::a.weight": "bfloat16"}
    )
    dtypes = {spec.name: spec.dtype for spec in source.table().tensors}
    assert [name for name, dtype in dtypes.items() if dtype == "bfloat16"] == ["draft::a.weight", "norm"]
    source.close()


def test_a_draft_that_cannot_be_published_leaves_nothing_open(tmp_path: Path) -> None:
    with pytest.raises(CkptEngineError, match="nothing to publish"):
        open_source(tensors(1, 4), draft={})
