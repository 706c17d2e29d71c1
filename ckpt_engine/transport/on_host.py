"""Which transports workers of this host may use, as an agent tells the manager, without loading what a worker would.

An agent runs beside every engine, so nothing here imports torch or starts CUDA. How a transport works is decided in its
own module; here only whether a host has what it needs.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from ckpt_engine.core.transports import (
    Availability,
    Maker,
    TransportKind,
    make,
    relay_transport,
    transport_kinds,
    worker_kinds,
)

log = logging.getLogger(__name__)


def worker_transports(only: Sequence[str] = ()) -> tuple[str, ...]:
    """The transports that workers of an engine on this host may use.

    only: the names that a user allows; none: all that work. Raises ValueError for a name that is unknown or does not
    work here.
    """
    found = {name: _on_host(kind) for name, kind in worker_kinds().items()}
    for name in only:
        if name not in found and name in transport_kinds():
            raise ValueError(
                f"transport {name} is between relays; workers of a host read its relay over {relay_transport()}: start "
                "one (ckpt-engine relay)"
            )
        if name not in found:
            raise ValueError(f"there is no transport {name!r}; there are {', '.join(found)}")
        if not found[name].ok:
            raise ValueError(f"transport {name} does not work on this host: {found[name].reason}")
    return tuple(name for name, each in found.items() if each.ok and (not only or name in only))


def try_load(kind: TransportKind, maker: Maker) -> Any:
    """Calls a maker; on failure logs it and returns an Availability that says why: a third-party transport must not
    stop a worker or an agent."""
    try:
        return make(maker)
    except Exception as error:
        log.exception("ckpt-engine: transport %s cannot be loaded", kind.name)
        return Availability(False, f"it cannot be loaded: {type(error).__name__}: {error}")


def _on_host(kind: TransportKind) -> Availability:
    if kind.on_host is None:
        reader = try_load(kind, kind.reader or "")
        return reader if isinstance(reader, Availability) else reader.availability()
    found: Availability = try_load(kind, kind.on_host)
    return found
