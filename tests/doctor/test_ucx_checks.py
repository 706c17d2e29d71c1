"""What `ckpt-engine doctor` says of UCX, on this host and on hosts made of files."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from ckpt_engine.doctor import ucx_checks
from ckpt_engine.doctor.ucx_checks import ucx_rows
from ckpt_engine.transport.ucx.settings import DEVICES, helper_environment
from tests.network.ucx_world import NEEDS_NIXL


def told(interfaces: Path, rdma: Path, **environment: str) -> dict[str, tuple[bool | None, str]]:
    return {name: (ok, detail) for name, ok, detail in ucx_rows(interfaces, rdma, environment)}


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """One with an interface and a RoCE device. What is tried is told; nothing is started."""
    monkeypatch.setattr(ucx_checks, "installed", lambda: "nixl_cu12")
    monkeypatch.setattr(ucx_checks, "_try_ucx", lambda package, devices: ("UCX", True, f"tried {devices}"))
    monkeypatch.delenv(DEVICES, raising=False)
    net, rdma = tmp_path / "net", tmp_path / "infiniband"
    (net / "eth0").mkdir(parents=True)
    port = rdma / "mlx5_0" / "ports" / "1"
    (port / "gids").mkdir(parents=True)
    (port / "gids" / "0").write_text("fe80:0000:0000:0000:0202:c9ff:fe00:1\n")
    (port / "gids" / "1").write_text("0000:0000:0000:0000:0000:0000:0000:0000\n")
    (port / "link_layer").write_text("Ethernet\n")
    (port / "state").write_text("4: ACTIVE\n")
    return net, rdma


def test_without_nixl_it_says_which_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(ucx_checks, "installed", lambda: None)
    assert [(ok, "ckpt-engine[relay-ucx]" in detail) for ok, detail in told(tmp_path, tmp_path).values()] == [
        (None, True)
    ]


def test_devices_are_named_and_tried(host: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DEVICES, "mlx5_0:1,eth0")
    found = told(*host)
    assert found["UCX"] == (True, "tried ('mlx5_0:1', 'eth0')")
    assert found["UCX devices"] == (None, "mlx5_0:1, eth0")
    monkeypatch.setenv(DEVICES, "mlx5_7:1,eth0")
    found = told(*host)
    assert "UCX" not in found
    assert found["UCX devices"] == (False, f"{DEVICES} names mlx5_7:1, and this host has eth0, mlx5_0")


def test_variables_of_ucx_that_lead_nowhere_are_a_no(host: tuple[Path, Path]) -> None:
    assert told(*host)["UCX over TCP listens at"][1].startswith("any free port")
    found = told(*host, UCX_TLS="sm,self", UCX_NET_DEVICES="eth0,eth9:1", UCX_TCP_PORT_RANGE="7000-7100")
    assert found["UCX_TLS"][0] is False
    assert found["UCX_NET_DEVICES"] == (False, "eth9: no such device; it has eth0, mlx5_0")
    assert found["UCX over TCP listens at"][1].startswith("7000-7100")
    for right in ("tcp", "rc,self", "^cuda_copy", "all"):
        assert told(*host, UCX_TLS=right)["UCX_TLS"][0] is True


def test_infiniband_needs_locked_memory_and_an_address(
    host: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = [8 << 20]
    monkeypatch.setattr(resource, "getrlimit", lambda what: (limit[0], limit[0]))
    assert told(*host)["locked memory"][0] is False
    limit[0] = resource.RLIM_INFINITY
    found = told(*host)
    assert found["locked memory"][0] is True
    assert found["mlx5_0:1"] == (True, "Ethernet, 4: ACTIVE, 1 GIDs")
    port = host[1] / "mlx5_0" / "ports" / "1"
    (port / "gids" / "0").unlink()
    assert "no GID" in told(*host)["mlx5_0:1"][1]
    (port / "state").write_text("1: DOWN\n")
    assert told(*host)["mlx5_0:1"] == (None, "Ethernet, 1: DOWN: not used")


@pytest.mark.parametrize(
    ("chosen", "given"),
    [
        ("tcp", "tcp,cuda_copy"),
        ("rc,cuda", "rc,cuda"),
        ("tcp, cuda_copy", "tcp, cuda_copy"),
        ("all", "all"),
        ("^sm", "^sm"),
    ],
)
def test_helpers_on_hosts_with_gpus_get_what_nixl_asks_for(chosen: str, given: str, tmp_path: Path) -> None:
    (tmp_path / "nvidiactl").touch()
    assert helper_environment({"UCX_TLS": chosen}, tmp_path)["UCX_TLS"] == chosen
    (tmp_path / "nvidia0").touch()
    assert helper_environment({"UCX_TLS": chosen}, tmp_path)["UCX_TLS"] == given
    assert helper_environment({}, tmp_path) == {}


def test_a_host_without_infiniband_says_what_that_costs(host: tuple[Path, Path], tmp_path: Path) -> None:
    found = told(host[0], tmp_path / "none")
    assert found["InfiniBand"][0] is None
    assert "locked memory" not in found


@NEEDS_NIXL
def test_here_a_helper_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DEVICES, "lo")
    found = {name: (ok, detail) for name, ok, detail in ucx_rows()}
    assert found["UCX"][0] is True, found
    assert found["UCX devices"] == (None, "lo")
