"""The orders that relays get for a plan in which several are filled with the same at the same time. Pure.

The manager does not know the chunks, and need not: it plans for shares of equal size, and relays deal their chunks to
the trees by these (core/relay_chunks.py). The peers that a relay may ask come before it in the tree's order, so no
relay waits for itself, whichever of them it asks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping

from ckpt_engine.core.fan_out import Chunk, HostRate, plan_fan_out
from ckpt_engine.core.relay_chunks import KEY_BYTES
from ckpt_engine.v1.manager_pb2 import FanOut
from ckpt_engine.v1.weights_pb2 import Region

SHARES = 64
"""Shares of all bytes, which are dealt to the trees."""


def fan_out_orders(relays: Mapping[str, Region], about: bytes, leaves: Collection[str] = ()) -> dict[str, FanOut]:
    """The order for each relay, by its name. The same arguments give the same plan.

    relays: by name, the region in which it passes on. about: what the plan is about; no other plan has the same.
    leaves: names of relays that must pass nothing on, unless all are named.
    """
    names = sorted(relays)
    hosts = tuple(range(len(names)))
    chunks = [Chunk(1, hosts, (0,)) for _ in range(SHARES)]
    slow = frozenset(number for number, name in enumerate(names) if name in leaves)
    plan = plan_fan_out(chunks, [HostRate(name) for name in names], [HostRate("the version's holders")], slow)
    key = hashlib.sha256(b"\0".join([about, *(name.encode() for name in names)])).digest()[:KEY_BYTES]
    found = {}
    for name in names:
        order = found[name] = FanOut(plan=key)
        numbers: dict[str, int] = {}
        for upstream in sorted(plan.upstreams(name), key=lambda each: each.tree):
            ask = [] if upstream.parent is None else [upstream.parent, *filter(None, upstream.alternates)]
            for each in ask:
                if each not in numbers:
                    numbers[each] = len(numbers)
                    order.peers.add(relay=each, region=relays[each])
            order.trees.add(share=plan.trees[upstream.tree].bytes, ask=[numbers[each] for each in ask])
    return found
