"""verl's own trainer, `python -m verl.trainer.main_ppo` (GRPO, trainer and rollouts apart), with replicas of ours.

Makes what it reads, runs it, and judges what came of it. Decides nothing of how verl trains.

    python -m tests.frameworks.verl_trainer --out DIRECTORY [--cpu]

Without --cpu: one rank on GPU 0, and one vLLM on the same GPU, outside of Ray. verl's Python is
CKPT_ENGINE_VERL_PYTHON, or this one with the folders of CKPT_ENGINE_VERL_PATH. Prints a line that begins with RESULT.

Nothing of verl is replaced. On a processor verl_cpu.py tells it of a platform that it does not know. So these are
verl's: main, TaskRunner, trainer, worker group, FSDP2 engine, loss, optimizer, TransferQueue, agent loop, client,
balancer, reward loop, checkpoint manager, checkpoints.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch

from tests.cluster import Cluster, Replica, running_cluster
from tests.frameworks.ray_environment import ray_environment
from tests.frameworks.words import tokenizer
from tests.tiny_model import VOCABULARY, make_tiny_qwen3, regrets

STEPS = 3
PROMPT = [5, 6, 7, 8]
TOKENS = 48
NEWLINE = ("\n", "<|im_end|>")
"""Tokens that verl asks a Qwen's tokenizer for."""

REWARD = '''
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """The part of the answer's numbers that are below 256."""
    words = solution_str.split()
    return sum(word.isdigit() and int(word) < 256 for word in words) / max(1, len(words))
'''


