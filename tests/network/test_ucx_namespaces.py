"""UCX between two hosts of a test: over every lane, and when the network is cut."""

from __future__ import annotations

import os
import signal

import pytest

from tests.network.chunk_owner import SLOT_BYTES
from tests.network.hosts import NetworkHost, hosts, ip
from tests.network.ucx_world import NEEDS_NIXL, Other, helpers, maps

pytestmark = [NEEDS_NIXL, pytest.mark.slow]


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")


def second_lane(near: NetworkHost, far: NetworkHost) -> None:
    """A cable between two hosts, besides the switch."""
    ip("-n", near.namespace, "link", "add", "lane1", "type", "veth", "peer", "name", "lane1", "netns", far.namespace)
    for number, host in enumerate((near, far)):
        ip("-n", host.namespace, "addr", "add", f"10.9.9.{number + 1}/24", "dev", "lane1")
        ip("-n", host.namespace, "link", "set", "lane1", "up")


def sent(host: NetworkHost, device: str) -> int:
    return int(ip("netns", "exec", host.namespace, "cat", f"/sys/class/net/{device}/statistics/tx_bytes"))


def other(host: NetworkHost, devices: str) -> Other:
    return Other(devices, host.address, tuple(host.inside))


def test_two_lanes_carry_it_together_bit_for_bit() -> None:
    with hosts(2) as (near, far):
        second_lane(near, far)
        devices = "eth0,lane1"
        with other(near, devices) as owner, other(far, devices) as asker:
            asker("connect", offered=owner("lend_whole"))
            before = {device: sent(near, device) for device in devices.split(",")}
            asker("read_whole")
            assert asker("digest", slot=1) == owner("digest", slot=0)
            assert len(owner("facts")["helpers"]) == 2
            assert len(asker("facts")["helpers"]) == 4
            for device, count in before.items():
                assert SLOT_BYTES // 4 < sent(near, device) - count < 1.02 * SLOT_BYTES, device


def test_an_owner_whose_helper_hangs_sends_over_tcp() -> None:
    with hosts(2) as (near, far), other(near, "eth0") as owner, other(far, "eth0") as asker:
        asker("connect", offered=owner("lend_whole"))
        (lender,) = [pid for pid in helpers(owner.process.pid) if maps(pid) == {"r--s"}]
        os.kill(lender, signal.SIGSTOP)
        asker("read_whole")
        assert asker("digest", slot=1) == owner("digest", slot=0)
        assert len(asker("facts")["helpers"]) == 1, "the one that read was killed"


def test_a_cable_that_is_pulled_ends_the_connection_and_the_next_one_reads() -> None:
    with hosts(2) as (near, far), other(near, "eth0") as owner, other(far, "eth0") as asker:
        asker("connect", offered=owner("lend_whole"))
        (lends,) = asker("facts")["helpers"]
        near.cut()
        with pytest.raises(RuntimeError, match=r"DEADLINE_EXCEEDED|UNAVAILABLE"):
            asker("read_whole")
        asker("close")
        assert asker("facts")["helpers"] == [lends]
        near.mend()
        asker("connect", offered=owner("lend_whole"))
        asker("read_whole")
        assert asker("digest", slot=1) == owner("digest", slot=0)
