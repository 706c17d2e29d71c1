"""Drives an SGLang server over its own HTTP API, and knows how to start one behind our gate.

It decides the order of SGLang's calls and which servers it can drive. It moves no weights: each order only makes the
schedulers call our loader, and the outcome arrives over the workers' channel.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ckpt_engine.agent.http import AFTERWARDS_SECONDS, HttpAdapter
from ckpt_engine.core.check_verdict import Score
from ckpt_engine.core.labels import version_label
from ckpt_engine.engine.adapter import (
    OLD_GATE,
    AdapterAvailability,
    AdapterSettings,
    Capabilities,
    EngineCallError,
    EngineInfo,
    LaunchPlan,
)
from ckpt_engine.engine.command import completed
from ckpt_engine.engine.node_plan import NodePart, leave_to_nodes
from ckpt_engine.host.gpus import has_nvidia_driver
from ckpt_engine.v1 import manager_pb2, weights_pb2
from ckpt_engine_adapters.sglang.command import (
    LOADER,
    SUPPORTED,
    WORKERS_VARIABLE,
    WRAPPER,
    check_options,
    options_of,
    server_arguments,
    worker_count,
    wrapped,
)
from ckpt_engine_adapters.sglang.gate import RELEASE_ROUTE, RESUME_ROUTE, STATE_ROUTE
from ckpt_engine_adapters.sglang.instruction import Action, Instruction, encode
from ckpt_engine_adapters.sglang.payload import serialized

_FLUSH_AGAIN_SECONDS = 0.02

_NEEDED = frozenset(
    {
        "/update_weights_from_tensor",
        "/update_weight_version",
        "/pause_generation",
        "/continue_generation",
        "/flush_cache",
        "/server_info",
    }
)
_BEGIN, _END = "/begin_weight_update", "/end_weight_update"

_MODES = (manager_pb2.PAUSE_MODE_KEEP, manager_pb2.PAUSE_MODE_ABORT, manager_pb2.PAUSE_MODE_IN_PLACE)

_SET_BY_NODES = {"--nnodes", "--node-rank", "--dist-init-addr", "--nccl-init-addr"}

_MEMORY = {"weights": ("weights",), "kv_cache": ("kv_cache", "cuda_graph")}
"""Our tags to SGLang's. Graphs are useful only for computing, which needs caches."""


CAPABILITIES = Capabilities(
    pause_modes=frozenset(_MODES),
    default_pause_mode=manager_pb2.PAUSE_MODE_KEEP,
    sleep_levels=frozenset({1, 2}),
    wake_tags=frozenset(_MEMORY),
    layouts=("TP",),
    versions=("0.5.16 and 0.5.23 on CPUs and GPUs",),
    notes=(
        "keep retracts running requests and recomputes their caches with the new weights; in_place keeps the old ones, "
        "for running requests only.",
        "sleep ends the requests that are inside, and needs --enable-memory-saver; level 1 needs "
        "--enable-weights-cpu-backup besides; on a CPU it frees nothing.",
    ),
    cannot=(
        "Quantised layers that several GPUs share (tensor parallelism) are refused.",
        "On GPUs 0.5.16 and 0.5.23 were run, with a mixture of experts, too; in 0.5.16 its heads must have 64, 128, "
        "256 or 512 elements there. All else was seen on CPUs.",
        "SGLang has no way to wait for running requests to end before an update.",
        "Pipeline parallelism is refused: the stages would take new weights one after the other, with tokens between.",
        "Data parallelism within one server is refused, except for attention: start one replica for each copy.",
        "A server with a draft model is refused: an update would leave that model behind.",
        "Further API processes, gRPC, Ray and encoder servers are refused: they answer without the gate.",
        "Stored caches (--hicache-storage-backend, LMCache, FlexKV) and disaggregated servers are refused: caches of "
        "old weights would outlive an update.",
    ),
)


