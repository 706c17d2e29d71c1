"""The fields of requests in vLLM's dialects, with what becomes of each when a request is resumed. Pure; what the kinds
mean is gateway/resumability.py's to say."""

from __future__ import annotations

from typing import Any

from ckpt_engine.gateway.resumability import (
    BEAM,
    ELSEWHERE,
    EXPERTS,
    GRAMMAR,
    NOT_IDS,
    NOTHING,
    PARSER,
    PENALTY,
    STATE,
    TEXT,
    Kind,
    Rule,
    Table,
    rules,
)
from ckpt_engine.gateway.stitching import ABORT, ERROR, Finish

_VLLM_SAMPLING: dict[str, Rule] = {
    **rules(Kind.TRAVELS, "temperature top_p top_k min_p stop_token_ids ignore_eos skip_special_tokens"),
    **rules(Kind.TRAVELS, "spaces_between_special_tokens logprobs logit_bias allowed_token_ids logprob_token_ids"),
    **rules(Kind.TRAVELS, "include_stop_str_in_output detokenize stream_interval skip_reading_prefix_cache"),
    **rules(Kind.COUNTED, "max_tokens min_tokens"),
    **rules(Kind.OURS, "n seed truncate_prompt_tokens"),
    **rules(Kind.NEVER, "presence_penalty frequency_penalty", why=PENALTY),
    **rules(Kind.NEVER, "repetition_penalty", (None, 1, 1.0), PENALTY),
    **rules(Kind.NEVER, "stop bad_words", why=TEXT),
    **rules(Kind.NEVER, "structured_outputs", why=GRAMMAR),
    **rules(Kind.NEVER, "repetition_detection extra_args vllm_xargs watermarking", why=STATE),
    **rules(Kind.NEVER, "thinking_token_budget", (None, -1), STATE),
    **rules(Kind.NEVER, "routed_experts_prompt_start return_routed_experts", why=EXPERTS),
    **rules(Kind.WHOLE, "prompt_logprobs", (None,), "engines return them with whole answers only"),
}

COMPLETIONS: Table = {
    **_VLLM_SAMPLING,
    **rules(Kind.OURS, "prompt stream stream_options return_token_ids request_id"),
    **rules(Kind.TRAVELS, "model user priority cache_salt session_id return_tokens_as_token_ids add_special_tokens"),
    **rules(Kind.FIRST, "echo"),
    **rules(Kind.NEVER, "truncation_side", why="the gateway cuts prompts from the left only"),
    **rules(Kind.NEVER, "suffix prompt_embeds mm_processor_kwargs", why=NOT_IDS),
    **rules(Kind.NEVER, "use_beam_search best_of", (*NOTHING, 1), BEAM),
    **rules(Kind.NEVER, "length_penalty", (None, 1, 1.0), BEAM),
    **rules(Kind.NEVER, "response_format", (None, {"type": "text"}), GRAMMAR),
    **rules(Kind.NEVER, "guided_json guided_regex guided_choice guided_grammar json_schema regex ebnf", why=GRAMMAR),
    **rules(Kind.NEVER, "logits_processors custom_logit_processor return_hidden_states", why=STATE),
    **rules(Kind.NEVER, "kv_transfer_params ec_transfer_params", why=ELSEWHERE),
}
"""`/v1/completions`, as vLLM has it."""

INFERENCE: Table = {
    **rules(Kind.OURS, "token_ids stream stream_options request_id sampling_params"),
    **rules(Kind.TRAVELS, "model priority cache_salt token_offsets"),
    **rules(Kind.WHOLE, "return_token_ids"),
    **rules(Kind.NEVER, "features content_parts", why=NOT_IDS),
    **rules(Kind.NEVER, "output_mode", (None, "tokens"), TEXT),
    **rules(Kind.NEVER, "reasoning_ended reasoning_parser_kwargs", why=PARSER),
    **rules(Kind.NEVER, "kv_transfer_params ec_transfer_params", why=ELSEWHERE),
}
"""vLLM's `/inference/v1/generate`, beside its `sampling_params`."""

INFERENCE_SAMPLING: Table = {**_VLLM_SAMPLING, **rules(Kind.OURS, "output_kind")}


def finish_of(reason: Any, stop_reason: Any) -> Finish | None:
    """The end of a sample, in the words of vLLM's routes; None: it goes on."""
    if reason is None:
        return None
    kind = {"abort": ABORT, "error": ERROR}.get(str(reason), str(reason))
    return Finish(kind, reason, stop_reason)
