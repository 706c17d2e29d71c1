"""The demo on hosts of their own: what went over the wire, and what is said where there can be none."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ckpt_engine.demo.hosts import HostsError, hosts
from ckpt_engine.demo.play import play
from ckpt_engine.demo.stage import DemoSettings
from tests.demo.demo_run import Run
from tests.network.hosts import hosts as hosts_or_skip

CONTROL = 500_000
"""Bytes that members may send for an update besides the weights."""


@pytest.fixture
def makes_hosts() -> None:
    """Skips the test where there can be none."""
    with hosts_or_skip(1) as found:
        assert found[0].sent() >= 0


class Silent:
    def state(self, words: str) -> None:
        """Nobody watches."""

    def started(self, *_: object) -> None:
        """Nobody watches."""

    def act(self, *_: object) -> None:
        """Nobody watches."""


async def test_what_is_missing_is_a_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with monkeypatch.context() as other:
        other.setattr(os, "geteuid", lambda: 1000)
        other.setattr(shutil, "which", lambda name: name)
        outcome = await play(DemoSettings(hosts=3), Silent())
        assert not outcome.ok
        assert outcome.problem.startswith("network namespaces need root, and this is user 1000: put `sudo` before")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(HostsError, match="`ip` is not installed, which makes network namespaces: install iproute2"):
        with hosts(2):
            pytest.fail("there are none")


@pytest.mark.slow
@pytest.mark.usefixtures("makes_hosts")
def test_a_container_without_the_capability_is_told_so() -> None:
    code = "from ckpt_engine.demo.hosts import hosts; hosts(2).__enter__()"
    command = ["setpriv", "--bounding-set", "-sys_admin", "--inh-caps", "-sys_admin", sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert "HostsError: no network namespaces can be made here: unshare" in done.stderr
    assert "a container needs the capabilities SYS_ADMIN and NET_ADMIN" in done.stderr


@pytest.mark.slow
@pytest.mark.usefixtures("makes_hosts")
def test_hosts_are_fed_over_the_wire_and_leave_nothing(runs: list[Run]) -> None:
    runs.append(run := Run("--hosts", "3", "--updates", "2"))
    out, err = run.finish(600)
    assert run.process.returncode == 0, err
    result = json.loads(out.splitlines()[-1])
    assert result["ok"] is result["verified"] is result["final_text_matches"] is True
    assert (result["hosts"], result["replicas"], result["updates"]) == (3, 2, 2)
    model = result["bytes"] // 2  # each replica gets it
    first, second = result["wire"]
    assert first["host-1"]["sent"] > model
    for replica in ("host-2", "host-3"):
        assert model < first[replica]["received"] < 1.02 * model + CONTROL
        # Rows of the embedding that no token of the training text names stay as they were: relays send what differs.
        assert 0.5 * model < second[replica]["received"] < 1.02 * model + CONTROL
    assert "host-1 sent" in err, "what the kernel counted"
    assert run.left() == ({}, [])


@pytest.mark.slow
@pytest.mark.usefixtures("makes_hosts")
def test_killed_it_leaves_no_host(runs: list[Run]) -> None:
    runs.append(run := Run("--hosts", "2"))
    run.wait_for("ckpt_engine_adapters.reference.server", 150)
    networks = set[str]()
    for process in run.processes():
        with contextlib.suppress(OSError):  # it has ended since
            networks.add(os.readlink(f"/proc/{process}/ns/net"))
    networks.discard(os.readlink("/proc/self/ns/net"))
    assert len(networks) == 3, "two hosts and a switch"
    os.kill(run.process.pid, signal.SIGKILL)
    run.finish(60)
    assert run.left()[0] == {}, "who holds a network has gone, and so has the network"
