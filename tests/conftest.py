"""What holds for every test process."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
"""Before torch is imported, and for all that tests start: threads of small models only wait for each other, and
several processes share the machine."""

_BASE = pytest.StashKey[Path]()
"""Of the first process of a run: the directory that it made for what tests write."""

LONGEST = (
    "test_updates_reach_replicas.py",
    "test_lint.py",
    "test_fault_sample.py",
    "test_sleeping_replicas.py",
    "test_relays.py",
    "test_gateway.py",
    "test_conformance.py",
    "test_demo_runs.py",
    "test_missing_replicas.py",
    "test_environments.py",
    "test_examples.py",
    "test_member_faults.py",
    "test_ledger_faults.py",
    "test_several_nodes.py",
    "test_agent_end_to_end.py",
    "test_forced_transport.py",
    "test_operators.py",
    "test_secured_cluster.py",
    "test_trainer_life.py",
    "test_design_rules.py",
    "test_simulation.py",
    "test_simulator_bites.py",
    "test_reference_engine.py",
    "test_engine_hosts.py",
    "test_agent_session.py",
    "test_sharded.py",
)
"""Files whose tests take longest together: they are begun first, so that none of them is what all others wait for."""


def pytest_configure(config: pytest.Config) -> None:
    """Tests write below a short path: sockets stand there, and a socket's path has at most 107 bytes. That of pytest
    itself gets longer by every tenth, hundredth and thousandth run."""
    if config.option.basetemp is None and not hasattr(config, "workerinput"):
        config.stash[_BASE] = Path(tempfile.mkdtemp(prefix="ck"))
        config.option.basetemp = str(config.stash[_BASE])


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Of a run in which something failed, what its tests have written stays."""
    base = session.config.stash.get(_BASE, None)
    if base is not None and exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        shutil.rmtree(base, ignore_errors=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files in the order in which `make test` begins them; the tests of a file stay in theirs."""
    order = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.name, len(LONGEST)))
