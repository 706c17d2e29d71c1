"""Another host for a world of faults: namespaces of its own at the other end of a cable. Needs root, `ip`, `nsenter`.

This side has two addresses on the cable: members of the far host dial the manager at one, relays read each other at the
other, so that each way can be cut by itself.
"""

from __future__ import annotations

import secrets
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import pytest

from tests.line_process import ROOT
from tests.network.hosts import ip, process_inside

NOBODY = "02:00:00:00:00:01"
"""The address of no network card: what is sent there is lost without a word."""


@dataclass(frozen=True)
class FarHost:
    """manager, relays: this side's addresses. address: its own. inside: what a command is to begin with that runs
    there, beside others; it ends with whoever started it."""

    namespace: str
    device: str
    manager: str
    relays: str
    address: str
    inside: tuple[str, ...]

    def cut(self) -> None:
        """Pulls the cable: nothing is refused, nothing is heard."""
        ip("-n", self.namespace, "link", "set", self.device, "down")

    def mend(self) -> None:
        """Plugs it in again. May be repeated."""
        ip("-n", self.namespace, "link", "set", self.device, "up")

    def lose(self, address: str = "") -> None:
        """What it sends to one of this side's addresses is lost, by default to relays'; all else is heard."""
        where = (address or self.relays, "lladdr", NOBODY, "dev", self.device, "nud", "permanent")
        ip("-n", self.namespace, "neigh", "replace", *where)

    def find(self, address: str = "") -> None:
        """That is heard again. May be repeated."""
        where = (address or self.relays, "dev", self.device, "nud", "permanent")
        ip("-n", self.namespace, "neigh", "flush", "to", *where)


@contextmanager
def far_host() -> Iterator[FarHost]:
    """Skips the test, saying why, where there can be none. Whatever runs there ends with the block."""
    for command in ("ip", "unshare", "nsenter", "setpriv"):
        if shutil.which(command) is None:
            pytest.skip(f"`{command}` is not installed")
    name = f"ck{secrets.token_hex(3)}"
    net = f"198.{18 + secrets.randbelow(2)}.{secrets.randbelow(256)}"  # for tests of networks (RFC 2544)
    with ExitStack() as made:
        try:
            ip("netns", "add", name)
            made.callback(subprocess.run, ["ip", "netns", "del", name], check=False, capture_output=True, timeout=60)
            ip("link", "add", name, "type", "veth", "peer", "name", name, "netns", name)
            for address in (f"{net}.1/24", f"{net}.2/24"):
                ip("addr", "add", address, "dev", name)
            ip("link", "set", name, "up")
            ip("-n", name, "addr", "add", f"{net}.9/24", "dev", name)
            ip("-n", name, "link", "set", name, "up")
            ip("-n", name, "link", "set", "lo", "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
        first = _first_process(made, name)
        inside = ("nsenter", "--target", str(first), "--net", "--pid", "--mount", "--")
        inside += ("setpriv", "--pdeathsig", "KILL", "env", "-C", str(ROOT))
        yield FarHost(name, name, f"{net}.1", f"{net}.2", f"{net}.9", inside)


def _first_process(made: ExitStack, namespace: str) -> int:
    """Of the host: its process ids, and all processes that have them, are there as long as it is."""
    within = ["ip", "netns", "exec", namespace, "unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    process = subprocess.Popen([*within, "sh", "-c", "echo; exec sleep infinity"], stdout=subprocess.PIPE)
    made.callback(process.wait, 30)
    made.callback(process.kill)
    assert process.stdout is not None
    with process.stdout as told:
        assert told.readline(), "the far host's first process has ended"
    return process_inside(process.pid)
