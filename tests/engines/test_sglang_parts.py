"""The parts of our half of SGLang's schedulers that are torch alone: orders, forms, live layers, tensors beside."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine_adapters.sglang.beside import PostLoadTensors, made_while_loading
from ckpt_engine_adapters.sglang.forms import materialized, note_forms, noted_forms, same_form
from ckpt_engine_adapters.sglang.instruction import TENSOR, Action, Instruction, decode, encode
from ckpt_engine_adapters.sglang.live import LiveLayer
from ckpt_engine_adapters.sglang.ranks import worker_rank
from ckpt_engine_adapters.sglang.refusals import refusals


def text_of(order: str) -> list[tuple[str, torch.Tensor]]:
    return [(TENSOR, torch.tensor(list(order.encode()), dtype=torch.uint8))]


@pytest.mark.parametrize(
    "order", [Instruction(Action.PREPARE), Instruction(Action.INSTALL, 2**63 - 1), Instruction(Action.DISCARD)]
)
def test_an_order_arrives_as_it_was_sent(order: Instruction) -> None:
    assert decode(encode(order)) == order


@pytest.mark.parametrize(
    "wrong",
    [
        [],
        [("model.embed_tokens.weight", torch.zeros(3, dtype=torch.uint8))],
        [*encode(Instruction(Action.PREPARE)), *encode(Instruction(Action.PREPARE))],
        [(TENSOR, torch.zeros(3))],
        [(TENSOR, torch.zeros(2000, dtype=torch.uint8))],
        text_of(""),
        text_of("[]"),
        text_of('{"action":"install"}'),
        text_of('{"action":"install","epoch":1,"more":2}'),
        text_of('{"action":"explode","epoch":1}'),
        text_of('{"action":"install","epoch":-1}'),
        text_of('{"action":"install","epoch":true}'),
        text_of('{"action":"install","epoch":9223372036854775808}'),
        text_of('{"action":["install"],"epoch":1}'),
        [(TENSOR, torch.tensor([255, 254], dtype=torch.uint8))],
    ],
)
def test_what_is_no_order_is_refused(wrong: list[tuple[str, torch.Tensor]]) -> None:
    with pytest.raises(ValueError, match=r"order|action|epoch"):
        decode(wrong)


class Special(nn.Parameter):
    """As SGLang's parameters: of its own class, with its loader as an attribute."""


def layer_of(kind: type[nn.Parameter] = Special) -> Any:
    layer: Any = nn.Module()
    layer.weight = kind(torch.arange(6.0).reshape(2, 3), requires_grad=False)
    layer.weight.weight_loader = "a loader"
    layer.register_buffer("scale", torch.ones(2))
    layer.beside = torch.ones(3)
    return layer


@pytest.mark.parametrize("kind", [Special, nn.Parameter])
def test_a_form_is_the_parameter_without_its_memory(kind: type[nn.Parameter]) -> None:
    model = nn.Sequential(layer_of(kind))
    note_forms(model)
    forms = noted_forms(model)
    assert forms is not None
    form = forms[model[0]]["weight"]
    assert form.is_meta
    made = materialized(form, torch.device("cpu"))
    assert type(made) is kind
    assert same_form(made, model[0].get_parameter("weight"))
    assert made.weight_loader == "a loader"  # type: ignore[attr-defined]
    assert noted_forms(nn.Sequential()) is None


def test_a_layer_without_shapes_has_no_form() -> None:
    model = nn.Sequential(nn.LazyLinear(3))
    note_forms(model)
    assert noted_forms(model) == {}


def test_what_processing_makes_is_copied_to_where_kernels_read() -> None:
    layer = layer_of()
    own = {"weight": layer.weight, "scale": layer.scale, "beside": layer.beside}
    live = LiveLayer(layer)
    layer.weight = nn.Parameter(torch.full((2, 3), 7.0), requires_grad=False)
    layer.register_buffer("scale", torch.full((2,), 8.0))
    layer.beside = torch.full((3,), 9.0)
    live.take_over()
    for name, value in (("weight", 7.0), ("scale", 8.0), ("beside", 9.0)):
        assert getattr(layer, name) is own[name]
        assert torch.equal(own[name], torch.full_like(own[name], value))


