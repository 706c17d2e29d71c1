"""SGLang's model classes: our install leaves in them what SGLang's own loader would, and refuses what lacks something.

All kinds are played by one process of SGLang's Python (tests/engines/sglang_install.py), without a server: how a model
computes is SGLang's, and what it computes with is compared tensor by tensor.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest
import torch

from tests.engines.quantised_models import dense, experts
from tests.engines.quantised_models import write as write_files
from tests.engines.sglang_server import OVERLAY, PYTHON, STUBS, needs_sglang
from tests.engines.test_vllm_models import SMALL, deepseek_v2, gpt2, llama, qwen2, qwen3_mixture
from tests.engines.vision_models import qwen2_5_vl, qwen3_vl, save_model

pytestmark = needs_sglang

REPOSITORY = Path(__file__).parents[2]


def phi3() -> Any:
    """Its checkpoint holds QKV, and gate and up, in one tensor each."""
    from transformers import Phi3Config

    return Phi3Config(**SMALL, tie_word_embeddings=False, architectures=["Phi3ForCausalLM"])


def deepseek() -> Any:
    yarn = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
    }
    groups = {"n_group": 1, "topk_group": 1, "topk_method": "group_limited_greedy"}
    return deepseek_v2(32, 32, 16, 32, **groups, rope_parameters=yarn)


class Kind(NamedTuple):
    """leaves_out: checkpoint tensors without which an update is refused, by what they are. quantised: int8 or FP8
    blocks in the files, or bfloat16 that SGLang quantises (`--quantization fp8`)."""

    make: Callable[[], Any]
    leaves_out: dict[str, str]
    quantised: Literal["", "int8", "online", "block-wise"] = ""


DENSE = {"o_proj": "model.layers.1.self_attn.o_proj.weight", "leg of QKV": "model.layers.0.self_attn.k_proj.weight"}
EXPERT = {"expert": "model.layers.1.mlp.experts.3.gate_proj.weight"}
KINDS = {
    "llama-tied": Kind(llama, DENSE),
    "qwen2-bias": Kind(qwen2, DENSE | {"leg of the QKV bias": "model.layers.0.self_attn.v_proj.bias"}),
    "qwen3-experts": Kind(qwen3_mixture, DENSE | EXPERT),
    "gpt2-transposed": Kind(gpt2, {"fc": "transformer.h.1.mlp.c_fc.weight"}),
    "phi3-fused": Kind(phi3, {"qkv": "model.layers.0.self_attn.qkv_proj.weight"}),
    "deepseek-absorbed": Kind(deepseek, {"kv_b_proj": "model.layers.1.self_attn.kv_b_proj.weight"}),
    "qwen2.5-vl": Kind(qwen2_5_vl, {**DENSE, "tower": "visual.blocks.1.attn.qkv.weight"}),
    "qwen3-vl": Kind(
        qwen3_vl,
        {
            "o_proj": "model.language_model.layers.1.self_attn.o_proj.weight",
            "tower": "model.visual.blocks.1.attn.qkv.weight",
        },
    ),
    "qwen2-int8": Kind(qwen2, DENSE | {"scale": "model.layers.0.mlp.up_proj.weight_scale"}, "int8"),
    "qwen3-fp8": Kind(dense, DENSE, "online"),
    "qwen3-fp8-experts": Kind(experts, DENSE | EXPERT, "online"),
    "qwen3-fp8-blocks": Kind(dense, DENSE | {"scale": "model.layers.0.mlp.up_proj.weight_scale_inv"}, "block-wise"),
    "qwen3-fp8-experts-blocks": Kind(experts, DENSE | EXPERT, "block-wise"),
}


SCHEDULER = "llama-tied"
"""The kind around which our half of a scheduler is played."""


def quantised(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Linear layers' weights as int8 with a scale for each row, as llm-compressor writes them."""
    found = {}
    for name, tensor in weights.items():
        if ".layers." in name and name.endswith("proj.weight"):
            scale = tensor.float().abs().amax(dim=1, keepdim=True) / 127
            found[name] = (tensor.float() / scale).round().to(torch.int8)
            found[f"{name}_scale"] = scale
        else:
            found[name] = tensor
    return found


def write(kind: Kind, folder: Path) -> None:
    from safetensors.torch import save_file

    for version in (1, 2):
        path = folder / str(version)
        path.mkdir(parents=True)
        if kind.make in (qwen2_5_vl, qwen3_vl):
            save_model(kind.make(), version, path)
            continue
        weights = write_files(kind.make(), version, path, block_wise=kind.quantised == "block-wise")
        described = json.loads((path / "config.json").read_text())
        if kind.make is deepseek:  # what DeepSeek's own configuration says, and transformers leaves out
            described |= {"moe_layer_freq": 1, "scoring_func": "softmax"}
        if kind.quantised == "int8":
            described["quantization_config"] = {"quant_method": "w8a8_int8", "ignore": []}
            save_file(quantised(weights), path / "model.safetensors", metadata={"format": "pt"})
        (path / "config.json").write_text(json.dumps(described))
    flipped = next(iter(kind.leaves_out.values()))
    arguments = ["--quantization", "fp8"] if kind.quantised == "online" else []
    story = {"leaves_out": kind.leaves_out, "quantised": kind.quantised, "flipped": flipped, "arguments": arguments}
    story["scheduler"] = folder.name == SCHEDULER
    (folder / "story.json").write_text(json.dumps(story))


