"""Which transport an edge takes, chosen by what two processes know of where they run. Pure.

A region says which transport can open it; each transport has a rule that says whether a given worker can. Runs in the
manager.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from ckpt_engine.core.problems import precondition
from ckpt_engine.core.relay_remedy import name_of, relay_remedy
from ckpt_engine.core.transports import transport_kinds
from ckpt_engine.v1.weights_pb2 import Host


class Choice(NamedTuple):
    """A transport, and why it was chosen."""

    transport: str
    reason: str  # a sentence for people
    distance: int = 0  # see reach.Distance; of edges that bring the same bytes, the nearest is taken


def choose_transport(
    source: Host, transport: str, worker: Host, available: Sequence[str], relays: Collection[str] | None = None
) -> Choice:
    """How a worker reads regions of a source that offers them over `transport`.

    available: the transports that the worker's host can use. relays: boot ids of hosts on which relays run; None:
    unknown. Raises FAILED_PRECONDITION, saying why and what to do, if the worker cannot use this transport, or it does
    not reach the worker.
    """
    kinds = transport_kinds()
    kind = kinds.get(transport)
    if kind is None:
        raise precondition(
            f"the source on host {name_of(source)} offers its weights over {transport or 'no transport'!r}, which this "
            f"manager does not know (it knows {', '.join(kinds)}); bring manager, trainer and replicas to one version"
        )
    if transport not in available and kind.relays_only:
        raise precondition(
            f"the relay of host {name_of(source)} offers its weights to other relays over {transport}, which no worker "
            f"reads; {relay_remedy([worker], relays)}"
        )
    if transport not in available:
        raise precondition(
            f"the source on host {name_of(source)} offers its weights over {transport}, which the worker on host "
            f"{name_of(worker)} cannot use (it can use {', '.join(available) or 'none'}); run `ckpt-engine doctor` "
            "there to see why, or start its replica without --transport, which allows only some"
        )
    verdict = kind.reach(source, worker)
    if not verdict.ok:
        remedy = f"; {relay_remedy(verdict.relays, relays)}" if verdict.relays else ""
        raise precondition(verdict.reason + remedy)
    return Choice(transport, verdict.reason, verdict.distance)
