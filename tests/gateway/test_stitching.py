"""Every row of the table in docs/gateway.md: an answer in legs is the answer at once, wherever the legs were cut."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_engine.gateway import dialect as dialects
from ckpt_engine.gateway.dialect import Dialect
from ckpt_engine.gateway.refusals import RefusedError
from ckpt_engine.gateway.resumability import FieldKind
from ckpt_engine.gateway.single import leg_seed
from ckpt_engine.gateway.stitching import ABORT, AnswerPiece, OverrunError, Stitch
from ckpt_engine.gateway.versions import GatewayVersion
from ckpt_engine_adapters.reference.sampling import choose
from ckpt_engine_adapters.sglang import chats as sglang_chats
from ckpt_engine_adapters.sglang import generate
from ckpt_engine_adapters.sglang.generate import Generate
from ckpt_engine_adapters.vllm import fields
from ckpt_engine_adapters.vllm.completions import Completions
from ckpt_engine_adapters.vllm.inference import Inference
from tests.gateway import model_engine

Engine = Callable[[Mapping[str, Any], model_engine.Chunks, int], Iterator[dict[str, Any]]]


def body_of(dialect: type[Dialect], **sampling: Any) -> dict[str, Any]:
    """A request for tokens after [1, 2, 3]."""
    if dialect is Completions:
        return {"prompt": [1, 2, 3], "return_token_ids": True, "logprobs": 1, "max_tokens": 24, **sampling}
    if dialect is Inference:
        return {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 24, "logprobs": 0, **sampling}}
    renamed = {
        {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens"}.get(k, k): v for k, v in sampling.items()
    }
    params = {"max_new_tokens": 24, **renamed}
    return {"input_ids": [1, 2, 3], "sampling_params": params, "return_logprob": True}


ENGINES: dict[type[Dialect], Engine] = {
    Completions: model_engine.completions,
    Inference: model_engine.inference,
    Generate: model_engine.sglang,
}
DIALECTS = sorted(ENGINES, key=lambda each: each.__name__)


def in_legs(dialect: type[Dialect], body: dict[str, Any], cuts: Sequence[int], chunks: Sequence[int]) -> Any:
    """The answer, whole. cuts: after so many events each leg breaks off, the last leg does not. chunks: tokens of each
    event, again and again. Leg number k is made by version k."""
    asked = dialect.read(body)
    assert asked is not None
    made = dialect(asked, "id", 0)
    stitches = [Stitch(single) for single in asked.singles]
    for number, stitch in enumerate(stitches):
        told: list[int] = []
        for version, cut in enumerate([*cuts, None]):
            leg = stitch.begin(f"replica-{version}")
            leg.bounds = lambda version=version: (GatewayVersion(version), GatewayVersion(version))  # type: ignore[misc]
            events = ENGINES[dialect](
                made.leg_body(stitch, f"leg-{version}"), lambda count: split(count, chunks), version
            )
            for place, event in enumerate(events):
                if place == cut:
                    break
                piece = stitch.take(made.piece(stitch, event, False))
                told += piece.tokens
                made.chunk(number, stitch, piece, stitch.finish is not None)
            if stitch.broken(made.finish):
                break
        assert told == stitch.tokens, "what a stream tells is what a whole answer has"
    return made.whole(stitches)


def split(count: int, chunks: Sequence[int]) -> list[int]:
    sizes, place = [], 0
    while count > 0:
        sizes.append(min(count, chunks[place % len(chunks)]))
        count -= sizes[-1]
        place += 1
    return sizes


def bare(answer: Any) -> Any:
    """Without what says that there were legs."""
    if isinstance(answer, dict):
        left = {name: bare(value) for name, value in answer.items() if name not in UNEQUAL}
        return {name: value for name, value in left.items() if name != "matched" or value is not None}
    return [bare(part) for part in answer] if isinstance(answer, list) else answer


UNEQUAL = {"ckpt_engine", "weight_versions", "weight_version"}

cuts = st.lists(st.integers(0, 12), max_size=4)
sizes = st.lists(st.integers(1, 5), min_size=1, max_size=4)


@pytest.mark.parametrize("dialect", DIALECTS)
@settings(max_examples=40, deadline=None)
@given(cuts=cuts, chunks=sizes, most=st.integers(1, 24))
def test_max_tokens_is_reduced(dialect: type[Dialect], cuts: list[int], chunks: list[int], most: int) -> None:
    body = body_of(dialect, max_tokens=most)
    assert bare(in_legs(dialect, body, cuts, chunks)) == bare(in_legs(dialect, body, [], [1]))


@pytest.mark.parametrize("dialect", DIALECTS)
@settings(max_examples=40, deadline=None)
@given(cuts=cuts, chunks=sizes, least=st.integers(0, 20))
def test_min_tokens_is_reduced(dialect: type[Dialect], cuts: list[int], chunks: list[int], least: int) -> None:
    body = body_of(dialect, min_tokens=least, stop_token_ids=list(range(0, model_engine.VOCABULARY, 4)))
    answer = in_legs(dialect, body, cuts, chunks)
    assert bare(answer) == bare(in_legs(dialect, body, [], [1]))
    tokens = answer["output_ids"] if dialect is Generate else answer["choices"][0]["token_ids"]
    assert len(tokens) > least


@settings(max_examples=40, deadline=None)
@given(cuts=cuts, chunks=sizes, most=st.integers(0, 24))
def test_an_echo_is_of_the_first_leg_that_says_anything(cuts: list[int], chunks: list[int], most: int) -> None:
    """As vLLM has it: log-probabilities of the prompt stand before the output's, token ids are the output's alone."""
    body = body_of(Completions, echo=True, max_tokens=most)
    answer = in_legs(Completions, body, cuts, chunks)
    assert bare(answer) == bare(in_legs(Completions, body, [], [1]))
    (choice,) = answer["choices"]
    assert (len(choice["token_ids"]), answer["usage"]["completion_tokens"]) == (most, most)
    logprobs = choice["logprobs"]
    assert logprobs["tokens"][:3] == ["<1>", "<2>", "<3>"]
    assert [len(values) for values in logprobs.values()] == [3 + most] * 4
    assert logprobs["text_offset"] == [
        3 * place if place < 3 else logprobs["text_offset"][place] for place in range(3 + most)
    ]
    said = choice["ckpt_engine"]["prompt"]
    first = next((place for place, cut in enumerate(cuts) if cut), len(cuts))
    assert (said["first"], said["count"], said["version"]) == (0, 3, first)


@settings(max_examples=40, deadline=None)
@given(cuts=cuts, chunks=sizes)
def test_log_probabilities_of_the_prompt_are_of_the_first_leg_only(cuts: list[int], chunks: list[int]) -> None:
    body = {**body_of(Generate), "logprob_start_len": 1}
    answer = in_legs(Generate, body, cuts, chunks)
    assert bare(answer) == bare(in_legs(Generate, body, [], [1]))
    assert [entry[1] for entry in answer["meta_info"]["input_token_logprobs"]] == [2, 3]
    said = answer["meta_info"]["ckpt_engine"]["prompt"]
    first = next((place for place, cut in enumerate(cuts) if cut), len(cuts))
    assert (said["first"], said["count"], said["version"]) == (1, 2, first)


@settings(max_examples=40, deadline=None)
@given(cuts=cuts, chunks=sizes, to=st.integers(1, 5))
def test_a_prompt_that_is_truncated_stays_so(cuts: list[int], chunks: list[int], to: int) -> None:
    body = body_of(Completions, truncate_prompt_tokens=to)
    same = body_of(Completions) | {"prompt": [1, 2, 3][-to:]}
    assert bare(in_legs(Completions, body, cuts, chunks)) == bare(in_legs(Completions, same, [], [1]))


@pytest.mark.parametrize("dialect", DIALECTS)
@settings(max_examples=25, deadline=None)
@given(cuts=cuts, chunks=sizes, count=st.integers(2, 3))
def test_several_samples_are_split(dialect: type[Dialect], cuts: list[int], chunks: list[int], count: int) -> None:
    body = body_of(dialect, n=count, seed=5) if dialect is not Generate else body_of(dialect, n=count, sampling_seed=5)
    asked = dialect.read(body)
    assert asked is not None
    assert [single.seed for single in asked.singles] == list(range(5, 5 + count))
    assert bare(in_legs(dialect, body, cuts, chunks)) == bare(in_legs(dialect, body, [], [1]))


@pytest.mark.parametrize("dialect", DIALECTS)
@settings(max_examples=25, deadline=None)
@given(cuts=cuts, chunks=sizes)
def test_each_token_is_under_the_leg_that_made_it(dialect: type[Dialect], cuts: list[int], chunks: list[int]) -> None:
    answer = in_legs(dialect, body_of(dialect), cuts, chunks)
    said = answer["meta_info"]["ckpt_engine"] if dialect is Generate else answer["choices"][0]["ckpt_engine"]
    assert [span["first"] for span in said["spans"]] == [
        sum(span["count"] for span in said["spans"][:place]) for place in range(len(said["spans"]))
    ]
    assert sum(span["count"] for span in said["spans"]) == 24
    made = [span["min_version"] for span in said["spans"]]
    assert made == sorted(set(made))
    assert (said["min_global_steps"], said["max_global_steps"], said["global_steps"]) == (made[0], made[-1], made[-1])


def test_events_that_do_not_repeat_the_tokens_before_are_read_alike() -> None:
    asked = Generate.read(body_of(Generate))
    assert asked is not None
    made, stitch = Generate(asked, "id", 0), Stitch(asked.singles[0])
    stitch.begin("one")
    for event in model_engine.sglang(made.leg_body(stitch, "leg"), lambda count: split(count, [3]), 0, repeats=False):
        stitch.take(made.piece(stitch, event, False))
    assert bare(made.whole([stitch])) == bare(in_legs(Generate, body_of(Generate), [], [1]))


NEVER = [
    (Completions, "presence_penalty", 0.5),
    (Completions, "frequency_penalty", -0.5),
    (Completions, "repetition_penalty", 1.1),
    (Completions, "response_format", {"type": "json_object"}),
    (Completions, "structured_outputs", {"regex": "a*"}),
    (Completions, "use_beam_search", True),
    (Completions, "stop", ["\n"]),
    (Completions, "bad_words", ["no"]),
    (Completions, "truncate_prompt_tokens", -1),
    (Completions, "a_field_of_tomorrow", 1),
    (Inference, "presence_penalty", 0.5),
    (Inference, "extra_args", {"mine": 1}),
    (Inference, "thinking_token_budget", 5),
    (Generate, "frequency_penalty", 0.5),
    (Generate, "regex", "a*"),
    (Generate, "custom_params", {"mine": 1}),
    (Generate, "a_field_of_tomorrow", 1),
]


@pytest.mark.parametrize(("dialect", "name", "value"), NEVER)
def test_what_is_never_resumed_says_why_and_travels_on(dialect: type[Dialect], name: str, value: Any) -> None:
    asked = dialect.read(body_of(dialect, **{name: value}))
    assert asked is not None
    assert name in asked.not_resumable
    body = dialect(asked, "id", 0).leg_body(Stitch(asked.singles[0]), "leg")
    assert body.get(name, body.get("sampling_params", {}).get(name)) == value


@pytest.mark.parametrize("dialect", DIALECTS)
def test_values_that_change_nothing_keep_it_resumable(dialect: type[Dialect]) -> None:
    neutral = {"presence_penalty": 0.0, "frequency_penalty": 0, "repetition_penalty": 1.0, "stop": None}
    asked = dialect.read(body_of(dialect, **neutral))
    assert asked is not None
    assert asked.not_resumable == ""


def test_a_seed_is_never_used_twice() -> None:
    """At temperature 1 a leg with the caller's seed would draw the same numbers again for other tokens."""
    seen = {leg_seed(7, offset) for offset in range(200)}
    assert len(seen) == 200
    assert leg_seed(7, 0) == 7
    assert leg_seed(None, 5) is None
    assert all(seed is not None and 0 <= seed < 1 << 62 for seed in seen)
    asked = Completions.read(body_of(Completions, seed=7, temperature=1.0))
    assert asked is not None
    made, stitch = Completions(asked, "id", 0), Stitch(asked.singles[0])
    assert made.leg_body(stitch, "one")["seed"] == 7
    stitch.begin("one")
    stitch.take(AnswerPiece([4, 5], [{}, {}]))
    assert made.leg_body(stitch, "two")["seed"] == leg_seed(7, 2)


