"""What holds for every test process. Where tests write: tests/short_paths.py."""

from __future__ import annotations

import gc
import os
import ssl
from collections.abc import Generator
from functools import cache
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadFileScheduling

os.environ.setdefault("OMP_NUM_THREADS", "1")
"""Before torch is imported, and for all that tests start: threads of small models only wait for each other, and
several processes share the machine."""

settings.register_profile("busy machines", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy machines")
"""Unless it is told, Hypothesis fails an example that takes 200 ms, on a machine that others use as well."""

pytest_plugins = ["tests.short_paths"]

_new_context = httpx.create_ssl_context


@cache
def _usual_context(trust_env: bool, file: str | None, folder: str | None) -> ssl.SSLContext:
    return _new_context(trust_env=trust_env)


def _context(verify: Any = True, cert: Any = None, trust_env: bool = True) -> ssl.SSLContext:
    """What httpx makes for each client, and so for each `httpx.get`, of addresses without TLS too: the usual one is
    made once a process, since to read the list of all authorities takes 24 ms of a processor."""
    if verify is True and cert is None:
        return _usual_context(trust_env, os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR"))
    return _new_context(verify, cert, trust_env)


httpx._transports.default.create_ssl_context = _context  # type: ignore[attr-defined]

LONGEST = (
    "test_updates_reach_replicas.py",
    "test_lint.py",
    "test_fault_sample.py",
    "test_sleeping_replicas.py",
    "test_relays.py",
    "test_gateway.py",
    "test_conformance.py",
    "test_vllm_layouts.py",
    "test_vllm_models.py",
    "test_sglang_updates.py",
    "test_vllm_two_workers.py",
    "test_relays_engines.py",
    "test_vllm_updates.py",
    "test_slurm.py",
    "test_chats_engines.py",
    "test_gateway_engines.py",
    "test_engine_image.py",
    "test_vllm_nodes.py",
    "test_containers.py",
    "test_chaos.py",
    "test_demo_runs.py",
    "test_missing_replicas.py",
    "test_environments.py",
    "test_examples.py",
    "test_bounds.py",
    "test_collective_hosts.py",
    "test_fan_out_hosts.py",
    "test_collective_ranks.py",
    "test_rollback.py",
    "test_member_faults.py",
    "test_ledger_faults.py",
    "test_far_faults.py",
    "test_several_nodes.py",
    "test_collective_faults.py",
    "test_five_hundred_updates.py",
    "test_forced_transport.py",
    "test_operators.py",
    "test_secured_cluster.py",
    "test_trainer_life.py",
    "test_design_rules.py",
    "test_simulation.py",
    "test_collective_rules.py",
    "test_digest.py",
    "test_simulator_bites.py",
    "test_reference_engine.py",
    "test_engine_hosts.py",
    "test_agent_session.py",
    "test_sharded.py",
)
"""Files whose tests take longest together: they are begun first, so that none of them is what all others wait for."""


ONE_ENGINE_AT_A_TIME = ("test_conformance.py", "test_relays_engines.py")
"""Files whose tests' first parameter is an engine, with a server for each: they are divided by it."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files in the order in which they are begun; the tests of a file stay in theirs."""
    order = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.name, len(LONGEST)))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is collected stays until the end. So garbage is sought only among what tests make: among thousands of tests
    a search takes half a second."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


class Files(LoadFileScheduling):  # type: ignore[misc]
    """Several files at a time, and of those in ONE_ENGINE_AT_A_TIME several engines."""

    def _split_scope(self, nodeid: str) -> str:
        """What is run by one process."""
        file, _, test = nodeid.partition("::")
        if not file.endswith(ONE_ENGINE_AT_A_TIME):
            return file
        engine = test.partition("[")[2].rstrip("]").partition("-")[0]
        return f"{file} {engine} {'-by relay' in test}"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Files | None:
    return Files(config, log) if config.getvalue("dist") == "loadfile" else None
