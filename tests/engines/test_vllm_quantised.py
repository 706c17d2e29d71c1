"""Quantised models in vLLM on the CPU.

torchao's methods at servers: one that was updated answers with the tokens of one that loaded the same files with the
same options, and a corrupt slice closes it until the next update. FP8, of which this CPU has no kernel, without a
server: tensor by tensor what vLLM's own loader leaves, at the addresses that a captured graph reads.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from ckpt_engine import Trainer
from tests.cluster import Cluster, Replica, corrupt_after_sealing, outcomes, running_cluster
from tests.engines.quantised_models import dense, experts, write
from tests.engines.serving import model_of
from tests.engines.vllm_server import (
    assert_closed,
    complete,
    needs_vllm,
    plain_vllm,
    run_in_vllm,
    start_vllm,
    tokens,
)
from tests.tiny_model import make_tiny_qwen3

pytestmark = needs_vllm

ROWS = {"_type": "PerRow", "_version": 1, "_data": {"dim": -1}}
FP8 = {"weight_dtype": {"_type": "torch.dtype", "_data": "float8_e4m3fn"}, "granularity": ROWS}
KINDS = {
    "fp8": {"_type": "Float8WeightOnlyConfig", "_version": 2, "_data": {**FP8, "set_inductor_config": True}},
    "int8": {
        "_type": "Int8WeightOnlyConfig",
        "_version": 2,
        "_data": {"group_size": None, "granularity": ROWS, "set_inductor_config": True},
    },
}
"""torchao's configurations, as its `config_to_dict` writes them."""

LOADED = 7
SEEDS = (LOADED, 1, LOADED, 3)
PROMPTS = [[5, 6, 7], [400, 3, 77, 12, 9], list(range(100, 148))]


class Pair(NamedTuple):
    """Our replica, and a server that loaded the files of LOADED."""

    cluster: Cluster
    replica: Replica
    plain: Any


def options(kind: str) -> tuple[str, ...]:
    overrides = json.dumps({"quantization_config_dict_json": json.dumps(KINDS[kind])})
    return ("--quantization", "torchao", "--hf-overrides", overrides)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Pair]]:
    """All servers, started at once."""
    path = tmp_path_factory.mktemp("quantised")
    torch.set_num_threads(1)
    make_tiny_qwen3(path / "bare", weights=False)
    make_tiny_qwen3(path / "loaded", LOADED)
    with contextlib.ExitStack() as stack:
        found = {}
        for kind in KINDS:
            cluster = stack.enter_context(running_cluster(path / kind))
            replica = start_vllm(cluster, kind, path / "bare", *options(kind))
            plain = stack.enter_context(plain_vllm(path / "loaded", path / f"{kind}.log", *options(kind)))
            found[kind] = Pair(cluster, replica, plain)
        yield found


@pytest.mark.parametrize("kind", list(KINDS))
def test_updates_are_as_loaded_and_a_corrupt_slice_heals(pairs: dict[str, Pair], tmp_path: Path, kind: str) -> None:
    cluster, replica, plain = pairs[kind]
    live = model_of(tmp_path, 99)
    plain.wait(600)
    expected = [tokens(complete(plain, prompt)) for prompt in PROMPTS]
    replica.registered(600)
    assert_closed(replica)
    with Trainer(cluster.address, lineage=kind) as trainer:
        trainer.publish(live, move=True)
        for version, seed in enumerate(SEEDS):
            live.load_state_dict(model_of(tmp_path, seed).state_dict())
            report = trainer.update_weights(version=version)
            assert report.ok, f"{report}\n{replica.tail()}"
            assert report.verified
            answers = [tokens(complete(replica, prompt)) for prompt in PROMPTS]
            assert (answers == expected) == (seed == LOADED), f"update {version}, of the weights of seed {seed}"

        restore = corrupt_after_sealing(trainer, live.model.layers[1].self_attn.o_proj.weight, 7)
        report = trainer.update_weights(version=len(SEEDS))
        restore()
        assert outcomes(report) == {replica.name: "quarantined"}
        assert "o_proj" in report.replicas[0].problem
        assert_closed(replica)
        live.load_state_dict(model_of(tmp_path, LOADED).state_dict())
        assert trainer.update_weights(version=len(SEEDS) + 1).ok
        assert [tokens(complete(replica, prompt)) for prompt in PROMPTS] == expected


FP8_KINDS = {
    # vLLM makes its group of experts for the first model only
    "experts, online": (experts, {"quantization": "fp8"}, "Fp8PerTensorOnlineMoEMethod"),
    "experts, block-wise": (experts, {}, "Fp8MoEMethod"),
    "dense, online": (dense, {"quantization": "fp8"}, "Fp8PerTensorOnlineLinearMethod"),
    "dense, online by channel": (dense, {"quantization": "fp8_per_channel"}, "Fp8PtpcOnlineLinearMethod"),
    "dense, block-wise": (dense, {}, "Fp8LinearMethod"),
}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What tests/engines/quantised_install.py tells of each kind, in one process of vLLM's Python."""
    path = tmp_path_factory.mktemp("installed")
    for kind, (make, arguments, _) in FP8_KINDS.items():
        for version in (1, 2, 3):
            write(make(), version, path / kind / str(version), block_wise="block" in kind)
        (path / kind / "arguments.json").write_text(json.dumps(arguments))
    lines = run_in_vllm("tests.engines.quantised_install", *(path / kind for kind in FP8_KINDS))
    return {line["kind"]: line for line in lines}


@pytest.mark.parametrize("kind", list(FP8_KINDS))
def test_fp8_is_what_vllms_own_loader_makes(installed: dict[str, Any], kind: str) -> None:
    found = installed[kind]
    assert found["problem"] == ""
    assert found["differ"] == [[], [], [], []]
    assert found["moved"] == []
    assert found["torn"] == [["dirty", True]] * 4
    assert found["as_loaded"] > found["verified"] > 0
    assert "quantised" in found["split over GPUs"]
    assert "tensor parallelism of 2 on GPUs" in found["split over GPUs"]
    published = "block" in kind
    assert [published, FP8_KINDS[kind][2]] in found["quantised"].values()
    assert {how[0] for how in found["quantised"].values()} == {published}
