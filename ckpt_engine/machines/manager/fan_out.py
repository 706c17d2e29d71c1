"""Which relays are filled together: told at the same time to bring the same from the same network, they pass it on to
each other, so that each byte leaves those who hold the version about once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from ckpt_engine.core.fan_out_orders import fan_out_orders
from ckpt_engine.core.reach import by_network
from ckpt_engine.core.version import Fence, Version
from ckpt_engine.machines.manager.filling import FINAL, Filling
from ckpt_engine.machines.manager.members import Holder
from ckpt_engine.machines.manager.relay_facts import slow_relays
from ckpt_engine.v1 import manager_pb2, weights_pb2

OVER = "tcp"
"""The transport over which relays pass on."""


@dataclass(frozen=True)
class Together:
    """What relays that are filled together are told of each other.

    orders: by relay, what is to be added to its command. why: by relay, a sentence that says what that is for, or
    why nothing of it is done.
    """

    orders: Mapping[str, manager_pb2.FanOut] = field(default_factory=dict)
    why: Mapping[str, str] = field(default_factory=dict)


def filled_together(
    fillings: Iterable[Filling],
    holders: Mapping[str, Holder],
    command_of: Callable[[Filling], manager_pb2.FillRelay],
    fence: Fence,
) -> Together:
    """What relays are told that are now told something for the first time. command_of: what one is told without it, but
    for tables."""
    slow = slow_relays(holders.values())
    classes: dict[tuple[object, ...], list[str]] = {}
    others: dict[tuple[str, ...], list[str]] = {}
    for filling in fillings:
        holder, route = holders.get(filling.relay), filling.route
        if holder is None or holder.peer is None or holder.filling is None:
            continue
        if not route.over or route.ahead:
            continue
        # Whoever is reached on its own host only is no step for others.
        passes_on = holder.filling.HasField("passes_on") and by_network(holder.host, weights_pb2.Host()).ok
        if set(route.over) != {OVER} or not passes_on:
            others.setdefault(route.over, []).append(filling.relay)
            continue
        command = command_of(filling)
        identity = Version.of(command.identity)
        if any(held.identity == identity for held in holder.held):
            continue  # it answers from what it holds, and passes nothing on
        last = holder.words.last_filled
        if last is not None and last.problem.code in FINAL:
            continue  # it may be too small this time, too, and the others would wait for it
        needs = tuple(sorted(each.digest for each in command.needs))
        within = tuple(sorted(each.digest for each in command.within))
        classes.setdefault((needs, command.everything, within), []).append(filling.relay)
    orders: dict[str, manager_pb2.FanOut] = {}
    why: dict[str, str] = {}
    for names in classes.values():
        if len(names) < 2:
            continue
        leaves = {name: slow[name] for name in names if name in slow}
        regions = {name: _passes_on(holders[name]) for name in names}
        told = fan_out_orders(regions, _about(fence, names, holders), leaves)
        orders |= told
        for name in names:
            peers = sorted({peer.relay for peer in told[name].peers})
            others_too = "1 other" if len(names) == 2 else f"{len(names) - 1} others"
            words = f"it is filled along with {others_too}, and reads {', '.join(peers)} meanwhile"
            why[name] = f"{words}, but passes nothing on: it {leaves[name]}" if name in leaves else words
    for over, names in others.items():
        if len(names) > 1 and over != (OVER,):
            why |= dict.fromkeys(names, f"who reads over {' and '.join(over)} passes nothing on meanwhile")
    return Together(orders, why)


def _passes_on(holder: Holder) -> weights_pb2.Region:
    assert holder.filling is not None
    return holder.filling.passes_on


def _about(fence: Fence, names: Iterable[str], holders: Mapping[str, Holder]) -> bytes:
    """Another process under a name is another relay."""
    return str(fence).encode() + b"".join(f"\0{name}\0{holders[name].session_id}".encode() for name in sorted(names))
