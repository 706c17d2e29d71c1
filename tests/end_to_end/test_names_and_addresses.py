"""Hosts that know each other by names, over IPv6 alone, with clocks an hour apart: what moves is found again.

The names are a real DNS server's. A clock that is wrong is what Python tells the processes of a host.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from tests.end_to_end.conftest import PADDED_VOCABULARY
from tests.end_to_end.test_several_hosts import TOKENS, World
from tests.line_process import ROOT, LineProcess
from tests.network.hosts import NetworkHost, hosts, process_inside
from tests.network.names import Names, clock, first_process, readdress
from tests.tiny_model import decisive_prompts, make_tiny_qwen3, reference_tokens

pytestmark = pytest.mark.slow

MANAGER = "manager.test"
DNS = "fd77::53"
NOBODY = "fd77::dead"
"""An address that no host has."""


class NamedWorld(World):
    """Four hosts. DNS server, trainer and gateway are on the first, the replica is on the second; the manager begins on
    the third, and is to move to the fourth."""

    HOURS = (0, -1, 1, -1)
    """By how much the clock of each host is wrong."""

    def __init__(self, path: Path, model: Path, found: list[NetworkHost], stack: ExitStack) -> None:
        self.path, self._model, self.hosts, self._stack = path, model, found, stack
        self._processes = {}
        self.address = f"{MANAGER}:50051"
        for number, host in enumerate(found):
            readdress(host, [f"fd77::{number + 1}", *([DNS] if number == 0 else [])])
        self.names = Names(path, found[0], DNS, stack)
        for number in range(len(found)):
            self.names.means(f"host{number}.test", f"fd77::{number + 1}")
        self.inside = [
            [*first_process(host, self.names, stack), "env", "-C", str(ROOT), *clock(path, hours)]
            for host, hours in zip(found, self.HOURS, strict=True)
        ]
        self.manager(2)
        self.trainer = stack.enter_context(
            LineProcess(self.TRAINER, self.address, before=self.inside[0], OMP_NUM_THREADS="1")
        )
        self._eventually("the manager answers", 120.0, lambda: "problem" not in self.status())

    def manager(self, host: int) -> None:
        """Starts it there, with the ledger that it had. Its name means this host, and an address that nothing has."""
        self.names.means(MANAGER, NOBODY, f"fd77::{host + 1}")
        self.start(
            *(f"manager-{host}", host, "manager", "--listen", "[::]:50051", "--http", "[::]:8080", "--insecure"),
            *("--ledger", str(self.path / "ledger.sqlite3"), "--log-level", "info"),
        )

    def named_relay(self, host: int) -> None:
        self.start(
            *(f"relay-{host}", host, "relay", "--manager", self.address, "--name", f"r{host}", "--memory", "64MiB"),
            *("--listen", "[::]:0", "--advertise", f"host{host}.test", "--insecure", "--metrics", "[::]:9101"),
        )
        self._eventually(f"relay {host} registers", 120.0, lambda: f"r{host}" in self.status()["relays"])

    def kill(self, name: str) -> None:
        """SIGKILL, to the process itself: what it is started by would leave it running."""
        process = self._processes.pop(name)
        os.kill(process_inside(process.pid), signal.SIGKILL)
        process.wait(30)

    def get(self, url: str) -> int:
        """The status of an answer, asked on the first host; 0: there is none."""
        with self.hosts[0].on_network():
            try:
                return httpx.get(url, timeout=10).status_code
            except httpx.TransportError:
                return 0

    def update(self, version: int) -> None:
        """A training step, and what the replica serves after it."""
        assert self.trainer.ask(train=[str(self.path / "train"), version]) is True
        report = self.trainer.ask(update={"version": version})
        assert report.get("outcomes") == {"far": "new_serving"}, f"{report} {self.logs()}"
        self.serves("far", version)
        model = make_tiny_qwen3(self.path / "expected", version, vocabulary=PADDED_VOCABULARY, weights=False)
        prompt = decisive_prompts(model, 1, TOKENS)[0]
        body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": TOKENS, "temperature": 0}}
        with self.hosts[0].on_network():
            answer = httpx.post("http://[fd77::1]:8000/generate", json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        assert answer.json()["output_ids"] == reference_tokens(model, prompt, TOKENS).tokens

    def logs(self) -> dict[str, str]:
        return {log.name: log.read_text(errors="replace")[-3000:] for log in self.path.glob("relay*.log")}

    def all_back(self) -> bool:
        status = self.status()
        return "problem" not in status and set(status["relays"]) == {"r0", "r1"} and "far" in status["replicas"]


@pytest.fixture
def world(tmp_path: Path, bare_model: Path) -> Iterator[NamedWorld]:
    with ExitStack() as stack:
        yield NamedWorld(tmp_path, bare_model, stack.enter_context(hosts(4)), stack)


def test_what_moves_to_another_address_is_found_by_its_name(world: NamedWorld) -> None:
    world.named_relay(0)
    world.named_relay(1)
    world.start(
        *("far", 1, "agent", "--manager", world.address, "--engine", "reference", "--model", str(world._model)),
        *(
            "--name",
            "far",
            "--advertise",
            "host1.test",
            "--metrics",
            "[::]:9100",
            "--engine-output",
            "--",
            "--host",
            "::",
        ),
    )
    world.start("gateway", 0, "gateway", "--manager", world.address, "--listen", "[::]:8000", "--insecure")
    world.registers("far")
    assert world.status()["replicas"]["far"]["url"].startswith("http://host1.test:")
    world.update(1)
    for page in ("[fd77::2]:9100/metrics", "[fd77::2]:9101/metrics", "[fd77::3]:8080/healthz", "[fd77::1]:8000/readyz"):
        assert world.get(f"http://{page}") == 200, page

    # The manager's host is gone, without a word to those who are connected.
    world.hosts[2].cut()
    world.kill("manager-2")
    world.manager(3)
    world._eventually("all are back at the manager", 240.0, world.all_back)

    # The trainer's host, with its relay, gets another address, and the old one is nobody's.
    world.kill("relay-0")
    readdress(world.hosts[0], ["fd77::b1", "fd77::1", DNS])
    world.names.means("host0.test", "fd77::b1")
    world.named_relay(0)
    world._eventually("all are back at the manager", 240.0, world.all_back)
    world.update(2)
