"""Adapters in vLLM servers of several workers: all of them hold a version, in the same place, or none serves it."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from ckpt_engine import Trainer
from ckpt_engine.integrations.adapters import adapter
from tests.cluster import Stream
from tests.engines.adapter_models import stir, with_adapter
from tests.engines.adapter_world import World, adapter_world, ask, version_of
from tests.engines.vllm_server import needs_vllm, tokens
from tests.waiting import eventually

pytestmark = [*needs_vllm, pytest.mark.slow]


def test_tensor_parallel_workers(tmp_path: Path) -> None:
    """Each has its slices of A and B."""
    with adapter_world(tmp_path, ["policy=3", "critic"], tensor_parallel=2) as world:
        check_workers(world)


@pytest.mark.parametrize("processes", ["1", "2"])
def test_data_parallel_engines(tmp_path: Path, processes: str) -> None:
    """Each core loads a version by itself when a request of its own needs it; each API process knows it."""
    arguments = ["--data-parallel-size", "2", *(["--api-server-count", processes] if processes != "1" else [])]
    with adapter_world(tmp_path, ["policy=3", "critic"], *arguments, serve=processes != "1") as world:
        check_workers(world)


def check_workers(world: World) -> None:
    """Versions change under streams; six of them share three slots."""
    assert len(world.replica.workers()) == 2
    policy = with_adapter(world.base, 60, target_modules=["q_proj", "k_proj", "o_proj", "up_proj", "down_proj"])
    critic = with_adapter(world.base, 70, target_modules="all-linear", r=8)
    answers: list[Any] = []
    with world.trainer("policy") as trainer, world.trainer("critic") as other:
        trainer.publish(adapter(policy, base=world.root))
        other.publish(adapter(critic, base=world.root))
        world.note("policy@0", policy)
        report = trainer.update_weights(version=0)
        assert report.ok, f"{report}\n{world.replica.tail()}"
        assert len(report.replicas[0].message.workers) == 2
        streams = [Stream(lambda: ask(world.replica, "policy", 48)) for _ in range(6)]
        try:
            for version in range(1, 7):
                stir(policy, version)
                world.note(f"policy@{version}", policy)
                eventually(
                    f"version {version}", 240, lambda version=version: trainer.update_weights(version=version).ok
                )
                stir(critic, 80 + version)
                world.note(f"critic@{version}", critic)
                report = other.update_weights(version=version)
                assert report.ok, f"{report}\n{world.replica.tail()}"
                for name in (f"policy@{version}", f"critic@{version}"):
                    world.check(ask(world.replica, name.partition("@")[0], 8), name)
        finally:
            answers = [answer for stream in streams for answer in stream.end()]
    assert {answer.status_code for answer in answers} == {200}, [answer.text for answer in answers]
    for answer in {(version_of(answer), tuple(tokens(answer))): answer for answer in answers}.values():
        world.check(answer, f"policy@{version_of(answer)}")
    listed = [each["id"] for each in httpx.get(f"{world.replica.url}/v1/models", timeout=60).json()["data"]]
    names = [name for name in listed if "@" in name]
    assert len(names) == 6, listed
    assert {"critic@4", "critic@5", "critic@6", "policy@6"} <= set(names)
    with ThreadPoolExecutor(6) as pool:
        for _ in range(3):
            for name, answer in zip(names, pool.map(lambda name: ask(world.replica, name, 24), names), strict=True):
                world.check(answer, name)


TENANTS = [f"tenant-{number}" for number in range(8)]
VERSIONS = 3


def seed_of(tenant: str, version: int) -> int:
    """Of a tenant's weights."""
    return 1000 * (1 + TENANTS.index(tenant)) + version


def train(address: str, tenant: str, base: Any, root: str, count: int) -> None:
    """One tenant's trainer: brings its versions one after another, and prints each."""
    model = with_adapter(base, 0, target_modules=["q_proj", "down_proj"])
    with Trainer(address, lineage=tenant, pool=tenant) as trainer:
        trainer.wait_for_replicas(1, timeout=240)
        trainer.publish(adapter(model, base=root))
        for version in range(count):
            stir(model, seed_of(tenant, version))
            eventually(f"{tenant}@{version}", 300, lambda version=version: trainer.update_weights(version=version).ok)
            print(version, flush=True)


