"""Parses requests for tokens, in three forms: this engine's own, SGLang's `/generate`, and `/v1/completions` as vLLM
and SGLang have it. Each form becomes generations; `answers.py` writes the answers.

There is no tokenizer, so prompts are token ids. In the two foreign forms, a field without meaning here is ignored, as
those engines ignore unknown fields. A field that would change the tokens, or asks for more in the answer, is refused
unless its value changes nothing: an answer that silently means something else would be worse than none.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    Tag,
    model_validator,
)

from ckpt_engine_adapters.reference.generation import Generation

MAX_SAMPLES = 1024
"""Most samples of one prompt."""

_SEED_BITS = 62

_NOTHING: tuple[Any, ...] = (None, False, 0, "", [], {})
_UNLIMITED_TOP_K = (None, 0, -1, 1 << 30)
_ONE = (None, 1.0)


def fields(names: str, **neutral: tuple[Any, ...]) -> dict[str, tuple[Any, ...]]:
    """Fields to their values that change nothing."""
    return {**dict.fromkeys(names.split(), _NOTHING), **neutral}


_SGLANG_REFUSED = fields(
    "text input_embeds image_data video_data audio_data session_params lora_path lora_id custom_logit_processor "
    "positional_embed_overrides top_logprobs_num token_ids_logprob return_sampling_mask return_hidden_states "
    "return_routed_experts return_indexer_topk return_entropy max_thinking_tokens",
    logprob_start_len=(None, -1),
)
_SGLANG_SAMPLING_REFUSED = fields(
    "stop stop_regex min_p frequency_penalty presence_penalty min_new_tokens json_schema regex ebnf structural_tag "
    "logit_bias custom_params watermark",
    top_p=_ONE,
    top_k=_UNLIMITED_TOP_K,
    repetition_penalty=_ONE,
    beam_width=(None, 1),
)
_SGLANG_TAKEN = fields(
    "background bootstrap_host bootstrap_pair_key bootstrap_port bootstrap_room cache_salt conversation_id "
    "custom_labels data_parallel_rank disagg_prefill_dp_rank extra_key log_metrics modalities no_logs priority "
    "require_reasoning return_text_in_logprobs routed_dp_rank routed_experts_start_len routing_key session_id"
)
COMPLETION_REFUSED = fields(
    "echo frequency_penalty logit_bias presence_penalty stop suffix use_beam_search min_p min_tokens bad_words "
    "truncate_prompt_tokens allowed_token_ids prompt_logprobs logprob_token_ids prompt_embeds structured_outputs "
    "repetition_detection json_schema regex ebnf lora_path return_hidden_states custom_logit_processor",
    top_p=_ONE,
    top_k=_UNLIMITED_TOP_K,
    repetition_penalty=_ONE,
    length_penalty=_ONE,
    best_of=(None, 1),
    response_format=(None, {"type": "text"}),
    thinking_token_budget=(None, -1),
)
_WITHOUT_STOPS = {**COMPLETION_REFUSED, "min_tokens": (None, 0, 1)}
"""Where no token ends an answer early, each has one token at least."""


def _prompts(value: Any) -> Any:
    """Lists of token ids; one prompt may stand without its outer list."""
    if isinstance(value, str) or (isinstance(value, list) and any(isinstance(part, str) for part in value)):
        raise ValueError("this engine has no tokenizer: give token ids")
    return [value] if isinstance(value, list) and not _is_nested(value) else value


_Prompt = Annotated[list[Annotated[int, Field(strict=True)]], Field(min_length=1)]
_Prompts = Annotated[list[_Prompt], Field(min_length=1), BeforeValidator(_prompts)]
_Seed = Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)]
_Temperature = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]


class GenerateBody(BaseModel):
    """The engine's own form; any other field is refused.

    temperature 0 is greedy; equal seeds draw equal samples from equal weights; a stop token ends the output.
    """

    model_config = ConfigDict(extra="forbid")

    input_ids: list[int] = Field(min_length=1)
    max_tokens: int = Field(default=16, ge=1)
    temperature: _Temperature = 0.0
    seed: int = Field(default=0, ge=0, lt=1 << 63)
    logprobs: bool = False
    stream: bool = False
    stop_token_ids: list[int] = []

    def generations(self, max_positions: int) -> list[Generation]:
        return [
            Generation(
                self.input_ids,
                max_tokens=self.max_tokens,
                temperature=self.temperature,
                seed=self.seed,
                stop_tokens=self.stop_token_ids,
            )
        ]


_COMMON = frozenset({"input_ids", "stream"})
_ONLY_OURS = frozenset(GenerateBody.model_fields) - _COMMON


class SamplingParams(BaseModel):
    """SGLang's, which refuses names that it does not know. max_new_tokens None: as many as the model has room for."""

    model_config = ConfigDict(extra="forbid")

    max_new_tokens: int | None = Field(default=128, ge=1)
    temperature: _Temperature | None = None
    sampling_seed: _Seed | None = None
    stop_token_ids: list[int | None] | None = None
    n: int | None = Field(default=None, ge=1, le=MAX_SAMPLES)
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    stream_interval: int | None = None

    @model_validator(mode="before")
    @classmethod
    def _usable(cls, values: Any) -> Any:
        return without(values, _SGLANG_SAMPLING_REFUSED)


