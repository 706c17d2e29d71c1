"""Runs an agent with one more beside it for each adapter of its engine.

It decides what becomes of the others when one of them ends. It decides nothing about versions: to the manager a shelf
is a replica in the pool that has the adapter's name, and all that holds for replicas holds for it.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

from ckpt_engine.agent.engine import EngineFailedError
from ckpt_engine.agent.session import ReplicaAgent
from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.v1 import manager_pb2


async def run_with_shelves(agent: ReplicaAgent, stop: asyncio.Event) -> None:
    """Runs an agent, and one beside it for each adapter of its engine, until `stop` is set or the agent ends. Raises
    what `ReplicaAgent.run` does. A shelf that ends, as after an eviction, is told and leaves the others alone."""
    launch = agent.settings.launch
    shelves = [asyncio.ensure_future(_run_shelf(agent, name, stop)) for name in (launch.adapters if launch else ())]
    try:
        await agent.run(stop)
    finally:
        stop.set()
        await asyncio.gather(*shelves, return_exceptions=True)


async def _run_shelf(agent: ReplicaAgent, adapter: str, stop: asyncio.Event) -> None:
    settings = replace(
        agent.settings,
        name=f"{agent.settings.name}.{adapter}" if agent.settings.name else "",
        pool=adapter,
        mode=manager_pb2.MODE_STANDALONE,
        metrics="",
        check_engine="never",
        close_when_alone=False,
    )
    try:
        await agent.shelf(settings, adapter).run(stop)
    except Exception as error:
        known = isinstance(error, CkptEngineError | EngineFailedError)
        why = str(error) if known else f"{type(error).__name__}: {error}"
        agent.say(f"the adapter {adapter} gets no versions any more: {why}")
