"""verl's own manager, balancer and client, from its own package, on Ray: each step's version served, its tokens, and an
abort in the middle of an answer. A stand-in is in the place of verl's FSDP engine (tests/frameworks/verl_run.py)."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import Cluster
from tests.engines import vllm_server
from tests.frameworks.ray_environment import messages, ray_environment
from tests.tiny_model import DECISIVE_GAP, ROUNDING, VOCABULARY

UPDATES = 5
LONG = 200


@pytest.fixture(scope="module")
def said(replicas: Cluster, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What one run says, with two reference replicas; CKPT_ENGINE_VERL_WITH_VLLM=1: and a real vLLM as the third."""
    output = tmp_path_factory.mktemp("verl")
    if os.environ.get("CKPT_ENGINE_VERL_WITH_VLLM"):
        made = save_tokenizer(replicas.path / "model")
        more = ("--dtype", "float32", "--no-skip-tokenizer-init")
        vllm_server.start_vllm(replicas, "three", made, *more).registered(600)
    names = [replica.name for replica in replicas.replicas]
    command = [os.environ["CKPT_ENGINE_VERL_PYTHON"], "-m", "frameworks.verl_run", replicas.address]
    with ray_environment() as environment:
        process = subprocess.Popen(
            [*command, str(replicas.path / "model"), str(output), str(UPDATES), *names],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=output,
        )
        printed, errors = process.communicate(timeout=500)
    assert process.returncode == 0, f"{printed[-6000:]}\n{errors[-6000:]}"
    return messages(printed)


def save_tokenizer(model: Path) -> Path:
    """Beside the model, since vLLM wants to name the tokens whose log-probabilities it tells."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    names = {str(number): number for number in range(VOCABULARY)}
    words = Tokenizer(models.WordLevel(names, unk_token="0"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="0").save_pretrained(model)
    return model


def test_the_seam_is_what_is_installed(said: list[dict[str, Any]]) -> None:
    """A method that verl's manager or its worker calls in another way fails here, by name."""
    seam = said[0]
    assert seam["have"] == seam["wanted"]
    assert seam["calls"]["send"] == [
        "self.checkpoint_engine.send_weights(per_tensor_param, global_steps=global_steps)",
        "self.checkpoint_engine.send_weights(self.actor.engine, global_steps=global_steps)",
    ]
    assert seam["calls"]["new"] == [
        "CheckpointEngineRegistry.new(backend, is_master=torch.distributed.get_rank() == 0, "
        "bucket_size=bucket_size, **engine_kwargs)"
    ]


@pytest.mark.parametrize(
    ("attempt", "words"),
    [
        ("a rollout in the trainer's process", "(hybrid) is not supported"),
        ("a hybrid replica", "(hybrid) is not supported"),
        ("a colocated replica", "(colocated) is not supported"),
        ("another backend", "the backend is 'nccl'"),
        ("a replica too many", "verl wants rollout replica 9"),
        ("verl's own rollouts", "verl's own rollouts cannot be given weights"),
        ("weights through verl", "verl's own rollouts cannot be given weights"),
        ("no replicas", "give the names of the replicas"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(said: list[dict[str, Any]], attempt: str, words: str) -> None:
    assert said[0]["refused"][attempt].startswith("INVALID_ARGUMENT: ")
    assert words in said[0]["refused"][attempt]


def test_each_step_is_served(replicas: Cluster, said: list[dict[str, Any]]) -> None:
    """Tokens are the trainer's, from every replica, and say the step."""
    steps = [each for each in said if "step" in each]
    assert [each["step"] for each in steps] == list(range(UPDATES))
    for each in steps:
        assert each["gap"] > DECISIVE_GAP / 10, "float32 on both sides"
        number = len(each["tokens"])
        assert number == 2 * len(replicas.replicas)
        assert each["tokens"] == [each["expected"]] * number
        assert each["logprobs"] == [len(each["expected"])] * number
        assert each["steps"] == [[each["step"]] * 3] * number
        assert each["stop_reasons"] == ["completed"] * number
        assert each["metrics"]["ckpt_engine/bytes"] > 0


def test_an_abort_in_the_middle(replicas: Cluster, said: list[dict[str, Any]]) -> None:
    """verl's client resumes: the first tokens are of the old step, the others of the new one, and it says so."""
    found = [each for each in said if "aborted" in each]
    last = [each for each in found if each["aborted"] == found[-1]["aborted"]]
    assert len(last) == len(replicas.replicas)
    for each in last:
        step = each["aborted"]
        assert each["tokens"] == each["logprobs"] == LONG
        assert each["steps"] == [step, step - 1, step]
        old, new = ([regret < ROUNDING for regret in each[name]] for name in ("old", "new"))
        cuts = [cut for cut in range(1, LONG) if all(old[:cut]) and all(new[cut:])]
        assert cuts, f"no place where tokens change from one step's to the next's: {old} {new}"
        assert not all(old)
        assert not all(new)
