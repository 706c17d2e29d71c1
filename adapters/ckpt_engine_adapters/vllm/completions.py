"""`/v1/completions` as vLLM has it: `prompt` as token ids, `return_token_ids`, `logprobs`. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from ckpt_engine.gateway import dialect
from ckpt_engine.gateway.dialect import Dialect, MalformedError, ParsedRequest
from ckpt_engine.gateway.refusals import ENGINE_REFUSED, RefusedError, bad_request
from ckpt_engine.gateway.resumability import judge, not_streamed, travelling
from ckpt_engine.gateway.single import Single
from ckpt_engine.gateway.stitching import STOP, AnswerPiece, Finish, Stitch
from ckpt_engine.gateway.versions import Label
from ckpt_engine_adapters.vllm.fields import COMPLETIONS, counted, finish_of

_LOGPROBS = ("tokens", "token_logprobs", "top_logprobs")


class Completions(Dialect):
    """See Dialect. A record is the token's entry of each list in `logprobs`."""

    route: ClassVar[str] = "/v1/completions"
    of_any_engine: ClassVar[bool] = True

    @classmethod
    def read(cls, body: Mapping[str, Any]) -> ParsedRequest | None:
        prompts = dialect.prompts(body.get("prompt"), "prompt")
        if prompts is None:
            return None
        count, seed = dialect.samples(body.get("n"), "n"), dialect.seed_of(body.get("seed"), "seed")
        most = dialect.whole_number(body["max_tokens"], "max_tokens", None) if "max_tokens" in body else 16
        least = dialect.whole_number(body.get("min_tokens"), "min_tokens", 0) or 0
        stops = dialect.stop_ids(body.get("stop_token_ids"), "stop_token_ids")
        echo = dialect.truth(body.get("echo"), "echo")
        if count * len(prompts) > dialect.SAMPLES:
            raise bad_request(
                f"{count} samples of {len(prompts)} prompts; {dialect.SAMPLES} are the most of one request"
            )
        singles, reasons = [], [judge(body, COMPLETIONS)]
        for prompt in prompts:
            cut, why = dialect.truncated(prompt, body.get("truncate_prompt_tokens"), "truncate_prompt_tokens")
            reasons.append(why)
            for sample in range(count):
                drawn = None if seed is None else seed + sample
                singles.append(Single(cut, most, least, drawn, stops, echo, body))
        return ParsedRequest(
            body,
            tuple(singles),
            dialect.truth(body.get("stream"), "stream"),
            "; ".join(dict.fromkeys(filter(None, reasons))),
            # An echo is text unless ids are requested, and only the engine knows the prompt's text.
            not_streamed(body, COMPLETIONS) or (echo and not body.get("return_token_ids")),
            str(body.get("session_id") or body.get("user") or ""),
        )

    def leg_body(self, stitch: Stitch, identifier: str) -> dict[str, Any]:
        single, offset = stitch.single, len(stitch.tokens)
        body = travelling(single.fields, COMPLETIONS, first=not stitch.started)
        body |= {"prompt": [*single.prompt, *stitch.tokens], "max_tokens": stitch.remaining, "request_id": identifier}
        body |= counted(single, single.fields, offset, not self.request.not_resumable)
        return {**body, "stream": True, "return_token_ids": True}

    def piece(self, stitch: Stitch, event: Mapping[str, Any], labelled: bool) -> AnswerPiece:
        about = {}
        details = (event.get("usage") or {}).get("prompt_tokens_details") or {}
        if isinstance(details.get("cached_tokens"), int):
            about["cached_tokens"] = details["cached_tokens"]
        choices = event.get("choices")
        if not choices:
            return AnswerPiece(about=about)
        choice = choices[0]
        if choice.get("text") and choice.get("token_ids") is None:
            detail = f"{stitch.leg.replica} sends texts without token ids on this route, so they cannot be joined"
            raise RefusedError(502, ENGINE_REFUSED, detail)
        tokens = dialect.output_tokens(choice.get("token_ids") or [])
        # vLLM's event with an echo has log-probabilities and text of both, but ids of the output alone.
        echoes = stitch.single.echo and not stitch.started and choice.get("prompt_token_ids") is not None
        echo = list(stitch.single.prompt) if echoes else []
        if stitch.single.max_tokens == 0:
            tokens = []  # vLLM makes one nevertheless, and reports it nowhere else
        records = _records(choice.get("logprobs"), len(echo) + len(tokens), _text_before(stitch))
        return AnswerPiece(
            tokens,
            records[len(echo) :],
            choice.get("text") or "",
            echo,
            records[: len(echo)],
            finish_of(choice.get("finish_reason"), choice.get("stop_reason")),
            _labels(stitch, event, len(tokens)) if labelled else None,
            about,
            len(echo) if records else 0,
        )

    def finish(self, kind: str, detail: Any) -> Finish:
        return Finish(kind, kind, detail if kind == STOP else None)

    def chunk(self, number: int, stitch: Stitch, piece: AnswerPiece, finished: bool) -> dict[str, Any]:
        first = len(stitch.tokens) == len(piece.tokens) and stitch.started
        records = [*piece.echo_records, *piece.records]
        choice = self._choice(number, stitch, piece.tokens, records, piece.text, finished)
        if first and self.request.body.get("return_token_ids"):
            choice["prompt_token_ids"] = list(stitch.single.prompt)
        return {**self._head(), "choices": [choice]}

    def closing(self, stitches: Sequence[Stitch]) -> list[dict[str, Any]]:
        options = self.request.body.get("stream_options") or {}
        return [{**self._head(), "choices": [], "usage": _usage(stitches)}] if options.get("include_usage") else []

    def whole(self, stitches: Sequence[Stitch]) -> Any:
        choices = []
        for number, stitch in enumerate(stitches):
            records = [*stitch.echo_records, *stitch.records]
            choice = self._choice(number, stitch, list(stitch.tokens), records, stitch.text, True)
            if self.request.body.get("return_token_ids"):
                choice["prompt_token_ids"] = list(stitch.single.prompt)
            choices.append(choice)
        return {**self._head(), "choices": choices, "usage": _usage(stitches)}

    def _head(self) -> dict[str, Any]:
        head = {"id": f"cmpl-{self.identifier}", "object": "text_completion", "created": self.created}
        return {**head, "model": self.request.body.get("model") or ""}

    def _choice(
        self,
        number: int,
        stitch: Stitch,
        tokens: list[int],
        records: list[Any],
        text: str,
        finished: bool,
    ) -> dict[str, Any]:
        end = stitch.finish if finished else None
        choice: dict[str, Any] = {
            "index": number,
            "text": text,
            "logprobs": None,
            "finish_reason": end.reason if end else None,
            "stop_reason": end.stop_reason if end else None,
        }
        if self.request.body.get("logprobs") is not None:
            lists = {name: [record[name] for record in records] for name in _LOGPROBS}
            choice["logprobs"] = {**lists, "text_offset": [record["text_offset"] for record in records]}
        if self.request.body.get("return_token_ids"):
            choice["token_ids"] = tokens
        if finished:
            choice["ckpt_engine"] = self.about_versions(stitch)
        return choice


