"""TCP ports for servers that we start and that bind them later, perhaps after minutes of loading.

It chooses a server's port so that two agents of one user never choose the same one. It cannot keep other programs from
taking the port; the starter of a server checks that (`is_free`) and chooses another.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import random
import socket
from pathlib import Path

from ckpt_engine.core.problems import precondition

FIRST, LAST = 20000, 32767
"""Ports for engines: below those that Linux uses for outgoing connections by default, so that none of these takes
one."""

_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_ATTEMPTS = 200
_LISTEN = "0A"  # include/net/tcp_states.h
_WORDS_SHOWN = 120


class ReservedPort:
    """A port that no other agent of this user on this host takes, until `release` or the end of this process."""

    def __init__(self, root: Path) -> None:
        """root: the folder that all of them use, with a lock file for each port.

        Raises FAILED_PRECONDITION if no port is free.
        """
        folder = root / "ports"
        folder.mkdir(mode=0o700, exist_ok=True)
        low, high = _ephemeral_range()
        choice = random.SystemRandom()
        for _ in range(_ATTEMPTS):
            number = choice.randint(FIRST, LAST)
            if low <= number <= high and not (low <= FIRST and high >= LAST):
                continue
            descriptor = os.open(folder / str(number), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if is_free(number):
                    self.number = number
                    self._descriptor: int | None = descriptor
                    return
            except OSError:
                pass  # another agent has it
            os.close(descriptor)
        raise precondition(
            f"{_ATTEMPTS} ports between {FIRST} and {LAST} were tried and none is free: name one (--port)"
        )

    def release(self) -> None:
        """Frees the port. Safe to call twice."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def is_free(number: int, host: str = "") -> bool:
    """Whether a server could listen on this port now. host: its address; empty: all addresses."""
    families = [(socket.AF_INET, "0.0.0.0")]
    if socket.has_ipv6:
        families.append((socket.AF_INET6, "::"))
    if host:
        families = [(socket.AF_INET6 if ":" in host else socket.AF_INET, host)]
    for family, address in families:
        with contextlib.ExitStack() as stack:
            try:
                probe = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
            except OSError:
                continue  # this kernel has no such addresses
            # Like servers: connections of an earlier server that are still closing do not count.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            try:
                probe.bind((address, number))
                probe.listen(1)
            except OSError as error:
                if family == socket.AF_INET6 and error.errno == errno.EADDRNOTAVAIL:
                    continue  # IPv6 is switched off
                return False
    return True


def owner_of(number: int) -> str:
    """The program that listens on this port, for people: "vllm serve (pid 123)"; "another program" if not visible."""
    sockets = {f"socket:[{inode}]" for inode in _listening(number)}
    for process in Path("/proc").iterdir():
        if sockets and process.name.isdigit():
            with contextlib.suppress(OSError):  # it has ended, or it is another user's
                if any(os.readlink(descriptor) in sockets for descriptor in (process / "fd").iterdir()):
                    words = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
                    command = " ".join(words).strip()
                    ellipsis = "…" if len(command) > _WORDS_SHOWN else ""
                    return f"{command[:_WORDS_SHOWN]}{ellipsis} (pid {process.name})"
    return "another program"


def _listening(number: int) -> set[str]:
    """The inodes of sockets that listen on a port, from the kernel's tables."""
    inodes = set()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path("/proc/net", table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTEN and int(fields[1].rpartition(":")[2], 16) == number:
                    inodes.add(fields[9])
    return inodes


def _ephemeral_range() -> tuple[int, int]:
    try:
        low, high = map(int, _EPHEMERAL.read_text().split())
    except (OSError, ValueError):
        return 32768, 60999
    return low, high
