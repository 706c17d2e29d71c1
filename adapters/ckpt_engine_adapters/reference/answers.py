"""Writes answers to clients, in the three forms of requests: see `bodies.py`.

A form writes the answer of one request's generations: `whole` at once; in a stream, `event` for each token, and
`closing` after all of them.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from ckpt_engine_adapters.reference.bodies import CompletionBody, GenerateBody, SglangBody
from ckpt_engine_adapters.reference.generation import Generation, Token

_DONE = "[DONE]"

Event = dict[str, Any] | str
"""The content after `data: ` in a stream of server-sent events: an object, or a word."""


class AnswerForm(Protocol):
    """The form of one request's answer."""

    generations: Sequence[Generation]  # in the order of the answers

    def whole(self) -> Any: ...

    def event(self, number: int, token: Token | None) -> Iterator[Event]:
        """Events after the next token of generation `number`; None: it has ended."""
        ...

    def closing(self) -> Iterator[Event]: ...


class OwnForm:
    """One event a token, and a last one with the whole answer (or an error)."""

    def __init__(self, body: GenerateBody, generations: Sequence[Generation]) -> None:
        self.generations = generations
        self._logprobs = body.logprobs

    def whole(self) -> Any:
        generation = self.generations[0]
        versions = generation.weight_versions()
        return {
            "output_ids": generation.output,
            **({"logprobs": generation.logprobs} if self._logprobs else {}),
            "finish_reason": generation.finish_reason,
            "version": versions[-1]["version"] if versions else None,
            "weight_versions": versions,
        }

    def event(self, number: int, token: Token | None) -> Iterator[Event]:
        if token is not None:
            logprob = {"logprob": token.logprob} if self._logprobs else {}
            yield {"token": token.token, "version": token.version, **logprob}
        elif self.generations[number].error:
            yield {"error": self.generations[number].error}
        else:
            yield self.whole()

    def closing(self) -> Iterator[Event]:
        return iter(())


class Streamed:
    """Counts the tokens that were sent of each generation; the last token's event says how it ended."""

    def __init__(self, generations: Sequence[Generation]) -> None:
        self.generations = generations
        self.sent = [0] * len(generations)
        self._finished = [False] * len(generations)

    def event(self, number: int, token: Token | None) -> Iterator[Event]:
        generation = self.generations[number]
        if self._finished[number]:
            return
        if generation.error and token is None:
            yield {"error": {"message": generation.error, "type": "server_error", "code": 500}}
            return
        self.sent[number] += token is not None
        self._finished[number] = generation.ended.is_set() and self.sent[number] == len(generation.output)
        yield self.piece(number, token, self._finished[number])

    def piece(self, number: int, token: Token | None, finished: bool) -> dict[str, Any]:
        raise NotImplementedError

    def closing(self) -> Iterator[Event]:
        yield _DONE


