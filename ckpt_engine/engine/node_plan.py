"""The interface of an adapter for an engine that can span nodes: the command of one node's part."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from ckpt_engine.engine.adapter import LaunchPlan, load_adapter


@dataclass(frozen=True)
class NodePart:
    """One node's part of an engine, for an adapter's `node_plan`."""

    nodes: int
    rank: int  # of the node; 0 leads
    address: str  # where the engine's own parts meet
    port: int  # likewise; free on node 0

    def check(self, workers: int) -> None:
        """Checks that the nodes can share an engine's workers evenly. Raises ValueError."""
        if workers % self.nodes:
            raise ValueError(f"{workers} workers cannot be shared by {self.nodes} nodes")


def leave_to_nodes(options: Collection[str]) -> None:
    """Refuses an engine's options for where its parts run. Raises ValueError if there are any."""
    if options:
        names = ", ".join(sorted(options))
        raise ValueError(f"leave {names} out of the engine's arguments: `ckpt-engine agent --nodes` sets it")


class NodePlan(Protocol):
    """The function `node_plan` of an adapter, if its engine can span nodes."""

    def __call__(self, arguments: tuple[str, ...], port: int, model: str, part: NodePart) -> LaunchPlan:
        """The launch plan of one node's part. port: of the HTTP server, which only node 0 has; else 0."""
        ...


def node_plan_of(kind: str) -> NodePlan:
    """The adapter's `node_plan` for engines of this kind. Raises ValueError if they cannot span nodes."""
    plan_of: NodePlan | None = getattr(load_adapter(kind), "node_plan", None)
    if plan_of is None:
        raise ValueError(f"--nodes: an engine of kind {kind} on several nodes cannot be driven yet; start it on one")
    return plan_of
