"""Identifies the machine on which this process runs, by facts that only its processes share."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from ckpt_engine.host.gpus import used_gpus
from ckpt_engine.host.relay_directory import directory_identity
from ckpt_engine.v1.weights_pb2 import Host


def this_host(advertise: str = "") -> Host:
    """The Host of this process. `advertise` is the address at which other hosts reach it; it may be empty.

    Two processes with equal `boot_id` and `pid_namespace` can find each other under /proc. A fact that the kernel hides
    stays empty; an empty fact never counts as shared. GPUs are listed if this process uses some already.
    """
    return Host(
        boot_id=_read(Path("/proc/sys/kernel/random/boot_id")),
        pid_namespace=_link(Path("/proc/self/ns/pid")),
        name=socket.gethostname(),
        address=advertise,
        network_namespace=_link(Path("/proc/self/ns/net")),
        gpus=used_gpus(),
        relay_directory=directory_identity(),
    )


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _link(path: Path) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""
