"""What an adapter offers if its engine can span nodes: the command of one node's part."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from ckpt_engine.engine.adapter import LaunchPlan, load_adapter


@dataclass(frozen=True)
class NodePart:
    """One part of an engine that spans nodes, for an adapter's `node_plan`.

    rank: of the node, 0 leads. address, port: where the engine's own parts meet; port is free on node 0.
    """

    nodes: int
    rank: int
    address: str
    port: int

    def check(self, workers: int) -> None:
        """Checks that an engine of so many workers can be shared evenly. Raises ValueError."""
        if workers % self.nodes:
            raise ValueError(f"{workers} workers cannot be shared by {self.nodes} nodes")


def leave_to_nodes(options: Collection[str]) -> None:
    """Refuses options of an engine that say where its parts run. Raises ValueError if any are given."""
    if options:
        names = ", ".join(sorted(options))
        raise ValueError(f"leave {names} out of the engine's arguments: `ckpt-engine agent --nodes` sets it")


class NodePlan(Protocol):
    """What an adapter offers as `node_plan` if its engine can span nodes."""

    def __call__(self, arguments: tuple[str, ...], port: int, model: str, part: NodePart) -> LaunchPlan:
        """The launch plan of one node's part. port: of the HTTP server, which only node 0 has; else 0."""
        ...


def node_plan_of(kind: str) -> NodePlan:
    """What makes one node's command for engines of this kind. Raises ValueError if they cannot be driven on several
    nodes."""
    found: NodePlan | None = getattr(load_adapter(kind), "node_plan", None)
    if found is None:
        raise ValueError(f"--nodes: an engine of kind {kind} on several nodes cannot be driven yet; start it on one")
    return found