class SglangForm(Streamed):
    """SGLang 0.5: each event repeats the tokens before it; versions are texts, "default" the engine's own weights."""

    def __init__(self, body: SglangBody, generations: Sequence[Generation]) -> None:
        super().__init__(generations)
        self._body = body
        self._start = time.monotonic()
        self._ids = list(self._request_ids())

    def whole(self) -> Any:
        answers = [
            self._answer(number, len(generation.output), finished=True)
            for number, generation in enumerate(self.generations)
        ]
        return answers if self._body.listed else answers[0]

    def piece(self, number: int, token: Token | None, finished: bool) -> dict[str, Any]:
        index = {"index": number} if self._body.listed else {}
        return {**self._answer(number, self.sent[number], finished), **index}

    def _answer(self, number: int, count: int, finished: bool) -> dict[str, Any]:
        generation = self.generations[number]
        versions = [{**span, "version": _label(span["version"])} for span in generation.weight_versions(count)]
        meta: dict[str, Any] = {
            "id": self._ids[number],
            "finish_reason": _sglang_reason(generation) if finished else None,
            "prompt_tokens": len(generation.prompt),
            "completion_tokens": count,
            "cached_tokens": 0,
            "weight_version": versions[-1]["version"] if versions else _label(None),
            "weight_versions": versions,
        }
        if self._wants_logprob(number):
            pairs = zip(generation.logprobs[:count], generation.output, strict=False)
            meta["input_token_logprobs"] = []
            meta["output_token_logprobs"] = [[logprob, token, None] for logprob, token in pairs]
            meta["output_token_logprobs_length"] = count
        if finished:
            meta["e2e_latency"] = time.monotonic() - self._start
        prompt = {"prompt_token_ids": generation.prompt} if self._body.return_prompt_token_ids else {}
        return {"text": "", "output_ids": generation.output[:count], "meta_info": meta, **prompt}

    def _wants_logprob(self, number: int) -> bool:
        option = self._body.return_logprob
        return bool(option[number // self._body.samples] if isinstance(option, list) else option)

    def _request_ids(self) -> Iterator[str]:
        rid, samples = self._body.rid, self._body.samples
        for number in range(len(self.generations)):
            name = rid[number // samples] if isinstance(rid, list) else rid
            place = number % samples if isinstance(rid, list) else number
            alone = samples == 1 if isinstance(rid, list) else len(self.generations) == 1
            yield uuid.uuid4().hex if name is None else name if alone else f"{name}_{place}"


class CompletionForm(Streamed):
    """`/v1/completions` as vLLM answers it, without text, with SGLang's `metadata`, which names the version."""

    def __init__(self, body: CompletionBody, generations: Sequence[Generation], model: str) -> None:
        super().__init__(generations)
        self._body = body
        self._head = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }

    def whole(self) -> Any:
        choices = [
            self._choice(number, 0, len(generation.output), finished=True)
            for number, generation in enumerate(self.generations)
        ]
        versions = [{**span, "version": _label(span["version"])} for span in self.generations[0].weight_versions()]
        metadata = {"weight_version": versions[-1]["version"] if versions else _label(None)}
        return {**self._head, "choices": choices, "usage": self._usage(), "metadata": metadata}

    def piece(self, number: int, token: Token | None, finished: bool) -> dict[str, Any]:
        end = self.sent[number]
        start = end - (token is not None)
        version = self.generations[number].weight_versions(end)
        metadata = {"weight_version": _label(version[-1]["version"] if version else None)}
        return {**self._head, "choices": [self._choice(number, start, end, finished)], "metadata": metadata}

    def closing(self) -> Iterator[Event]:
        if self._body.stream_options and self._body.stream_options.include_usage:
            yield {**self._head, "choices": [], "usage": self._usage()}
        yield _DONE

    def _choice(self, number: int, start: int, end: int, finished: bool) -> dict[str, Any]:
        """The choice with tokens [start, end) of a generation. finished: also how it ended."""
        generation = self.generations[number]
        tokens = generation.output[start:end]
        choice: dict[str, Any] = {
            "index": number,
            "text": "",
            "logprobs": None,
            "finish_reason": generation.finish_reason if finished else None,
            "stop_reason": generation.output[-1] if finished and generation.finish_reason == "stop" else None,
        }
        if self._body.logprobs is not None:
            names = [f"token_id:{token}" for token in tokens]
            values = generation.logprobs[start:end]
            choice["logprobs"] = {
                "text_offset": [0] * len(tokens),
                "token_logprobs": values,
                "tokens": names,
                "top_logprobs": [{name: value} for name, value in zip(names, values, strict=True)],
            }
        if self._body.return_token_ids:
            choice["token_ids"] = tokens
            if start == 0:
                choice["prompt_token_ids"] = generation.prompt
        return choice

    def _usage(self) -> dict[str, int]:
        prompt = sum(len(tokens) for tokens in self._body.prompt)
        completion = sum(len(generation.output) for generation in self.generations)
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _label(version: int | None) -> str:
    return "default" if version is None else str(version)


def _sglang_reason(generation: Generation) -> dict[str, Any]:
    match generation.finish_reason:
        case "stop":
            return {"type": "stop", "matched": generation.output[-1]}
        case "length":
            return {"type": "length", "length": len(generation.output)}
        case reason:
            return {"type": reason, "message": "Aborted", "status_code": None, "err_type": None}
