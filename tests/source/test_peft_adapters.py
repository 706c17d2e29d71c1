"""Adapters of PEFT, live and in directories, as what a trainer publishes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_engine import CkptEngineError
from ckpt_engine.core.adapters import FACTS, AdapterFacts
from ckpt_engine.integrations.adapters import adapter
from tests.engines.adapter_models import stir, with_adapter
from tests.tiny_model import make_tiny_qwen3

ROOT = "ab" * 32


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_tiny_qwen3(tmp_path_factory.mktemp("base"), 1, weights=False)


def facts_of(pairs: dict[str, torch.Tensor]) -> AdapterFacts:
    return AdapterFacts.from_bytes(pairs[FACTS].numpy().tobytes())


def test_a_live_model_and_its_directory_are_the_same(base: Any, tmp_path: Path) -> None:
    """With rsLoRA, and ranks and alphas by pattern; the scalings are those of the live layers."""
    settings = {"use_rslora": True, "rank_pattern": {"v_proj": 2}, "alpha_pattern": {r"layers\.1\.self_attn.q_proj": 5}}
    model = with_adapter(base, 3, **settings)
    model.save_pretrained(tmp_path / "saved")
    live, saved = (dict(adapter(source, ROOT)()) for source in (model, tmp_path / "saved"))
    assert live.keys() == saved.keys()
    assert all(torch.equal(live[name], saved[name]) for name in live)
    facts = facts_of(live)
    assert facts.base_root == bytes.fromhex(ROOT)
    for module, scaling in facts.scaling.items():
        assert scaling == model.get_submodule(f"base_model.model.{module}").scaling["default"]
    assert len(set(facts.scaling.values())) == 3


def test_each_update_reads_the_model_as_it_is(base: Any) -> None:
    model = with_adapter(base, 3)
    roots = iter([ROOT, "cd" * 32])
    walk = adapter(model, lambda: next(roots))
    first = {name: tensor.clone() for name, tensor in walk()}
    stir(model, 4)
    second = dict(walk())
    name = next(iter(first))
    assert not torch.equal(first[name], second[name])
    assert [facts_of(each).base_root.hex() for each in (first, second)] == [ROOT, "cd" * 32]


def test_one_of_several_adapters(base: Any) -> None:
    from peft import LoraConfig

    model = with_adapter(base, 3)
    model.add_adapter("other", LoraConfig(r=2, target_modules=["k_proj"]))
    assert all("k_proj" in name for name in dict(adapter(model, ROOT, "other")()) if name != FACTS)
    assert not any("k_proj" in name for name in dict(adapter(model, ROOT)()))
    with pytest.raises(CkptEngineError, match="no adapter 'third', only default, other"):
        adapter(model, ROOT, "third")


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "dora": ({"use_dora": True}, "use_dora=True: DoRA"),
    "bias": ({"bias": "all"}, "bias='all': trained biases"),
    "lora_bias": ({"lora_bias": True}, "lora_bias=True"),
    "modules_to_save": ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    "pissa": ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa' has changed the base"),
    "olora": ({"init_lora_weights": "olora"}, "init_lora_weights='olora' has changed the base"),
    "head": ({"target_modules": ["lm_head"]}, "lm_head: adapters of embeddings and output heads"),
    "embedding": ({"target_modules": ["embed_tokens", "q_proj"]}, "embed_tokens"),
    "tokens": ({"trainable_token_indices": [1, 2]}, "trainable_token_indices"),
    "replication": ({"layer_replication": [(0, 2), (1, 2)]}, "layer_replication"),
    "alora": ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("how", REFUSED)
def test_more_than_a_plain_adapter_is_refused_by_name(base: Any, how: str) -> None:
    settings, words = REFUSED[how]
    model = with_adapter(base, 3, **settings)
    with pytest.raises(CkptEngineError) as caught:
        dict(adapter(model, ROOT)())
    assert words in str(caught.value)
    assert "merged" in str(caught.value) or "convert it" in str(caught.value)


def test_what_is_trained_beside_the_adapter_is_refused(base: Any) -> None:
    model = with_adapter(base, 3)
    model.base_model.model.model.norm.weight.requires_grad_(True)
    with pytest.raises(CkptEngineError, match=r"trains base_model\.model\.model\.norm\.weight"):
        dict(adapter(model, ROOT)())


CHANGES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "qalora": (lambda settings: settings.update(use_qalora=True), "use_qalora"),
    "blocks": (lambda settings: settings.update(use_bdlora={"nblocks": 2}), "use_bdlora"),
    "parameters": (lambda settings: settings.update(target_parameters=["experts.down_proj"]), "target_parameters"),
    "loftq": (lambda settings: settings.update(init_lora_weights="loftq"), "loftq"),
    "corda": (lambda settings: settings.update(init_lora_weights="corda"), "corda"),
    "unknown": (lambda settings: settings.update(use_what_comes_next=True), "use_what_comes_next"),
    "kind": (lambda settings: settings.update(peft_type="IA3"), "IA3"),
    "rank": (lambda settings: settings.update(r=5), "has rank 4, and its configuration says 5"),
}


@pytest.mark.parametrize("how", CHANGES)
def test_a_directory_that_is_more_is_refused_by_name(base: Any, tmp_path: Path, how: str) -> None:
    change, words = CHANGES[how]
    with_adapter(base, 3).save_pretrained(tmp_path)
    path = tmp_path / "adapter_config.json"
    settings = json.loads(path.read_text())
    change(settings)
    path.write_text(json.dumps(settings))
    with pytest.raises(CkptEngineError, match=words):
        dict(adapter(tmp_path, ROOT)())


def test_mistakes_are_told(base: Any, tmp_path: Path) -> None:
    with pytest.raises(CkptEngineError, match="64 hexadecimal digits"):
        dict(adapter(with_adapter(base, 3), "abc")())
    with pytest.raises(CkptEngineError, match="not from a Qwen3ForCausalLM"):
        adapter(base, ROOT)
    with pytest.raises(CkptEngineError, match=r"must have adapter_config\.json"):
        dict(adapter(tmp_path, ROOT)())
