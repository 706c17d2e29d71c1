"""Relays that fill themselves from each other over UCX, on loopback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from safetensors.torch import save_file

from ckpt_engine.host.facts import this_host
from ckpt_engine.host.relay_directory import DIRECTORY
from ckpt_engine.relay.slots import FillWish, Slots
from ckpt_engine.source.directory import directory_source
from ckpt_engine.transport.fetched import FetchedTransport
from ckpt_engine.transport.registry import all_transports
from ckpt_engine.transport.shared_memory.memory import SharedMemoryTransport
from ckpt_engine.transport.tcp.fetcher import TcpFetcher
from ckpt_engine.transport.ucx.lanes import UcxLanes
from ckpt_engine.transport.ucx.reader import UcxFetcher
from ckpt_engine.transport.ucx.settings import DEVICES
from ckpt_engine.v1.weights_pb2 import SourceTable
from tests.install.install_world import Checkpoint
from tests.network.hosts import hosts
from tests.network.test_tcp import LOOPBACK, assert_same, filled, odd
from tests.network.ucx_world import NEEDS_NIXL, alive, until
from tests.relay.relay_process import RelayProcess
from tests.relay.relay_world import seal, tables, wish

pytestmark = [NEEDS_NIXL, pytest.mark.slow]


def relay(name: str, *fetchers: UcxFetcher | TcpFetcher) -> Slots:
    transports = {each.name: each for each in (SharedMemoryTransport(), *(FetchedTransport(each) for each in fetchers))}
    return Slots(name, this_host(), 32 << 20, transports, 5.0, (), LOOPBACK)


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Slots, Slots]]:
    monkeypatch.setenv("UCX_TLS", "tcp")
    monkeypatch.setenv(DEVICES, "lo")
    near, far = relay("near", UcxFetcher(), TcpFetcher()), relay("far", UcxFetcher(), TcpFetcher())
    yield near, far
    near.close()
    far.close()


def lanes_in(slots: Slots) -> UcxLanes:
    """What a relay has for UCX."""
    (lanes,) = slots._arena.writers
    assert isinstance(lanes, UcxLanes)
    return lanes


def test_a_relay_fills_itself_over_ucx_bit_for_bit(pair: tuple[Slots, Slots]) -> None:
    near, far = pair
    weights = odd()
    checkpoint = Checkpoint(weights, 2)
    recorded = seal(checkpoint, [])
    table = filled(near, 0, recorded, tables(checkpoint)).table
    assert [[offer.transport for offer in each.offers] for each in table.regions] == [["relay_memory", "ucx", "tcp"]]
    read = lanes_in(far)
    assert len(read.helpers) == 1  # its own lender
    for slot in (0, 1, 0):
        held = filled(far, slot, recorded, [table])
        assert_same(held, weights)
        assert held.filled.bytes_by_source == {"relay near": sum(weight.nbytes for weight in weights.values())}
        assert not held.filled.faults
    assert len(read.helpers) == 2  # one reads for both slots


def test_without_ucx_the_next_way_is_taken(pair: tuple[Slots, Slots]) -> None:
    near, far = pair
    weights = odd()
    checkpoint = Checkpoint(weights, 1)
    recorded = seal(checkpoint, [])
    table = filled(near, 0, recorded, tables(checkpoint)).table
    server = lanes_in(far).fork_server
    (lender,) = lanes_in(far).helpers
    os.kill(server, signal.SIGKILL)
    until(lambda: not alive(lender))
    held = filled(far, 0, recorded, [table])
    assert_same(held, weights)
    assert [fault.message for fault in held.filled.faults] != []
    assert [offer.transport for offer in held.table.regions[0].offers] == ["relay_memory", "tcp"]


def test_between_hosts_an_owner_that_hangs_is_read_over_tcp_the_next_time(tmp_path: Path) -> None:
    weights = odd()
    checkpoint = Checkpoint(weights, None)
    recorded = seal(checkpoint, [])
    path = tmp_path / "model.safetensors"
    save_file(weights, path)
    with ExitStack() as stack:
        source = directory_source(path, host=this_host())
        stack.callback(source.close)
        near, far = [
            stack.enter_context(
                RelayProcess(
                    host.namespace,
                    before=host.inside,
                    address=host.address,
                    **{DIRECTORY: str(tmp_path / host.namespace), DEVICES: "eth0", "UCX_TLS": "tcp"},
                    STALL_SECONDS="6",
                )
            )
            for host in stack.enter_context(hosts(2))
        ]

        def asked(*tables: SourceTable) -> FillWish:
            return wish(recorded, 1, tables, everything=True)

        table = near.fill(0, asked(source.table()))["table"]
        there = far.fill(0, asked(table))
        assert (there["missing"], there["faults"]) == ([], [])
        (lender,) = [pid for pid in helpers(near.process.pid) if "r--s" in maps(pid) and "rw-s" not in maps(pid)]
        os.kill(lender, signal.SIGSTOP)
        stopped = far.fill(0, asked(table))
        assert "over UCX" in stopped["missing"][0] or "UCX did not answer" in stopped["missing"][0]
        os.kill(lender, signal.SIGKILL)
        over_tcp = far.fill(0, asked(table))
        assert over_tcp["missing"] == []
        assert over_tcp["bytes"] == there["bytes"]


def helpers(pid: int) -> list[int]:
    """All processes below one, as this host numbers them."""
    children = [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return children + [each for child in children for each in helpers(child)]


def maps(pid: int) -> set[str]:
    """How a process maps memory files of relays."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {line.split()[1] for line in lines if "memfd:ckpt-engine relay" in line}


def test_nobody_uses_ucx_who_was_not_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(DEVICES, raising=False)
    assert "ucx" not in all_transports(relay=True)
    monkeypatch.setenv(DEVICES, "all")
    assert "ucx" in all_transports(relay=True)
    assert "ucx" not in all_transports()


def test_a_relay_with_a_device_that_is_none_does_not_start_and_says_so(tmp_path: Path) -> None:
    told = subprocess.run(
        [
            *(sys.executable, "-m", "ckpt_engine", "relay", "--manager", "127.0.0.1:1", "--memory", "64MiB"),
            *("--directory", str(tmp_path / "here"), "--ucx-devices", "nowhere7"),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert told.returncode == 1, told.stderr
    assert "UCX cannot be used" in told.stderr
    assert "nowhere7" in told.stderr
    assert not list((tmp_path / "here").iterdir())
