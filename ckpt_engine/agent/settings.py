"""What an agent is told about its replica."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Literal

from ckpt_engine.agent.engine import checked_advertise
from ckpt_engine.agent.launched import LaunchSettings
from ckpt_engine.agent.nodes import NodeSettings
from ckpt_engine.connection import checked_address
from ckpt_engine.core.deadlines import Deadlines
from ckpt_engine.core.names import check_pool
from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.transport.on_host import worker_transports
from ckpt_engine.v1 import manager_pb2
from ckpt_engine.words.state import HoldLimits


@dataclass(frozen=True)
class AgentSettings:
    """One replica.

    manager: host:port. name: empty: host-kind-port. pool: the replicas that it is updated with. Exactly one of launch
    and url says which engine; kind is its kind. advertise: name or address at which other hosts reach this one.
    transports: over which weights may be read; empty: all that work here. startup_seconds: for an attached engine to
    answer. nodes: of an engine that spans several, which this agent leads. close_when_alone: the gate closes once this
    agent has been gone for a lease. check_engine: which versions of engines are checked before their first update:
    "auto" those that no test has run, "always" all, "never" none. metrics: host:port where Prometheus scrapes this
    agent; empty: nowhere.
    """

    manager: str
    kind: str
    launch: LaunchSettings | None = None
    url: str = ""
    name: str = ""
    pool: str = ""
    mode: manager_pb2.Mode = manager_pb2.MODE_STANDALONE
    advertise: str = ""
    transports: tuple[str, ...] = ()
    startup_seconds: float = 600.0
    deadlines: Deadlines = field(default_factory=lambda: Deadlines.from_environment(os.environ))
    nodes: NodeSettings = field(default_factory=NodeSettings)
    close_when_alone: bool = False
    hold: HoldLimits = field(default_factory=HoldLimits)
    metrics: str = ""
    check_engine: Literal["auto", "always", "never"] = "auto"

    def __post_init__(self) -> None:
        """Raises ValueError."""
        if (self.launch is None) == (not self.url):
            raise ValueError("an agent either launches its engine or is told the url of one that runs")
        try:
            checked_address(self.manager)
            check_pool(self.pool)
        except CkptEngineError as error:
            raise ValueError(error.problem.message) from error
        if self.nodes.nodes > 1 and (self.launch is None or self.nodes.rank != 0):
            raise ValueError("an engine on several --nodes is launched by its agents (no --url), and node 0 leads")
        worker_transports(self.transports)
        checked_advertise(self.advertise)
