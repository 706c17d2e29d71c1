"""Faults between hosts: who suffers what at which stage, and what may come of it. See `cells.py` for those of one host.

The process that is held at a stage is always one of the far host: its relay, or its worker.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.faults.cells import NEW, OLD, Cell, Stage

UPSTREAM, LINK, CABLE = "upstream", "link", "cable"

STAGES = {
    stage.name: stage
    for stage in (
        Stage("idle", "", None),
        Stage("count", "relay.does.CountSlot.begin", "relay"),
        Stage("fill", "relay.does.FillSlot.begin", "relay"),
        Stage("filled", "relay.sends.RelayFilled", "relay"),
        Stage("transfer", "worker.install.transfer", "worker"),
    )
}
"""count: the far relay knows whom it is to read, and has not dialled. fill: it has. filled: it has read all."""

FAULTS = {
    "kill": "SIGKILL; started again after the update",
    "restart": "SIGKILL, and another relay of that name at that address and port before anything goes on, which holds "
    "nothing: what the far relay was told to read is gone",
    "stop": "SIGSTOP for 3 s",
    "stop60": "SIGSTOP for 60 s, past everybody's patience",
    "reset": "every connection is reset; reachable again at once",
    "cut": "nothing of what is sent arrives, for 2 s",
    "away": "the same until the update is over",
    "slow": "every 64 KiB take half a second longer",
}
VICTIMS = {
    UPSTREAM: "the relay of the trainer's host, which the far relay reads",
    LINK: "the way from the far relay to it, and nothing else",
    CABLE: "the far host's only cable: its agent and relay do not reach the manager either",
}
CELLS = {
    UPSTREAM: {"kill": tuple(STAGES), "restart": ("count", "fill"), "stop": ("idle", "fill"), "stop60": ("fill",)},
    LINK: {"reset": ("idle", "fill"), "cut": ("fill",), "away": ("idle", "fill"), "slow": ("fill",)},
    CABLE: {"cut": ("fill", "transfer"), "away": ("idle", "fill", "filled", "transfer")},
}


@dataclass(frozen=True)
class FarCell(Cell):
    """Of a world with two hosts. The victim's replica is the one on the far host."""

    def allowed(self) -> tuple[frozenset[str], frozenset[str]]:
        """See Cell. Nobody is ever closed: weights are changed only by what lies on the replica's own host."""
        anything = frozenset({NEW, OLD})
        harmless = self.fault in ("reset", "cut", "slow", "stop") and self.victim != CABLE
        mapped = self.stage == "transfer"
        there = self.victim in (LINK, CABLE)
        return frozenset({NEW}) if harmless or mapped else anything, frozenset({NEW}) if there else anything


def far_cells() -> list[FarCell]:
    return [
        FarCell(victim, fault, stage)
        for victim, faults in CELLS.items()
        for fault, stages in faults.items()
        for stage in stages
    ]
