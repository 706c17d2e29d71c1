"""SGLang's `/generate`: `input_ids`, `sampling_params`, `return_logprob`, `meta_info`. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from ckpt_engine.gateway import dialect
from ckpt_engine.gateway.dialect import Dialect, MalformedError, ParsedRequest
from ckpt_engine.gateway.refusals import bad_request
from ckpt_engine.gateway.resumability import (
    BEAM,
    ELSEWHERE,
    EXPERTS,
    GRAMMAR,
    NOT_IDS,
    PENALTY,
    STATE,
    TEXT,
    FieldKind,
    Table,
    judge,
    not_streamed,
    rules,
    travelling,
)
from ckpt_engine.gateway.single import Single, leg_seed
from ckpt_engine.gateway.stitching import ABORT, ERROR, STOP, AnswerPiece, Finish, Stitch

DEFAULT_TOKENS = 128

_PER_TOKEN = ("output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs")
_OF_THE_PROMPT = ("input_token_logprobs", "input_top_logprobs", "input_token_ids_logprobs", "cached_tokens")
_PER_PROMPT = ("sampling_params", "return_logprob", "rid", "logprob_start_len", "top_logprobs_num", "token_ids_logprob")

FIELDS: Table = {
    **rules(FieldKind.OURS, "input_ids stream rid sampling_params return_prompt_token_ids"),
    **rules(FieldKind.TRAVELS, "return_logprob top_logprobs_num token_ids_logprob return_text_in_logprobs log_metrics"),
    **rules(
        FieldKind.TRAVELS, "priority extra_key cache_salt session_id routing_key conversation_id no_logs custom_labels"
    ),
    **rules(FieldKind.TRAVELS, "lora_path modalities background routed_dp_rank data_parallel_rank require_reasoning"),
    **rules(FieldKind.FIRST, "logprob_start_len"),
    **rules(FieldKind.NEVER, "text input_embeds image_data video_data audio_data", why=NOT_IDS),
    **rules(FieldKind.NEVER, "session_params bootstrap_host bootstrap_port bootstrap_room", why=ELSEWHERE),
    **rules(FieldKind.NEVER, "custom_logit_processor return_hidden_states return_sampling_mask watermark", why=STATE),
    **rules(FieldKind.NEVER, "return_routed_experts routed_experts_start_len return_indexer_topk", why=EXPERTS),
}
"""Fields of a request, beside its `sampling_params`."""

SAMPLING: Table = {
    **rules(
        FieldKind.TRAVELS, "temperature top_p top_k min_p stop_token_ids ignore_eos skip_special_tokens logit_bias"
    ),
    **rules(FieldKind.TRAVELS, "spaces_between_special_tokens no_stop_trim stream_interval"),
    **rules(FieldKind.COUNTED, "max_new_tokens min_new_tokens"),
    **rules(FieldKind.OURS, "n sampling_seed"),
    **rules(FieldKind.NEVER, "presence_penalty frequency_penalty", why=PENALTY),
    **rules(FieldKind.NEVER, "repetition_penalty", (None, 1, 1.0), PENALTY),
    **rules(FieldKind.NEVER, "stop stop_regex", why=TEXT),
    **rules(FieldKind.NEVER, "json_schema regex ebnf structural_tag", why=GRAMMAR),
    **rules(FieldKind.NEVER, "custom_params max_thinking_tokens", why=STATE),
    **rules(FieldKind.NEVER, "beam_width", (None, 1), BEAM),
}


class Generate(Dialect):
    """See Dialect. A record is the token's entry of each list of log-probabilities that `meta_info` has.

    Each event of a caller's stream repeats the tokens before it, as SGLang's do.
    """

    route: ClassVar[str] = "/generate"

    @classmethod
    def read(cls, body: Mapping[str, Any]) -> ParsedRequest | None:
        if body.get("input_ids") is None and ("text" in body or "input_embeds" in body):
            return None
        prompts = dialect.prompts(body.get("input_ids"), "input_ids")
        if prompts is None:
            raise bad_request("input_ids: a list of token ids; texts are `text`")
        nested = isinstance(body["input_ids"][0], list)
        singles, reasons, session = [], [], ""
        for index, prompt in enumerate(prompts):
            fields = {name: _of_prompt(name, value, index, len(prompts), nested) for name, value in body.items()}
            params = dialect.an_object(fields.get("sampling_params"), "sampling_params")
            reasons += [judge(fields, FIELDS), judge(params, SAMPLING, "sampling_params.")]
            session = session or str(fields.get("session_id") or fields.get("routing_key") or fields.get("rid") or "")
            singles += _samples(prompt, fields, params)
        if len(singles) > dialect.SAMPLES:
            raise bad_request(f"{len(singles)} samples, {dialect.SAMPLES} are the most of one request")
        if len(singles) % len(prompts):
            raise bad_request("sampling_params.n must be the same for all prompts")
        return ParsedRequest(
            body,
            tuple(singles),
            dialect.truth(body.get("stream"), "stream"),
            "; ".join(dict.fromkeys(filter(None, reasons))),
            not_streamed(body, FIELDS),
            session,
        )

    def leg_body(self, stitch: Stitch, identifier: str) -> dict[str, Any]:
        single, offset, first = stitch.single, len(stitch.tokens), not stitch.started
        params = travelling(single.sampling, SAMPLING, first)
        params["max_new_tokens"] = stitch.remaining
        if single.min_tokens:
            params["min_new_tokens"] = max(0, single.min_tokens - offset)
        if single.seed is not None:
            params["sampling_seed"] = leg_seed(single.seed, offset)
        body = travelling(single.fields, FIELDS, first)
        body |= {"input_ids": [*single.prompt, *stitch.tokens], "sampling_params": params}
        return {**body, "rid": identifier, "stream": True}

    def piece(self, stitch: Stitch, event: Mapping[str, Any], labelled: bool) -> AnswerPiece:
        meta = event.get("meta_info")
        if not isinstance(meta, dict):
            raise MalformedError("an event of /generate has no meta_info")
        output = dialect.output_tokens(event.get("output_ids") or [])
        total = meta.get("completion_tokens")
        # Servers differ in whether an event repeats the tokens before it, so new tokens are counted from the end.
        new = (total if isinstance(total, int) else len(output)) - stitch.leg.count
        if new < 0 or new > len(output):
            raise MalformedError(f"{total} tokens so far, {stitch.leg.count} had come, and the event has {len(output)}")
        tokens = output[len(output) - new :]
        about = {name: meta[name] for name in _OF_THE_PROMPT if meta.get(name) is not None}
        text = event.get("text") or ""
        if len(output) > new:
            text = text[len(stitch.text) - stitch.leg.text_before :]
        return AnswerPiece(
            tokens,
            _records(meta, new),
            text,
            finish=_finish(meta.get("finish_reason"), len(stitch.tokens) + new),
            labels=dialect.labels_of(meta.get("weight_versions")),
            about=about,
            scored=len(meta.get("input_token_logprobs") or ()),
        )

    def finish(self, kind: str, detail: Any) -> Finish:
        return Finish(kind, {"type": kind, ("matched" if kind == STOP else "length"): detail})

    def chunk(self, number: int, stitch: Stitch, piece: AnswerPiece, finished: bool) -> dict[str, Any]:
        answer = self._answer(number, stitch, finished)
        return {**answer, "index": number} if self._listed else answer

    def closing(self, stitches: Sequence[Stitch]) -> list[dict[str, Any]]:
        return []

    def whole(self, stitches: Sequence[Stitch]) -> Any:
        answers = [self._answer(number, stitch, True) for number, stitch in enumerate(stitches)]
        return answers if self._listed else answers[0]

    @property
    def _listed(self) -> bool:
        return len(self.request.singles) > 1 or isinstance(self.request.body["input_ids"][0], list)

    def _answer(self, number: int, stitch: Stitch, finished: bool) -> dict[str, Any]:
        single = stitch.single
        spans = stitch.spans() if finished or all(leg.labels for leg in stitch.legs if leg.count) else []
        exact = bool(spans) and all(span.exact for span in spans)
        versions = [span.highest.version for span in spans if span.highest]
        meta: dict[str, Any] = {
            "id": self._identifier(number),
            "finish_reason": stitch.finish.reason if finished and stitch.finish else None,
            "prompt_tokens": len(single.prompt),
            "completion_tokens": len(stitch.tokens),
            "cached_tokens": 0,
            "weight_version": str(versions[-1]) if versions else "default",
            **stitch.about,
        }
        if exact:
            meta["weight_versions"] = [
                {"version": str(span.lowest.version), "start": span.first, "end": span.first + span.count}
                for span in spans
                if span.lowest
            ]
        if single.fields.get("return_logprob"):
            meta.setdefault("input_token_logprobs", [])
            names = stitch.records[0].keys() if stitch.records else ("output_token_logprobs",)
            meta |= {name: [record[name] for record in stitch.records] for name in names}
            meta["output_token_logprobs_length"] = len(stitch.records)
        if finished:
            meta["ckpt_engine"] = self.about_versions(stitch)
        prompt = {"prompt_token_ids": list(single.prompt)} if single.fields.get("return_prompt_token_ids") else {}
        return {"text": stitch.text, "output_ids": list(stitch.tokens), "meta_info": meta, **prompt}

    def _identifier(self, number: int) -> str:
        rid = self.request.singles[number].fields.get("rid")
        alone = len(self.request.singles) == 1
        return str(rid) if rid and alone else f"{rid or self.identifier}_{number}" if not alone else self.identifier


def _of_prompt(name: str, value: Any, index: int, prompts: int, nested: bool) -> Any:
    """A field's value for one prompt; some fields may be lists with a value for each prompt."""
    if nested and name in _PER_PROMPT and isinstance(value, list):
        if len(value) != prompts:
            raise bad_request(f"{name}: {len(value)} for {prompts} prompts")
        return value[index]
    return value


