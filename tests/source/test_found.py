"""What was found in a module is looked up anew whenever something may be different, and only then."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from ckpt_engine.source.found import Finder, signature_of
from ckpt_engine.source.held import HeldBox, held


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 3)
        self.last = nn.Linear(4, 3, bias=False)
        self.last.weight = self.first.weight
        self.register_buffer("kept", torch.ones(2))
        self.register_buffer("passing", torch.ones(2), persistent=False)


class Listing(Tied):
    """Lists its own parameters."""

    def named_parameters(self, *args: object, **words: object) -> object:  # type: ignore[override]
        return super().named_parameters()


def _replace(model: Tied) -> None:
    model.first.bias = nn.Parameter(torch.zeros(3))


def _untie(model: Tied) -> None:
    model.last.weight = nn.Parameter(model.first.weight.detach().clone())


def _assign_data(model: Tied) -> None:
    model.first.bias.data = torch.zeros(3)


def _transpose(model: Tied) -> None:
    model.first.weight.data = model.first.weight.data.view(4, 3)


def _free(model: Tied) -> None:
    model.kept.untyped_storage().resize_(0)


def _add(model: Tied) -> None:
    model.more = nn.Linear(1, 1)


def _rename(model: Tied) -> None:
    model._modules["other"] = model._modules.pop("last")


CHANGES = [_replace, _untie, _assign_data, _transpose, _free, _add, _rename]


@pytest.mark.parametrize("change", CHANGES, ids=[each.__name__.strip("_") for each in CHANGES])
def test_every_change_of_what_is_published_is_looked_up(change: Callable[[Tied], None]) -> None:
    looks: list[list[HeldBox]] = []

    def look(module: nn.Module) -> list[HeldBox]:
        looks.append(held([(name, each) for name, each in module.named_parameters()]))
        return looks[-1]

    model = Tied()
    finder = Finder(model, look)
    assert finder() is finder() is looks[0]
    with torch.no_grad():
        model.first.weight.add_(1.0)
    model.passing = torch.zeros(2)
    assert finder() is looks[0], "other values, and what no checkpoint holds, change nothing"
    assert len(looks) == 1
    change(model)
    assert finder() is looks[1]


def test_modules_that_list_their_own_tensors_are_always_looked_up() -> None:
    assert signature_of(Tied()) is not None
    assert signature_of(Listing()) is None
    model = Tied()
    model.first.weight = nn.Parameter(torch.eye(4).to_sparse())
    assert signature_of(model) is None
    model = Tied()
    model.first.register_parameter("lazy", nn.UninitializedParameter())
    assert signature_of(model) is None
