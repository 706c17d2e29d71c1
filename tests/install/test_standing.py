"""Whether tensors of a model still stand where they stood, whoever moved one and how."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ckpt_engine.install.standing import Standing


class Layer(nn.Module):
    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 4), requires_grad=False)
        self.register_buffer("scale", torch.ones(4))


class Model(nn.Module):
    layers: nn.ModuleList

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.norm = nn.Parameter(torch.ones(4), requires_grad=False)


def standing(model: Model) -> Standing:
    return Standing({"": model}, {**dict(model.named_parameters()), **dict(model.named_buffers())})


def first(model: Model) -> Layer:
    layer = model.layers[0]
    assert isinstance(layer, Layer)
    return layer


def test_nothing_moved_while_values_change() -> None:
    model = Model()
    seen = standing(model)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.add_(1)
    assert seen.holds()
    model.register_buffer("another", torch.zeros(2))
    first(model).register_parameter("another", nn.Parameter(torch.zeros(2)))
    assert seen.holds(), "what else there is moves nothing"


def _put_another_parameter(model: Model) -> None:
    first(model).weight = nn.Parameter(torch.zeros(4, 4), requires_grad=False)


def _give_other_memory(model: Model) -> None:
    model.norm.data = torch.ones(4)


def _turn(model: Model) -> None:
    first(model).weight.data = first(model).weight.data.t()


def _cut(model: Model) -> None:
    model.norm.data = model.norm.data[:3]


def _read_as_integers(model: Model) -> None:
    first(model)._buffers["scale"] = first(model).scale.view(torch.int32)


def _read_in_place_as_integers(model: Model) -> None:
    first(model).scale.data = first(model).scale.data.view(torch.int32)


def _put_other_dictionaries(model: Model) -> None:
    layer = first(model)
    layer._parameters = {name: nn.Parameter(torch.zeros(4, 4)) for name in layer._parameters}


def _put_another_list_of_layers(model: Model) -> None:
    model.layers._modules = {name: Layer() for name in model.layers._modules}


def _put_another_layer(model: Model) -> None:
    new, old = Layer(), first(model)
    new._parameters, new._buffers = old._parameters, old._buffers
    model.layers[0] = new


def _put_other_layers(model: Model) -> None:
    model.layers = nn.ModuleList([Layer(), Layer()])


class _OwnWays(nn.Parameter):
    """As vLLM's parameters are: what is asked of them goes through Python."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


def test_parameters_with_ways_of_their_own() -> None:
    model = Model()
    first(model).weight = _OwnWays(torch.zeros(4, 4), requires_grad=False)
    seen = standing(model)
    assert seen.holds()
    first(model).weight.data = torch.zeros(4, 4)
    assert not seen.holds()


def _take_away(model: Model) -> None:
    del first(model).weight


def _make_it_a_plain_attribute(model: Model) -> None:
    kept = model.norm.data
    del model.norm
    model.norm = kept  # type: ignore[assignment]


@pytest.mark.parametrize(
    "move",
    [
        _put_another_parameter,
        _give_other_memory,
        _turn,
        _cut,
        _read_as_integers,
        _read_in_place_as_integers,
        _put_another_layer,
        _put_other_dictionaries,
        _put_another_list_of_layers,
        _put_other_layers,
        _take_away,
        _make_it_a_plain_attribute,
    ],
)
def test_what_moved_is_noticed(move: Callable[[Model], None]) -> None:
    model = Model()
    seen = standing(model)
    assert seen.holds()
    move(model)
    assert not seen.holds()


@pytest.mark.parametrize("name", ["layers.2.weight", "layers.0.bias", "missing", "layers.0"])
def test_what_is_not_in_the_model_never_stands(name: str) -> None:
    model = Model()
    assert not Standing({"": model}, {"norm": model.norm, name: torch.zeros(2)}).holds()


def test_a_tensor_under_another_name_than_its_own() -> None:
    model = Model()
    assert not Standing({"": model}, {"norm": first(model).scale}).holds()


def test_nothing_is_kept_of_nothing() -> None:
    assert Standing({"": Model()}, {}).holds()
