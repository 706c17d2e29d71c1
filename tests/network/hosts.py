"""Hosts of a test: network and process-id namespaces of their own, on one switch. Needs root and `ip`.

Those of `ckpt_engine/demo/hosts.py`, with names for `ip netns`. To relays these are hosts: each has its own interface,
addresses, process ids and relays' directory, and nothing of one is reached from another but over the switch. They share
the boot id and the disk. All of it goes when the block ends.
"""

from __future__ import annotations

import secrets
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from ckpt_engine.demo import hosts as made
from ckpt_engine.demo.hosts import HostsError


@dataclass(frozen=True)
class NetworkHost(made.NetworkHost):
    """namespace: of its network, as `ip netns` knows it."""

    namespace: str

    @property
    def inside(self) -> list[str]:
        """What a command is to begin with that runs on this host, with a /sys of its own; it ends with whoever started
        it."""
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


def ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=60, text=True)
    return done.stdout


@contextmanager
def hosts(count: int) -> Iterator[list[NetworkHost]]:
    """So many of them; skips the test, saying why, where there can be none."""
    name = f"ck{secrets.token_hex(3)}"
    with ExitStack() as stack:
        try:
            found = stack.enter_context(made.hosts(count))
        except HostsError as error:
            pytest.skip(str(error))
        yield [_named(stack, each, f"{name}{number}") for number, each in enumerate(found)]


def _named(stack: ExitStack, host: made.NetworkHost, name: str) -> NetworkHost:
    ip("netns", "attach", name, str(host.keeper))
    stack.callback(subprocess.run, ["ip", "netns", "del", name], check=False, capture_output=True, timeout=60)
    return NetworkHost(host.keeper, host.address, host.device, name)


def process_inside(pid: int) -> int:
    """The process that a host's command runs as, as this host numbers it; pid: of what was started."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return process_inside(int(children[0])) if children else pid