def test_a_stop_token_below_the_least_number_ends_nothing_after_a_break() -> None:
    asked = Completions.read(body_of(Completions, min_tokens=3, stop_token_ids=[9]))
    assert asked is not None
    made, stitch = Completions(asked, "id", 0), Stitch(asked.singles[0])
    for tokens, over in (([4, 9], False), ([9], False), ([9], True)):
        stitch.begin("one")
        stitch.take(AnswerPiece(tokens))
        assert stitch.broken(made.finish) is over
    assert stitch.finish is not None
    assert (stitch.finish.kind, stitch.finish.stop_reason) == ("stop", 9)


def test_tokens_that_are_taken_back_are_in_no_span() -> None:
    asked = Completions.read(body_of(Completions))
    assert asked is not None
    stitch = Stitch(asked.singles[0])
    stitch.begin("one")
    stitch.take(AnswerPiece([4, 5], [{}, {}]))
    stitch.begin("two")
    stitch.take(AnswerPiece([6, 7, 8], [{}, {}, {}]))
    stitch.cut(3)
    assert (stitch.tokens, len(stitch.records)) == ([4, 5, 6], 3)
    assert [leg.count for leg in stitch.legs] == [2, 1]
    assert sum(span.count for span in stitch.spans()) == 3
    stitch.cut(3)
    assert sum(span.count for span in stitch.spans()) == 3


