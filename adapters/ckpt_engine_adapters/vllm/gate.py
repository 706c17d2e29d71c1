"""The gate with vLLM's routes, for `--middleware ckpt_engine_adapters.vllm.gate.VllmGate`.

It also has each request salted on its way to vLLM's core (core_requests.py), and adds routes. One reports what vLLM
does not: whether this server can sleep, and be updated in place. The other two shorten the time without tokens. One
pauses at once: vLLM's `/pause` sleeps for 20 ms after its scheduler has stopped, so that the last answers are sent
first, which an update does not need. The other makes an update's three calls to the workers, for which vLLM has three
routes; once all state words say that the weights are whole, it resumes vLLM under its new label, for which vLLM has two
more.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping
from typing import Any, ClassVar
from urllib.parse import parse_qs

from ckpt_engine.core.adapters import NOT_HERE, adapter_versions
from ckpt_engine.core.labels import version_label
from ckpt_engine.gate.asgi import Application, Message, Receive, Scope, Send, answer_json, refuse
from ckpt_engine.gate.gate import Gate
from ckpt_engine.gate.holding import DecisionKind, GateDecision
from ckpt_engine.gate.page import admission
from ckpt_engine.gate.salt import CacheSalt
from ckpt_engine.gate.shelf import ENVIRONMENT as ADAPTERS_VARIABLE
from ckpt_engine.v1 import weights_pb2
from ckpt_engine_adapters.vllm.adapter_requests import (
    AdapterDoor,
    AdapterModels,
    AdapterNotHereError,
    end_running,
    guard_sends,
)
from ckpt_engine_adapters.vllm.connectors import connectors, in_place_refusal
from ckpt_engine_adapters.vllm.core_requests import ELSEWHERE, salt_requests

log = logging.getLogger(__name__)

PAUSE_ROUTE = "/ckpt_engine/pause"
"""Takes `mode` and `clear_cache` as vLLM's `/pause` does. 404: this vLLM keeps its scheduler elsewhere."""

INSTALL_ROUTE = "/ckpt_engine/install"
"""Takes `epoch`. Does in the workers what `/start_weight_update`, `/update_weights` and `/finish_weight_update` do, the
last one in every case. 404: this vLLM calls its workers elsewhere.

Takes `then`, too: `resume`, or `label` for naming the version before that. Done only if every worker is clean with one
version by this epoch and the engine is awake; then `resumed_as` in the answer is that version's label. If it is null
the agent has to see for itself."""

_METHODS = {"resume": ("resume_generation",), "label": ("update_weight_version", "resume_generation")}
"""What vLLM's engine client needs for each `then`."""

ADAPTER_ROUTE = "/ckpt_engine/adapter"
"""Takes `adapter`, and `epoch` if a version of it is to be installed and not only prepared for. Calls the adapter's
shelf in each worker; nothing is paused."""

ABILITIES_ROUTE = "/ckpt_engine/abilities"
"""Answers `{"sleeps": …, "in_place": …, "connectors": [name, …]}`.

sleeps: false for a server on a GPU without sleep mode, whose `/sleep` answers 200 and frees nothing; null: this vLLM
keeps its settings elsewhere. in_place: why it cannot be updated in place; empty: it can. connectors: what it keeps
caches in beside its own."""


