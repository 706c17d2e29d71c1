"""Drives the shelf of one adapter in a running vLLM server, as an agent drives an engine.

It decides nothing about versions, and moves no weights: each call only makes every worker ask the shelf's agent for its
order (transfer_engine.py). Nothing is paused or resumed: a version comes beside those that are in use.
"""

from __future__ import annotations

from collections.abc import Sequence

from ckpt_engine.agent.http import HttpAdapter
from ckpt_engine.core.check_verdict import Score
from ckpt_engine.engine.adapter import AdapterSettings, Capabilities, EngineCallError, EngineInfo
from ckpt_engine.v1 import manager_pb2, weights_pb2
from ckpt_engine_adapters.vllm.gate import ADAPTER_ROUTE

CAPABILITIES = Capabilities(
    pause_modes=frozenset(
        {
            manager_pb2.PAUSE_MODE_KEEP,
            manager_pb2.PAUSE_MODE_ABORT,
            manager_pb2.PAUSE_MODE_WAIT,
            manager_pb2.PAUSE_MODE_IN_PLACE,
        }
    ),
    default_pause_mode=manager_pb2.PAUSE_MODE_KEEP,
)


class VllmShelfAdapter(HttpAdapter):
    """The EngineAdapter of one shelf. In every pause mode requests go on with the version that they began with."""

    kind = "vllm"
    capabilities = CAPABILITIES

    def __init__(self, settings: AdapterSettings, adapter: str) -> None:
        super().__init__(settings)
        self._adapter = adapter

    async def probe(self, seconds: float) -> EngineInfo:
        version = str((await self._get("/version", seconds))["version"])
        world_size = int((await self._get("/get_world_size", seconds))["world_size"])
        return EngineInfo(version, world_size, True, paused=False, asleep=False)

    def keeps_caches(self, mode: manager_pb2.PauseMode) -> bool:
        return False

    async def prepare(self, seconds: float) -> None:
        await self._client.call("POST", ADAPTER_ROUTE, seconds, params={"adapter": self._adapter})

    async def install(self, epoch: int, seconds: float) -> None:
        await self._client.call("POST", ADAPTER_ROUTE, seconds, params={"adapter": self._adapter, "epoch": epoch})

    async def score(self, tokens: Sequence[int], more: int, seconds: float, cached: bool = False) -> Score:
        raise EngineCallError("an adapter is neither checked nor probed by itself", answered=True)

    async def pause(self, mode: manager_pb2.PauseMode, seconds: float) -> None:
        """Does nothing."""

    async def resume(self, seconds: float) -> None:
        """Does nothing."""

    async def discard(self, seconds: float) -> None:
        raise EngineCallError("a shelf does not sleep apart from its engine", answered=True)

    async def sleep(self, level: int, seconds: float) -> None:
        raise EngineCallError("a shelf does not sleep apart from its engine", answered=True)

    async def wake(self, tags: Sequence[str], seconds: float) -> None:
        raise EngineCallError("a shelf does not sleep apart from its engine", answered=True)

    async def stamp(self, identity: weights_pb2.Identity, seconds: float) -> None:
        """Does nothing: vLLM names the version by its adapter's name."""