class SglangAdapter(HttpAdapter):
    """Drives a running SGLang server over its HTTP routes."""

    kind = "sglang"
    capabilities = CAPABILITIES

    def __init__(self, settings: AdapterSettings) -> None:
        super().__init__(settings)
        self._routes: frozenset[str] = frozenset()
        self._entries = 1
        self._loses_weights = False

    async def probe(self, seconds: float) -> EngineInfo:
        """Asks for version, routes and layout. A server without our wrapper is reported as not supported."""
        end = time.monotonic() + seconds
        try:
            state = await self._state(seconds)
        except EngineCallError as error:
            if not error.answered:
                raise
            return EngineInfo(
                "", 0, False, f"start it with `python -m {WRAPPER}`, which puts it behind our gate: {error}"
            )
        self._routes = frozenset(state["routes"])
        if missing := sorted(_NEEDED - self._routes):
            return EngineInfo("", 0, False, f"this server lacks {', '.join(missing)}")
        info = await self._get("/server_info", end - time.monotonic())
        version = str(info["version"])
        refusal = SUPPORTED.refusal(version)
        if not refusal and LOADER not in (info.get("custom_weight_loader") or ()):
            refusal = f"start it with `python -m {WRAPPER}`: it does not know our weight loader"
        self._entries = int(info["tp_size"])
        self._loses_weights = bool(info.get("enable_memory_saver")) and not info.get("enable_weights_cpu_backup")
        # The first order loads torch, which takes seconds on a busy host. It is loaded now, on another thread: so no
        # update waits for that, and the agent's loop keeps running.
        await asyncio.to_thread(_entry, Instruction(Action.DISCARD))
        world_size = self._entries * int(info["pp_size"])
        paused, asleep, untested = state["paused"], bool(state["released"]), SUPPORTED.untested(version)
        in_place = state.get("in_place", OLD_GATE)
        refused_modes = {manager_pb2.PAUSE_MODE_IN_PLACE: str(in_place)} if in_place else {}
        return EngineInfo(
            version, world_size, not refusal, refusal, paused, asleep, untested, refused_modes=refused_modes
        )

    async def prepare(self, seconds: float) -> None:
        await self._order_whenever(Instruction(Action.PREPARE), seconds)

    async def score(self, tokens: Sequence[int], more: int, seconds: float, cached: bool = False) -> Score:
        sampling = {"max_new_tokens": more, "temperature": 0, "ignore_eos": True}
        body = {"input_ids": list(tokens), "sampling_params": sampling, "return_logprob": True}
        if not cached:
            body |= {"logprob_start_len": 0, "top_logprobs_num": 1, "extra_key": secrets.token_hex(16)}
        meta_info = (await self._client.call("POST", "/generate", seconds, body)).json()["meta_info"]
        prompt = () if cached else tuple(float(each[0]) for each in meta_info["input_token_logprobs"][1:])
        top = () if cached else tuple(int(each[0][1]) for each in meta_info["input_top_logprobs"][1:])
        output = meta_info["output_token_logprobs"]
        return Score(prompt, tuple(int(each[1]) for each in output), tuple(float(each[0]) for each in output), top)

    async def pause(self, mode: manager_pb2.PauseMode, seconds: float) -> None:
        """Stops the schedulers, and empties their caches unless `mode` keeps them.

        Caches are emptied before an update and not with it: a scheduler that refuses to does so before a byte changes.
        """
        end = time.monotonic() + seconds
        mode = mode or self.capabilities.default_pause_mode
        if mode == manager_pb2.PAUSE_MODE_ABORT:
            await self._post("/pause_generation", seconds, mode="abort")
        if mode == manager_pb2.PAUSE_MODE_IN_PLACE:
            await self._post("/pause_generation", seconds, mode="in_place")
            await self._get("/server_info", end - time.monotonic())  # answered by schedulers that have seen the pause
            return
        # Also after an abort, which stops no scheduler: a request that came in during the abort must not compute.
        await self._retract(end)

    async def _retract(self, end: float) -> None:
        while True:
            await self._post("/pause_generation", end - time.monotonic(), mode="retract")
            if "kv_cache" in (await self._state(end - time.monotonic()))["released"]:
                return
            try:
                await self._post("/flush_cache", end - time.monotonic())
                return
            except EngineCallError as error:
                if not error.answered or time.monotonic() > end - 1.0:
                    raise
            # A request waits for the compilation of its grammar; it advances while the scheduler runs.
            await self._continue(end - time.monotonic())
            await asyncio.sleep(_FLUSH_AGAIN_SECONDS)

    async def install(self, epoch: int, seconds: float) -> None:
        await self._order(Instruction(Action.INSTALL, epoch), True, seconds)

    async def resume(self, seconds: float) -> None:
        await self._continue(seconds)

    async def discard(self, seconds: float) -> None:
        await self._order_whenever(Instruction(Action.DISCARD), seconds)

    async def sleep(self, level: int, seconds: float) -> None:
        """Ends running requests and has SGLang give memory up; the engine stays paused until all memory is awake."""
        end = time.monotonic() + seconds
        if level == 1 and self._loses_weights:
            raise EngineCallError(
                "this server would lose its weights at level 1: start it with --enable-weights-cpu-backup, or let it "
                "sleep at level 2",
                answered=True,
            )
        await self.pause(manager_pb2.PAUSE_MODE_ABORT, seconds)
        tags = [theirs for ours in _MEMORY.values() for theirs in ours]
        await self._post(RELEASE_ROUTE, end - time.monotonic(), tags=tags)

    async def wake(self, tags: Sequence[str], seconds: float) -> None:
        end = time.monotonic() + seconds
        memory_tags = [theirs for ours in tags or _MEMORY for theirs in _MEMORY[ours]]
        await self._post(RESUME_ROUTE, seconds, tags=memory_tags)
        if not (await self._state(end - time.monotonic()))["released"]:
            await self.resume(end - time.monotonic())

    async def stamp(self, identity: weights_pb2.Identity, seconds: float) -> None:
        await self._post(
            "/update_weight_version", seconds, new_version=version_label(identity), abort_all_requests=False
        )

    async def _state(self, seconds: float) -> Any:
        return await self._get(STATE_ROUTE, seconds)

    async def _continue(self, seconds: float) -> None:
        # Giving unused memory back to CUDA, which SGLang would do here by default, is not worth a longer pause.
        await self._post("/continue_generation", seconds, torch_empty_cache=False)

    async def _order_whenever(self, order: Instruction, seconds: float) -> None:
        end = time.monotonic() + seconds
        paused = (await self._state(seconds))["paused"]
        await self._order(order, paused, end - time.monotonic())

    async def _order(self, order: Instruction, paused: bool, seconds: float) -> None:
        """Makes every scheduler call our loader with `order`, inside a session where SGLang has them.

        A running SGLang would first wait until all running requests have ended, and start no new ones. So it is paused
        in place meanwhile, which takes at most one step.
        """
        end = time.monotonic() + seconds
        entry = await asyncio.to_thread(_entry, order)
        async with contextlib.nullcontext() if paused else self._paused_in_place(end), self._update_session(end):
            await self._post(
                "/update_weights_from_tensor",
                end - time.monotonic(),
                serialized_named_tensors=[entry] * self._entries,
                load_format=LOADER,
                flush_cache=False,
                **({"selector": "target"} if _BEGIN in self._routes else {}),
            )

    @contextlib.asynccontextmanager
    async def _paused_in_place(self, end: float) -> AsyncIterator[None]:
        try:
            await self._post("/pause_generation", end - time.monotonic(), mode="in_place")
            yield
        finally:
            await self._continue(max(end - time.monotonic(), AFTERWARDS_SECONDS))

    @contextlib.asynccontextmanager
    async def _update_session(self, end: float) -> AsyncIterator[None]:
        """Opens an update session, which newer versions require. It is for the draft model, which does not exist: at
        its end SGLang would process the served model's weights again, which our half has done already."""
        if _BEGIN not in self._routes:
            yield
            return
        async with self._session(partial(self._post, _BEGIN, selector="draft"), partial(self._post, _END), end):
            yield


