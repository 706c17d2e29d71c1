"""Which fields of a request let it be resumed, one table a dialect. Pure.

A resumed leg asks for the prompt and the tokens so far. That is the same request only if nothing that chooses a token
looks at where the output began. Each field that a caller may set stands in a table with what becomes of it on later
legs; one that stands in none travels on and makes the request not resumable, since nobody knows what it does.
`docs/gateway.md` has the same table for people, and a test compares the two.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any


class Kind(Enum):
    """What becomes of a field."""

    TRAVELS = "goes on every leg as it came"
    COUNTED = "reduced by the tokens so far"
    FIRST = "goes on the first leg only"
    OURS = "the gateway sets it on each leg, and answers it itself"
    NEVER = "makes the request not resumable, unless it has a neutral value"
    WHOLE = "makes the request one that is passed on as it came: engines do not stream what it asks for"


NOTHING: tuple[Any, ...] = (None, False, 0, "", [], {})


@dataclass(frozen=True)
class Rule:
    """What becomes of one field of a request on later legs.

    neutral: values with which a field of NEVER or WHOLE changes nothing. why: in words, for the answer.
    """

    kind: Kind
    neutral: tuple[Any, ...] = NOTHING
    why: str = ""


Table = Mapping[str, Rule]


def _rules(kind: Kind, names: str, neutral: tuple[Any, ...] = NOTHING, why: str = "") -> dict[str, Rule]:
    return dict.fromkeys(names.split(), Rule(kind, neutral, why))


_PENALTY = "it counts the tokens of the output, and those so far would count as prompt"
_TEXT = "it looks at text, which begins anew with each leg"
_GRAMMAR = "its grammar stands where the output is, and a leg would begin it anew"
_STATE = "what it keeps from token to token begins anew with each leg"
_EXPERTS = "what engines return of experts is not put together"
_BEAM = "beams have no tokens so far until all of them end"
_NOT_IDS = "the prompt is not token ids alone"
_PARSER = "a parser's state is not known to the gateway"
_ELSEWHERE = "it ties the request to memory of one engine"

_VLLM_SAMPLING: dict[str, Rule] = {
    **_rules(Kind.TRAVELS, "temperature top_p top_k min_p stop_token_ids ignore_eos skip_special_tokens"),
    **_rules(Kind.TRAVELS, "spaces_between_special_tokens logprobs logit_bias allowed_token_ids logprob_token_ids"),
    **_rules(Kind.TRAVELS, "include_stop_str_in_output detokenize stream_interval skip_reading_prefix_cache"),
    **_rules(Kind.COUNTED, "max_tokens min_tokens"),
    **_rules(Kind.OURS, "n seed truncate_prompt_tokens"),
    **_rules(Kind.NEVER, "presence_penalty frequency_penalty", why=_PENALTY),
    **_rules(Kind.NEVER, "repetition_penalty", (None, 1, 1.0), _PENALTY),
    **_rules(Kind.NEVER, "stop bad_words", why=_TEXT),
    **_rules(Kind.NEVER, "structured_outputs", why=_GRAMMAR),
    **_rules(Kind.NEVER, "repetition_detection extra_args vllm_xargs watermarking", why=_STATE),
    **_rules(Kind.NEVER, "thinking_token_budget", (None, -1), _STATE),
    **_rules(Kind.NEVER, "routed_experts_prompt_start return_routed_experts", why=_EXPERTS),
    **_rules(Kind.WHOLE, "prompt_logprobs", (None,), "engines return them with whole answers only"),
}

COMPLETIONS: Table = {
    **_VLLM_SAMPLING,
    **_rules(Kind.OURS, "prompt stream stream_options return_token_ids request_id"),
    **_rules(Kind.TRAVELS, "model user priority cache_salt session_id return_tokens_as_token_ids add_special_tokens"),
    **_rules(Kind.FIRST, "echo"),
    **_rules(Kind.NEVER, "truncation_side", why="the gateway cuts prompts from the left only"),
    **_rules(Kind.NEVER, "suffix prompt_embeds mm_processor_kwargs", why=_NOT_IDS),
    **_rules(Kind.NEVER, "use_beam_search best_of", (*NOTHING, 1), _BEAM),
    **_rules(Kind.NEVER, "length_penalty", (None, 1, 1.0), _BEAM),
    **_rules(Kind.NEVER, "response_format", (None, {"type": "text"}), _GRAMMAR),
    **_rules(Kind.NEVER, "guided_json guided_regex guided_choice guided_grammar json_schema regex ebnf", why=_GRAMMAR),
    **_rules(Kind.NEVER, "logits_processors custom_logit_processor return_hidden_states", why=_STATE),
    **_rules(Kind.NEVER, "kv_transfer_params ec_transfer_params", why=_ELSEWHERE),
}
"""`/v1/completions`, as vLLM has it."""

INFERENCE: Table = {
    **_rules(Kind.OURS, "token_ids stream stream_options request_id sampling_params"),
    **_rules(Kind.TRAVELS, "model priority cache_salt token_offsets"),
    **_rules(Kind.WHOLE, "return_token_ids"),
    **_rules(Kind.NEVER, "features content_parts", why=_NOT_IDS),
    **_rules(Kind.NEVER, "output_mode", (None, "tokens"), _TEXT),
    **_rules(Kind.NEVER, "reasoning_ended reasoning_parser_kwargs", why=_PARSER),
    **_rules(Kind.NEVER, "kv_transfer_params ec_transfer_params", why=_ELSEWHERE),
}
"""vLLM's `/inference/v1/generate`, beside its `sampling_params`."""

