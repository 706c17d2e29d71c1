"""Changes of digests, summed on a GPU, are the differences of digests of the same weights on a CPU."""

from __future__ import annotations

import pytest
import torch

from ckpt_engine.core.dtypes import ITEMSIZES
from ckpt_engine.digest.boxes import digest_box
from ckpt_engine.digest.changes import changed_digest
from ckpt_engine.torch_dtypes import torch_dtype
from tests.digest.test_digest import random_tensor

GPU = torch.device("cuda", 0)


@pytest.mark.parametrize("name", sorted(ITEMSIZES))
def test_the_sum_is_the_difference_of_digests(name: str) -> None:
    dtype, start = torch_dtype(name), (5, 1 << 35)
    old, other = (random_tensor((300, 1000), dtype, seed) for seed in (1, 2))
    places = torch.randperm(old.numel(), generator=torch.Generator().manual_seed(3))[:3000]
    new = old.clone()
    elements = [each.view(-1).view(torch.uint8).view(-1, dtype.itemsize) for each in (new, other)]
    elements[0][places] = elements[1][places]
    one, two = (each.view(-1).view(torch.uint8).view(-1, dtype.itemsize)[places] for each in (old, new))
    before, after = (each.view(-1).view(dtype).to(GPU) for each in (one, two))
    found = changed_digest(start, new.shape, places.to(GPU), before, after)
    assert found == (digest_box(new, start) - digest_box(old, start)) & ((1 << 64) - 1) != 0
