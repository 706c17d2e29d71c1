"""Checks whether a relay of this host could use UCX, and what would stop it or slow it down. Each row: name, whether it
works (None: a fact that decides nothing), what was found, or why not and what to do. No check raises."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.core.relay_layout import GROUP_BYTES, SLOTS
from ckpt_engine.relay.arena import Arena
from ckpt_engine.transport.ucx.lanes import lanes_on
from ckpt_engine.transport.ucx.packages import installed
from ckpt_engine.transport.ucx.settings import DEVICES, ucx_devices

Row = tuple[str, bool | None, str]

INTERFACES = Path("/sys/class/net")
RDMA = Path("/sys/class/infiniband")

_BETWEEN_HOSTS = {"all", "tcp", "rc", "ud", "dc", "ib", "srd", "efa"}
"""UCX's transports that lead to another host: their names up to the underscore."""


def ucx_rows(
    interfaces: Path = INTERFACES, rdma: Path = RDMA, environment: Mapping[str, str] = os.environ
) -> Iterator[Row]:
    """What a relay with --ucx-devices would find that this user starts now. Starts its helper for a moment, if NIXL is
    installed. interfaces, rdma: where the kernel lists devices."""
    package = installed()
    if package is None:
        yield (
            "UCX",
            None,
            "NIXL is not installed: chunks between relays come over TCP; pip install 'ckpt-engine[relay-ucx]'",
        )
        return
    chosen = [device for device in ucx_devices() if device]
    devices = _devices(interfaces, rdma)
    missing = [device for device in chosen if not any(name in devices for name in (device, device.split(":")[0]))]
    if missing:
        have = ", ".join(sorted(devices)) or "none"
        yield "UCX devices", False, f"{DEVICES} names {', '.join(missing)}, and this host has {have}"
    else:
        yield _try_ucx(package, tuple(chosen) or ("",))
        selection = (
            ", ".join(chosen) if chosen else f"all that UCX finds; this host has {', '.join(sorted(devices)) or 'none'}"
        )
        yield "UCX devices", None, selection
    yield from _variables(devices, environment)
    if rdma.is_dir() and any(rdma.iterdir()):
        yield _locked_memory()
        yield from _gids(rdma)
    else:
        yield "InfiniBand", None, "no device: UCX goes over TCP, which takes processor time at both ends"


def _try_ucx(package: str, devices: tuple[str, ...]) -> Row:
    try:
        arena = Arena(SLOTS * GROUP_BYTES, carriers=[partial(lanes_on, devices=devices)])
    except CkptEngineError as error:
        return "UCX", False, error.problem.message
    arena.close()
    hint = "" if ucx_devices() else f"; a relay uses it with --ucx-devices ({DEVICES})"
    return "UCX", True, f"{package}: a helper process started an agent with UCX{hint}"


def _devices(interfaces: Path, rdma: Path) -> set[str]:
    found = set()
    for folder in (interfaces, rdma):
        try:
            found |= {each.name for each in folder.iterdir()}
        except OSError:
            continue
    return found


def _variables(devices: set[str], environment: Mapping[str, str]) -> Iterator[Row]:
    """Checks variables of UCX itself, which helpers inherit."""
    if (chosen := environment.get("UCX_TLS")) is not None:
        begin = {each.strip().split("_")[0] for each in chosen.split(",")}
        ok = chosen.startswith("^") or bool(begin & _BETWEEN_HOSTS)
        why = "" if ok else ": none of these leads to another host; add tcp, or rc for InfiniBand"
        yield "UCX_TLS", ok, f"{chosen}{why}"
    if chosen := environment.get("UCX_NET_DEVICES"):
        names = {each.strip().split(":")[0] for each in chosen.split(",")} - {"all"}
        if missing := names - devices:
            yield (
                "UCX_NET_DEVICES",
                False,
                f"{', '.join(sorted(missing))}: no such device; it has {', '.join(sorted(devices))}",
            )
        else:
            yield "UCX_NET_DEVICES", None, f"{chosen}; --ucx-devices other than all comes before it"
    ports = environment.get("UCX_TCP_PORT_RANGE", "0")
    listens = "any free port, chosen by the kernel" if ports == "0" else ports
    yield "UCX over TCP listens at", None, f"{listens}; for a firewall set UCX_TCP_PORT_RANGE=FIRST-LAST for relays"


def _locked_memory() -> Row:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return "locked memory", True, "unlimited"
    return (
        "locked memory",
        False,
        f"{soft >> 10} KiB, and each helper registers (locks) all that its relay holds: ulimit -l unlimited, or "
        "LimitMEMLOCK=infinity of the service",
    )


def _gids(rdma: Path) -> Iterator[Row]:
    """Checks for an address (GID), which RoCE needs; UCX picks one, or takes that of UCX_IB_GID_INDEX."""
    for device in sorted(rdma.iterdir()):
        for port in sorted((device / "ports").glob("*")):
            name = f"{device.name}:{port.name}"
            layer = _read(port / "link_layer") or "unknown"
            state = _read(port / "state") or "unknown"
            if "ACTIVE" not in state:
                yield name, None, f"{layer}, {state}: not used"
                continue
            gids = [each for each in (_read(path) for path in sorted((port / "gids").glob("*"))) if each.strip("0:")]
            ok = layer != "Ethernet" or bool(gids)
            why = "" if ok else ": no GID, so RoCE cannot be used; give its interface an address"
            yield name, ok, f"{layer}, {state}, {len(gids)} GIDs{why}"


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""
