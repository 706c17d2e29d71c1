"""Classes of models in vLLM on a GPU: after an update of ours, greedy tokens and their log-probabilities are those of a
server that loaded the same files with vLLM's own loader.

Each class is a small random model of transformers' configuration. Four updates: of other weights, of those that the
other server loaded, of others, and of those again, so that what is made of weights only once is noticed. Both servers
run the same kernels on the same GPU with one request at a time; so tokens are equal, and log-probabilities too.

    python -m pytest tests/gpu/test_model_classes.py --seen FILE       what ran, for `python -m tests.gpu.seen`
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from ckpt_engine import Trainer
from tests.cluster import Cluster, Replica, running_cluster
from tests.engines.plain import PlainServer
from tests.engines.test_vllm_models import MIXTURE, SMALL, build, deepseek_v2
from tests.gpu import exact
from tests.gpu.exact import PROMPTS
from tests.gpu.gpu_server import needs_gpu_vllm, plain_vllm, start_gpu_vllm
from tests.gpu.pairs import Pairs
from tests.tiny_model import regrets

pytestmark = [*needs_gpu_vllm, pytest.mark.timeout(1200)]

SEEDS = (1, 7, 3, 7)
LOADED = 7
"""The seed of the weights that the other server loads."""

TOKENS = 32
LARGEST_DIFFERENCE = 1e-3
"""Of log-probabilities: equal but for a kernel that adds up in no fixed order."""

UP_SECONDS = 480.0
"""Until servers answer. The first hybrids of a machine compile kernels for three minutes."""

AT_A_TIME = 4
"""Classes whose servers, two each, are up or starting: they share a GPU and the host's memory."""

CACHE_BYTES = 512 << 20

COMMON: dict[str, Any] = SMALL | {"vocab_size": 512, "hidden_size": 256, "tie_word_embeddings": False}


def qwen3(**changed: Any) -> Any:
    from transformers import Qwen3Config

    return Qwen3Config(**COMMON | {"head_dim": 64} | changed, architectures=["Qwen3ForCausalLM"])


def tied() -> Any:
    return qwen3(tie_word_embeddings=True)


def experts() -> Any:
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(
        **COMMON, **MIXTURE, head_dim=64, decoder_sparse_step=1, architectures=["Qwen3MoeForCausalLM"]
    )


def latent_attention() -> Any:
    groups = {"n_group": 1, "topk_group": 1, "topk_method": "greedy"}
    return deepseek_v2(512, 128, 64, 128, **COMMON | {"num_key_value_heads": 4}, **groups)


def gpt_oss() -> Any:
    """Its experts are not quantised here."""
    from transformers import GptOssConfig

    return GptOssConfig(
        **COMMON,
        head_dim=64,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=128,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
        },
        layer_types=["sliding_attention", "full_attention"],
        architectures=["GptOssForCausalLM"],
    )


def gemma3() -> Any:
    from transformers import Gemma3TextConfig

    return Gemma3TextConfig(
        **COMMON | {"tie_word_embeddings": True},
        head_dim=64,
        query_pre_attn_scalar=64,
        sliding_window=64,
        layer_types=["sliding_attention", "full_attention"],
        architectures=["Gemma3ForCausalLM"],
    )


def hybrid() -> Any:
    """Three layers of linear attention, whose sizes are Qwen3-Next's own, and one of full attention."""
    from transformers import Qwen3NextConfig

    return Qwen3NextConfig(
        **COMMON | MIXTURE | {"num_hidden_layers": 4},
        head_dim=64,
        shared_expert_intermediate_size=64,
        decoder_sparse_step=1,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        layer_types=["linear_attention", "linear_attention", "linear_attention", "full_attention"],
        architectures=["Qwen3NextForCausalLM"],
    )


def routers() -> Any:
    """Its routers are in bfloat16 in the checkpoint, and in float32 in vLLM."""
    from transformers import Glm4MoeConfig

    return Glm4MoeConfig(
        **COMMON,
        moe_intermediate_size=64,
        n_routed_experts=4,
        num_experts_per_tok=2,
        head_dim=64,
        num_mtp_layers=0,
        architectures=["Glm4MoeForCausalLM"],
    )


@dataclass(frozen=True)
class Kind:
    """A class of models in one setting of the server."""

    make: Callable[[], Any]
    arguments: tuple[str, ...] = ()  # of both servers
    float32: tuple[str, ...] = ()  # ends of the names of tensors that ours publishes in float32
    embedding: float = 1.0  # see build


TRITON = ("--gdn-prefill-backend", "triton")
"""vLLM's own choice on Hopper for linear attention needs flashinfer, whether we are there or not."""

KINDS = {
    "dense": Kind(qwen3),
    "tied embeddings": Kind(tied),
    "experts": Kind(experts),
    "latent attention": Kind(latent_attention),
    "hybrid": Kind(hybrid, TRITON),  # vLLM keeps A_log in float32, and widens it
    "hybrid, A_log published in float32": Kind(hybrid, TRITON, float32=(".A_log",)),
    "hybrid of float32 masters": Kind(hybrid, TRITON, float32=("",)),  # served in bfloat16, but for A_log
    "experts with routers in float32": Kind(routers),
    "gpt-oss": Kind(gpt_oss),
    "gemma3": Kind(gemma3, embedding=1 / 16),  # it multiplies what it looks up by the root of its hidden size
    "LoRA enabled": Kind(qwen3, ("--enable-lora", "--max-lora-rank", "8")),
    "FP8 cache": Kind(lambda: qwen3(head_dim=128), ("--kv-cache-dtype", "fp8")),
}