class SglangBody(BaseModel):
    """SGLang's form."""

    model_config = ConfigDict(extra="ignore")

    input_ids: _Prompts
    sampling_params: SamplingParams | list[SamplingParams] | None = None
    return_logprob: bool | list[bool] | None = None
    return_prompt_token_ids: bool | None = None
    stream: bool | None = None
    rid: str | list[str] | None = None
    _nested: bool = PrivateAttr(False)

    @model_validator(mode="wrap")
    @classmethod
    def _checked(cls, values: Any, handler: ModelWrapValidatorHandler[SglangBody]) -> SglangBody:
        misplaced = sorted(_ONLY_OURS & set(values)) if isinstance(values, dict) else []
        if misplaced:
            raise ValueError(f"{', '.join(misplaced)}: SGLang's form has no such field; it has sampling_params")
        body = handler(without(values, _SGLANG_REFUSED))
        body._nested = isinstance(values, dict) and _is_nested(values.get("input_ids"))
        for name in ("sampling_params", "return_logprob", "rid"):
            value = getattr(body, name)
            if isinstance(value, list) and len(value) != len(body.input_ids):
                raise ValueError(f"{name}: {len(value)} for {len(body.input_ids)} prompts")
        if len({params.n or 1 for params in body._sampling()}) > 1:
            raise ValueError("sampling_params: n must be the same for all prompts")
        return body

    @property
    def listed(self) -> bool:
        """Whether the answer is a list: prompts were one, or each has several samples."""
        return self._nested or self.samples > 1

    @property
    def samples(self) -> int:
        """Samples of each prompt."""
        return self._sampling()[0].n or 1

    def _sampling(self) -> list[SamplingParams]:
        params = self.sampling_params or SamplingParams()
        return params if isinstance(params, list) else [params] * len(self.input_ids)

    def generations(self, max_positions: int) -> list[Generation]:
        """Samples of one prompt stand together."""
        return [
            generation
            for prompt, params in zip(self.input_ids, self._sampling(), strict=True)
            for generation in samples(
                prompt,
                params.n or 1,
                params.max_new_tokens or max(1, max_positions - len(prompt)),
                params.temperature,
                params.sampling_seed,
                [token for token in params.stop_token_ids or () if token is not None],
            )
        ]


class StreamOptions(BaseModel):
    include_usage: bool | None = None


class CompletionBody(BaseModel):
    """A body of `/v1/completions`."""

    model_config = ConfigDict(extra="ignore")

    prompt: _Prompts
    model: str | None = None  # None or empty: the one that is served
    max_tokens: int | None = Field(default=16, ge=1)  # None: as many as the model has room for
    temperature: _Temperature | None = None
    seed: _Seed | None = None
    n: int | None = Field(default=None, ge=1, le=MAX_SAMPLES)
    stop_token_ids: list[int] | None = None
    logprobs: int | None = Field(default=None, ge=0, le=1)  # of the chosen tokens
    return_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @model_validator(mode="before")
    @classmethod
    def _usable(cls, values: Any) -> Any:
        stops = isinstance(values, dict) and values.get("stop_token_ids")
        return without(values, COMPLETION_REFUSED if stops else _WITHOUT_STOPS)

    def generations(self, max_positions: int) -> list[Generation]:
        """Samples of one prompt stand together."""
        return [
            generation
            for prompt in self.prompt
            for generation in samples(
                prompt,
                self.n or 1,
                self.max_tokens or max(1, max_positions - len(prompt)),
                self.temperature,
                self.seed,
                self.stop_token_ids or (),
            )
        ]


def _form(value: Any) -> str:
    """The form of a body of /generate: SGLang's if it has a field that only SGLang knows."""
    if isinstance(value, SglangBody) or (isinstance(value, dict) and _is_sglangs(value)):
        return "sglang"
    return "own"


def _is_sglangs(body: Mapping[str, Any]) -> bool:
    only_sglangs = (SglangBody.model_fields.keys() | _SGLANG_REFUSED.keys() | _SGLANG_TAKEN.keys()) - _COMMON
    return _is_nested(body.get("input_ids")) or bool(set(body) & only_sglangs)


def _is_nested(prompts: Any) -> bool:
    return isinstance(prompts, list) and any(isinstance(part, list) for part in prompts)


GenerateForm = Annotated[
    Annotated[GenerateBody, Tag("own")] | Annotated[SglangBody, Tag("sglang")], Discriminator(_form)
]
"""A body of /generate. One with fields of both forms counts as SGLang's, which refuses this engine's fields."""


def samples(
    prompt: Sequence[int],
    count: int,
    max_tokens: int,
    temperature: float | None,
    seed: int | None,
    stop_tokens: Iterable[int],
) -> list[Generation]:
    """Generations for different samples, reproducible with a seed. Without a temperature it is 1, as in the engines."""
    first = secrets.randbits(_SEED_BITS) if seed is None else seed
    return [
        Generation(
            prompt,
            max_tokens=max_tokens,
            temperature=1.0 if temperature is None else temperature,
            seed=first + number,
            stop_tokens=frozenset(stop_tokens),
        )
        for number in range(count)
    ]


def without(values: Any, refused: Mapping[str, tuple[Any, ...]]) -> Any:
    """The fields without those of `refused`; raises ValueError if the value of one of these would change something."""
    if not isinstance(values, dict):
        return values
    for name, neutral in refused.items():
        if name in values and values[name] not in neutral:
            raise ValueError(f"{name}: this engine cannot do that, and the answer would not be what you asked for")
    return {name: value for name, value in values.items() if name not in refused}
