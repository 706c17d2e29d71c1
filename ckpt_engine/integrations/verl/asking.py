"""A Ray actor for each replica: translates verl's requests for it, and verl's abort and resume for running requests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
from verl.workers.rollout.replica import TokenOutput

from ckpt_engine.channel import ManagerStub, open_channel
from ckpt_engine.core.json_text import load_json
from ckpt_engine.core.problems import CkptEngineError, deadline, error, invalid
from ckpt_engine.integrations.sampling import without_neutral
from ckpt_engine.integrations.verl.options import Options
from ckpt_engine.leader import reached
from ckpt_engine.v1 import manager_pb2
from ckpt_engine.v1.weights_pb2 import Problem

POLL_SECONDS = 0.5
CALL_SECONDS = 10.0
ADMITTED = "x-ckpt-engine-admitted-version"
ENDS = {"stop": "completed", "length": "completed", "abort": "aborted", None: "aborted"}
"""Engines' finish reasons to verl's; others stay. None: the request was cut, or broke off. verl's client asks for the
rest of an "aborted" answer."""

STEPS = ("global_steps", "min_global_steps", "max_global_steps")


@dataclass
class _PartialAnswer:
    """The answer to one request so far."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    end_reason: str | None = None
    admitted: int | None = None  # the version that the replica held when it let the request in


