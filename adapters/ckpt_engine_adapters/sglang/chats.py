"""SGLang's `/v1/chat/completions`: its fields, and how its chats go on by text. Pure.

It streams no ids, so they go on no other way. SGLang opens the assistant's turn itself before it continues a message.
"""

from __future__ import annotations

from ckpt_engine.gateway.chat_text import IDS_ONLY, ChatText
from ckpt_engine.gateway.resumability import (
    ELSEWHERE,
    EXPERTS,
    GRAMMAR,
    NOT_IDS,
    PENALTY,
    STATE,
    TEXT,
    FieldKind,
    Table,
    rules,
)

CHATS: Table = {
    **rules(FieldKind.TRAVELS, "model user temperature top_p top_k min_p stop stop_token_ids ignore_eos no_stop_trim"),
    **rules(FieldKind.TRAVELS, "skip_special_tokens logit_bias lora_path priority extra_key cache_salt session_id"),
    **rules(FieldKind.TRAVELS, "data_parallel_rank routed_dp_rank"),
    **rules(FieldKind.COUNTED, "max_tokens max_completion_tokens min_tokens"),
    **rules(FieldKind.OURS, "stream stream_options seed rid"),
    **rules(FieldKind.RENDERED, "messages tools parallel_tool_calls reasoning_effort chat_template_kwargs"),
    **rules(FieldKind.RENDERED, "continue_final_message separate_reasoning stream_reasoning metadata store"),
    **rules(FieldKind.NEVER, "n", (None, 1), "its samples are not told apart by text"),
    **rules(FieldKind.NEVER, "logprobs top_logprobs return_token_ids return_prompt_token_ids", why=IDS_ONLY),
    **rules(FieldKind.NEVER, "return_meta_info", why=IDS_ONLY),
    **rules(FieldKind.NEVER, "presence_penalty frequency_penalty", why=PENALTY),
    **rules(FieldKind.NEVER, "repetition_penalty", (None, 1, 1.0), PENALTY),
    **rules(FieldKind.NEVER, "stop_regex", why=TEXT),
    **rules(FieldKind.NEVER, "regex ebnf", why=GRAMMAR),
    **rules(FieldKind.NEVER, "response_format", (None, {"type": "text"}), GRAMMAR),
    **rules(FieldKind.NEVER, "tool_choice", (None, "none", "auto"), GRAMMAR),
    **rules(FieldKind.NEVER, "custom_logit_processor custom_params return_hidden_states watermark", why=STATE),
    **rules(FieldKind.NEVER, "return_routed_experts", why=EXPERTS),
    **rules(FieldKind.NEVER, "session_params", why=ELSEWHERE),
    **rules(FieldKind.NEVER, "input_ids", why=NOT_IDS),
}

CHAT_TEXT = ChatText(
    fields=CHATS,
    template=("model", "tools", "tool_choice", "reasoning_effort", "chat_template_kwargs", "continue_final_message"),
    continues={"continue_final_message": True},
    text_name="text",
    detokenize={"skip_special_tokens": False},
    drops=("rid",),
)
