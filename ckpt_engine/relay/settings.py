"""What a relay is told, and what of it cannot be."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, field

from ckpt_engine.addresses import split_address
from ckpt_engine.connection import checked_address
from ckpt_engine.core.deadlines import LONGEST_SECONDS, Deadlines
from ckpt_engine.core.loopback import is_loopback
from ckpt_engine.core.problems import invalid, precondition
from ckpt_engine.core.relay_layout import GROUP_BYTES, SLOTS
from ckpt_engine.core.sizes import in_words
from ckpt_engine.host.room import memory_room, memory_total
from ckpt_engine.transport.base import Network

RELAY_LISTEN, RELAY_INSECURE = "CKPT_ENGINE_RELAY_LISTEN", "CKPT_ENGINE_RELAY_INSECURE"

LISTEN = "127.0.0.1:0"
"""Where a relay listens that was told nothing: other hosts do not reach it."""


@dataclass(frozen=True)
class RelaySettings:
    """One relay.

    manager: host:port. name: empty: this host's name. memory: bytes of all its slots. everything: it wants the whole
    model, not only what its host's workers need. users: ids of users that may read, besides this process's own and
    root. slot_grace: seconds that a reader may keep a slot which is to be filled. listen: host:port where relays of
    other hosts reach it, port 0: a free one. advertise: name or address at which they do; empty: what it listens on.
    insecure: they may be sent weights without encryption. metrics: host:port where Prometheus scrapes it; empty:
    nowhere.
    """

    manager: str
    memory: int
    name: str = ""
    everything: bool = False
    users: tuple[int, ...] = ()
    slot_grace: float = 30.0
    listen: str = LISTEN
    advertise: str = ""
    insecure: bool = False
    metrics: str = ""
    deadlines: Deadlines = field(default_factory=lambda: Deadlines.from_environment(os.environ))

    def __post_init__(self) -> None:
        """Raises INVALID_ARGUMENT; FAILED_PRECONDITION for more memory than there is, with both numbers."""
        checked_address(self.manager)
        split_address(self.listen, "--listen")
        if self.metrics:
            split_address(self.metrics, "--metrics")
        if not 0 <= self.slot_grace <= LONGEST_SECONDS:
            raise invalid(f"--slot-grace is a number of seconds from 0 to {LONGEST_SECONDS:.0f}, not {self.slot_grace}")
        if self.memory < SLOTS * GROUP_BYTES:
            raise invalid(
                f"--memory: a relay needs {in_words(SLOTS * GROUP_BYTES)} of memory or more, for {SLOTS} versions, and "
                f"{in_words(self.memory)} were given: twice what the workers of this host need of one is right"
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
        """Where relays of other hosts reach it. Looks which address of this host leads to the manager, if it listens
        on all of them and was told none. Raises INVALID_ARGUMENT if that leads to no other host."""
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


EVERY_ADDRESS = ("0.0.0.0", "::")


def _towards(manager: str) -> str:
    """The address of this host that the manager would be reached from. Nothing is sent."""
    host, port = split_address(manager)
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(where)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise invalid(
            f"--advertise: {manager} does not tell which address of this host leads to it ({error}): name one"
        ) from error


def half_of_the_room() -> int:
    """The memory of a relay that was told none: half of what this host and this process's cgroup have left."""
    return memory_room() // 2
