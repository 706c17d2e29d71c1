"""Requests that run while versions change, and the law of each pause mode for what they are answered."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ckpt_engine.v1 import manager_pb2
from tests.cluster import Replica
from tests.conformance.engines import Answer, Engine
from tests.conformance.weights import of_either_version, of_one_version
from tests.tiny_model import ROUNDING, regrets

COUNT = 120
BEGUN = 5
"""Tokens after which a request counts as running."""


class Updates:
    """asked: how many updates have been asked for; streams note it, so that it is known which one they lived through.

    Prompts are handed out here: no two have the same beginning, so none is answered from caches of another one, which
    requests that were let in before an update in place may be.
    """

    def __init__(self) -> None:
        self.asked = 0
        self._numbers = itertools.count()

    def prompt(self) -> tuple[int, ...]:
        number = next(self._numbers)
        return (1 + number % 500, 3, 5, 7)


@dataclass(frozen=True)
class Seen:
    """One answered request. crossed: an update was asked for after its first tokens and before its end."""

    prompt: tuple[int, ...]
    answer: Answer
    crossed: bool


class Stream(threading.Thread):
    """Asks one replica for long answers, one after the other, until `end` is called."""

    def __init__(self, engine: Engine, replica: Replica, updates: Updates) -> None:
        super().__init__(daemon=True)
        self._engine, self._replica, self._updates = engine, replica, updates
        self._ended = threading.Event()
        self.seen: list[Seen] = []
        self.running = False
        """Whether a request has its first tokens and has not ended."""
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            while not self._ended.is_set():
                self._ask()
        except Exception as error:  # shown by end()
            self.error = error
        finally:
            self.running = False

    def _ask(self) -> None:
        begun: list[int] = []
        prompt = self._updates.prompt()

        def told(count: int) -> None:
            if count >= BEGUN and not begun:
                begun.append(self._updates.asked)
                self.running = True

        answer = self._engine.stream(self._replica, prompt, COUNT, told)
        self.running = False
        self.seen.append(Seen(prompt, answer, bool(begun) and begun[0] < self._updates.asked))
        if answer.status != 200:
            self._ended.wait(0.1)

    def end(self, seconds: float = 120.0) -> list[Seen]:
        """Waits for the request that runs, raises what went wrong, returns everything."""
        self._ended.set()
        self.join(seconds)
        assert not self.is_alive(), "a request did not come back"
        if self.error is not None:
            raise self.error
        return self.seen


def shows(mode: manager_pb2.PauseMode, models: Sequence[Any], seen: Seen) -> bool:
    """Whether this answer proves that `mode` did to a running request what it says, and not less."""
    tokens = seen.answer.tokens
    if seen.answer.status != 200 or not seen.crossed:
        return False
    match mode:
        case manager_pb2.PAUSE_MODE_ABORT:
            return 0 < len(tokens) < COUNT and seen.answer.ended == "abort"
        case manager_pb2.PAUSE_MODE_WAIT:
            return len(tokens) == COUNT
        case manager_pb2.PAUSE_MODE_KEEP:
            return not of_one_version(models, seen.prompt, tokens)
        case _:
            return not of_either_version(models, seen.prompt, tokens)


def breaks(mode: manager_pb2.PauseMode, models: Sequence[Any], seen: Seen) -> str:
    """Why this answer must never be given in this mode; empty: it may."""
    prompt, answer = seen.prompt, seen.answer
    if answer.status != 200:
        return f"answered with {answer.status}: {answer.detail}"
    if mode != manager_pb2.PAUSE_MODE_ABORT and len(answer.tokens) != COUNT:
        return f"a request that was let in ended after {len(answer.tokens)} tokens of {COUNT}: {answer.ended}"
    if not answer.tokens:
        return ""  # ended before its first token
    if wrong := misnamed(mode, models, seen):
        return wrong
    match mode:
        case manager_pb2.PAUSE_MODE_ABORT | manager_pb2.PAUSE_MODE_WAIT:
            return (
                ""
                if of_one_version(models, prompt, answer.tokens)
                else f"not of one version: {difference(models, seen)}"
            )
        case manager_pb2.PAUSE_MODE_KEEP:
            if of_either_version(models, prompt, answer.tokens):
                return ""
            return f"not of whole versions: {difference(models, seen)}"
        case _:
            # Later tokens come from new weights over old caches, which no model can tell.
            return "" if of_one_version(models, prompt, answer.tokens[:1]) else "its first token is of no version"


def misnamed(mode: manager_pb2.PauseMode, models: Sequence[Any], seen: Seen) -> str:
    """Which tokens the answer's body calls those of a version that did not make them; empty: none, or it says nothing.

    models: version `v` is that of `models[v % len(models)]`.
    """
    tokens, spans = list(seen.answer.tokens), seen.answer.spans
    if not spans:
        return ""
    if [each.start for each in spans] != [0, *(each.end for each in spans[:-1])] or spans[-1].end != len(tokens):
        return f"does not say of each of {len(tokens)} tokens which version made it: {spans}"
    if int(seen.answer.admitted) > spans[0].version:
        return f"was let in under version {seen.answer.admitted}, and its first token is of version {spans[0].version}"
    # Over caches of older weights no model can tell what comes next.
    known = spans[:1] if mode == manager_pb2.PAUSE_MODE_IN_PLACE else spans
    for version, start, end in known:
        model = models[version % len(models)]
        if max(regrets(model, [*seen.prompt, *tokens[:start]], tokens[start:end])) >= ROUNDING:
            return f"tokens {start} to {end} are called those of version {version}: {difference(models, seen)}"
    return ""


def difference(models: Sequence[Any], seen: Seen) -> str:
    """Which tokens none of the models makes, and how far each model is from making them."""
    found = [regrets(model, list(seen.prompt), list(seen.answer.tokens)) for model in models]
    wrong = [place for place, each in enumerate(zip(*found, strict=True)) if min(each) >= ROUNDING]
    worst = ", ".join(f"{max(each):.2f}" for each in found)
    return f"tokens {wrong} of {len(seen.answer.tokens)} are of neither; the models' largest regrets are {worst}"
