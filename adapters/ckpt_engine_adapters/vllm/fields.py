"""The fields of requests in vLLM's dialects, and how resumed legs treat each. Pure; gateway/resumability.py defines the
kinds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckpt_engine.gateway.chat_text import IDS_ONLY
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
    FieldKind,
    FieldRule,
    Table,
    rules,
)
from ckpt_engine.gateway.single import Single, leg_seed
from ckpt_engine.gateway.stitching import ABORT, ERROR, Finish

PROMPT_TEXT = "the answer has the prompt's text, which its tokens' route does not send"
NOT_TOKENIZED = "the route that tells what a prompt is made of does not know it"
OTHER_LOGPROBS = "the route that turns tokens into a chat does not know it"

_VLLM_SAMPLING: dict[str, FieldRule] = {
    **rules(FieldKind.TRAVELS, "temperature top_p top_k min_p stop_token_ids ignore_eos skip_special_tokens"),
    **rules(FieldKind.TRAVELS, "spaces_between_special_tokens logprobs logit_bias allowed_token_ids logprob_token_ids"),
    **rules(FieldKind.TRAVELS, "include_stop_str_in_output detokenize stream_interval skip_reading_prefix_cache"),
    **rules(FieldKind.COUNTED, "max_tokens min_tokens"),
    **rules(FieldKind.OURS, "n seed truncate_prompt_tokens"),
    **rules(FieldKind.NEVER, "presence_penalty frequency_penalty", why=PENALTY),
    **rules(FieldKind.NEVER, "repetition_penalty", (None, 1, 1.0), PENALTY),
    **rules(FieldKind.NEVER, "stop bad_words", why=TEXT),
    **rules(FieldKind.NEVER, "structured_outputs", why=GRAMMAR),
    **rules(FieldKind.NEVER, "repetition_detection extra_args vllm_xargs watermarking", why=STATE),
    **rules(FieldKind.NEVER, "thinking_token_budget", (None, -1), STATE),
    **rules(FieldKind.NEVER, "routed_experts_prompt_start return_routed_experts", why=EXPERTS),
    **rules(FieldKind.WHOLE, "prompt_logprobs", (None,), "engines return them with whole answers only"),
}

COMPLETIONS: Table = {
    **_VLLM_SAMPLING,
    **rules(FieldKind.OURS, "prompt stream stream_options return_token_ids request_id"),
    **rules(
        FieldKind.TRAVELS, "model user priority cache_salt session_id return_tokens_as_token_ids add_special_tokens"
    ),
    **rules(FieldKind.FIRST, "echo"),
    **rules(FieldKind.NEVER, "truncation_side", why="the gateway cuts prompts from the left only"),
    **rules(FieldKind.NEVER, "suffix prompt_embeds mm_processor_kwargs", why=NOT_IDS),
    **rules(FieldKind.NEVER, "use_beam_search best_of", (*NOTHING, 1), BEAM),
    **rules(FieldKind.NEVER, "length_penalty", (None, 1, 1.0), BEAM),
    **rules(FieldKind.NEVER, "response_format", (None, {"type": "text"}), GRAMMAR),
    **rules(
        FieldKind.NEVER, "guided_json guided_regex guided_choice guided_grammar json_schema regex ebnf", why=GRAMMAR
    ),
    **rules(FieldKind.NEVER, "logits_processors custom_logit_processor return_hidden_states", why=STATE),
    **rules(FieldKind.NEVER, "kv_transfer_params ec_transfer_params", why=ELSEWHERE),
}
"""`/v1/completions`, as vLLM has it."""

INFERENCE: Table = {
    **rules(FieldKind.OURS, "token_ids stream stream_options request_id sampling_params"),
    **rules(FieldKind.TRAVELS, "model priority cache_salt token_offsets"),
    **rules(FieldKind.WHOLE, "return_token_ids"),
    **rules(FieldKind.NEVER, "features content_parts", why=NOT_IDS),
    **rules(FieldKind.NEVER, "output_mode", (None, "tokens"), TEXT),
    **rules(FieldKind.NEVER, "reasoning_ended reasoning_parser_kwargs", why=PARSER),
    **rules(FieldKind.NEVER, "kv_transfer_params ec_transfer_params", why=ELSEWHERE),
}
"""vLLM's `/inference/v1/generate`, beside its `sampling_params`."""