def test_an_abort_is_no_end_and_a_lost_last_event_is_one() -> None:
    asked = Completions.read(body_of(Completions, max_tokens=2, stop_token_ids=[9]))
    assert asked is not None
    made, stitch = Completions(asked, "id", 0), Stitch(asked.singles[0])
    stitch.begin("one")
    event = {"choices": [{"index": 0, "text": "", "token_ids": [4], "finish_reason": "abort"}]}
    piece = stitch.take(made.piece(stitch, event, False))
    assert piece.finish is not None
    assert piece.finish.kind == ABORT
    assert stitch.finish is None
    assert not stitch.broken(made.finish)
    stitch.take(AnswerPiece([5]))
    assert stitch.broken(made.finish)
    assert stitch.finish is not None
    assert stitch.finish.kind == "length"
    with pytest.raises(OverrunError, match="1 tokens"):
        stitch.take(AnswerPiece([6]))
    assert stitch.tokens == [4, 5]


@pytest.mark.parametrize(
    ("dialect", "body", "why"),
    [
        (Completions, {"prompt": []}, "at least one token id"),
        (Completions, {"prompt": {"ids": [1]}}, "at least one token id"),
        (Completions, {"prompt": [1, -1]}, "number 1 of it is -1"),
        (Completions, {"prompt": [1, True]}, "number 1 of it is true"),
        (Completions, {"prompt": [1], "n": 0}, "n: must be an integer of 1 or more, not 0"),
        (Completions, {"prompt": [1], "n": 2000}, "the most of one request"),
        (Completions, {"prompt": [[1]] * 100, "n": 100}, "the most of one request"),
        (Completions, {"prompt": [1], "max_tokens": "many"}, "max_tokens"),
        (Completions, {"prompt": [1], "stream": "yes"}, "true or false"),
        (Inference, {"token_ids": "text"}, "at least one token id"),
        (Inference, {"token_ids": [1], "sampling_params": []}, "an object"),
        (Generate, {}, "at least one token id"),
        (Generate, {"input_ids": [[1], [2]], "sampling_params": [{}]}, "1 for 2 prompts"),
    ],
)
def test_what_cannot_be_is_refused_before_a_replica_hears_of_it(
    dialect: type[Dialect], body: dict[str, Any], why: str
) -> None:
    with pytest.raises(RefusedError, match=re.escape(why)) as caught:
        dialect.read(body)
    assert caught.value.status == 400


