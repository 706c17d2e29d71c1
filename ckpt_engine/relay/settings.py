"""What a relay is told, and what of it cannot be."""

from __future__ import annotations

import os
import re
import socket
from dataclasses import dataclass, field

from ckpt_engine.connection import checked_address
from ckpt_engine.core.deadlines import LONGEST_SECONDS, Deadlines
from ckpt_engine.core.problems import invalid, precondition
from ckpt_engine.core.relay_layout import GROUP_BYTES, SLOTS
from ckpt_engine.host.room import memory_room, memory_total

UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40, "KB": 10**3, "MB": 10**6, "GB": 10**9}
UNITS |= {"TB": 10**12, "B": 1}
_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,15})?)\s*([A-Za-z]+)")


@dataclass(frozen=True)
class RelaySettings:
    """One relay.

    manager: host:port. name: empty: this host's name. memory: bytes of all its slots. everything: it wants the whole
    model, not only what its host's workers need. users: ids of users that may read, besides this process's own and
    root. slot_grace: seconds that a reader may keep a slot which is to be filled. advertise: name or address at which
    other hosts reach this one.
    """

    manager: str
    memory: int
    name: str = ""
    everything: bool = False
    users: tuple[int, ...] = ()
    slot_grace: float = 30.0
    advertise: str = ""
    deadlines: Deadlines = field(default_factory=lambda: Deadlines.from_environment(os.environ))

    def __post_init__(self) -> None:
        """Raises INVALID_ARGUMENT; FAILED_PRECONDITION for more memory than there is, with both numbers."""
        checked_address(self.manager)
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
        """Its name."""
        return self.name or socket.gethostname()


def bytes_of(text: str) -> int:
    """The bytes that a size such as "200GiB" names. Raises INVALID_ARGUMENT, with what can be written."""
    found = _SIZE.fullmatch(text.strip())
    unit = next((size for name, size in UNITS.items() if found and name.lower() == found[2].lower()), 0)
    if not found or not unit:
        raise invalid(
            f"--memory {text!r} is no amount of memory: write a number and a unit, such as 200GiB, 512MiB or 1.5TB"
        )
    return int(float(found[1]) * unit)


def half_of_the_room() -> int:
    """The memory of a relay that was told none: half of what this host and this process's cgroup have left."""
    return memory_room() // 2


def in_words(count: int) -> str:
    """Bytes as people write memory: "200 GiB"."""
    for name in ("TiB", "GiB", "MiB"):
        if count >= UNITS[name]:
            return f"{count / UNITS[name]:.4g} {name}"
    return f"{count} bytes"
