"""An engine and a transport that only an installed distribution knows: each process finds them, and they do their work.

tests/toys is what such a package has: docs/writing-an-adapter.md and docs/writing-a-transport.md show it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.cluster import Cluster, generate, running_cluster
from tests.distributions import distribution
from tests.gateway.gateways import running_gateway
from tests.tiny_model import make_tiny_qwen3

TOYS = Path(__file__).parents[1] / "toys"
POINTS = {
    "ckpt_engine.engines": {
        "toy": "toy_engine.kind:ENGINE",
        "lost": "no_such_module:ENGINE",
        "misnamed": "toy_engine.kind:ENGINE",
    },
    "ckpt_engine.transports": {"borrowed": "borrowed:BORROWED"},
}
TRAINER = """
import json, sys
import torch
from safetensors.torch import load_file
from ckpt_engine import Trainer
with Trainer(sys.argv[1], rank=0, world_size=1) as trainer:
    trainer.publish(load_file(sys.argv[2]), transport="borrowed")
    trainer.wait_for_replicas(1, timeout=240)
    report = trainer.update_weights()
    assert report.ok and report.verified, report
    (replica,) = report.replicas
    print(json.dumps([replica.outcome, [use.transport for use in replica.transports]]))
"""


@pytest.fixture(scope="module", autouse=True)
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The toys as a wheel would leave them, on the path of all processes that are started meanwhile."""
    path = distribution(tmp_path_factory.mktemp("site-packages"), "toys", POINTS)
    shutil.copytree(TOYS, path, dirs_exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(path), os.environ.get("PYTHONPATH", "")))))
        yield path


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ckpt_engine", *arguments], capture_output=True, text=True, timeout=240, check=False
    )


def test_commands_list_them() -> None:
    shown = command("agent", "-h").stdout
    assert "lost|misnamed|reference|sglang|toy|transformers|vllm" in shown.replace("\n", "").replace(" ", "")
    assert "borrowed" in shown
    assert "It is a toy." in command("engines", "toy").stdout
    every = command("engines").stdout
    assert "no_such_module" in every, "one that cannot be loaded is named, and hides no other"
    assert "It is a toy." in every
    wrong = command("agent", "--manager", "127.0.0.1:1", "--engine", "tory")
    assert wrong.returncode == 2
    assert "'toy'" in wrong.stderr, "an unknown engine is named with those that there are"


def test_the_doctor_looks_at_them() -> None:
    rows = {(row["group"], row["name"]): row for row in json.loads(command("doctor", "--json").stdout)["checks"]}
    assert rows["engines", "toy"]["result"] == "ok"
    assert rows["transports", "borrowed"]["detail"] == "paths can be opened"
    assert rows["engines", "lost"]["result"] == "no"
    assert "no_such_module" in rows["engines", "lost"]["detail"]
    assert "is that of 'toy'" in rows["engines", "misnamed"]["detail"]


def test_an_adapter_that_cannot_be_loaded_is_refused_in_words() -> None:
    refused = command("agent", "--manager", "127.0.0.1:1", "--engine", "lost")
    assert refused.returncode == 2
    assert "No module named 'no_such_module'" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_an_update_is_planned(tmp_path: Path) -> None:
    make_tiny_qwen3(tmp_path / "model", 1, weights=False)
    model, engine = str(tmp_path / "model"), ("--engine", "toy", "--cpu", "--trainer-memory", "host")
    told = json.loads(command("plan", model, *engine, "--json").stdout)
    assert told["edges"][0]["transport"] == "shared_memory", "borrowed lends nothing unasked"
    assert (told["time"]["pause_seconds"], told["time"]["unmeasured"]) == (None, "toy")
    assert "no update was measured of engine toy" in " ".join(command("plan", model, *engine).stdout.split())
    refused = command("plan", model, *engine, "--pp", "2")
    assert "drives toy with TP only" in refused.stderr


@pytest.fixture(scope="module")
def cluster(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    path = tmp_path_factory.mktemp("toys")
    make_tiny_qwen3(path / "model", 3)
    with running_cluster(path / "cluster") as running:
        running.replica("toy-0", "toy", path / "model", "--load-format", "dummy")
        yield running


def test_an_update_reaches_the_engine_over_the_transport_and_the_gateway_asks_it(cluster: Cluster) -> None:
    (replica,) = cluster.replicas
    replica.registered()
    assert replica.status is not None
    assert replica.status.engine.kind == "toy"
    weights = next((cluster.path.parent / "model").glob("*.safetensors"))
    trainer = [sys.executable, "-c", TRAINER, cluster.address, str(weights)]
    done = subprocess.run(trainer, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, f"{done.stderr}\n{replica.tail()}"
    assert json.loads(done.stdout.splitlines()[-1]) == ["new_serving", ["borrowed"]]
    own = generate(replica, [1, 2, 3], 4)
    with running_gateway(cluster.path / "gateway.log", "--manager", cluster.address) as gateway:
        gateway.ready()
        sampling = {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True}
        body = {"input_ids": [1, 2, 3], "sampling_params": sampling}
        answer = httpx.post(f"{gateway.url}/generate", json=body, timeout=120)
        assert answer.json()["output_ids"] == own, answer.text
        refused = httpx.post(f"{gateway.url}/inference/v1/generate", json={"token_ids": [1, 2, 3]}, timeout=120)
        assert (refused.status_code, "engines of toy" in refused.text) == (501, True), "it does not speak that"