@pytest.mark.parametrize("name", ["weight", "scale", "beside", "another"])
def test_another_form_than_at_start_is_refused_and_nothing_is_copied(name: str) -> None:
    layer = layer_of()
    own = layer.weight
    live = LiveLayer(layer)
    layer.weight = nn.Parameter(torch.full((2, 3), 7.0), requires_grad=False)
    other = torch.zeros(2, 2)
    setattr(layer, name, nn.Parameter(other, requires_grad=False) if name == "weight" else other)
    with pytest.raises(CkptEngineError, match=f"tensor {name}"):
        live.take_over()
    live.put_back()
    assert layer.weight is own
    assert torch.equal(own, torch.arange(6.0).reshape(2, 3))
    assert not hasattr(layer, "another")


def loaded_model() -> Any:
    """A model that keeps a tensor computed of weights, one that it had before, and one that shows a parameter."""
    model: Any = nn.Sequential(layer_of())
    note_forms(model)
    model[0].absorbed = torch.full((2,), 5.0)
    model[0].shown = model[0].weight.data.view(3, 2)
    model[0].indices = torch.arange(3)
    return model


def test_only_what_loading_made_of_weights_is_found_beside() -> None:
    model = loaded_model()
    assert list(made_while_loading(model, ())) == ["0.absorbed"]
    assert made_while_loading(model, {model[0]}) == {}
    model[0].beside = torch.zeros(3)
    assert list(made_while_loading(model, ())) == ["0.beside", "0.absorbed"]


def test_a_step_must_compute_what_it_made_anew_and_in_place() -> None:
    model = loaded_model()
    absorbed = model[0].absorbed
    computed = PostLoadTensors(model, made_while_loading(model, ()))
    computed.before()
    with pytest.raises(CkptEngineError, match=r"does not recompute 0\.absorbed"):
        computed.after()
    computed.before()
    absorbed.fill_(6.0)
    computed.after()
    computed.before()
    assert torch.equal(absorbed, torch.full((2,), 6.0)), "it is tried only once"
    computed.after()
    model[0].absorbed = absorbed.clone()
    with pytest.raises(CkptEngineError, match="somewhere else"):
        computed.after()


@pytest.mark.parametrize(
    ("attention", "ranks", "expected"),
    [
        (False, {"tp_rank": 1, "tp_size": 2, "pp_rank": 0, "pp_size": 1, "dp_rank": None, "dp_size": 1}, (1, 2)),
        (False, {"tp_rank": 1, "tp_size": 2, "pp_rank": 1, "pp_size": 2, "dp_rank": 2, "dp_size": 3}, (11, 12)),
        (True, {"tp_rank": 3, "tp_size": 4, "pp_rank": 0, "pp_size": 1, "dp_rank": 1, "dp_size": 2}, (3, 4)),
    ],
)
def test_the_rank_of_a_scheduler_of_0_5_16(attention: bool, ranks: dict[str, Any], expected: tuple[int, int]) -> None:
    arguments = SimpleNamespace(enable_dp_attention=attention)
    assert worker_rank(SimpleNamespace(ps=SimpleNamespace(**ranks), server_args=arguments)) == expected


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ({}, ""),
        ({"speculative_algorithm": "NGRAM"}, ""),
        ({"speculative_algorithm": "EAGLE"}, "draft model"),
        ({"torchao_config": "int4wo-128"}, "--torchao-config"),
        ({"cpu_offload_gb": 4}, "--cpu-offload-gb"),
        ({"offload_group_size": 2}, "--cpu-offload-gb"),
        ({"enable_eplb": True}, "--enable-eplb"),
        ({"enable_lora": True}, "--enable-lora"),
    ],
)
def test_launch_arguments_that_no_update_is_right_with(arguments: dict[str, Any], names: str) -> None:
    found = refusals(SimpleNamespace(**arguments))
    assert bool(found) == bool(names)
    assert names in "; ".join(found)
