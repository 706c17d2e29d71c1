"""Whether starting a relay helps where memory is out of reach, in words. Pure.

It decides from the hosts that need a relay and those on which one runs. It does not decide what is out of reach
(reach.py), nor which relay is filled.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from ckpt_engine.v1.weights_pb2 import Host


def relay_remedy(needed: Iterable[Host], running: Collection[str] | None) -> str:
    """What to do so that relays bring weights between hosts, as the end of a sentence.

    needed: hosts that each need a relay. running: boot ids of hosts on which relays run; None: unknown.
    """
    hosts = {host.boot_id or name_of(host): host for host in needed}
    lacking = [name_of(host) for key, host in hosts.items() if running is None or key not in running]
    if not lacking:
        places = " and on host ".join(name_of(host) for host in hosts.values())
        return f"a relay runs on host {places}, and is not used for it: `report.prefetch` says why"
    start = f"start a relay on host {' and on host '.join(lacking)} (`ckpt-engine relay`)"
    return start if running is not None else f"{start} unless one runs there"


def name_of(host: Host) -> str:
    """A host as messages name it."""
    return host.name or host.address or (host.boot_id[:8] if host.boot_id else "(unnamed)")
