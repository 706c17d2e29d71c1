"""Trainer, replicas and late replicas on hosts that share nothing but a network: only their relays talk over it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from ckpt_engine.host.relay_directory import DIRECTORY
from tests.cluster import eventually
from tests.end_to_end.conftest import PADDED_VOCABULARY
from tests.line_process import ROOT, LineProcess
from tests.network.hosts import NetworkHost, hosts, process_inside
from tests.tiny_model import DECISIVE_GAP, decisive_prompts, make_tiny_qwen3, named_weights, reference_tokens

pytestmark = pytest.mark.slow

TOKENS = 8


class World:
    """Three hosts on a switch; the manager and the trainer are on the first."""

    TRAINER = "tests.end_to_end.far_trainer"

    def __init__(self, path: Path, model: Path, found: list[NetworkHost], stack: ExitStack) -> None:
        self.path, self._model, self.hosts, self._stack = path, model, found, stack
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.inside = [self._keeper(host) for host in found]
        self.address = f"{found[0].address}:50051"
        ledger = str(path / "ledger.sqlite3")
        self.start("manager", 0, "manager", "--listen", self.address, "--http", "", "--insecure", "--ledger", ledger)
        before = self.inside[0]
        trainer = LineProcess(self.TRAINER, self.address, before=before, OMP_NUM_THREADS="1")
        self.trainer = stack.enter_context(trainer)
        eventually("the manager answers", 120.0, lambda: "problem" not in self.status())

    def _keeper(self, host: NetworkHost) -> list[str]:
        """What a command is to begin with that runs on this host, beside others: they see each other's processes. All
        of them end with the test."""
        process = subprocess.Popen([*host.inside, "sleep", "infinity"])
        self._stack.callback(process.wait, 30)
        self._stack.callback(process.kill)

        def started() -> int | None:
            found = process_inside(process.pid)
            return found if Path(f"/proc/{found}/comm").read_text().strip() == "sleep" else None

        first = eventually("the host's first process", 30.0, started)
        return ["nsenter", "--target", str(first), "--net", "--pid", "--mount", "--", "env", "-C", str(ROOT)]

    def start(self, name: str, host: int, *arguments: str, **environment: str) -> subprocess.Popen[bytes]:
        """A process of the command line on one of the hosts; it ends with the test."""
        environment = {DIRECTORY: str(self.relays(host)), "OMP_NUM_THREADS": "1", **environment}
        command = [f"{name}={value}" for name, value in environment.items()]
        command += [sys.executable, "-m", "ckpt_engine", *arguments]
        with (self.path / f"{name}.log").open("ab") as log:
            process = subprocess.Popen([*self.inside[host], *command], stdout=log, stderr=subprocess.STDOUT)
        self._stack.callback(process.wait, 30)
        self._stack.callback(process.kill)
        self._processes[name] = process
        return process

    def relays(self, host: int) -> Path:
        """Where relays of a host have their sockets."""
        folder = self.path / f"relays-{host}"
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder

    def relay(self, host: int) -> None:
        address = self.hosts[host].address
        self.start(
            *(f"relay-{host}", host, "relay", "--manager", self.address, "--name", f"r{host}", "--memory", "64MiB"),
            *("--listen", f"{address}:0", "--insecure"),
        )
        eventually(f"relay {host} registers", 120.0, lambda: f"r{host}" in self.status()["relays"])

    def replica(self, name: str, host: int, *arguments: str) -> None:
        self.start(
            *(name, host, "agent", "--manager", self.address, "--engine", "reference", "--model", str(self._model)),
            *("--name", name, "--engine-output", "--", *arguments),
        )

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = self.trainer.ask(status=True)
        return found

    def registers(self, name: str) -> None:
        self._eventually(f"{name} registers", 400.0, lambda: name in self.status()["replicas"])

    def serves(self, name: str, version: int) -> None:
        def look() -> bool:
            replica = self.status()["replicas"].get(name)
            return bool(replica) and replica["version"] == version

        self._eventually(f"{name} serves version {version}", 120.0, look)

    def _eventually(self, what: str, seconds: float, look: Callable[[], bool]) -> None:
        """Waits until it looks so; what the processes told is in the error, and one that has ended ends the wait."""

        def found() -> bool:
            ended = {name: code for name, process in self._processes.items() if (code := process.poll() or 0) > 0}
            assert not ended, f"ended by themselves: {ended}"
            return look()

        try:
            eventually(what, seconds, found)
        except AssertionError as error:
            logs = {log.name: log.read_text(errors="replace")[-2000:] for log in self.path.glob("*.log")}
            raise AssertionError(f"{what}: {error}: {self.status()} {logs}") from None

    def tokens(self, name: str, host: int, prompt: list[int]) -> list[int]:
        """What an engine generates, asked on its own host."""
        url = self.status()["replicas"][name]["url"]
        body = {"input_ids": prompt, "max_tokens": TOKENS, "temperature": 0}
        with self.hosts[host].on_network():
            found: list[int] = httpx.post(f"{url}/generate", json=body, timeout=120).json()["output_ids"]
        return found


@pytest.fixture
def world(tmp_path: Path, bare_model: Path) -> Iterator[World]:
    with ExitStack() as stack:
        yield World(tmp_path, bare_model, stack.enter_context(hosts(3)), stack)


def test_weights_reach_replicas_of_other_hosts_by_way_of_relays(world: World, tmp_path: Path) -> None:
    world.relay(0)
    world.relay(1)
    world.replica("far", 1)
    world.registers("far")
    for version in (1, 2):
        model = make_tiny_qwen3(tmp_path / "expected", version, vocabulary=PADDED_VOCABULARY, weights=False)
        prompt = decisive_prompts(model, 1, TOKENS)[0]
        reference = reference_tokens(model, prompt, TOKENS)
        assert reference.gap > DECISIVE_GAP
        size = sum(tensor.numel() * tensor.element_size() for _, tensor in named_weights(model))
        assert world.trainer.ask(train=[str(tmp_path / "train"), version]) is True
        before = world.hosts[0].sent()
        report = world.trainer.ask(update={"version": version, "until": "held"})
        assert world.trainer.ask(spoil=True) is True
        assert report.get("held"), report["problem"]
        # The update waits for no answer of an origin once all that was asked of it has come.
        report["relays"]["relay r0"]["brought"] = report["relays"]["relay r0"]["brought"] or {"rank 0": size}
        assert report["relays"] == {
            "relay r0": {"stage": 0, "upstream": [], "replicas": [], "brought": {"rank 0": size}},
            "relay r1": {"stage": 1, "upstream": ["relay r0"], "replicas": ["far"], "brought": {"relay r0": size}},
        }
        assert "relay r0 is filled for relay r1, which does not reach the trainer" in report["prefetch"]
        world.serves("far", version)
        assert world.tokens("far", 1, prompt) == reference.tokens
        assert world.hosts[0].sent() - before < 1.1 * size + 1_000_000, "each byte once"
    world.trainer.ask(close=True)
    world.relay(2)
    world.replica("late", 2, "--dtype", "float32")
    world.serves("late", 2)
    assert world.tokens("late", 2, prompt) == reference_tokens(model.float(), prompt, TOKENS).tokens
    assert world.status()["relays"]["r2"] == [2]
