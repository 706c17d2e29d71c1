"""Where the demo's processes run: all on this machine's loopback, or on hosts of their own with a relay on each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ckpt_engine.demo.hosts import NetworkHost
from ckpt_engine.host.relay_directory import DIRECTORY

RELAY_MEMORY = "128MiB"
"""Memory of a relay: for two versions of the demo's model."""


@dataclass(frozen=True)
class Site:
    """A place where the demo's processes run."""

    name: str
    prefix: Sequence[str]  # begin of a command that runs there
    address: str  # at which the other sites reach it
    directory: Path  # for files of its processes
    host: NetworkHost | None = None  # None: this machine itself

    @property
    def variables(self) -> Mapping[str, str]:
        """Variables of its processes, beside the demo's environment."""
        if self.host is None:
            return {}
        return {"XDG_RUNTIME_DIR": str(self.directory), DIRECTORY: str(self.directory / "relay")}

    @property
    def relay(self) -> Sequence[str]:
        """Options of its relay, without --manager."""
        return ("--name", self.name, "--memory", RELAY_MEMORY, "--listen", f"{self.address}:0", "--insecure")

    @property
    def listen_options(self) -> tuple[Sequence[str], Sequence[str]]:
        """Options of an agent, and of its engine, so that other sites reach them."""
        return ((), ()) if self.host is None else (("--advertise", self.address), ("--host", "0.0.0.0"))


def sites_of(hosts: Sequence[NetworkHost], directory: Path) -> list[Site]:
    """One site for each host, with a directory of its own; without hosts, this machine. The caller is already on the
    first host's network, from which processes are started."""
    if not hosts:
        return [Site("here", (), "127.0.0.1", directory)]
    found = []
    for number, host in enumerate(hosts, 1):
        own = directory / f"host-{number}"
        own.mkdir(mode=0o700)
        prefix = () if number == 1 else tuple(host.inside)
        found.append(Site(f"host-{number}", prefix, host.address, own, host))
    return found


@dataclass(frozen=True)
class Wire:
    """Bytes that went through each host's interface, by the kernel's counts."""

    counts: Mapping[str, tuple[int, int]]  # (sent, received) by the host's name

    @classmethod
    def now(cls, sites: Sequence[Site]) -> Wire:
        """The counts since the hosts were made. Empty on this machine's loopback."""
        return cls({each.name: (each.host.sent(), each.host.received()) for each in sites if each.host is not None})

    def since(self, earlier: Wire) -> Wire:
        """The difference to earlier counts."""
        return Wire(
            {
                name: (sent - earlier.counts[name][0], received - earlier.counts[name][1])
                for name, (sent, received) in self.counts.items()
            }
        )
