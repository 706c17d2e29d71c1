"""Hosts on one machine: network namespaces of their own on one switch, each with an interface and an address.

To relays these are hosts: they reach each other only over the switch. They share the disk and the kernel. Everything
is removed when the block ends, and also when the process that made it is killed. Linux, root.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

DEVICE = "eth0"
COMMANDS = {"ip": "iproute2", "nsenter": "util-linux", "unshare": "util-linux"}
"""Commands that make the hosts, and their packages."""

NET = "10.77.0"
"""Start of the hosts' addresses. The machine may use the same network: it is not touched."""

STEP_SECONDS = 30.0


class HostsError(Exception):
    """Such hosts cannot be made here; the message says what is missing and what to do."""


@dataclass(frozen=True)
class NetworkHost:
    """A host of the demo: a network namespace."""

    keeper: int  # pid of the process that holds the network
    address: str  # of its interface `device`
    device: str

    @property
    def inside(self) -> list[str]:
        """The begin of a command that runs on this host, with process ids of its own. What it starts ends with it;
        SIGTERM must be sent to its group."""
        return [
            *("nsenter", f"--net=/proc/{self.keeper}/ns/net", "--"),
            *("unshare", "--pid", "--fork", "--kill-child", "--mount-proc"),
        ]

    @contextmanager
    def on_network(self) -> Iterator[None]:
        """Puts this thread, with the processes and threads that it starts meanwhile, on this host's network. Raises
        OSError."""
        with open("/proc/thread-self/ns/net", "rb") as former, open(f"/proc/{self.keeper}/ns/net", "rb") as network:
            _enter(network.fileno())
            try:
                yield
            finally:
                _enter(former.fileno())

    def sent(self) -> int:
        """Bytes that left its interface, headers included, by the kernel's count. Raises HostsError."""
        return self._counters()[8]

    def received(self) -> int:
        """Bytes that came to its interface, by the kernel's count. Raises HostsError."""
        return self._counters()[0]

    def _counters(self) -> list[int]:
        with suppress(OSError):
            for line in Path(f"/proc/{self.keeper}/net/dev").read_text().splitlines():
                device, _, counters = line.partition(":")
                if device.strip() == self.device:
                    return [int(each) for each in counters.split()]
        raise HostsError(f"the host {self.address} has gone: process {self.keeper}, which holds its network, was ended")


@contextmanager
def hosts(count: int) -> Iterator[list[NetworkHost]]:
    """Gives so many hosts on one switch, and removes them. Raises HostsError."""
    _check()
    with ExitStack() as stack:
        try:
            switch = _network(stack)
            _ip(switch, "link", "add", "switch", "type", "bridge")
            _ip(switch, "link", "set", "switch", "up")
            found = [_host(stack, switch, number) for number in range(1, count + 1)]
        except subprocess.CalledProcessError as error:
            problem = str(error.stderr).strip() or f"`{' '.join(error.cmd)}` failed"
            raise HostsError(
                f"no network namespaces can be made here: {problem}; a container needs the capabilities SYS_ADMIN and "
                "NET_ADMIN for it (`docker run --privileged`)"
            ) from error
        yield found


def _check() -> None:
    for command, package in COMMANDS.items():
        if shutil.which(command) is None:
            raise HostsError(f"`{command}` is not installed, which makes network namespaces: install {package}")
    if os.geteuid():
        raise HostsError(
            f"network namespaces need root, and this is user {os.geteuid()}: put `sudo` before the command, with the "
            "whole path of this program"
        )


def _network(stack: ExitStack) -> int:
    """Makes a network. Returns the pid of its keeper, which ends with the block, or when this process has ended."""
    command = ["unshare", "--net", "sh", "-c", "echo made; exec cat"]
    keeper = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C is for us: the hosts end last
    )
    stack.callback(_end, keeper)
    assert keeper.stdout is not None
    assert keeper.stderr is not None
    if not keeper.stdout.readline():
        raise subprocess.CalledProcessError(keeper.wait(STEP_SECONDS), command, stderr=keeper.stderr.read())
    _ip(keeper.pid, "link", "set", "lo", "up")
    return keeper.pid


def _end(keeper: subprocess.Popen[str]) -> None:
    for stream in (keeper.stdin, keeper.stdout, keeper.stderr):
        if stream is not None:
            with suppress(OSError):
                stream.close()
    try:
        keeper.wait(STEP_SECONDS)
    except subprocess.TimeoutExpired:
        keeper.kill()
        keeper.wait(STEP_SECONDS)


def _host(stack: ExitStack, switch: int, number: int) -> NetworkHost:
    keeper, port, address = _network(stack), f"host{number}", f"{NET}.{number}"
    _ip(switch, "link", "add", port, "type", "veth", "peer", "name", DEVICE, "netns", str(keeper))
    _ip(switch, "link", "set", port, "master", "switch", "up")
    _ip(keeper, "addr", "add", f"{address}/24", "dev", DEVICE)
    _ip(keeper, "link", "set", DEVICE, "up")
    return NetworkHost(keeper, address, DEVICE)


def _ip(keeper: int, *arguments: str) -> None:
    command = ["nsenter", f"--net=/proc/{keeper}/ns/net", "--", "ip", *arguments]
    subprocess.run(command, check=True, capture_output=True, timeout=STEP_SECONDS, text=True)


def _enter(network: int) -> None:
    """Does what os.setns does from Python 3.12 on."""
    library = ctypes.CDLL(None, use_errno=True)
    if library.setns(network, 0):
        number = ctypes.get_errno()
        raise OSError(number, f"setns: {os.strerror(number)}")
