"""TRL's AsyncGRPOTrainer with agents of many turns: no turn is made by older weights than the one before it, and each
names the versions that made it.

It decides what a turn's request asks of a gateway, and where the turn's versions are kept. It does not decide what a
turn is and runs no tool: TRL's rollout loop does, in its process, and this is that loop with two methods around it.
Written for TRL 1.16, whose workers are specialised in this way (`_loop_cls`); another one fails by name when it starts.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any, cast

import aiohttp
from trl.experimental.async_grpo.async_rollout_worker import AsyncRolloutWorker, _AsyncRolloutLoop

from ckpt_engine.core.version_bounds import FIELD, NEW_SESSION


class _TurnHistory:
    """The turns of one conversation so far."""

    def __init__(self) -> None:
        self.session = NEW_SESSION  # as the last answer names it (docs/gateway.md)
        self.turns: list[dict[str, Any]] = []  # of each answer: `ckpt_engine`


_history: ContextVar[_TurnHistory] = ContextVar("history")


class TurnLoop(_AsyncRolloutLoop):  # type: ignore[misc, unused-ignore]
    """TRL's loop, in its child process; one asyncio task a conversation."""

    async def _generate_one(self, prompt: Any, *arguments: Any, **named: Any) -> Any:
        """Rolls out one conversation. Each message of the assistant has the `ckpt_engine` of its answer."""
        history = _TurnHistory()
        _history.set(history)
        rollout = await super()._generate_one(prompt, *arguments, **named)
        answers = [message for message in rollout[0] if message.get("role") == "assistant"]
        for message, turn in zip(answers, history.turns, strict=True):
            message["ckpt_engine"] = turn
        return rollout

    async def _post(self, path: str, payload: dict[str, Any], *arguments: Any, **named: Any) -> dict[str, Any]:
        """Asks for one turn. A version that was taken back ends no rollout: the conversation goes on with what is
        served, and its turns say so."""
        history = _history.get(None)
        assert history is not None
        request = {**payload, FIELD: {"session": history.session}}
        try:
            answer = await super()._post(path, request, *arguments, **named)
        except aiohttp.ClientResponseError as error:
            if error.status != 409 or history.session == NEW_SESSION:
                raise
            answer = await super()._post(path, {**payload, FIELD: {"session": NEW_SESSION}}, *arguments, **named)
        about = answer["choices"][0].get("ckpt_engine")
        if about is None:
            raise RuntimeError(
                "a turn was answered without its versions: the worker's server must be a gateway of ckpt-engine"
            )
        history.session = about.get("session") or NEW_SESSION
        history.turns.append(about)
        return cast("dict[str, Any]", answer)


class TurnWorker(AsyncRolloutWorker):  # type: ignore[misc, unused-ignore]
    """A `rollout_worker` of AsyncGRPOTrainer, with the arguments of TRL's own AsyncRolloutWorker.

    `vllm_server_url` is a gateway with `--manager`. In what reward functions get as `completions`, and in each sample's
    `completion`, an assistant's message has `ckpt_engine`: the spans of its tokens with their versions.
    """

    _loop_cls = TurnLoop
