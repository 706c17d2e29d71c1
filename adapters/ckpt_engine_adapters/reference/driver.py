"""Drives a reference engine for an agent: its HTTP routes, and how to start one.

Everything here runs in the agent, on its event loop. The engine is never imported; docs/writing-an-adapter.md walks
through this file.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import math
import sys
from collections.abc import Sequence
from dataclasses import replace

from ckpt_engine.agent.http import ENGINE_SHARE, HttpAdapter
from ckpt_engine.core.check_verdict import Score
from ckpt_engine.engine.adapter import (
    AdapterAvailability,
    AdapterSettings,
    Capabilities,
    EngineAdapter,
    EngineInfo,
    LaunchPlan,
)
from ckpt_engine.engine.command import command_options, completed, value
from ckpt_engine.engine.node_plan import NodePart
from ckpt_engine.engine.programs import program_at
from ckpt_engine.v1 import manager_pb2, weights_pb2
from ckpt_engine_adapters.reference.versions import engine_version

KIND = "reference"
SERVER_MODULE = "ckpt_engine_adapters.reference.server"

_PAUSE_MODES = {
    manager_pb2.PAUSE_MODE_UNSPECIFIED: "keep",
    manager_pb2.PAUSE_MODE_KEEP: "keep",
    manager_pb2.PAUSE_MODE_ABORT: "abort",
    manager_pb2.PAUSE_MODE_WAIT: "wait",
    manager_pb2.PAUSE_MODE_IN_PLACE: "in_place",
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
    sleep_levels=frozenset({1, 2}),
    wake_tags=frozenset({"weights", "kv_cache"}),
    layouts=("TP",),
    versions=("that of ckpt-engine itself",),
    notes=(
        "Runs on the CPU, or with `--device cuda` on one GPU.",
        "Its responses name the version in the workers' state words, not a label.",
        "Prompts are token ids. Beside its own form it takes SGLang's /generate and /v1/completions: fields without a "
        "meaning here are not used, those that would change the tokens or ask for more in the answer are refused.",
    ),
    cannot=("It is there for tests and for learning: it is slow, and on GPUs it has one worker.",),
)


class ReferenceAdapter(HttpAdapter):
    """The `EngineAdapter` of the reference engine. One call at a time, except `healthy`."""

    kind = KIND
    capabilities = CAPABILITIES

    async def probe(self, seconds: float) -> EngineInfo:
        info = await self._get("/info", seconds)
        version, workers = str(info.get("engine_version", "")), int(info.get("tensor_parallel", 0))
        if info.get("engine") != KIND:
            return EngineInfo(version, workers, False, f"{self._client.url} is not a reference engine")
        if version != engine_version():
            reason = f"this agent is of ckpt-engine {engine_version()}; start both from one installation"
            return EngineInfo(version, workers, False, reason)
        paused, asleep = info["paused"] is not None, bool(info["asleep"])
        return EngineInfo(version, workers, True, paused=paused, asleep=asleep)

    async def prepare(self, seconds: float) -> None:
        await self._post_within("/ckpt_engine/prepare", seconds)

    async def score(self, tokens: Sequence[int], more: int, seconds: float, cached: bool = False) -> Score:
        """Without a cache in any case: this engine keeps none from one request to the next. It tells a value that is
        not finite as null."""
        body = {"tokens": list(tokens), "more": more, "seconds": seconds * ENGINE_SHARE}
        score = (await self._client.call("POST", "/ckpt_engine/score", seconds, body)).json()
        prompt, chosen = (
            tuple(math.nan if value is None else float(value) for value in score[name]) for name in ("prompt", "chosen")
        )
        return Score(prompt, tuple(map(int, score["tokens"])), chosen, tuple(map(int, score["top"])))

    async def pause(self, mode: manager_pb2.PauseMode, seconds: float) -> None:
        await self._post_within("/pause", seconds, mode=_PAUSE_MODES[mode])

    async def install(self, epoch: int, seconds: float) -> None:
        await self._post_within("/ckpt_engine/install", seconds, epoch=epoch)

    async def resume(self, seconds: float) -> None:
        await self._post("/resume", seconds)

    async def discard(self, seconds: float) -> None:
        await self._post_within("/ckpt_engine/discard", seconds)

    async def sleep(self, level: int, seconds: float) -> None:
        await self._post_within("/sleep", seconds, level=level)

    async def wake(self, tags: Sequence[str], seconds: float) -> None:
        await self._post_within("/wake", seconds, tags=list(tags))

    async def stamp(self, identity: weights_pb2.Identity, seconds: float) -> None:
        label = {"version": identity.version, "lineage": identity.lineage, "root": identity.root.hex()}
        await self._post_within("/stamp", seconds, **label)


def create_adapter(settings: AdapterSettings) -> EngineAdapter:
    """Makes a driver for the reference engine at `settings.url`. No I/O."""
    return ReferenceAdapter(settings)


def launch_plan(arguments: Sequence[str], port: int, model: str) -> LaunchPlan:
    """Plans the start of the server `python -m ckpt_engine_adapters.reference.server`. arguments: that command with its
    options, or only the options (then with this Python).

    Raises:
        ValueError: the arguments start something else, name what the agent decides (port), the model twice or not at
            all, or a tensor parallel size that is not a number.
    """
    command = list(arguments)
    if not command or command[0].startswith("-"):
        command = [sys.executable, "-m", SERVER_MODULE, *command]
    at = program_at(command)
    if tuple(command[at + 1 : at + 3]) != ("-m", SERVER_MODULE):
        program = " ".join(command[:3])
        raise ValueError(f"{program} ... must be `python -m {SERVER_MODULE}` with its options, or options")
    options = command_options(command[at + 3 :])
    for option in ("--port", *(["--model"] if model else [])):
        if option in options:
            raise ValueError(f"leave {option} out of the engine's arguments: `ckpt-engine agent` sets it")
    for option in ("--nnodes", "--node-rank", "--master-addr", "--master-port"):
        if option in options:
            raise ValueError(f"leave {option} out of the engine's arguments: `ckpt-engine agent --nodes` sets it")
    if not model and not value(options, "--model"):
        raise ValueError("no model: give `ckpt-engine agent --model DIR`")
    workers = value(options, "--tensor-parallel", "1")
    if not workers.isdecimal() or int(workers) < 1:
        raise ValueError(f"--tensor-parallel {workers}: must be a number, at least 1")
    additions, url = completed(options, "--model", model, port)
    return LaunchPlan(argv=(*command[: at + 3], *additions, *command[at + 3 :]), url=url, workers=int(workers))


def node_plan(arguments: Sequence[str], port: int, model: str, part: NodePart) -> LaunchPlan:
    """Plans the start of one node's share of the workers; only node 0 serves HTTP.

    Raises ValueError as `launch_plan` does, and if the nodes cannot share the workers evenly.
    """
    plan = launch_plan(arguments, port, model)
    part.check(plan.workers)
    where = ("--nnodes", part.nodes, "--node-rank", part.rank, "--master-addr", part.address)
    options = tuple(map(str, (*where, "--master-port", part.port)))
    return replace(plan, argv=(*plan.argv, *options))


def refused_command(command: Sequence[str]) -> str:
    """Refuses nothing: the engine runs with the agent's own Python, and `probe` refuses other versions."""
    return ""


def availability() -> AdapterAvailability:
    """Whether transformers, which the workers need, is installed here."""
    if importlib.util.find_spec("transformers") is None:
        return AdapterAvailability(False, "", "transformers is not installed: pip install 'ckpt-engine[demo]'")
    return AdapterAvailability(True, f"transformers {importlib.metadata.version('transformers')}", "")
