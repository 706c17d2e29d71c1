"""The samples in an answer that is passed on: how each ended, and the versions that the gateway adds. Pure.

It reads what chats, texts and whole answers have in common. It does not decide what happens to an answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckpt_engine.core.version_stamps import stamp
from ckpt_engine.gateway.dialect import MalformedError, labels_of
from ckpt_engine.gateway.stitching import ABORT, Leg
from ckpt_engine.gateway.versions import Label, Span, leg_spans, version_summary

PASSED_ON = "it is passed on as it came"


def samples_of(content: Any) -> list[dict[str, Any]]:
    """The object of each sample that has its finish_reason: its choice, or its `meta_info` in SGLang's form."""
    if isinstance(content, list):
        return [sample for each in content for sample in samples_of(each)]
    if not isinstance(content, dict):
        return []
    if isinstance(content.get("meta_info"), dict):
        return [content["meta_info"]]
    choices = content.get("choices")
    return [each for each in choices if isinstance(each, dict)] if isinstance(choices, list) else []


def has_ended(sample: Mapping[str, Any]) -> bool:
    """Whether a sample has ended."""
    return sample.get("finish_reason") is not None


def was_aborted(sample: Mapping[str, Any]) -> bool:
    """Whether an update ended a sample early. An abort with a status is an error of the request instead."""
    reason = sample.get("finish_reason")
    if isinstance(reason, dict):
        return reason.get("type") == ABORT and not reason.get("status_code")
    return reason == ABORT


def says(content: Any) -> bool:
    """Whether an event has any content; the first one of a chat has only the role."""
    samples = samples_of(content)
    return not samples or any(map(_brings, samples))


def _brings(sample: Mapping[str, Any]) -> bool:
    if sample.get("token_ids"):
        return True
    delta = sample.get("delta")
    if isinstance(delta, dict):
        return any(value for name, value in delta.items() if name != "role")
    return bool(sample.get("text", True))


def name_versions(
    content: Any,
    leg: Leg,
    believed: bool = True,
    streamed: Mapping[int, int] | None = None,
    why: str = PASSED_ON,
) -> list[Span]:
    """Adds `ckpt_engine` to each sample that has ended. Returns all their spans.

    believed: whether to trust the engine's labels. streamed: how many ids a stream has brought of each sample so far;
    None: the answer is whole. why: it is not resumable; empty: it is.
    """
    all_spans: list[Span] = []
    samples = samples_of(content)
    for sample in samples:
        if not has_ended(sample):
            continue
        labels, count = facts(content, sample, len(samples) == 1, streamed)
        spans = _spans(leg, count, labels if believed else None)
        all_spans += spans
        summary = version_summary(spans)
        if not count:
            summary["spans"] = [{**each, "count": None} for each in summary["spans"]]
        one = {"replica": leg.replica, "first": 0, "count": count, "ended": "whole"}
        sample["ckpt_engine"] = {**summary, "resumes": 0, "legs": [one], **({"not_resumable": why} if why else {})}
    return all_spans


def stamp_versions(content: Any) -> None:
    """Writes the first and the last version beside the `ckpt_engine` of samples, where clients of slime look for them
    (core/version_stamps.py). Other content stays as it is."""
    if isinstance(content, list):
        for each in content:
            stamp_versions(each)
        return
    all_spans = [sample["ckpt_engine"]["spans"] for sample in samples_of(content) if "ckpt_engine" in sample]
    starts = [spans[0]["min_version"] for spans in all_spans if spans]
    ends = [spans[-1]["max_version"] for spans in all_spans if spans]
    if starts:
        known = [each for each in starts if each is not None], [each for each in ends if each is not None]
        stamp(content, min(known[0], default=None), max(known[1], default=None))


def facts(
    content: Any, sample: Mapping[str, Any], alone: bool, streamed: Mapping[int, int] | None
) -> tuple[list[Label] | None, int | None]:
    """The labels of one sample's tokens and the number of its tokens, as the engine reports them; None: it does not."""
    whole = content if isinstance(content, dict) and alone else {}
    metadata, usage, ids = whole.get("metadata"), whole.get("usage"), sample.get("token_ids")
    versions = metadata.get("weight_versions") if isinstance(metadata, dict) else None
    try:
        labels = labels_of(sample.get("weight_versions") or versions)
    except MalformedError:
        labels = None
    counts = (
        sample.get("completion_tokens"),
        streamed.get(sample.get("index", 0)) if streamed is not None else len(ids) if isinstance(ids, list) else None,
        usage.get("completion_tokens") if isinstance(usage, dict) else None,
        labels[-1].end if labels else None,
    )
    return labels, next((each for each in counts if isinstance(each, int) and each > 0), None)


def _spans(leg: Leg, count: int | None, labels: list[Label] | None) -> list[Span]:
    if count is None:
        return [leg.span(0, 0)]
    return leg_spans(0, count, labels, leg.identify, leg.bounds(), leg.caches, leg.entry)
