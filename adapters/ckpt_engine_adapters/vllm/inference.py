"""vLLM's `/inference/v1/generate`: token ids in and out, with the version of every token on the last chunk. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from ckpt_engine.gateway import dialect
from ckpt_engine.gateway.dialect import Dialect, Legs, MalformedError, ParsedRequest
from ckpt_engine.gateway.resumability import judge, not_streamed, travelling
from ckpt_engine.gateway.single import Single
from ckpt_engine.gateway.stitching import STOP, AnswerPiece, Finish, Stitch
from ckpt_engine_adapters.vllm.fields import INFERENCE, INFERENCE_SAMPLING, counted, finish_of


class InferenceLegs(Legs):
    """See Legs. A record is the token's entry of `logprobs.content`."""

    route: ClassVar[str] = "/inference/v1/generate"

    def leg_body(self, stitch: Stitch, identifier: str) -> dict[str, Any]:
        single, offset, first = stitch.single, len(stitch.tokens), not stitch.started
        params = travelling(single.sampling, INFERENCE_SAMPLING, first)
        if stitch.remaining is not None:
            params["max_tokens"] = stitch.remaining
        elif "max_tokens" in single.sampling:
            params["max_tokens"] = None
        params |= counted(single, single.sampling, offset, not self.request.not_resumable)
        body = travelling(single.fields, INFERENCE, first)
        body |= {"token_ids": [*single.prompt, *stitch.tokens], "sampling_params": params}
        return {**body, "request_id": identifier, "stream": True}

    def piece(self, stitch: Stitch, event: Mapping[str, Any], labelled: bool) -> AnswerPiece:
        choices = event.get("choices")
        if not choices:
            return AnswerPiece()
        choice = choices[0]
        tokens = dialect.output_tokens(choice.get("token_ids") or [])
        content = (choice.get("logprobs") or {}).get("content") or []
        if content and len(content) != len(tokens):
            raise MalformedError(f"log-probabilities of {len(content)} tokens beside {len(tokens)} token ids")
        finish = finish_of(choice.get("finish_reason"), choice.get("stop_reason"))
        return AnswerPiece(tokens, content, finish=finish, labels=dialect.labels_of(choice.get("weight_versions")))

    def finish(self, kind: str, detail: Any) -> Finish:
        return Finish(kind, kind, detail if kind == STOP else None)


class Inference(InferenceLegs, Dialect):
    """See Dialect."""

    @classmethod
    def read(cls, body: Mapping[str, Any]) -> ParsedRequest | None:
        where = "sampling_params."
        prompt = dialect.ids(body.get("token_ids"), "token_ids")
        params = dialect.an_object(body.get("sampling_params"), "sampling_params")
        count, seed = dialect.samples(params.get("n"), f"{where}n"), dialect.seed_of(params.get("seed"), f"{where}seed")
        most = dialect.whole_number(params.get("max_tokens"), f"{where}max_tokens", None)
        least = dialect.whole_number(params.get("min_tokens"), f"{where}min_tokens", 0) or 0
        stops = dialect.stop_ids(params.get("stop_token_ids"), f"{where}stop_token_ids")
        name = f"{where}truncate_prompt_tokens"
        prompt, why = dialect.truncated(prompt, params.get("truncate_prompt_tokens"), name)
        reasons = [judge(body, INFERENCE), judge(params, INFERENCE_SAMPLING, where), why]
        singles = [
            Single(prompt, most, least, None if seed is None else seed + sample, stops, False, body, params)
            for sample in range(count)
        ]
        whole = not_streamed(body, INFERENCE) or not_streamed(params, INFERENCE_SAMPLING)
        stream = dialect.truth(body.get("stream"), "stream")
        return ParsedRequest(body, tuple(singles), stream, "; ".join(filter(None, reasons)), whole)

    def chunk(self, number: int, stitch: Stitch, piece: AnswerPiece, finished: bool) -> dict[str, Any]:
        return {
            "request_id": self.identifier,
            "output_mode": "tokens",
            "choices": [self._choice(number, stitch, piece.tokens, piece.records, finished)],
        }

    def closing(self, stitches: Sequence[Stitch]) -> list[dict[str, Any]]:
        options = self.request.body.get("stream_options") or {}
        if not options.get("include_usage"):
            return []
        return [{"request_id": self.identifier, "output_mode": "tokens", "choices": [], "usage": usage_of(stitches)}]

    def whole(self, stitches: Sequence[Stitch]) -> Any:
        choices = [
            self._choice(number, stitch, stitch.tokens, stitch.records, True) for number, stitch in enumerate(stitches)
        ]
        head = {"request_id": self.identifier, "output_mode": "tokens", "model": self.request.body.get("model")}
        return {**head, "created": self.created, "choices": choices, "usage": usage_of(stitches)}

    def _choice(
        self, number: int, stitch: Stitch, tokens: list[int], records: list[Any], finished: bool
    ) -> dict[str, Any]:
        end = stitch.finish if finished else None
        choice: dict[str, Any] = {
            "index": number,
            "token_ids": list(tokens),
            "logprobs": {"content": list(records)} if self._wants_logprobs() else None,
            "finish_reason": end.reason if end else None,
            "stop_reason": end.stop_reason if end else None,
            "weight_versions": None,
        }
        if finished:
            spans = stitch.spans()
            if spans and all(span.exact and span.lowest for span in spans):
                choice["weight_versions"] = [
                    {"version": str(span.lowest.version), "start": span.first, "end": span.first + span.count}
                    for span in spans
                    if span.lowest
                ]
            choice["ckpt_engine"] = self.about_versions(stitch)
        return choice

    def _wants_logprobs(self) -> bool:
        return self.request.singles[0].sampling.get("logprobs") is not None


def usage_of(stitches: Sequence[Stitch]) -> dict[str, int]:
    prompt, output = len(stitches[0].single.prompt), sum(len(stitch.tokens) for stitch in stitches)
    return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