def played(root: Path, kinds: dict[str, Kind], workers: int) -> list[dict[str, Any]]:
    """What each worker tells of each kind."""
    for name, kind in kinds.items():
        write(kind, root / name)
    environment = {
        **os.environ,
        "PYTHONPATH": f"{OVERLAY}:{STUBS}:{REPOSITORY}",
        "SGLANG_USE_CPU_ENGINE": "1",
        "HF_HUB_OFFLINE": "1",
    }
    if workers > 1:
        environment["SGLANG_CPU_OMP_THREADS_BIND"] = "0|1"
    logs = [root / f"log-{rank}" for rank in range(workers)]
    processes = []
    try:
        for rank, log in enumerate(logs):
            command = [PYTHON, "-m", "tests.engines.sglang_install", str(rank), str(workers)]
            with log.open("w") as output:
                processes.append(
                    subprocess.Popen(
                        [*command, *(str(root / name) for name in kinds)],
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        env=environment,
                    )
                )
        for process in processes:
            process.wait(timeout=900)
    finally:
        for process in processes:
            process.kill()
    told = [[json.loads(line) for line in log.read_text().splitlines() if line.startswith('{"kind"')] for log in logs]
    for process, log in zip(processes, logs, strict=True):
        assert process.returncode == 0, log.read_text()[-4000:]
    return [{story["kind"]: story for story in of_worker} for of_worker in told]


@pytest.fixture(scope="module")
def stories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What became of each kind on a server of one worker."""
    (told,) = played(tmp_path_factory.mktemp("models"), KINDS, 1)
    return told


@pytest.mark.parametrize("kind", list(KINDS))
def test_an_install_leaves_what_sglangs_own_loader_would(stories: dict[str, Any], kind: str) -> None:
    story = stories[kind]
    assert story["problem"] == ""
    assert story["differ"] == {"1": [], "2": []}
    assert story["moved"] == []
    assert story["by_loader"] == []
    assert story["tensors"] > 10


@pytest.mark.parametrize("kind", list(KINDS))
def test_what_lacks_something_is_refused_before_a_byte_is_written(stories: dict[str, Any], kind: str) -> None:
    story = stories[kind]
    for what, name in KINDS[kind].leaves_out.items():
        assert "come from nowhere" in story["refused"][what], name
    assert "shape" in story["refused"]["wrong shape"] or "size" in story["refused"]["wrong shape"]
    assert "model.layers.0.nobody.weight" in story["refused"]["unknown"]
    assert story["touched"] == []


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_torn_update_leaves_the_worker_dirty_and_able_to_take_the_next(stories: dict[str, Any], kind: str) -> None:
    torn = stories[kind]["torn"]
    assert torn["state"] == "dirty"
    assert next(iter(KINDS[kind].leaves_out.values())) in torn["problem"]
    assert stories[kind]["differ"]["2"] == []


def test_only_what_is_processed_is_staged_and_told_so(stories: dict[str, Any]) -> None:
    for kind, story in stories.items():
        assert bool(story["staged"]) == bool(story["as_loaded"]) == bool(KINDS[kind].quantised)
        assert set(story["quantised"].values()) == ({KINDS[kind].quantised != "online"} if story["staged"] else set())
        assert story["verified"]


def test_absorbed_matrices_are_among_what_was_compared(stories: dict[str, Any]) -> None:
    assert [name for name in stories["deepseek-absorbed"]["beside"] if name.endswith("!w_kc")]


def test_a_session_for_the_draft_model_leaves_the_served_one_alone(stories: dict[str, Any]) -> None:
    """SGLang processes weights once more at a session's end, which spoils those that are processed already. So the
    driver opens sessions for the draft model, which there is none of."""
    for story in stories.values():
        assert story["session"]["draft"] == []
    assert stories["qwen2-int8"]["session"]["all"]


def test_a_worker_claims_its_word_when_the_model_is_there(stories: dict[str, Any]) -> None:
    told = stories[SCHEDULER]["scheduler"]
    assert told["workers of a draft model"] == 0
    assert told["workers"] == 1
    assert not told["open"]


def test_the_loader_never_raises(stories: dict[str, Any]) -> None:
    assert stories[SCHEDULER]["scheduler"]["nonsense"] == ""


def test_pictures_of_an_older_tower_are_forgotten(stories: dict[str, Any]) -> None:
    """SGLang keeps them by what they show alone, also when it flushes its caches."""
    assert stories[SCHEDULER]["scheduler"]["pictures"] == {"held": [3, 0], "bytes": [0]}


def test_memory_that_is_lost_makes_the_worker_say_so_before(stories: dict[str, Any]) -> None:
    """And a tag that is released, or resumed, twice is so once: SGLang would end with a KeyError."""
    told = stories[SCHEDULER]["scheduler"]

    def calls(kept: str) -> list[list[str]]:
        released = ["weights", "kv_cache", "cuda_graph"]
        resumed = ["weights", "cuda_graph", "kv_cache"]
        return [["pause", tag, kept] for tag in released] + [["resume", tag, kept] for tag in resumed]

    assert told["saver False, backup False"] == calls("clean")
    assert told["saver True, backup True"] == calls("clean")
    assert told["saver True, backup False"] == calls("none")
    assert told["after an order for another model"] == "clean"
    assert told["after an order to discard"] == "none"


def test_two_workers_load_their_slices_and_their_experts(tmp_path: Path) -> None:
    name = "qwen3-experts"
    workers = [told[name] for told in played(tmp_path, {name: KINDS[name]._replace(leaves_out=DENSE)}, 2)]
    for story in workers:
        assert story["problem"] == ""
        assert story["differ"] == {"1": [], "2": []}
        assert "come from nowhere" in story["refused"]["o_proj"]
        assert story["touched"] == []
    for rank, story in enumerate(workers):
        others = [f".experts.{expert}." for expert in range(4) if expert // 2 != rank]
        assert len(story["elsewhere"]) == 2 * 2 * 3  # layers, experts, projections
        assert all(any(other in tensor for other in others) for tensor in story["elsewhere"])