class VllmGate(Gate):
    """See Gate. A test compares this with the routes of a real server, so that new routes are classified by people."""

    open_routes: ClassVar[frozenset[str]] = frozenset(
        {
            "/docs",
            "/docs/oauth2-redirect",
            "/fault_tolerance/status",
            "/health",
            "/is_scaling_elastic_ep",
            "/kv_event_sources",
            "/load",
            "/metrics",
            "/metrics/",
            "/openapi.json",
            "/ping",
            "/redoc",
            "/static/",  # what /docs shows where there is no Internet
            # They need the tokenizer alone. Kept, a chat's text could not follow its tokens into a pause that waits for
            # running requests to end.
            "/v1/chat/completions/derender",
            "/v1/chat/completions/render",
            "/v1/completions/derender",
            "/v1/completions/render",
            "/v1/models",
            "/version",
        }
    )
    generation_routes: ClassVar[frozenset[str]] = frozenset(
        {
            "/classify",
            "/cohere/v2/chat",
            "/cohere/v2/chat/render",
            "/detokenize",
            "/generative_scoring",
            "/inference/v1/generate",
            "/invocations",
            "/pooling",
            "/rerank",
            "/score",
            "/tokenize",
            "/tokenizer_info",
            "/v1/audio/transcriptions",
            "/v1/audio/translations",
            "/v1/chat/completions",
            "/v1/chat/completions/batch",
            "/v1/completions",
            "/v1/embeddings",
            "/v1/messages",
            "/v1/messages/count_tokens",
            "/v1/messages/render",
            "/v1/realtime",
            "/v1/rerank",
            "/v1/responses",
            "/v1/responses/render",
            "/v1/responses/{response_id}",
            "/v1/responses/{response_id}/cancel",
            "/v1/score",
            "/v1/systemone",
            "/v2/embed",
            "/v2/rerank",
        }
    )
    control_routes: ClassVar[frozenset[str]] = frozenset(
        {
            "/abort_requests",
            "/adapters",
            "/adapters/{adapter_name}",
            "/collective_rpc",
            "/fault_tolerance/apply",
            "/finish_weight_update",
            "/get_world_size",
            "/inference/v1/abort_requests",
            "/init_weight_transfer_engine",
            "/is_paused",
            "/is_sleeping",
            "/pause",
            "/release_kv_cache_memory",
            "/reset_encoder_cache",
            "/reset_mm_cache",
            "/reset_prefix_cache",
            "/resume",
            "/scale_elastic_ep",
            "/server_info",
            "/shutdown_weight_transfer_engine",
            "/sleep",
            "/start_draft_weight_update",
            "/start_profile",
            "/start_weight_update",
            "/stop_profile",
            "/update_weight_version",
            "/update_weights",
            "/v1/load_lora_adapter",
            "/v1/unload_lora_adapter",
            "/wake_up",
            "/weight_checker",
            "/weight_info",
        }
    )

    def __init__(self, app: Application) -> None:
        super().__init__(app)
        self._salt = CacheSalt(self._page)
        self._no_salt = ELSEWHERE  # why requests get no salt; empty: they do
        versions = adapter_versions(os.environ.get(ADAPTERS_VARIABLE, ""))
        self._adapters = AdapterDoor(self._directory.path, versions) if versions else None
        self._adopted = not versions  # whether vLLM looks adapters up here

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Has requests salted, and adapters found, before the first one is let in: by then vLLM has made its engine."""
        if self._no_salt:
            self._no_salt = salt_requests(_engine(scope), self._salt)
        if not self._adopted:
            self._adopt(scope)
        await super().__call__(scope, receive, send)

    def base(self) -> weights_pb2.Identity | None:
        """The version that the workers hold; None: none, or the engine's own."""
        return self._state.decision().verdict.identity

    def _admitted_base(self) -> weights_pb2.Identity | None:
        """The same, if requests are let in now; else None."""
        decision = self._state.decision()
        return decision.verdict.identity if decision.kind is DecisionKind.ADMIT else None

    def _adopt(self, scope: Scope) -> None:
        """Takes the place of vLLM's own adapters."""
        engine, models = _engine(scope), getattr(scope["app"].state, "openai_serving_models", None)
        if self._adapters is None or engine is None or models is None:
            return
        guard_sends(engine, self._adapters, self._admitted_base)
        models.lora_requests = AdapterModels(self._adapters, self)
        self._adopted = True

    async def _enter(
        self,
        decision: GateDecision,
        headers: Mapping[str, str],
        body: Message | None,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        """Pins a request for an adapter to one version of it. See Gate."""
        if self._adapters is None or body is None:
            await super()._enter(decision, headers, body, scope, receive, send)
            return
        try:
            with self._adapters.pinned(body.get("body", b""), decision.verdict.identity) as pin:
                send = send if pin is None else pin.naming(send)
                await super()._enter(decision, headers, body, scope, receive, send)
        except AdapterNotHereError as error:
            await refuse(scope["type"], send, 503, str(error), NOT_HERE, 1)

    async def control(self, route: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers our own routes; vLLM answers the others."""
        engine = _engine(scope)
        query = parse_qs(scope["query_string"].decode())
        if route == PAUSE_ROUTE:
            await self._pause(engine, query, send)
        elif route == ADAPTER_ROUTE:
            if sleeping := self._page.marked().sleeping:
                await answer_json(send, 409, {"detail": f"the engine is {sleeping.describe()}"})
                return
            order = {"adapter": query["adapter"][0], "epoch": int(query.get("epoch", ["0"])[0])}
            await engine.collective_rpc("init_weight_transfer_engine", kwargs={"init_info": order})
            await answer_json(send, 200, {"status": "called"})
        elif route == INSTALL_ROUTE:
            await self._install(engine, query, send)
        elif route == ABILITIES_ROUTE:
            names = connectors(getattr(engine, "vllm_config", None))
            in_place = self._no_salt or in_place_refusal(names)
            await answer_json(send, 200, {"sleeps": _sleeps(engine), "in_place": in_place, "connectors": names})
        else:
            await super().control(route, scope, receive, send)

    async def _pause(self, engine: Any, query: Mapping[str, list[str]], send: Send) -> None:
        """Pauses the scheduler. Requests with adapters end first, unless they may finish: they would go on with the
        next base. Further API processes have requests that this one cannot end, so that then all requests end."""
        mode = query["mode"][0]
        if self._adapters is not None and mode == "keep":
            settings = getattr(getattr(engine, "vllm_config", None), "parallel_config", None)
            if getattr(settings, "_api_process_count", 1) > 1:
                mode = "abort"
            else:
                await end_running(engine, self._adapters)
        await _pause(engine, mode, query, send)

    async def _install(self, engine: Any, query: Mapping[str, list[str]], send: Send) -> None:
        """Calls all workers (`Worker` in vllm/v1/worker/gpu_worker.py) within one update session of vLLM's."""
        call = getattr(engine, "collective_rpc", None)
        if call is None:
            await answer_json(send, 404, {"detail": "this vLLM calls its workers elsewhere: use /update_weights"})
            return
        # All three are sent at once, since engines carry calls out in order. A session that a dead agent left open
        # refuses to start again, and works nevertheless. A failed update has closed the session, so that there is
        # nothing to finish.
        epoch = int(query["epoch"][0])
        update = {"update_info": {"epoch": epoch}}
        calls = (call("start_weight_update"), call("update_weights", kwargs=update), call("finish_weight_update"))
        start_call, update_call, finish_call = (asyncio.ensure_future(each) for each in calls)
        await asyncio.wait((update_call,))
        label = None
        if update_call.exception() is None:
            label = await self._resume(engine, epoch, query.get("then", [""])[0])
        await asyncio.gather(start_call, finish_call, return_exceptions=True)
        errors = [each.exception() for each in (update_call, start_call)]
        if errors[0] is None:
            await answer_json(send, 200, {"status": "installed", "resumed_as": label})
        else:
            messages = [f"{type(error).__name__}: {error}" for error in errors if error is not None]
            await answer_json(send, 500, {"detail": "; ".join(messages)})

    async def _resume(self, engine: Any, epoch: int, then: str) -> str | None:
        """Labels and resumes vLLM if the agent would (machines/agent/install.py). Returns the label; None: the agent is
        to decide. vLLM's session may still be open: these calls are carried out after its end."""
        words = self._page.read()
        state = admission(words, self._page.marked())
        if not state.open or state.identity is None or any(word.epoch != epoch for word in words):
            return None
        if then not in _METHODS or not all(hasattr(engine, method) for method in _METHODS[then]):
            return None
        label = version_label(state.identity)
        try:
            if then == "label":
                await engine.update_weight_version(label)
            await engine.resume_generation()
        except Exception:
            log.warning("ckpt-engine: vLLM did not resume itself with version %s; its agent will", label, exc_info=True)
            return None
        return label


def _engine(scope: Scope) -> Any:
    """vLLM's AsyncLLM; None: there is none yet."""
    return getattr(getattr(scope.get("app"), "state", None), "engine_client", None)


def _sleeps(engine: Any) -> bool | None:
    """Whether this server can sleep; None: unknown. On a CPU it can: vLLM accepts the calls, without memory to free."""
    settings = getattr(engine, "vllm_config", None)
    enabled = getattr(getattr(settings, "model_config", None), "enable_sleep_mode", None)
    device = getattr(getattr(settings, "device_config", None), "device_type", None)
    return None if enabled is None or device is None else bool(enabled) or device == "cpu"


async def _pause(engine: Any, mode: str, query: Mapping[str, list[str]], send: Send) -> None:
    """Pauses the scheduler as `AsyncLLM.pause_generation` does, without its sleep."""
    stop = getattr(getattr(engine, "engine_core", None), "pause_scheduler_async", None)
    clear = getattr(getattr(engine, "renderer", None), "clear_mm_cache_async", None)
    if stop is None or clear is None:
        await answer_json(send, 404, {"detail": "this vLLM keeps its scheduler elsewhere: use /pause"})
        return
    clear_cache = query.get("clear_cache", ["true"])[0] != "false"
    if clear_cache:
        await clear()
    await stop(mode=mode, clear_cache=clear_cache)
    await answer_json(send, 200, {"status": "paused"})
