"""UCX between two hosts of a test: over every lane, and when the network is cut."""

from __future__ import annotations

import pytest

from tests.network.hosts import NetworkHost, hosts, ip
from tests.network.ucx_world import NEEDS_NIXL, SLOT, Other, until

pytestmark = [NEEDS_NIXL, pytest.mark.slow]

SIZE = 4 * SLOT


def second_lane(near: NetworkHost, far: NetworkHost) -> None:
    """A cable between two hosts, besides the switch."""
    ip("-n", near.namespace, "link", "add", "lane1", "type", "veth", "peer", "name", "lane1", "netns", far.namespace)
    for number, host in enumerate((near, far)):
        ip("-n", host.namespace, "addr", "add", f"10.9.9.{number + 1}/24", "dev", "lane1")
        ip("-n", host.namespace, "link", "set", "lane1", "up")


def sent(host: NetworkHost, device: str) -> int:
    return int(ip("netns", "exec", host.namespace, "cat", f"/sys/class/net/{device}/statistics/tx_bytes"))


def test_two_lanes_carry_it_together_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    with hosts(2) as (near, far):
        second_lane(near, far)
        devices = "eth0,lane1"
        with (
            Other(SIZE, devices, before=tuple(near.inside)) as owner,
            Other(SIZE, devices, before=tuple(far.inside)) as reader,
        ):
            digest = owner("fill", slot=0, seed=4)
            reader("connect", region=owner("offer", slot=0), slot=1)
            before = {device: sent(near, device) for device in devices.split(",")}
            reader("read", runs=[[0, 0, SIZE]])
            assert reader("digest", slot=1) == digest
            assert len(owner("facts")["helpers"]) == 2
            assert len(reader("facts")["helpers"]) == 4
            for device, count in before.items():
                assert SIZE // 4 < sent(near, device) - count < 1.02 * SIZE, device


def test_a_cable_that_is_pulled_ends_the_read_and_the_next_one_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    with hosts(2) as (near, far):
        with (
            Other(SLOT, "eth0", before=tuple(near.inside)) as owner,
            Other(SLOT, "eth0", stall=1.0, before=tuple(far.inside)) as reader,
        ):
            digest = owner("fill", slot=0, seed=5)
            region = owner("offer", slot=0)
            reader("connect", region=region, slot=0)
            (lends, reads) = reader("facts")["helpers"]
            near.cut()
            with pytest.raises(RuntimeError, match="DEADLINE_EXCEEDED"):
                reader("read", runs=[[0, 0, SLOT]])
            reader("sever")
            assert reader("facts")["helpers"] == [lends]
            near.mend()

            def again() -> bool:
                try:
                    reader("connect", region=owner("offer", slot=0), slot=0)
                    reader("read", runs=[[0, 0, SLOT]])
                except RuntimeError:
                    return False
                return True

            until(again, 60.0)
            assert reader("digest", slot=0) == digest
            assert reads not in reader("facts")["helpers"]
