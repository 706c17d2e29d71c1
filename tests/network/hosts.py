"""Hosts of a test: network and process-id namespaces of their own, on one switch. Needs root and `ip`.

To relays these are hosts: each has its own interface, addresses, process ids and relays' directory, and nothing of one
is reached from another but over the switch. They share the boot id and the disk. All of it goes when the block ends.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class NetworkHost:
    """namespace: of its network. device: its interface. address: of it."""

    namespace: str
    device: str
    address: str

    @property
    def inside(self) -> list[str]:
        """What a command is to begin with that runs on this host; it ends with whoever started it."""
        return [
            *("ip", "netns", "exec", self.namespace),
            *("unshare", "--pid", "--fork", "--kill-child", "--mount-proc"),
        ]

    def cut(self) -> None:
        """Pulls the cable: nothing is refused, nothing is heard."""
        ip("-n", self.namespace, "link", "set", self.device, "down")

    def mend(self) -> None:
        """Plugs it in again."""
        ip("-n", self.namespace, "link", "set", self.device, "up")

    def sent(self) -> int:
        """Bytes that left its interface, by the kernel's count."""
        told = ip("netns", "exec", self.namespace, "cat", f"/sys/class/net/{self.device}/statistics/tx_bytes")
        return int(told)


def ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=60, text=True)
    return done.stdout


@contextmanager
def hosts(count: int) -> Iterator[list[NetworkHost]]:
    """So many of them; skips the test, saying why, where there can be none."""
    for command in ("ip", "unshare"):
        if shutil.which(command) is None:
            pytest.skip(f"`{command}` is not installed")
    if os.geteuid():
        pytest.skip("network namespaces need root")
    name = f"ck{secrets.token_hex(3)}"
    net = f"10.{secrets.randbelow(200) + 20}.{secrets.randbelow(256)}"
    with ExitStack() as made:
        try:
            _namespace(made, f"{name}s")
            ip("-n", f"{name}s", "link", "add", "switch", "type", "bridge")
            ip("-n", f"{name}s", "link", "set", "switch", "up")
            found = [_host(made, f"{name}s", f"{name}{number}", f"{net}.{number + 1}") for number in range(count)]
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
        yield found


def _namespace(made: ExitStack, name: str) -> None:
    ip("netns", "add", name)
    made.callback(subprocess.run, ["ip", "netns", "del", name], check=False, capture_output=True, timeout=60)
    ip("-n", name, "link", "set", "lo", "up")


def _host(made: ExitStack, switch: str, name: str, address: str) -> NetworkHost:
    _namespace(made, name)
    ip("-n", switch, "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
    ip("-n", switch, "link", "set", name, "master", "switch", "up")
    ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
    ip("-n", name, "link", "set", "eth0", "up")
    return NetworkHost(name, "eth0", address)


def process_inside(pid: int) -> int:
    """The process that a host's command runs as, as this host numbers it; pid: of what was started."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return process_inside(int(children[0])) if children else pid
