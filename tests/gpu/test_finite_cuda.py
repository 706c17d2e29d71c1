"""NaN and infinity on a GPU are found, and asking for them waits once."""

from __future__ import annotations

import pytest
import torch

from ckpt_engine.source.finite import not_finite

GPU = torch.device("cuda", 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn], ids=str)
def test_wrong_elements_are_found_by_name(dtype: torch.dtype) -> None:
    tensors = {str(number): torch.ones(1000, 257, device=GPU).to(dtype) for number in range(20)}
    for name, place in (("3", 0), ("7", 128_500), ("19", -1)):
        flat = tensors[name].float().flatten()
        flat[place] = float("nan")
        tensors[name] = flat.view(1000, 257).to(dtype)
    assert not_finite(tensors.items()) == ["3", "7", "19"]
