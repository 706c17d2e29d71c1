"""An agent's settings."""

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
from ckpt_engine.gate.page import HoldLimits
from ckpt_engine.transport.on_host import worker_transports
from ckpt_engine.v1 import manager_pb2


@dataclass(frozen=True)
class AgentSettings:
    """One replica. Exactly one of `launch` and `url` says which engine."""

    manager: str  # host:port
    kind: str  # of engine
    launch: LaunchSettings | None = None
    url: str = ""  # of an engine that runs already
    name: str = ""  # empty: host-kind-port
    pool: str = ""  # replicas of one pool are updated together
    mode: manager_pb2.Mode = manager_pb2.MODE_STANDALONE
    advertise: str = ""  # name or address at which other hosts reach this one
    transports: tuple[str, ...] = ()  # over which weights may be read; empty: all that work here
    startup_seconds: float = 600.0  # for an attached engine to answer
    deadlines: Deadlines = field(default_factory=lambda: Deadlines.from_environment(os.environ))
    nodes: NodeSettings = field(default_factory=NodeSettings)  # of an engine on several nodes, which this agent leads
    close_when_alone: bool = False  # the gate closes once this agent has been dead or stuck for a lease
    hold: HoldLimits = field(default_factory=HoldLimits)
    metrics: str = ""  # host:port where Prometheus scrapes this agent; empty: nowhere
    # Engine versions to check before their first update: those that no test has run, all, or none.
    check_engine: Literal["auto", "always", "never"] = "auto"

    def __post_init__(self) -> None:
        """Checks the settings. Raises ValueError."""
        if (self.launch is None) == (not self.url):
            raise ValueError("an agent either launches its engine or has the url of one that runs")
        try:
            checked_address(self.manager)
            check_pool(self.pool)
        except CkptEngineError as error:
            raise ValueError(error.problem.message) from error
        if self.nodes.nodes > 1 and (self.launch is None or self.nodes.rank != 0):
            raise ValueError("an engine on several --nodes is launched by its agents (no --url), and node 0 leads")
        worker_transports(self.transports)
        checked_advertise(self.advertise)