def test_as_many_prompts_and_samples_as_are_allowed_and_not_one_more() -> None:
    most = dialects.SAMPLES
    for prompts, each in ((most, 1), (1, most)):
        asked = Completions.read({"prompt": [[1]] * prompts, "n": each, "max_tokens": 1})
        assert asked is not None
        assert len(asked.singles) == most
        more = {"prompt": [[1]] * (prompts + (each == 1)), "n": each + (prompts == 1), "max_tokens": 1}
        with pytest.raises(RefusedError, match=f"{most + 1} .* {most} are the most"):
            Completions.read(more)


def test_texts_are_passed_on() -> None:
    assert Completions.read({"prompt": "Call me"}) is None
    assert Generate.read({"text": "Call me"}) is None


def test_the_page_has_the_tables() -> None:
    """docs/gateway.md names every field of every table under what becomes of it."""
    page = (Path(__file__).parents[2] / "docs" / "gateway.md").read_text()
    rows = {
        FieldKind(match[1]): set(re.findall(r"`(\w+)`", match[2]))
        for match in re.finditer(r"^\| ([^|]+) \| (.+) \|$", page, re.M)
        if match[1] in {kind.value for kind in FieldKind}
    }
    tables = [
        fields.COMPLETIONS,
        fields.INFERENCE,
        fields.INFERENCE_SAMPLING,
        fields.CHATS,
        fields.CHATS_BY_TEXT,
        sglang_chats.CHATS,
        generate.FIELDS,
        generate.SAMPLING,
    ]
    for kind in FieldKind:
        assert rows[kind] == {name for table in tables for name, rule in table.items() if rule.kind is kind}


SAMPLES = 2000


def pairs(resumed: bool) -> list[int]:
    """How often each pair of tokens comes out at temperature 1, of four tokens, by the reference engine's sampler; the
    second one in a leg of its own, or not."""
    logits = torch.tensor([0.0, 0.5, 1.0, 1.5])
    found = [0] * 16
    for seed in range(SAMPLES):
        first = choose(logits, 1.0, seed, 0)
        own = leg_seed(seed, 1)
        assert own is not None
        second = choose(logits, 1.0, own, 0) if resumed else choose(logits, 1.0, seed, 1)
        assert first is not None
        assert second is not None
        found[4 * first[0] + second[0]] += 1
    return found


def test_samples_of_resumed_requests_are_distributed_as_those_of_others() -> None:
    """By a chi-squared test. With the caller's seed used again every pair would be of equal tokens."""
    weights = torch.softmax(torch.tensor([0.0, 0.5, 1.0, 1.5]), dim=0)
    expected = [float(one * other) * SAMPLES for one in weights for other in weights]
    for resumed in (False, True):
        distance = sum((seen - due) ** 2 / due for seen, due in zip(pairs(resumed), expected, strict=True))
        assert distance < 45, distance  # 15 degrees of freedom: one in ten thousand is farther
