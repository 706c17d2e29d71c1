"""Drives the shelf of one adapter in a running vLLM server, as an agent drives an engine.

It decides which servers can have shelves. It moves no weights: each call only makes every worker ask the shelf's agent
for its order (transfer_engine.py). Nothing is paused or resumed: a version comes beside those that are in use.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ckpt_engine.agent.http import HttpAdapter
from ckpt_engine.core.check_verdict import Score
from ckpt_engine.engine.adapter import AdapterSettings, Capabilities, EngineCallError, EngineInfo
from ckpt_engine.engine.command import Options, check_refused, size
from ckpt_engine.v1 import manager_pb2, weights_pb2
from ckpt_engine_adapters.vllm.command import AXES
from ckpt_engine_adapters.vllm.gate import ADAPTER_ROUTE

_OWN = "adapters of its own would take slots and names from those that are published (--adapter)"
_REFUSED = {
    "--lora-modules": ((), _OWN),
    "--default-mm-loras": ((), _OWN),
    "--fully-sharded-loras": ((), "its slots are cut in a way that is not verified (--adapter)"),
    "--enable-moe-shared-loras": ((), "adapters of experts are not supported (--adapter)"),
    "--enable-tower-connector-lora": ((), "adapters of towers are not supported (--adapter)"),
}
_REFUSED_ENVIRONMENT = {
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": _OWN,
    "VLLM_ENABLE_RESPONSES_API_STORE": (
        "responses in the background outlive the requests that keep their adapter's version in use (--adapter)"
    ),
}

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

    async def score(self, tokens: Sequence[int], more: int, seconds: float) -> Score:
        raise EngineCallError("an adapter is not checked by itself", answered=True)

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


def check_adapters(options: Options, environment: Mapping[str, str], versions: Mapping[str, int]) -> None:
    """Raises ValueError unless a vLLM command can serve these adapters. versions: how many it keeps of each."""
    if "--enable-lora" not in options:
        raise ValueError("--adapter: vLLM has slots for adapters only with --enable-lora")
    check_refused(options, _REFUSED, environment, _REFUSED_ENVIRONMENT)
    for axis in AXES:
        if size(options, axis) > 1:
            raise ValueError(
                f"{axis} {size(options, axis)} cannot be used with --adapter: workers would have to agree in which "
                "place each version is kept, and do not; leave it out, and start a replica with --adapter for each GPU"
            )
    slots = size(options, "--max-loras")
    name, needed = max(versions.items(), key=lambda each: each[1])
    if slots < needed:
        raise ValueError(
            f"--max-loras {slots}: {needed} versions of the adapter {name} may be in use at a time; start vLLM with "
            f"--max-loras {needed} or more"
        )