def _text_before(stitch: Stitch) -> int:
    """Characters of the answer so far, an echo included; text offsets continue from here."""
    last = stitch.echo_records[-1] if stitch.echo_records else None
    return len(stitch.text) + (last["text_offset"] + len(last["tokens"]) if last else 0)


def _records(logprobs: Any, count: int, before: int) -> list[Any]:
    """A record for each token. before: characters of the answer so far, added to the leg's own text offsets."""
    if logprobs is None:
        return []
    lists = [logprobs.get(name) or [] for name in _LOGPROBS]
    if any(len(each) != count for each in lists[:2]):
        raise MalformedError(f"log-probabilities of {len(lists[0])} tokens beside {count} token ids")
    offsets = logprobs.get("text_offset") or [0] * count
    first = offsets[0] if offsets else 0
    tops = lists[2] or [None] * count
    return [
        {
            "tokens": token,
            "token_logprobs": value,
            "top_logprobs": top,
            "text_offset": before + offset - first,
        }
        for token, value, top, offset in zip(lists[0], lists[1], tops, offsets, strict=True)
    ]


def _labels(stitch: Stitch, event: Mapping[str, Any], count: int) -> list[Label] | None:
    """The labels of the leg's tokens by now, for an engine with one token and its version in each event."""
    label = (event.get("metadata") or {}).get("weight_version")
    if label is None or count > 1:
        return None
    labels, at, version = list(stitch.leg.labels or []), stitch.leg.count, dialect.made_by(label)
    if count == 0:
        return labels or None
    if labels and labels[-1].made_by == version and labels[-1].end == at:
        labels[-1] = Label(labels[-1].start, at + 1, version)
    elif labels or at == 0:
        labels.append(Label(at, at + 1, version))
    return labels or None


def _usage(stitches: Sequence[Stitch]) -> dict[str, Any]:
    """Token counts of a request. Each prompt counts once, for any number of samples."""
    prompts = {id(stitch.single.prompt): len(stitch.single.prompt) for stitch in stitches}
    prompt, output = sum(prompts.values()), sum(len(stitch.tokens) for stitch in stitches)
    usage: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
    cached = [stitch.about["cached_tokens"] for stitch in stitches if "cached_tokens" in stitch.about]
    return {**usage, "prompt_tokens_details": {"cached_tokens": sum(cached)}} if cached else usage
