"""Weights that are published as a block-wise FP8 checkpoint: which tensors, which values, what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.integrations.block_fp8 import BLOCK, LARGEST, BlockFp8, quantise
from ckpt_engine.source.open import open_source
from tests.source.reading import read


def matrix(rows: int, columns: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator) * torch.logspace(-3, 3, columns)


def restored(quantised: Tensor, scales: Tensor) -> Tensor:
    rows, columns = quantised.shape
    spread = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return quantised.float() * spread[:rows, :columns]


@pytest.mark.parametrize(("rows", "columns"), [(256, 384), (1, 1), (130, 127), (128, 129)])
def test_each_block_spans_the_range_of_fp8(rows: int, columns: int) -> None:
    weight = matrix(rows, columns)
    quantised, scales = quantise(weight)
    assert (quantised.dtype, quantised.shape) == (torch.float8_e4m3fn, weight.shape)
    assert (scales.dtype, scales.shape) == (torch.float32, (-(-rows // BLOCK), -(-columns // BLOCK)))
    rounded = weight.bfloat16().float()
    for down in range(scales.shape[0]):
        for across in range(scales.shape[1]):
            block = rounded[down * BLOCK : (down + 1) * BLOCK, across * BLOCK : (across + 1) * BLOCK]
            assert scales[down, across] == block.abs().max() / LARGEST
            found = quantised[down * BLOCK : (down + 1) * BLOCK, across * BLOCK : (across + 1) * BLOCK]
            assert found.float().abs().max() == LARGEST
            # three bits of mantissa, and below the least normal number steps of 2**-9
            error = (restored(found, scales[down : down + 1, across : across + 1]) - block).abs()
            assert (error <= torch.maximum(block.abs() / 16, scales[down, across] * 2**-10) * 1.001).all()


def test_a_float32_master_gives_what_its_bfloat16_value_gives() -> None:
    master = matrix(128, 256)
    ours, rounded = quantise(master), quantise(master.bfloat16())
    assert torch.equal(ours[0].float(), rounded[0].float())
    assert torch.equal(ours[1], rounded[1])
    largest = master.abs().max() / LARGEST
    assert not torch.equal(ours[1].max(), largest), "else rounding would prove nothing"


class DividingAsCuda(TorchDispatchMode):
    """Divides by numbers as kernels on CUDA do: multiplies with the reciprocal, which may end one bit away."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.div.Tensor and not isinstance(args[1], Tensor):
            return args[0] * (1.0 / args[1])
        return function(*args, **(kwargs or {}))


def test_cuda_makes_the_bits_that_a_cpu_makes() -> None:
    weight = matrix(512, 512)
    expected, expected_scales = quantise(weight)
    with DividingAsCuda():
        assert not torch.equal(expected_scales * LARGEST / LARGEST, expected_scales), "else this would prove nothing"
        quantised, scales = quantise(weight)
    assert torch.equal(quantised.view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(scales, expected_scales)


def test_zeros_stay_zeros_and_nan_stays_nan() -> None:
    quantised, scales = quantise(torch.zeros(128, 256))
    assert not quantised.float().any()
    assert torch.equal(scales, torch.ones(1, 2))
    weight = torch.ones(128, 256)
    weight[3, 200] = torch.nan
    quantised, _ = quantise(weight)
    assert quantised[:, 128:].float().isnan().any()
    assert not quantised[:, :128].float().isnan().any()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(256, 128)
        self.q_proj = nn.Linear(128, 256, bias=True)
        self.gate = nn.Linear(128, 4, bias=False)
        self.gate_proj = nn.Linear(128, 128, bias=False)
        self.norm = nn.LayerNorm(128)
        self.lm_head = nn.Linear(128, 256, bias=False)
        self.register_buffer("steps", torch.arange(3))
        self.register_buffer("table", torch.ones(3), persistent=False)


def test_matrices_of_layers_are_quantised_and_all_else_is_bfloat16() -> None:
    model = Model()
    recipe = BlockFp8(model)
    found = dict(recipe())
    eight = {name for name, tensor in found.items() if tensor.dtype == torch.float8_e4m3fn}
    assert eight == {"q_proj.weight", "gate_proj.weight"}
    assert {name for name in found if name.endswith("_scale_inv")} == {f"{name}_scale_inv" for name in eight}
    assert found["steps"].dtype == torch.int64
    assert "table" not in found
    others = found.keys() - eight - {f"{name}_scale_inv" for name in eight} - {"steps"}
    assert {found[name].dtype for name in others} == {torch.bfloat16}
    assert recipe.quantization_config() == {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": ["embed_tokens", "gate", "lm_head"],
    }


def as_pairs(weights: dict[str, Tensor]) -> object:
    return list(weights.items())


def as_iterator(weights: dict[str, Tensor]) -> object:
    return iter(weights.items())


def as_callable(weights: dict[str, Tensor]) -> object:
    def walk() -> Iterator[tuple[str, Tensor]]:
        yield from weights.items()

    return walk


@pytest.mark.parametrize("form", [dict, as_pairs, as_iterator, as_callable])
def test_it_takes_weights_in_every_form_and_walks_again(form: Callable[[dict[str, Tensor]], object]) -> None:
    weights = {"a_proj.weight": matrix(128, 128), "a_proj.bias": torch.ones(128)}
    recipe = BlockFp8(form(weights))  # type: ignore[arg-type]
    before = dict(recipe())
    weights["a_proj.weight"].mul_(3)
    after = dict(recipe())
    assert before.keys() == after.keys() == {"a_proj.weight", "a_proj.weight_scale_inv", "a_proj.bias"}
    assert after["a_proj.weight_scale_inv"] > 2 * before["a_proj.weight_scale_inv"]


def test_what_it_cannot_quantise_is_named() -> None:
    with pytest.raises(CkptEngineError, match=r"mlp\.experts\.gate_up_proj holds all experts of a layer"):
        list(BlockFp8({"mlp.experts.gate_up_proj": torch.ones(2, 128, 128)})())
    with pytest.raises(CkptEngineError, match="not a regular expression"):
        BlockFp8({}, exclude="(")


def test_it_is_sealed_anew_at_each_update() -> None:
    weights = {"a_proj.weight": matrix(128, 128)}
    source = open_source(BlockFp8(weights))
    try:
        for factor in (1, 4):
            weights["a_proj.weight"].mul_(factor)
            source.check()
            source.seal()
            found = read(source.table())
            expected = dict(BlockFp8(weights)())
            assert found.keys() == expected.keys()
            for name, tensor in expected.items():
                assert found[name].dtype == tensor.dtype
                assert torch.equal(found[name].float(), tensor.float())
    finally:
        source.close()