def make_inputs(path: Path, dtype: torch.dtype, **model: int) -> None:
    """A model with a tokenizer of numbers, prompts and a reward, in files."""
    make_tiny_qwen3(path / "model", dtype=dtype, **model)
    words = tokenizer(VOCABULARY - len(NEWLINE))
    words.add_tokens([*NEWLINE])
    words.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    words.save_pretrained(path / "model")
    (path / "reward.py").write_text(REWARD)
    row = {"data_source": "numbers", "reward_model": {"style": "rule", "ground_truth": ""}}
    rows = [
        {**row, "prompt": [{"role": "user", "content": f"{number} 6 7 8"}], "extra_info": {"index": number}}
        for number in range(64)
    ]
    (path / "rows.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))


def settings(path: Path, cluster: Cluster, ranks: int, cpu: bool) -> list[str]:
    """verl's command line. What docs/frameworks.md says to set comes first; then that it is small."""
    rollout, actor = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
    ours = f"+{rollout}.checkpoint_engine.engine_kwargs.ckpt_engine"
    names = [each.name for each in cluster.replicas]
    return f"""
        trainer.v1.trainer_mode=separate_async actor_rollout_ref.hybrid_engine=False
        {rollout}.name=ckpt_engine {rollout}.nnodes=1 {rollout}.n_gpus_per_node={len(names)}
        {rollout}.tensor_model_parallel_size=1 {rollout}.checkpoint_engine.backend=ckpt_engine
        {ours}.manager={cluster.address} {ours}.replicas=[{",".join(names)}]

        algorithm.adv_estimator=grpo trainer.v1.separate_async.parameter_sync_step=1
        trainer.nnodes=1 trainer.n_gpus_per_node={ranks} trainer.device={"cpu" if cpu else "cuda"}
        trainer.total_training_steps={STEPS} trainer.val_before_train=False trainer.resume_mode=disable
        trainer.logger=[console,file] trainer.save_freq={STEPS} trainer.default_local_dir={path}/saved
        data.train_files={path}/rows.jsonl data.val_files={path}/rows.jsonl data.train_batch_size=4
        data.max_prompt_length=16 data.max_response_length={TOKENS} data.dataloader_num_workers=0
        actor_rollout_ref.model.path={path}/model +actor_rollout_ref.model.override_config.attn_implementation=eager
        actor_rollout_ref.model.use_remove_padding=False actor_rollout_ref.model.enable_gradient_checkpointing=False
        {actor}.strategy=fsdp2 {actor}.use_torch_compile=False {actor}.fsdp_config.use_torch_compile=False
        +{actor}.fsdp_config.mixed_precision.param_dtype={"fp32" if cpu else "bf16"}
        {actor}.checkpoint.save_contents=[model,hf_model]
        {actor}.ppo_mini_batch_size=4 {actor}.ppo_micro_batch_size_per_gpu=4 {actor}.optim.lr=0.03
        {rollout}.n=4 {rollout}.agent.num_workers=1 {rollout}.log_prob_micro_batch_size_per_gpu=4
        reward.num_workers=1 reward.custom_reward_function.path={path}/reward.py
        transfer_queue.backend.SimpleStorage.num_data_storage_units=1
        ray_kwargs.ray_init.num_cpus=16 +ray_kwargs.ray_init.num_gpus={ranks}
        +ray_kwargs.ray_init.include_dashboard=False +ray_kwargs.ray_init.object_store_memory=100000000
    """.split()


CPU = {
    "VERL_PLATFORM": "cpu",  # verl_cpu.py's
    "VERL_ENGINE_DEVICE": "cuda",  # whose FSDP engine: verl has registered none for processors
    "VERL_USE_EXTERNAL_MODULES": "frameworks.verl_cpu,ckpt_engine.integrations.verl",
}

BOTH = {
    # verl 0.9.1 passes flush=True to a logger where hybrid_engine=False, and ends with a TypeError if that logs.
    "VERL_LOGGING_LEVEL": "WARNING",
    "HYDRA_FULL_ERROR": "1",
}


def run_trainer(path: Path, cluster: Cluster, ranks: int, cpu: bool, seconds: float) -> str:
    """What it printed. Raises AssertionError if it did not end well."""
    python = os.environ.get("CKPT_ENGINE_VERL_PYTHON", sys.executable)
    command = [python, "-m", "verl.trainer.main_ppo", *settings(path, cluster, ranks, cpu)]
    more = {**BOTH, **(CPU if cpu else {}), "VERL_FILE_LOGGER_PATH": str(path / "metrics.jsonl")}
    if folders := os.environ.get("CKPT_ENGINE_VERL_PATH"):
        more["PYTHONPATH"] = folders
    with ray_environment() as environment, (path / "verl.log").open("w+") as log:
        environment |= more
        ended = subprocess.run(command, env=environment, stdout=log, stderr=log, cwd=path, timeout=seconds, check=False)
        log.seek(0)
        printed = log.read()
    assert ended.returncode == 0, printed[-12000:]
    return printed


@dataclass(frozen=True)
class Outcome:
    """What came of a run."""

    metrics: list[dict[str, Any]]  # verl's, a step each
    versions: dict[str, int]  # that each replica serves, by its name
    regrets: dict[str, float]  # of each replica's greedy tokens, the largest, in logits of the model that verl saved
    before: dict[str, float]  # the same by the model that it began with
    printed: str


def judged(path: Path, cluster: Cluster, printed: str) -> Outcome:
    """Asks each replica, and compares with the weights that verl saved after its last step."""
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    saved = auto.from_pretrained(path / "saved" / f"global_step_{STEPS}" / "actor" / "huggingface").eval()
    first = auto.from_pretrained(path / "model").eval()
    answers = {each.name: ask(each) for each in cluster.replicas}
    lines = (path / "metrics.jsonl").read_text().splitlines()
    return Outcome(
        metrics=[json.loads(line) for line in lines],
        versions={each.name: each.status.identity.version for each in cluster.replicas if each.status},
        regrets={name: max(regrets(saved, PROMPT, tokens)) for name, tokens in answers.items()},
        before={name: max(regrets(first, PROMPT, tokens)) for name, tokens in answers.items()},
        printed=printed,
    )


def ask(replica: Replica) -> list[int]:
    """Greedy tokens, as verl's rollouts ask."""
    model = httpx.get(f"{replica.url}/v1/models", timeout=60).json()["data"][0]["id"]
    body = {"model": model, "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{replica.url}/v1/completions", json={**body, "return_token_ids": True}, timeout=120)
    assert answer.status_code == 200, answer.text
    tokens: list[int] = answer.json()["choices"][0]["token_ids"]
    return tokens


def rehearse(path: Path, seconds: float) -> Outcome:
    """On a processor: two ranks with FSDP2 on gloo, two replicas of the reference engine, float32."""
    make_inputs(path, torch.float32)
    with running_cluster(path) as cluster:
        for name in ("one", "two"):
            cluster.replica(name, "reference", path / "model", "--dtype", "float32")
        for replica in cluster.replicas:
            replica.registered()
        return judged(path, cluster, run_trainer(path, cluster, ranks=2, cpu=True, seconds=seconds))


def on_a_gpu(path: Path, seconds: float) -> Outcome:
    """One rank and one vLLM on GPU 0, bfloat16; the model has 20 million parameters."""
    from tests.gpu.gpu_server import start_gpu_vllm

    make_inputs(path, torch.bfloat16, hidden=512, layers=8, intermediate=1536)
    with running_cluster(path) as cluster:
        words = ("--no-skip-tokenizer-init", "--enforce-eager")  # it names the tokens whose log-probabilities it tells
        start_gpu_vllm(cluster, "one", path / "model", *words).registered(200)
        return judged(path, cluster, run_trainer(path, cluster, ranks=1, cpu=False, seconds=seconds))


def problems(found: Outcome, rounding: float, near: float) -> list[str]:
    """What is not as it must be. rounding: logits by which the replicas' sums may differ from the saved model's. near:
    the same of probabilities, and the trainer's."""
    steps = [each["step"] for each in found.metrics]
    told = [each["data"].get("ckpt_engine/update_seconds", 0.0) > 0.0 for each in found.metrics]
    # verl's own comparison. Later rollouts may be of the version before: it asks for them while it trains.
    first = found.metrics[0]["data"]["training/rollout_probs_diff_max"]
    wrong = [
        ("verl's steps", steps, steps == [*range(1, STEPS + 1)]),
        ("an update in each step's metrics", told, all(told)),
        ("probabilities of the first step's tokens, against the trainer's", first, first < near),
        ("versions served", found.versions, bool(found.versions) and {*found.versions.values()} == {STEPS}),
        ("regrets by the saved model", found.regrets, max(found.regrets.values()) < rounding),
        ("regrets by the first model", found.before, min(found.before.values()) > 4 * rounding),
    ]
    return [f"{what}: {seen}" for what, seen, right in wrong if not right]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cpu", action="store_true", help="two ranks and the reference engine, without a GPU")
    parser.add_argument("--seconds", type=float, default=170.0, help="for verl's trainer, after the servers are up")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as path:
        found = (rehearse if options.cpu else on_a_gpu)(Path(path), options.seconds)
    wrong = problems(found, *((0.01, 1e-3) if options.cpu else (2.0, 0.5)))
    seconds = [each["data"]["ckpt_engine/update_seconds"] for each in found.metrics]
    result = {"wrong": wrong, "versions": found.versions, "regrets": found.regrets, "updates": seconds}
    told = {**result, "before": found.before, "metrics": found.metrics}
    (options.out / "verl.json").write_text(json.dumps(told, indent=1) + "\n")
    print("RESULT", json.dumps(result))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