INFERENCE_SAMPLING: Table = {**_VLLM_SAMPLING, **rules(FieldKind.OURS, "output_kind")}

CHATS: Table = {
    **_VLLM_SAMPLING,
    **rules(FieldKind.TRAVELS, "model user priority cache_salt session_id top_logprobs stop"),
    **rules(FieldKind.COUNTED, "max_completion_tokens"),
    **rules(FieldKind.OURS, "stream stream_options request_id return_token_ids"),
    **rules(FieldKind.RENDERED, "messages tools parallel_tool_calls reasoning_effort include_reasoning documents"),
    **rules(FieldKind.RENDERED, "add_generation_prompt continue_final_message add_special_tokens chat_template"),
    **rules(FieldKind.RENDERED, "chat_template_kwargs truncate_prompt_tokens truncation_side return_token_offsets"),
    **rules(FieldKind.RENDERED, "metadata store service_tier safety_identifier prompt_cache_key"),
    **rules(FieldKind.NEVER, "tool_choice", (None, "none", "auto"), GRAMMAR),
    **rules(FieldKind.NEVER, "response_format", (None, {"type": "text"}), GRAMMAR),
    **rules(FieldKind.NEVER, "use_beam_search", why=BEAM),
    **rules(FieldKind.NEVER, "length_penalty", (None, 1, 1.0), BEAM),
    **rules(FieldKind.NEVER, "echo return_prompt_text", why=PROMPT_TEXT),
    **rules(FieldKind.NEVER, "logprob_token_ids return_tokens_as_token_ids", why=OTHER_LOGPROBS),
    **rules(FieldKind.NEVER, "mm_processor_kwargs media_io_kwargs mm_payload return_mm_kwargs", why=NOT_IDS),
    **rules(FieldKind.NEVER, "kv_transfer_params ec_transfer_params", why=ELSEWHERE),
}
"""vLLM's `/v1/chat/completions`."""


CHATS_BY_TEXT: Table = {
    **CHATS,
    **rules(FieldKind.OURS, "seed"),
    **rules(FieldKind.NEVER, "n", (None, 1), "its samples are not told apart by text"),
    **rules(FieldKind.NEVER, "logprobs top_logprobs return_token_ids return_token_offsets", why=IDS_ONLY),
    **rules(FieldKind.NEVER, "add_generation_prompt", (None, True), NOT_TOKENIZED),
    **rules(FieldKind.NEVER, "reasoning_effort documents truncate_prompt_tokens truncation_side", why=NOT_TOKENIZED),
}
"""The same where a chat goes on by text."""


def finish_of(reason: Any, stop_reason: Any) -> Finish | None:
    """The end of a sample, by the fields of vLLM's routes; None: it has not ended."""
    if reason is None:
        return None
    kind = {"abort": ABORT, "error": ERROR}.get(str(reason), str(reason))
    return Finish(kind, reason, stop_reason)


def counted(single: Single, fields: Mapping[str, Any], offset: int, resumable: bool) -> dict[str, Any]:
    """The common fields of both dialects for a leg that begins after `offset` tokens: minimum tokens, and seed.

    fields: of the caller's request, where these stand. truncate_prompt_tokens is passed on only if the request is not
    resumable, so that its only leg has the engine truncate the prompt.
    """
    leg_fields: dict[str, Any] = {}
    if single.min_tokens:
        leg_fields["min_tokens"] = max(0, single.min_tokens - offset)
    if single.seed is not None:
        leg_fields["seed"] = leg_seed(single.seed, offset)
    if "truncate_prompt_tokens" in fields and not resumable:
        leg_fields["truncate_prompt_tokens"] = fields["truncate_prompt_tokens"]
    return leg_fields
