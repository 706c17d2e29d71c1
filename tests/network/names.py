"""Names of a test's hosts, by a real DNS server (dnsmasq) on one of them, and addresses that change. Needs root, `ip`.

A host inside asks that server for every name: its /etc/resolv.conf and /etc/hosts are files of the test.
"""

from __future__ import annotations

import ipaddress
import shlex
import shutil
import signal
import subprocess
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.cluster import eventually
from tests.network.hosts import NetworkHost, ip, process_inside

SECONDS_TO_LIVE = 1
"""How long an answer counts; a cluster's DNS has 5 to 30."""

V6 = "fd77::"


class Names:
    """The DNS server of the hosts. It answers what `means` said last."""

    def __init__(self, path: Path, host: NetworkHost, address: str, stack: ExitStack) -> None:
        """host: where it listens, at `address`. Skips the test where there is no dnsmasq."""
        program = shutil.which("dnsmasq") or shutil.which("dnsmasq", path="/usr/sbin")
        if program is None:
            pytest.skip("dnsmasq is not installed (Debian: dnsmasq-base)")
        self._records = path / "names"
        self._records.write_text("")
        self._known: dict[str, tuple[str, ...]] = {}
        self.hosts, self.resolver = path / "hosts", path / "resolv.conf"
        self.hosts.write_text("127.0.0.1 localhost\n::1 localhost\n")
        self.resolver.write_text(f"nameserver {address}\noptions timeout:1 attempts:2\n")
        command = [
            program,
            "--keep-in-foreground",
            "--conf-file=/dev/null",
            "--no-resolv",
            "--no-hosts",
            "--log-facility=-",
        ]
        command += [f"--addn-hosts={self._records}", f"--local-ttl={SECONDS_TO_LIVE}", f"--listen-address={address}"]
        command += [
            "--log-queries",
            "--bind-interfaces",
            "--user=root",
            "--pid-file=",
            "--local=/test/",
            "--no-negcache",
        ]
        said = path / "dnsmasq.log"
        with said.open("ab") as log:
            self._server = subprocess.Popen(
                ["ip", "netns", "exec", host.namespace, *command], stdout=log, stderr=subprocess.STDOUT
            )
        stack.callback(self._server.wait, 30)
        stack.callback(self._server.kill)
        # Before that the signal that has it read its names again would end it.
        eventually("the DNS server runs", 60.0, lambda: "read /" in said.read_text() or self._server.poll())
        assert self._server.poll() is None, said.read_text()

    def means(self, name: str, *addresses: str) -> None:
        """What the name means from now on; no addresses: it is not known."""
        self._known[name] = addresses
        lines = [f"{address} {each}\n" for each, found in self._known.items() for address in found]
        self._records.write_text("".join(lines))
        self._server.send_signal(signal.SIGHUP)


def first_process(host: NetworkHost, names: Names | None, stack: ExitStack) -> list[str]:
    """What a command is to begin with that runs on this host beside others, with these names; all end with the test."""
    mounts = ""
    if names is not None:
        mounts = "".join(
            f"mount --bind {shlex.quote(str(path))} /etc/{name}\n"
            for path, name in ((names.resolver, "resolv.conf"), (names.hosts, "hosts"))
        )
    process = subprocess.Popen([*host.inside, "sh", "-c", f"set -e\n{mounts}exec sleep infinity"])
    stack.callback(process.wait, 30)
    stack.callback(process.kill)

    def started() -> int | None:
        assert process.poll() is None, "the host's first process ended"
        found = process_inside(process.pid)
        return found if Path(f"/proc/{found}/comm").read_text().strip() == "sleep" else None

    first = eventually("the host's first process", 30.0, started)
    return ["nsenter", "--target", str(first), "--net", "--pid", "--mount", "--"]


def readdress(host: NetworkHost, addresses: Sequence[str]) -> None:
    """Gives the host's interface these addresses in the place of those that it has, as a pod that is made anew."""
    for family in ("-4", "-6"):
        ip("-n", host.namespace, family, "addr", "flush", "dev", host.device, "scope", "global")
    for address in addresses:
        v6 = ipaddress.ip_address(address).version == 6
        prefix = [f"{address}/64", "nodad"] if v6 else [f"{address}/24"]
        ip("-n", host.namespace, "addr", "add", prefix[0], "dev", host.device, *prefix[1:])


def clock(path: Path, hours: int) -> list[str]:
    """Words before a command of Python whose clock is wrong by so many hours. path: of the test.

    Clocks that only measure how long something takes go right, as on a host whose time was set wrong. (libfaketime does
    the same to C, but makes short sleeps of Python 3.11 fail.)
    """
    folder = path / f"clock{hours:+d}"
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(CLOCK.format(seconds=hours * 3600))
    return ["env", f"PYTHONPATH={folder}"]


CLOCK = """
import sys, time

real, real_ns = time.time, time.time_ns

def wrong():
    # gRPC hands what it is told to its C library, which sees this machine's clock.
    return real() + (0 if sys._getframe(1).f_globals["__name__"].startswith("grpc") else {seconds})

time.time, time.time_ns = wrong, lambda: real_ns() + {seconds} * 10**9
"""