PROGRAM = """
import sys
from pathlib import Path
from tests.engines.test_vllm_adapter_workers import train
from tests.tiny_model import make_tiny_qwen3
train(*sys.argv[1:3], make_tiny_qwen3(Path(sys.argv[4]), 83, weights=False), sys.argv[3], 1000)
"""


def test_eight_tenants_share_a_base(tmp_path: Path) -> None:
    """Each with a trainer of its own; updates come in any order, under load, with three slots. One trainer is killed in
    the middle: what it brought is served, and its next one goes on. None may name another's adapter. At last the worker
    dies."""
    with adapter_world(tmp_path, [f"{tenant}=2" for tenant in TENANTS]) as world, ThreadPoolExecutor(8) as pool:
        address, root = world.cluster.address, world.root
        killed, *others = TENANTS
        streams = [Stream(lambda tenant=tenant: ask(world.replica, tenant, 16)) for tenant in TENANTS]
        command = [sys.executable, "-c", PROGRAM, address, killed, root, str(tmp_path / "copy")]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]) as process:
            try:
                training = [pool.submit(train, address, each, world.base, root, VERSIONS) for each in others]
                assert process.stdout is not None
                while process.stdout.readline() not in ("2\n", ""):
                    continue
            finally:
                process.kill()
            for each in training:
                each.result()
        answers = [answer for stream in streams for answer in stream.end()]
        good = [answer for answer in answers if answer.status_code == 200]
        assert {answer.status_code for answer in answers} <= {200, 503}, "before the first version there is none"
        assert {answer.headers["x-ckpt-engine-adapter"].partition("@")[0] for answer in good} == set(TENANTS)
        model = with_adapter(world.base, 0, target_modules=["q_proj", "down_proj"])
        for answer in {(answer.headers["x-ckpt-engine-adapter"], *tokens(answer)): answer for answer in good}.values():
            name = answer.headers["x-ckpt-engine-adapter"]
            if name not in world.made:
                tenant, _, version = name.partition("@")
                stir(model, seed_of(tenant, int(version)))
                world.note(name, model)
            world.check(answer, name)
        for tenant in others:
            assert version_of(ask(world.replica, tenant, 4)) == VERSIONS - 1
        served = version_of(ask(world.replica, killed, 4))
        assert served >= 2
        with Trainer(address, lineage=killed, pool=killed) as trainer:
            stir(model, 7)
            trainer.publish(adapter(model, base=root))
            report = trainer.update_weights()
            assert report.ok, report
            assert report.version > served
            world.note(f"{killed}@{report.version}", model)
            world.check(ask(world.replica, killed), f"{killed}@{report.version}")
        with Trainer(address, lineage=others[0], pool=others[1]) as thief:
            thief.publish(adapter(model, base=root))
            assert f"slots of the adapter {others[1]!r}" in str(thief.update_weights())
        assert version_of(ask(world.replica, others[1], 4)) == VERSIONS - 1
        check_dead_worker(world)


def check_dead_worker(world: World) -> None:
    """Its server starts again, and serves an adapter once base and adapter have come again."""
    before = {worker.pid for worker in world.replica.workers()}
    world.replica.workers()[0].kill()
    name, other = TENANTS[:2]

    def started() -> bool:
        shelf = next((each for each in world.cluster.status().replicas if each.name == f"vllm.{name}"), None)
        pids = {worker.pid for worker in shelf.workers} if shelf is not None else set()
        return bool(pids) and 0 not in pids and not pids & before

    eventually("the shelf has new workers", 600, started)
    world.replica.registered(600)
    model = with_adapter(world.base, 90)
    with world.trainer(name) as trainer:
        trainer.publish(adapter(model, base=world.root))
        refused = trainer.update_weights()
        assert "holds no version" in str(refused), refused
        world.bring_base(2)
        report = trainer.update_weights()
        assert report.ok, report
    world.note(f"{name}@{report.version}", model)
    world.check(ask(world.replica, name, 16), f"{name}@{report.version}")
    assert ask(world.replica, other).status_code == 503