def _samples(prompt: tuple[int, ...], fields: Mapping[str, Any], params: Mapping[str, Any]) -> list[Single]:
    where = "sampling_params."
    most = (
        dialect.whole_number(params["max_new_tokens"], f"{where}max_new_tokens", None)
        if ("max_new_tokens" in params)
        else DEFAULT_TOKENS
    )
    least = dialect.whole_number(params.get("min_new_tokens"), f"{where}min_new_tokens", 0) or 0
    stops = dialect.stop_ids(params.get("stop_token_ids"), f"{where}stop_token_ids")
    if params.get("ignore_eos"):
        stops = frozenset()  # this engine then ignores them as well
    seed = dialect.seed_of(params.get("sampling_seed"), f"{where}sampling_seed")
    return [
        Single(prompt, most, least, None if seed is None else seed + sample, stops, False, fields, params)
        for sample in range(dialect.samples(params.get("n"), f"{where}n"))
    ]


def _records(meta: Mapping[str, Any], new: int) -> list[Any]:
    present = [name for name in _PER_TOKEN if isinstance(meta.get(name), list) and (meta[name] or not new)]
    if not present or not new:
        return []
    for name in present:
        if len(meta[name]) < new:
            raise MalformedError(f"{name} has {len(meta[name])} entries, {new} tokens are new")
    columns = {name: meta[name][len(meta[name]) - new :] for name in present}
    return [{name: column[at] for name, column in columns.items()} for at in range(new)]


def _finish(reason: Any, count: int) -> Finish | None:
    """The end of a sample. count: tokens of the whole answer by now; the leg's reason counts only its own."""
    if reason is None:
        return None
    if not isinstance(reason, dict) or "type" not in reason:
        raise MalformedError(f"a malformed finish_reason: {reason!r}")
    kind = str(reason["type"])
    if "length" in reason:
        reason = {**reason, "length": count}
    if kind == "abort" and reason.get("status_code"):
        return Finish(ERROR, reason, (reason["status_code"], reason.get("message", "")))
    return Finish(ABORT if kind == "abort" else kind, reason)
