"""A whole cluster over TLS with tokens, as users set it up: every secret in a file, named by the environment."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import trustme

from ckpt_engine import Trainer
from ckpt_engine.commands.agent import EVICTED
from ckpt_engine.security.grants import digest_of
from tests.cluster import eventually
from tests.ports import free_port
from tests.tiny_model import make_tiny_qwen3

TOKENS = {"trainer/run": "t" * 32, "replica/one": "r" * 32, "operator": "o" * 32}


def test_everybody_shows_a_token_and_a_stranger_stays_out(
    tmp_path: Path, bare_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    authority.cert_pem.write_to_path(tmp_path / "ca.crt")
    issued.private_key_and_cert_chain_pem.write_to_path(tmp_path / "server.pem")
    (tmp_path / "tokens").write_text("\n".join(f"{grant} {digest_of(token).hex()}" for grant, token in TOKENS.items()))

    def environment(grant: str) -> dict[str, str]:
        file = tmp_path / f"{grant.replace('/', '-')}.token"
        file.write_text(TOKENS[grant])
        return {"CKPT_ENGINE_AUTHORITY": str(tmp_path / "ca.crt"), "CKPT_ENGINE_TOKEN_FILE": str(file)}

    address = f"127.0.0.1:{free_port()}"
    started: list[subprocess.Popen[bytes]] = []

    def start(log: Path, variables: dict[str, str], *words: str) -> Path:
        command = [sys.executable, "-m", "ckpt_engine", *words]
        with log.open("wb") as file:
            started.append(
                subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env={**os.environ, **variables})
            )
        return log

    def replica(name: str) -> Path:
        words = ("agent", "--manager", address, "--engine", "reference", "--model", str(bare_model), "--name", name)
        return start(tmp_path / f"{name}.log", {"OMP_NUM_THREADS": "1", **environment("replica/one")}, *words)

    pem = str(tmp_path / "server.pem")
    serve = ("manager", "--listen", address, "--http", "", "--ledger", str(tmp_path / "ledger"))
    torch.set_num_threads(1)
    try:
        start(
            tmp_path / "manager.log",
            {},
            *serve,
            "--certificate",
            pem,
            "--key",
            pem,
            "--tokens",
            str(tmp_path / "tokens"),
        )
        replica("one")
        stranger = replica("two")
        for name, value in environment("trainer/run").items():
            monkeypatch.setenv(name, value)
        with Trainer(address, lineage="run") as trainer:
            trainer.publish(make_tiny_qwen3(tmp_path / "model", 3, vocabulary=500, weights=False), move=True)
            assert trainer.wait_for_replicas(timeout=400) == ["one"]
            assert trainer.update_weights(version=1).ok
        eventually("the stranger says why", 60, lambda: "may not act as replica 'two'" in stranger.read_text())
        asked = {**os.environ, **environment("operator")}
        command = [sys.executable, "-m", "ckpt_engine", "replica", "evict", "one", "--manager", address]
        assert subprocess.run(command, env=asked, timeout=240).returncode == 0
        assert started[1].wait(60) == EVICTED
        assert not any(token in log.read_text() for log in tmp_path.glob("*.log") for token in TOKENS.values())
    finally:
        for process in started:
            process.send_signal(signal.SIGTERM)
        for process in started:
            process.wait(60)
