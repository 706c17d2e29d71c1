"""OpenRLHF's own trainer on Ray (GRPO, DeepSpeed, two policy actors), changed as docs/frameworks/openrlhf.md says: each
step's rollouts are by that step's weights, and the last step's are served."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cluster import Cluster
from tests.frameworks.page import copy_with_diff, replicas_behind_gateway
from tests.frameworks.ray_environment import ray_environment
from tests.frameworks.verl_trainer import PROMPT, ask
from tests.frameworks.words import tokenizer
from tests.tiny_model import ROUNDING, VOCABULARY, make_tiny_qwen3, regrets

STEPS = 3
RANKS = 2

REWARD = '''
def reward_func(queries, prompts, labels):
    """The part of the answer's numbers that are below 256."""
    words = queries[0].split()
    return {"rewards": sum(word.isdigit() and int(word) < 256 for word in words) / max(1, len(words))}
'''


def installed_package() -> Path:
    python = os.environ["CKPT_ENGINE_OPENRLHF_PYTHON"]
    where = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    return Path(subprocess.check_output(where, text=True).strip()) / "openrlhf"


def arguments(path: Path, zero_stage: int) -> list[str]:
    """Of OpenRLHF's command: that it is small."""
    return f"""
        --actor.num_gpus_per_node {RANKS} --vllm.num_engines 2 --ds.zero_stage {zero_stage}
        --ds.attn_implementation eager --algo.kl.init_coef 0 --algo.advantage.estimator group_norm
        --algo.advantage.is_correction_level token --reward.remote_url {path}/reward.py
        --actor.model_name_or_path {path}/model --data.prompt_dataset {path}/rows.jsonl --data.max_len 80
        --rollout.max_new_tokens 24 --rollout.batch_size 4 --rollout.n_samples_per_prompt 4 --train.batch_size 16
        --train.micro_batch_size 4 --actor.adam.lr 0.03 --actor.lr_scheduler constant
        --ckpt.output_dir {path}/saved --ckpt.path {path}/checkpoints
    """.split()


def train(path: Path, cluster: Cluster, gateway: str, zero_stage: int) -> list[dict[str, Any]]:
    """OpenRLHF's figures of each step."""
    command = [os.environ["CKPT_ENGINE_OPENRLHF_PYTHON"], "-m", "frameworks.openrlhf_run", str(RANKS)]
    with ray_environment() as environment, (path / "log").open("w+") as log:
        environment |= {
            "PYTHONPATH": f"{path}:{environment['PYTHONPATH']}",
            "DS_ACCELERATOR": "cpu",
            "CKPT_ENGINE_MANAGER": cluster.address,
            "CKPT_ENGINE_GATEWAY": gateway,
        }
        ended = subprocess.run(
            [*command, *arguments(path, zero_stage)],
            env=environment,
            stdout=log,
            stderr=log,
            cwd=path,
            timeout=1100,
            check=False,
        )
        log.seek(0)
        printed = log.read()
    assert ended.returncode == 0, printed[-12000:]
    return [ast.literal_eval(found) for found in re.findall(r"Global step \d+: (\{.*\})", printed)]


@pytest.mark.slow
@pytest.mark.parametrize("zero_stage", [2, 3], ids=["as it lies", "gathered"])
def test_what_openrlhf_trains_is_served(tmp_path: Path, zero_stage: int) -> None:
    model = make_tiny_qwen3(tmp_path / "model", dtype=torch.bfloat16)
    tokenizer(VOCABULARY).save_pretrained(tmp_path / "model")
    (tmp_path / "reward.py").write_text(REWARD)
    rows = [{"input": f"{number} 6 7 8"} for number in range(4 * STEPS)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    copy_with_diff(installed_package(), "openrlhf.md", tmp_path)
    with replicas_behind_gateway(tmp_path) as (cluster, gateway):
        steps = train(tmp_path, cluster, gateway.url, zero_stage)
        answers = {replica.name: ask(replica.serving(STEPS)) for replica in cluster.replicas}
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    saved = auto.from_pretrained(tmp_path / "saved").eval()
    assert len(steps) == STEPS
    assert max(abs(each["vllm_kl"]) for each in steps) < 0.1, "each step's rollouts are by the weights that it trains"
    for tokens in answers.values():
        assert max(regrets(saved, PROMPT, tokens)) < ROUNDING
        assert max(regrets(model, PROMPT, tokens)) > 4 * ROUNDING, "training changed what is served"