@dataclass
class Pair:
    """Our replica of one class, and the server that loaded the files of LOADED."""

    kind: Kind
    model: Any  # transformers', of LOADED
    weights: dict[int, dict[str, torch.Tensor]]
    cluster: Cluster
    replica: Replica
    plain: PlainServer


@pytest.fixture(scope="module")
def pairs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pairs[Pair]]:
    """Of the classes that were asked for, in the order in which they run."""
    asked = [item.callspec.params["name"] for item in request.session.items if "pairs" in item.fixturenames]
    path = tmp_path_factory.mktemp("classes")

    def start(name: str, stack: contextlib.ExitStack) -> Pair:
        return _start(KINDS[name], path / str(asked.index(name)), stack)

    made = Pairs(asked, start, AT_A_TIME, UP_SECONDS)
    yield made
    made.close()


def _start(kind: Kind, path: Path, stack: contextlib.ExitStack) -> Pair:
    models, weights = {}, {}
    for seed in sorted({*SEEDS}):
        config = kind.make()
        config.dtype = torch.bfloat16
        models[seed], weights[seed] = build(config, seed, path / str(seed), kind.embedding)
    config.save_pretrained(path / "bare")
    arguments = ("--enforce-eager", "--kv-cache-memory-bytes", str(CACHE_BYTES), *kind.arguments)
    plain = stack.enter_context(plain_vllm(path / str(LOADED), path / "plain.log", *arguments))
    cluster = stack.enter_context(running_cluster(path / "cluster"))
    replica = start_gpu_vllm(cluster, "ours", path / "bare", *arguments)
    return Pair(kind, models[LOADED], weights, cluster, replica, plain)


Answer = tuple[list[int], list[float]]


def answer(url: str, prompt: list[int]) -> Answer:
    """Greedy tokens after `prompt`, and the log-probability of each."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    asked = {**body, "logprobs": 1, "return_tokens_as_token_ids": True, "return_token_ids": True, "detokenize": False}
    response = httpx.post(f"{url}/v1/completions", json=asked, timeout=120)
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    return choice["token_ids"], choice["logprobs"]["token_logprobs"]


def difference(ours: list[Answer], others: list[Answer]) -> float:
    """The largest of log-probabilities; infinite if a token differs."""
    if [tokens for tokens, _ in ours] != [tokens for tokens, _ in others]:
        return float("inf")
    pairs = [pair for (_, one), (_, other) in zip(ours, others, strict=True) for pair in zip(one, other, strict=True)]
    return max(abs(one - other) for one, other in pairs)


def judged(pair: Pair, answers: list[Answer]) -> list[float]:
    """How many logits each answer's worst token is away from transformers' best one."""
    return [round(max(regrets(pair.model, prompt, one)), 2) for prompt, (one, _) in zip(PROMPTS, answers, strict=True)]


@pytest.mark.parametrize("name", list(KINDS))
def test_a_model_class(pairs: Pairs[Pair], record_property: Callable[[str, object], None], name: str) -> None:
    try:
        check(pairs.get(name), record_property)
    finally:
        pairs.end(name)


def _wide(kind: Kind, name: str) -> bool:
    return any(name.endswith(end) for end in kind.float32)


def check(pair: Pair, record: Callable[[str, object], None]) -> None:
    record("architecture", pair.kind.make().architectures[0])
    record("arguments", " ".join(pair.kind.arguments))
    live = {
        name: torch.zeros_like(tensor, device=exact.DEVICE, dtype=torch.float32 if _wide(pair.kind, name) else None)
        for name, tensor in pair.weights[LOADED].items()
    }
    record("published in float32", sorted(name for name, tensor in live.items() if tensor.dtype == torch.float32))
    pair.plain.wait(UP_SECONDS)
    expected = [answer(pair.plain.url, prompt) for prompt in PROMPTS]
    pair.replica.registered(UP_SECONDS)
    differences = []
    with Trainer(pair.cluster.address, lineage="classes") as trainer:
        trainer.publish(live, move=True)
        for version, seed in enumerate(SEEDS):
            for name, tensor in pair.weights[seed].items():
                live[name].copy_(tensor)
            report = exact.update(trainer, pair.replica, version)
            (worker,) = report.replicas[0].message.workers
            answers = [answer(pair.replica.url, prompt) for prompt in PROMPTS]
            differences.append(difference(answers, expected))
    record("verified", worker.verified)
    record("verified as loaded", worker.verified_as_loaded)
    record("by vLLM's loader", sorted(worker.by_loader))
    record("equal tokens", len(PROMPTS) * TOKENS)
    for seed, found in zip(SEEDS, differences, strict=True):
        if seed == LOADED:
            record("largest difference of a log-probability", found)
            against = f"logits lost, ours {judged(pair, answers)}, the other server {judged(pair, expected)}"
            assert found <= LARGEST_DIFFERENCE, f"by update: {differences}; {against}\n{pair.replica.tail()}"
        else:
            assert found == float("inf"), f"the weights of {seed} answer as those of {LOADED} do: {differences}"
