"""slime's own rollouts and train group, changed as docs/frameworks/slime.md says; reference replicas behind a gateway.

slime has no package: CKPT_ENGINE_SLIME_SOURCE names a checkout, and CKPT_ENGINE_SLIME_PYTHON a Python that has what its
page says.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.engines.sglang_server import ENVIRONMENT
from tests.frameworks.page import copy_with_diff, replicas_behind_gateway
from tests.frameworks.ray_environment import messages, ray_environment
from tests.frameworks.words import tokenizer
from tests.tiny_model import ROUNDING, VOCABULARY, make_tiny_qwen3, regrets

UPDATES = 3


@pytest.mark.slow
def test_what_slime_writes_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each update's samples are by its weights, and say its version."""
    copy_with_diff(Path(os.environ["CKPT_ENGINE_SLIME_SOURCE"]) / "slime", "slime.md", tmp_path)
    (tmp_path / "updates").mkdir()
    monkeypatch.setenv("CKPT_ENGINE_MANAGER_ALLOW_DIRECTORY", str(tmp_path / "updates"))
    make_tiny_qwen3(tmp_path / "model")
    tokenizer(VOCABULARY).save_pretrained(tmp_path / "model")
    with replicas_behind_gateway(tmp_path) as (cluster, gateway):
        host, _, port = gateway.url.removeprefix("http://").partition(":")
        with ray_environment() as environment:
            environment |= {
                "PYTHONPATH": f"{tmp_path}:{environment['PYTHONPATH']}:{ENVIRONMENT['PYTHONPATH']}",
                "CKPT_ENGINE_MANAGER": cluster.address,
                "CKPT_ENGINE_LINEAGE": "slime",
            }
            command = [os.environ["CKPT_ENGINE_SLIME_PYTHON"], "-m", "frameworks.slime_run"]
            ended = subprocess.run(
                [*command, str(tmp_path), str(UPDATES), host, port],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                cwd=tmp_path,
                timeout=900,
                check=False,
            )
    assert ended.returncode == 0, ended.stdout[-8000:]
    said = messages(ended.stdout)
    assert [each["update"] for each in said] == [number for number in range(1, UPDATES + 1) for _ in range(4)]
    for each in said:
        weights = make_tiny_qwen3(tmp_path / "compared", seed=100 + each["update"], weights=False)
        prompt, output = each["tokens"][: -each["count"]], each["tokens"][-each["count"] :]
        assert each["versions"] == [str(each["update"])]
        assert each["logprobs"] == each["count"]
        assert max(regrets(weights, prompt, output)) < ROUNDING