def _entry(order: Instruction) -> str:
    """Encodes `order` for one tensor parallel rank. Loads torch."""
    return serialized(encode(order))


def create_adapter(settings: AdapterSettings) -> SglangAdapter:
    return SglangAdapter(settings)


def launch_plan(arguments: Sequence[str], port: int, model: str) -> LaunchPlan:
    """Plans the start of SGLang's server. arguments: `python -m sglang.launch_server` or `sglang serve` with its
    options, or only the options (then with this Python).

    The user's options are kept; host, port, model, loader and gate are added if missing.
    """
    command = wrapped(arguments)
    options = options_of(command)
    check_options(options, {})
    leave_to_nodes(options.keys() & _SET_BY_NODES)
    additions, url = completed(options, "--model-path", model, port)
    workers = worker_count(options)
    return LaunchPlan(
        argv=tuple(server_arguments([*command, *additions])),
        url=url,
        workers=workers,
        env={WORKERS_VARIABLE: str(workers)},
        # On a CPU there is no memory to give up.
        sleep_argument="--enable-memory-saver" if has_nvidia_driver() else "",
    )


def node_plan(arguments: Sequence[str], port: int, model: str, part: NodePart) -> LaunchPlan:
    """Plans the start of one node's part. All nodes run the same command; SGLang serves HTTP only on node 0.

    Raises ValueError for options for where parts run, or if the nodes cannot share the workers evenly.
    """
    plan = launch_plan(arguments, port, model)
    part.check(plan.workers)
    meeting = f"{part.address}:{part.port}"
    where = ("--nnodes", str(part.nodes), "--node-rank", str(part.rank), "--dist-init-addr", meeting)
    return replace(plan, argv=(*plan.argv, *where))


def refused_command(command: Sequence[str]) -> str:
    return SUPPORTED.refused_command(command)


def availability() -> AdapterAvailability:
    return SUPPORTED.installed()