class ReplicaActor:
    """A Ray actor that asks one replica, on its event loop. verl's client calls `generate`, its manager the rest.

    verl aborts before each update: running requests are cut, and answered with the tokens so far and "aborted"; new
    ones wait until it resumes. verl's FullyAsyncLLMServerClient then asks for the rest. A request that the engine
    aborts (pause mode "abort"), or that breaks off with its replica, ends in the same way.
    """

    def __init__(
        self, options: Options, name: str, prompt_length: int, response_length: int, always: Mapping[str, Any]
    ) -> None:
        """name: of the replica. always: fields of each request."""
        self._options, self._name, self._always = options, name, always
        self._prompt_length, self._response_length = prompt_length, response_length
        self._client = httpx.AsyncClient(timeout=options.answer_seconds, limits=httpx.Limits(max_connections=None))
        self._url: str | None = None
        self._model = options.model
        self._open, self._rejects = True, False
        self._changed, self._cut = asyncio.Event(), asyncio.Event()
        self._legs: dict[asyncio.Task[TokenOutput], _PartialAnswer] = {}

    def execute_checkpoint_engine(self, method: str, **_: Any) -> dict[str, Any]:
        """Answers verl's manager, which expects a process beside an engine: only "prepare" needs an answer."""
        return {"replica": self._name} if method == "prepare" else {}

    async def update_weights(self, global_steps: int | None = None) -> None:
        """Does nothing: agents bring the weights. verl calls it while trainer ranks send."""

    async def abort_all_requests(self, reject_request: bool = False) -> dict[str, Any]:
        """Cuts running requests; returns when all are answered. reject_request: new ones are answered "aborted" at
        once, instead of waiting."""
        self._set_admission(False, reject_request)
        self._cut.set()
        legs = list(self._legs)
        if legs:
            await asyncio.wait(legs)
        return {"aborted_count": len(legs), "request_ids": []}

    async def resume_generation(self) -> None:
        """Lets requests in again."""
        self._cut = asyncio.Event()
        self._set_admission(True, False)

    def _set_admission(self, opened: bool, rejects: bool) -> None:
        """Sets whether requests are let in or rejected, and wakes those that wait."""
        self._open, self._rejects = opened, rejects
        self._changed.set()
        self._changed = asyncio.Event()

    async def generate(
        self, prompt_ids: Sequence[int], sampling_params: Mapping[str, Any], request_id: str, **media: Any
    ) -> TokenOutput:
        """Tokens after `prompt_ids`, and their log-probabilities if `sampling_params["logprobs"]` says so.

        `extra_fields` has `global_steps`, `min_global_steps` and `max_global_steps`: the versions that made them. They
        differ only if an update came in between that verl did not announce; `global_steps` is then the older one.
        Raises CkptEngineError if media were given, or if the replica refuses the request or does not serve in time.
        """
        media_names = sorted(name for name, value in media.items() if value is not None)
        if media_names:
            raise invalid(f"{', '.join(media_names)}: only token ids can be asked for")
        try:
            async with asyncio.timeout(self._options.held_seconds):
                while not self._open and not self._rejects:
                    await self._changed.wait()
        except TimeoutError:
            raise deadline(f"verl did not resume generation within {self._options.held_seconds:g} s") from None
        # Nothing is awaited from here to the leg's start, so that an abort either holds the request or cuts it.
        if self._rejects:
            return TokenOutput(token_ids=[], stop_reason="aborted", extra_fields=dict.fromkeys(STEPS))
        leg = _PartialAnswer()
        task = asyncio.create_task(self._answer(self._body(list(prompt_ids), sampling_params), leg, self._cut))
        self._legs[task] = leg
        task.add_done_callback(self._legs.pop)
        return await task

    def _body(self, prompt: list[int], sampling: Mapping[str, Any]) -> dict[str, Any]:
        options = without_neutral(sampling)
        limits = options.pop("max_tokens", None), options.pop("max_new_tokens", None)
        most = next((each for each in limits if each is not None), None)
        if most is None:
            most = min(self._response_length, self._prompt_length + self._response_length - len(prompt))
        if options.pop("logprobs", False) is not False:
            options["logprobs"] = 0
        options = {**self._always, **options}
        return {**options, "prompt": prompt, "max_tokens": max(1, most), "stream": True, "return_token_ids": True}

    async def _answer(self, body: dict[str, Any], leg: _PartialAnswer, cut: asyncio.Event) -> TokenOutput:
        reading = asyncio.create_task(self._read(body, leg))
        cutting = asyncio.create_task(cut.wait())
        try:
            await asyncio.wait({reading, cutting}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            cutting.cancel()
            if not reading.done():
                reading.cancel()
                await asyncio.wait({reading})
        if not reading.cancelled():
            reading.result()
        return TokenOutput(
            token_ids=leg.tokens,
            log_probs=leg.logprobs if "logprobs" in body else None,
            stop_reason=ENDS.get(leg.end_reason, leg.end_reason),
            extra_fields=await self._steps(leg),
        )

    async def _read(self, body: dict[str, Any], leg: _PartialAnswer) -> None:
        end, why = time.monotonic() + self._options.held_seconds, ""
        while True:
            url = await self._serving(end, why)
            try:
                request = {**body, "model": await self._model_name(url)}
                async with self._client.stream("POST", f"{url}/v1/completions", json=request) as response:
                    if response.status_code == 200:
                        await _events(response, leg)
                        return
                    text = (await response.aread()).decode(errors="replace")
            except httpx.TransportError as transport_error:
                self._url = None  # the engine may come back elsewhere
                if leg.tokens:
                    return
                why = f": {url} broke off ({transport_error or type(transport_error).__name__})"
                await asyncio.sleep(POLL_SECONDS)
                continue
            if response.status_code != 503:
                raise self._refusal(response.status_code, text)
            self._url = None
            why = f": {url} answers 503: {text[:500]}"
            await asyncio.sleep(POLL_SECONDS)

    async def _steps(self, leg: _PartialAnswer) -> dict[str, int | None]:
        """The versions that can have made the leg's tokens: the admitted one, and the one that is held now."""
        newest = leg.admitted
        if leg.tokens and self._url is not None:
            try:
                answer = await self._client.get(f"{self._url}/ckpt_engine/ready", timeout=CALL_SECONDS)
                held_version = answer.json().get("version")
            except (httpx.TransportError, ValueError):
                held_version = None
            newest = leg.admitted if held_version is None else max(held_version, leg.admitted or held_version)
        return dict(zip(STEPS, (leg.admitted, leg.admitted, newest), strict=True))

    async def _serving(self, end: float, why: str) -> str:
        """The replica's URL, once the manager says that it serves. why: the last failure. Raises DEADLINE_EXCEEDED,
        also for a replica that is said to serve and does not."""
        while True:
            if time.monotonic() >= end:
                raise deadline(
                    f"replica {self._name} did not serve within {self._options.held_seconds:g} s{why}",
                    replica=self._name,
                )
            if self._url is not None:
                return self._url
            self._url, reason = await self._ask_manager()
            if self._url is None:
                why = reason
                await asyncio.sleep(POLL_SECONDS)

    async def _ask_manager(self) -> tuple[str | None, str]:
        """Asks the manager for the replica: its URL if it serves, else None and the reason."""
        channel = open_channel(self._options.manager)
        try:
            stub = ManagerStub(await reached(channel))
            status = await stub.GetStatus(manager_pb2.GetStatusRequest(), timeout=CALL_SECONDS)
        except Exception as error:
            return None, f": the manager at {self._options.manager} does not answer: {error}"
        finally:
            await channel.close(None)
        found = next((each for each in status.replicas if each.name == self._name), None)
        if found is None:
            return None, f": the manager knows no replica of this name ({[each.name for each in status.replicas]})"
        if not found.serving:
            return None, f": {found.closed_reason or 'it does not serve'}"
        return found.engine.url.rstrip("/"), ""

    def _refusal(self, status: int, text: str) -> CkptEngineError:
        code = Problem.CODE_INTERNAL if status >= 500 else Problem.CODE_INVALID_ARGUMENT
        return error(code, f"replica {self._name} answers {status}: {text[:500]}", replica=self._name)

    async def _model_name(self, url: str) -> str:
        if self._model is None:
            answer = await self._client.get(f"{url}/v1/models")
            if answer.status_code != 200:
                raise self._refusal(answer.status_code, answer.text)
            self._model = str(answer.json()["data"][0]["id"])
        return self._model


async def _events(response: httpx.Response, leg: _PartialAnswer) -> None:
    """Reads a completion's stream into `leg`, token by token."""
    admitted = response.headers.get(ADMITTED)
    leg.admitted = None if admitted is None else int(admitted)
    async for line in response.aiter_lines():
        text = line.removeprefix("data: ")
        if text == line or text == "[DONE]":
            continue
        try:
            event = load_json(text)
        except ValueError as parse_error:
            raise error(
                Problem.CODE_INTERNAL, f"the replica's event is not JSON ({parse_error}): {text[:80]!r}"
            ) from parse_error
        if "error" in event:
            raise error(Problem.CODE_INTERNAL, f"the replica broke off: {event['error']}")
        for choice in event.get("choices", ()):
            leg.tokens += choice.get("token_ids") or ()
            leg.logprobs += (choice.get("logprobs") or {}).get("token_logprobs") or ()
            leg.end_reason = choice.get("finish_reason") or leg.end_reason
