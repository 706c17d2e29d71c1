"""One request for tokens inside the engine: its parameters, its tokens so far, and the versions that made them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

from ckpt_engine.v1 import weights_pb2

_numbers = itertools.count(1)


class Token(NamedTuple):
    """A token, its log-probability, and the version of the weights that chose it (None: the engine's own)."""

    token: int
    logprob: float
    version: int | None


class Generation:
    """One request, on the API process's event loop. The engine appends tokens; the HTTP handler waits and reads.

    on_token: called with each token as it comes, then with None when the request has ended.
    fresh: the workers have no usable cache; the next step recomputes all tokens.
    error: why the request cannot continue; then finish_reason stays empty.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int,
        temperature: float = 0.0,
        seed: int = 0,
        stop_tokens: Collection[int] = (),
    ) -> None:
        self.request = str(next(_numbers))
        self.prompt = list(prompt)
        self.max_tokens = max_tokens
        self.temperature = temperature
        self.seed = seed
        self.stop_tokens = frozenset(stop_tokens)
        self.output: list[int] = []
        self.logprobs: list[float] = []
        self.finish_reason = ""
        self.error = ""
        self.fresh = True
        self.on_token: Callable[[Token | None], None] = _unheard
        self.ended = asyncio.Event()
        self._spans: list[tuple[weights_pb2.Identity | None, int]] = []

    def item(self) -> dict[str, Any]:
        """This request's part of the next step's command."""
        return {
            "request": self.request,
            "fresh": self.fresh,
            "tokens": self.prompt + self.output if self.fresh else self.output[-1:],
            "temperature": self.temperature,
            "seed": self.seed,
            "index": len(self.output),
        }

    def append(self, token: int, logprob: float, identity: weights_pb2.Identity | None) -> None:
        """Adds the next token, made by `identity` (None: the engine's own weights), and ends the request after the
        last."""
        if not self._spans or self._spans[-1][0] != identity:
            self._spans.append((identity, len(self.output)))
        self.fresh = False
        self.output.append(token)
        self.logprobs.append(logprob)
        self.on_token(Token(token, logprob, _version(identity)))
        if token in self.stop_tokens:
            self.end("stop")
        elif len(self.output) >= self.max_tokens:
            self.end("length")

    def end(self, finish_reason: str, error: str = "") -> None:
        """Ends the request; its client gets the tokens so far. A second call does nothing."""
        if not self.ended.is_set():
            self.finish_reason, self.error = finish_reason, error
            self.ended.set()
            self.on_token(None)

    def weight_versions(self, count: int | None = None) -> list[dict[str, Any]]:
        """The versions that made the first `count` output tokens (None: all), as spans [start, end). Equal numbers of
        two lineages make two entries."""
        count = len(self.output) if count is None else count
        ends = [start for _, start in self._spans[1:]] + [count]
        return [
            {"version": _version(identity), "start": start, "end": min(end, count)}
            for (identity, start), end in zip(self._spans, ends, strict=True)
            if start < count
        ]


def _unheard(_token: Token | None) -> None:
    """Ignores a token, for requests that are answered as a whole."""


def _version(identity: weights_pb2.Identity | None) -> int | None:
    return None if identity is None else identity.version
