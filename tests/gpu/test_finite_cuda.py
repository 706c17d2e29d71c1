"""NaN and infinity on a GPU are found while it digests, in each dtype, cast or not, in rows or flat."""

from __future__ import annotations

import pytest
import torch

from ckpt_engine.core.dtypes import ITEMSIZES
from ckpt_engine.digest import cuda_tiles
from ckpt_engine.digest.boxes import digest_boxes
from ckpt_engine.digest.prepared import prepare_digests
from ckpt_engine.torch_dtypes import torch_dtype
from tests.digest.test_digest import random_tensor
from tests.digest.test_finite import is_finite

GPU = torch.device("cuda", 0)


def views_of(name: str) -> list[torch.Tensor]:
    """Without NaN and infinity, then with one in some place or other."""
    dtype = torch_dtype(name)
    finite = random_tensor((257, 1008), dtype)
    if dtype.is_complex or dtype.is_floating_point:
        real = torch.view_as_real(finite)[..., 0] if dtype.is_complex else finite.to(torch.float64)
        finite = torch.where(is_finite(finite), real, 1.0).to(dtype)
    found = [finite]
    for row, column in ((0, 0), (256, 999), (129, 500), (200, 7)):
        view = finite.clone()
        last = (column + 1) * dtype.itemsize
        if name != "bool":
            view.view(torch.uint8)[row, last - min(dtype.itemsize, 2) : last] = 0x80 if "fnuz" in name else 0xFF
        found += [view, view[:, 1:], view[:, 16:], view.t()]
    return found


def on_gpu(view: torch.Tensor) -> torch.Tensor:
    """Laid out as it is here; `to` would let the rows of a part touch."""
    return torch.empty_strided(view.shape, view.stride(), dtype=view.dtype, device=GPU).copy_(view)


@pytest.mark.parametrize("longest", [cuda_tiles._COLUMN_WORDS, 64], ids=["rows", "flat"])
@pytest.mark.parametrize("name", sorted(ITEMSIZES))
def test_they_are_found_in_each_dtype(name: str, longest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_tiles, "_COLUMN_WORDS", longest)
    views = views_of(name)
    expected = [bool((~is_finite(view)).any()) for view in views]
    assert any(expected) is (torch_dtype(name).is_complex or torch_dtype(name).is_floating_point)
    there = [(on_gpu(view), (0, 0)) for view in views]
    prepared = prepare_digests(there, finite=True)
    assert prepared.launches
    for _ in range(2):
        assert prepared.run() == digest_boxes([(view, (0, 0)) for view in views])
        assert prepared.not_finite == expected
    for view, _ in there:
        view.zero_()
    prepared.run()
    assert not any(prepared.not_finite), "marks are cleared at each run"


@pytest.mark.parametrize(("served", "largest"), [(torch.bfloat16, 3.389e38), (torch.float16, 65519.0)])
def test_what_a_cast_makes_infinite_is_found(served: torch.dtype, largest: float) -> None:
    for value, wrong in ((largest, False), (largest * 1.003, True), (float("nan"), True), (float("-inf"), True)):
        view = torch.ones(300, 500, device=GPU)
        view[299, 499] = value
        prepared = prepare_digests([(view, (0, 0)), (view[:299], (0, 0))], served=[served, served], finite=True)
        prepared.run()
        assert prepared.not_finite == [wrong, False], value
