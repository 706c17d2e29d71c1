"""How fast one relay fills itself from another one's over UCX, on two hosts, against bare NIXL between the same two.

As test_network.py, with NIXL in place of a raw socket: one contiguous read of as many bytes. The digest is in the pass
of the filling, and in none of NIXL's.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.test_network import MEMORY, ROUNDS, SHAPES, keep, speeds_of, table_bytes, wish_of
from benchmarks.test_relay import Trainer
from ckpt_engine.host.relay_directory import DIRECTORY
from ckpt_engine.transport.ucx.link import REQUEST_BYTES
from ckpt_engine.transport.ucx.settings import DEVICES, TLS, helper_environment
from ckpt_engine.v1.weights_pb2 import SourceTable
from tests.line_process import LineProcess
from tests.network.hosts import NetworkHost, hosts
from tests.network.ucx_world import NEEDS_NIXL
from tests.relay.relay_process import written

UCX, BARE = "ucx", "bare NIXL"


class Cpu:
    """CPU seconds of processes and what they have started."""

    def __init__(self, *pids: int) -> None:
        self._pids = pids

    def seconds(self) -> float:
        return sum(self._of(pid) for pid in self._pids)

    def _of(self, pid: int) -> float:
        folder = Path(f"/proc/{pid}")
        fields = (folder / "stat").read_text().rpartition(")")[2].split()
        own = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        tasks = [task / "children" for task in (folder / "task").iterdir()]
        return own + sum(self._of(int(child)) for task in tasks for child in task.read_text().split())


@NEEDS_NIXL
def test_relay_to_relay_over_ucx(benchmark: BenchmarkFixture, tmp_path: Path) -> None:
    trainer = Trainer(SHAPES)
    recorded = trainer.sealed(trainer.needs(1))
    with ExitStack() as stack:
        stack.callback(trainer.arena.close)
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setenv(TLS, helper_environment({TLS: "tcp"})[TLS])
        patch.setenv("UCX_NET_DEVICES", "eth0")
        patch.setenv(DEVICES, "eth0")
        found = stack.enter_context(hosts(2))

        def started(host: NetworkHost, *command: str) -> LineProcess:
            before = ["ip", "netns", "exec", host.namespace]
            return stack.enter_context(
                LineProcess(*command, before=before, **{DIRECTORY: str(tmp_path / host.namespace)})
            )

        near, far = [
            started(host, "benchmarks.network_host", host.namespace, str(MEMORY), host.address) for host in found
        ]
        lends, reads = [started(host, "benchmarks.bare_nixl", f"bare {host.namespace}") for host in found]
        for each in (near, far):
            each.answer()
        held = near.ask(fill=[0, written(wish_of(recorded, trainer.table))])
        table = SourceTable.FromString(bytes.fromhex(held["table"]))
        assert UCX in {offer.transport for region in table.regions for offer in region.offers}
        bare = [*lends.ask(lend=held["size"]), held["size"]]
        asked = written(wish_of(recorded, table))
        processors = {
            UCX: Cpu(near.process.pid, far.process.pid),
            BARE: Cpu(lends.process.pid, reads.process.pid),
        }
        times: dict[str, list[float]] = {name: [] for name in processors}
        cpu: dict[str, list[float]] = {name: [] for name in processors}
        sent = 0
        for turn in range(ROUNDS + 2):
            for name in times:
                before, on_the_wire = processors[name].seconds(), found[0].sent()
                seconds = far.ask(fill=[turn % 2, asked])["seconds"] if name == UCX else reads.ask(read=bare)
                sent = found[0].sent() - on_the_wire if name == UCX else sent
                if turn > 1:  # both slots have been laid out, and their pages are there
                    times[name].append(seconds)
                    cpu[name].append(processors[name].seconds() - before)
    size = held["bytes"]
    speeds = speeds_of(size, times)
    ratio = round(speeds[UCX] / speeds[BARE], 3)
    keep(benchmark, size, times, cpu, sent, request_bytes=REQUEST_BYTES, ratio_to_bare=ratio)
    assert size == table_bytes(table)
