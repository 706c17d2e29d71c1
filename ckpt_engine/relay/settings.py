"""A relay's settings, and their checks."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, field
from pathlib import Path

from ckpt_engine.addresses import EVERY_ADDRESS, split_address
from ckpt_engine.connection import checked_address
from ckpt_engine.core.deadlines import LONGEST_SECONDS, Deadlines
from ckpt_engine.core.loopback import is_loopback
from ckpt_engine.core.problems import invalid, precondition
from ckpt_engine.core.relay_layout import GROUP_BYTES, SLOTS
from ckpt_engine.core.sizes import in_words
from ckpt_engine.host.room import memory_room, memory_total
from ckpt_engine.leader import addresses_of
from ckpt_engine.relay.deltas import DeltaUse
from ckpt_engine.transport.base import Network

RELAY_LISTEN, RELAY_INSECURE = "CKPT_ENGINE_RELAY_LISTEN", "CKPT_ENGINE_RELAY_INSECURE"

MOST_KEPT = 60
"""Versions in an archive, at most: a holder names no more than 64."""

LISTEN = "127.0.0.1:0"
"""Where a relay listens by default: other hosts do not reach it."""


@dataclass(frozen=True)
class RelaySettings:
    """The settings of one relay."""

    manager: str  # host:port
    memory: int  # bytes of all its slots
    name: str = ""  # empty: this host's name
    everything: bool = False  # it wants the whole model, not only what its host's workers need
    users: tuple[int, ...] = ()  # ids of users that may read, besides this process's own and root
    slot_grace: float = 30.0  # seconds that a reader may keep a slot which is to be filled
    listen: str = LISTEN  # host:port where relays of other hosts reach it; port 0: a free one
    advertise: str = ""  # name or address at which they reach it; empty: what it listens on
    insecure: bool = False  # other hosts may be sent weights without encryption
    deltas: DeltaUse = "auto"  # when versions travel between relays as what has changed
    metrics: str = ""  # host:port where Prometheus scrapes it; empty: nowhere
    archive: Path | None = None  # directory of the versions that it keeps on disk; None: it keeps none
    keep: int = 50  # versions in the archive
    deadlines: Deadlines = field(default_factory=lambda: Deadlines.from_environment(os.environ))

    def __post_init__(self) -> None:
        """Raises INVALID_ARGUMENT; FAILED_PRECONDITION for more memory than there is, with both numbers."""
        checked_address(self.manager)
        split_address(self.listen, "--listen")
        if self.metrics:
            split_address(self.metrics, "--metrics")
        if not 1 <= self.keep <= MOST_KEPT:
            raise invalid(f"--keep is a number of versions from 1 to {MOST_KEPT}, not {self.keep}")
        if not 0 <= self.slot_grace <= LONGEST_SECONDS:
            raise invalid(f"--slot-grace is a number of seconds from 0 to {LONGEST_SECONDS:.0f}, not {self.slot_grace}")
        if self.memory < SLOTS * GROUP_BYTES:
            raise invalid(
                f"--memory: a relay needs at least {in_words(SLOTS * GROUP_BYTES)}, got {in_words(self.memory)}; give "
                f"{SLOTS} times what the workers of this host need of one version"
            )
        if self.memory > (total := memory_total()):
            raise precondition(
                f"--memory: {in_words(self.memory)} were asked for, and this host, or the cgroup of this process, has "
                f"{in_words(total)} in all: give less, or raise that limit"
            )

    @property
    def called(self) -> str:
        """The relay's name."""
        return self.name or socket.gethostname()

    def network(self) -> Network:
        """Where relays of other hosts reach it. If it listens on all addresses and advertises none, that is the address
        from which this host reaches the manager. Raises INVALID_ARGUMENT if that is a loopback address."""
        host, _ = split_address(self.listen, "--listen")
        if is_loopback(host):
            address = host
        elif self.advertise or host not in EVERY_ADDRESS:
            address = self.advertise or host
        else:
            address = _towards(self.manager)
            if is_loopback(address):
                raise invalid(
                    f"--listen {self.listen}: say with --advertise at which name or IP other hosts reach this one"
                )
        return Network(self.listen, address, self.slot_grace, self.insecure)


def _towards(manager: str) -> str:
    """The address from which this host reaches the first manager that is named. Sends nothing."""
    host, port = split_address(addresses_of(manager)[0].removeprefix("dns:///"))
    problem: OSError | None = None
    try:
        for family, kind, protocol, _, where in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
            try:
                with socket.socket(family, kind, protocol) as probe:
                    probe.connect(where)
                    return str(probe.getsockname()[0])
            except OSError as error:  # no way leads to this one of its addresses
                problem = problem or error
    except OSError as error:
        problem = error
    raise invalid(
        f"--advertise: {manager} does not tell which address of this host leads to it ({problem}): name one"
    ) from problem


def half_of_the_room() -> int:
    """A relay's memory by default: half of what this host and this process's cgroup have left."""
    return memory_room() // 2
