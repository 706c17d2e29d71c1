"""What a model's state_dict does besides listing tensors is not published, and that is said, by name."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.source.open import open_source


class Extra(nn.Linear):
    def get_extra_state(self) -> torch.Tensor:
        return torch.ones(3)


class Packed(nn.Linear):
    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        destination[prefix + "packed"] = self.weight.detach().half()


def double(module: nn.Module, state: dict[str, torch.Tensor], prefix: str, *_: object) -> None:
    state[prefix + "weight"] = state[prefix + "weight"] * 2


def unpack(scale: float, module: nn.Module, prefix: str, keep_vars: bool) -> None:
    pass


def with_post_hook(layer: nn.Module) -> None:
    layer.register_state_dict_post_hook(double)


def with_old_hook(layer: nn.Module) -> None:
    layer._register_state_dict_hook(partial(double))


def with_pre_hook(layer: nn.Module) -> None:
    layer.register_state_dict_pre_hook(partial(unpack, 2.0))


def with_other_state_dict(layer: nn.Module) -> None:
    layer.state_dict = lambda *_, **__: {}  # type: ignore[method-assign]


HOOKS = [with_post_hook, with_old_hook, with_pre_hook, with_other_state_dict]


@pytest.mark.parametrize("change", HOOKS, ids=[each.__name__ for each in HOOKS])
def test_a_hook_is_told_by_the_name_of_its_module(
    change: Callable[[nn.Module], None], caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    change(model[1])
    with caplog.at_level(logging.WARNING):
        source = open_source(model)
    (warning,) = source.table().warnings
    assert "state_dict" in warning
    assert "1 (Linear)" in warning
    assert "0 (Linear)" not in warning
    assert warning in caplog.text


@pytest.mark.parametrize(
    ("layer", "words"), [(Extra(2, 2), "get_extra_state"), (Packed(2, 2), "_save_to_state_dict")], ids=["extra", "own"]
)
def test_a_method_of_its_own_is_told(layer: nn.Module, words: str) -> None:
    (warning,) = open_source(nn.Sequential(nn.Linear(2, 2), layer)).table().warnings
    assert words in warning
    assert f"1 ({type(layer).__name__})" in warning
    (warning,) = open_source(layer).table().warnings
    assert f"the module itself ({type(layer).__name__})" in warning


def test_plain_models_and_torchs_own_wrappers_warn_of_nothing() -> None:
    plain = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.LSTM(2, 2))
    wrapped: list[nn.Module] = [
        plain,
        torch.compile(nn.Linear(2, 2)),  # type: ignore[list-item]
        nn.Sequential(checkpoint_wrapper(nn.Linear(2, 2))),
        nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)),
        nn.utils.spectral_norm(nn.Linear(2, 2)),
    ]
    for model in wrapped:
        assert not open_source(model).table().warnings


def test_extra_state_among_named_tensors_is_refused_by_name() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(CkptEngineError, match="'_extra_state' is of type dict, not a tensor") as refused:
        open_source({**model.state_dict(), "_extra_state": {"scale": 2}})
    assert list(refused.value.problem.tensors) == ["_extra_state"]