INFERENCE_SAMPLING: Table = {**_VLLM_SAMPLING, **_rules(Kind.OURS, "output_kind")}

SGLANG: Table = {
    **_rules(Kind.OURS, "input_ids stream rid sampling_params return_prompt_token_ids"),
    **_rules(Kind.TRAVELS, "return_logprob top_logprobs_num token_ids_logprob return_text_in_logprobs log_metrics"),
    **_rules(
        Kind.TRAVELS, "priority extra_key cache_salt session_id routing_key conversation_id no_logs custom_labels"
    ),
    **_rules(Kind.TRAVELS, "lora_path modalities background routed_dp_rank data_parallel_rank require_reasoning"),
    **_rules(Kind.FIRST, "logprob_start_len"),
    **_rules(Kind.NEVER, "text input_embeds image_data video_data audio_data", why=_NOT_IDS),
    **_rules(Kind.NEVER, "session_params bootstrap_host bootstrap_port bootstrap_room", why=_ELSEWHERE),
    **_rules(Kind.NEVER, "custom_logit_processor return_hidden_states return_sampling_mask watermark", why=_STATE),
    **_rules(Kind.NEVER, "return_routed_experts routed_experts_start_len return_indexer_topk", why=_EXPERTS),
}
"""SGLang's `/generate`, beside its `sampling_params`."""

SGLANG_SAMPLING: Table = {
    **_rules(Kind.TRAVELS, "temperature top_p top_k min_p stop_token_ids ignore_eos skip_special_tokens logit_bias"),
    **_rules(Kind.TRAVELS, "spaces_between_special_tokens no_stop_trim stream_interval"),
    **_rules(Kind.COUNTED, "max_new_tokens min_new_tokens"),
    **_rules(Kind.OURS, "n sampling_seed"),
    **_rules(Kind.NEVER, "presence_penalty frequency_penalty", why=_PENALTY),
    **_rules(Kind.NEVER, "repetition_penalty", (None, 1, 1.0), _PENALTY),
    **_rules(Kind.NEVER, "stop stop_regex", why=_TEXT),
    **_rules(Kind.NEVER, "json_schema regex ebnf structural_tag", why=_GRAMMAR),
    **_rules(Kind.NEVER, "custom_params max_thinking_tokens", why=_STATE),
    **_rules(Kind.NEVER, "beam_width", (None, 1), _BEAM),
}


def judge(fields: Mapping[str, Any], table: Table, where: str = "") -> str:
    """Why a request with these fields is not resumable; empty: it is. where: what the fields stand in, with a dot."""
    reasons = []
    for name, value in fields.items():
        rule = table.get(name)
        if rule is None:
            reasons.append(f"{where}{name}: the gateway does not know it")
        elif rule.kind is Kind.NEVER and not is_neutral(value, rule.neutral):
            reasons.append(f"{where}{name}: {rule.why}")
    return "; ".join(sorted(reasons))


def not_streamed(fields: Mapping[str, Any], table: Table) -> bool:
    """Whether an engine answers it whole only."""
    rules = ((value, table.get(name)) for name, value in fields.items())
    return any(rule and rule.kind is Kind.WHOLE and not is_neutral(value, rule.neutral) for value, rule in rules)


def travelling(fields: Mapping[str, Any], table: Table, first: bool) -> dict[str, Any]:
    """The fields that go on a leg as they came. first: no token has come yet."""
    kept = {Kind.TRAVELS, Kind.NEVER, Kind.WHOLE} | ({Kind.FIRST} if first else set())
    return {name: value for name, value in fields.items() if name not in table or table[name].kind in kept}


def is_neutral(value: Any, neutral: Iterable[Any]) -> bool:
    """Whether the value is one of these; a number is no truth value here."""
    return any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in neutral)
