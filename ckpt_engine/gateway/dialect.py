"""What a dialect is: the form of one route, on the caller's side and on the engine's. Pure.

A dialect reads a body into singles, writes the body of each leg, reads an engine's events into pieces, and writes what
callers get. It decides nothing about replicas. Its engine's side alone is `Legs`, which rendered dialects have too.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ckpt_engine.core.labels import parsed_label
from ckpt_engine.gateway.json_numbers import load_answer
from ckpt_engine.gateway.refusals import bad_request
from ckpt_engine.gateway.single import Single
from ckpt_engine.gateway.stitching import AnswerPiece, Finish, Stitch
from ckpt_engine.gateway.versions import GatewayVersion, Label, version_summary

SAMPLES = 1024
"""Most samples of one request: each is a separate request to an engine."""


@dataclass(frozen=True)
class ParsedRequest:
    """A request whose prompts are token ids."""

    body: Mapping[str, Any]
    singles: tuple[Single, ...]
    stream: bool
    not_resumable: str = ""  # why it cannot be resumed; empty: it can
    whole: bool = False  # engines do not stream what it asks for, so it is passed on unchanged
    session: str = ""  # the session that the body names; empty: none


class Legs(ABC):
    """How one request is put to engines, leg by leg. An instance serves one request."""

    route: ClassVar[str]
    """Where engines are asked; a dialect's callers ask there too."""

    def __init__(self, request: ParsedRequest, identifier: str, created: int) -> None:
        """identifier, created (Unix seconds): as the answer names them."""
        self.request, self.identifier, self.created = request, identifier, created

    @abstractmethod
    def leg_body(self, stitch: Stitch, identifier: str) -> dict[str, Any]:
        """The body of the next leg's request, always streamed. identifier: of this leg."""

    @abstractmethod
    def piece(self, stitch: Stitch, event: Mapping[str, Any], labelled: bool) -> AnswerPiece:
        """Parses an event of the running leg. labelled: the engine names the version of each token
        (`GatewaySide.labels_each_token`). Raises MalformedError."""

    @abstractmethod
    def finish(self, kind: str, detail: Any) -> Finish:
        """The finish of a sample in this dialect, where the engine's own did not arrive."""

    def about_versions(self, stitch: Stitch) -> dict[str, Any]:
        """The `ckpt_engine` object of a sample's answer: its versions and legs, and the version of its adapter."""
        legs = [leg.to_dict() for leg in stitch.legs]
        about = {**version_summary(stitch.spans()), "resumes": stitch.resumes, "legs": legs}
        if stitch.adapter:
            about["adapter"] = stitch.adapter
        if (scored := stitch.prompt_span()) is not None:
            about["prompt"] = scored.to_dict()
        return {**about, "not_resumable": self.request.not_resumable} if self.request.not_resumable else about


class Dialect(Legs):
    """One route whose prompts are ids."""

    of_any_engine: ClassVar[bool] = False
    """Whether every engine's server has the route, so that a request that is only passed on may go to any."""

    @classmethod
    @abstractmethod
    def read(cls, body: Mapping[str, Any]) -> ParsedRequest | None:
        """Parses a body; None: its prompts are not ids, so it can only be passed on. Raises RefusedError (400)."""

    @abstractmethod
    def chunk(self, number: int, stitch: Stitch, piece: AnswerPiece, finished: bool) -> dict[str, Any]:
        """The event for the caller's stream that carries this piece of sample `number`. finished: it is the last."""

    @abstractmethod
    def closing(self, stitches: Sequence[Stitch]) -> list[dict[str, Any]]:
        """The events at the end of a stream, before its [DONE]."""

    @abstractmethod
    def whole(self, stitches: Sequence[Stitch]) -> Any:
        """The whole answer, for a caller that does not stream."""


class MalformedError(Exception):
    """An engine sent an event that its dialect does not have."""


class EngineError(Exception):
    """An engine's event reports an error."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status  # the event's code; from 500 on another engine may succeed


def load_event(data: bytes) -> Mapping[str, Any]:
    """Parses an event's object. Raises MalformedError, and EngineError if it reports an error."""
    try:
        event = load_answer(data)
    except ValueError as error:
        raise MalformedError(f"an engine's event is not JSON: {data[:80]!r}") from error
    if not isinstance(event, dict):
        raise MalformedError(f"an engine's event is not an object: {data[:80]!r}")
    problem = event.get("error")
    if problem and not event.get("choices"):
        if not isinstance(problem, dict):
            raise EngineError(500, str(problem))
        code = problem.get("code")
        raise EngineError(code if isinstance(code, int) else 500, str(problem.get("message", problem)))
    return event


def ids(value: Any, where: str) -> tuple[int, ...]:
    """Checks a list of token ids. Raises RefusedError."""
    if not isinstance(value, list) or not value:
        raise bad_request(f"{where}: a prompt must be a list of at least one token id, not {shortly(value)}")
    for place, token in enumerate(value):
        if type(token) is not int or token < 0:
            element = f"number {place} of it is {shortly(token)}"
            raise bad_request(f"{where}: a prompt must be a list of token ids; {element}")
    return tuple(value)


def shortly(value: Any) -> str:
    """A request's value as an error message quotes it, up to 80 characters."""
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:80]}…"


def prompts(value: Any, where: str) -> list[tuple[int, ...]] | None:
    """Parses one list of ids, or a list of such; None: the prompts are texts. Raises RefusedError."""
    if isinstance(value, str) or (isinstance(value, list) and value and all(isinstance(part, str) for part in value)):
        return None
    if isinstance(value, list) and any(isinstance(part, list) for part in value):
        if len(value) > SAMPLES:
            raise bad_request(f"{where}: {len(value)} prompts, {SAMPLES} are the most of one request")
        return [ids(part, where) for part in value]
    return [ids(value, where)]


def whole_number(value: Any, where: str, default: int | None, least: int = 0) -> int | None:
    """Checks an integer of a request; None stands for the default. Raises RefusedError unless it is an integer of at
    least `least`."""
    if value is None:
        return default
    if type(value) is not int or value < least:
        raise bad_request(f"{where}: must be an integer of {least} or more, not {value!r}")
    return value


def samples(value: Any, where: str) -> int:
    """How many samples of each prompt are requested. Raises RefusedError."""
    count = whole_number(value, where, 1, 1)
    assert count is not None
    if count > SAMPLES:
        raise bad_request(f"{where}: {count} samples, {SAMPLES} are the most of one request")
    return count


def seed_of(value: Any, where: str) -> int | None:
    """Checks a request's seed. Raises RefusedError."""
    if value is not None and type(value) is not int:
        raise bad_request(f"{where}: must be an integer, not {value!r}")
    return value


def stop_ids(value: Any, where: str) -> frozenset[int]:
    """The token ids at which an answer stops. Raises RefusedError."""
    if value is None:
        return frozenset()
    if not isinstance(value, list) or not all(token is None or type(token) is int for token in value):
        raise bad_request(f"{where}: must be a list of token ids")
    return frozenset(token for token in value if token is not None)


def an_object(value: Any, where: str) -> dict[str, Any]:
    """Checks an object of a request. Raises RefusedError."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise bad_request(f"{where}: must be an object")
    return value


def truth(value: Any, where: str) -> bool:
    """Checks a boolean of a request. Raises RefusedError for any other type, which engines would treat differently."""
    if value is None or isinstance(value, bool):
        return bool(value)
    raise bad_request(f"{where}: must be true or false")


def truncated(prompt: tuple[int, ...], to: Any, where: str) -> tuple[tuple[int, ...], str]:
    """Cuts the prompt as the engine would: resumed legs must continue from what the first one saw. Also returns why the
    request is not resumable; empty: it is."""
    if to is None:
        return prompt, ""
    count = whole_number(to, where, None, -1)
    if count == -1:
        return prompt, f"{where}: -1 cuts at a length that only the engine knows"
    return prompt[-count:] if count else prompt, ""


def labels_of(value: Any) -> list[Label] | None:
    """Labels from a list of {"version", "start", "end"}, as SGLang and vLLM have it; None: there is none."""
    if not isinstance(value, list) or not value:
        return None
    try:
        return [Label(int(span["start"]), int(span["end"]), made_by(span["version"])) for span in value]
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise MalformedError(f"malformed versions: {value!r}") from error


def made_by(label: Any) -> GatewayVersion | None:
    """Parses an engine's label; None: it is not one of ours ("default": the engine's own weights). Agents label real
    engines VERSION:ROOT:LINEAGE, with the first digits of the root."""
    parsed = parsed_label(str(label))
    return None if parsed is None else GatewayVersion(parsed[0], parsed[2], parsed[1])


def output_tokens(value: Any) -> list[int]:
    """The token ids of an engine's event. Raises MalformedError."""
    if not isinstance(value, list) or not all(type(token) is int for token in value):
        raise MalformedError("an event has no token ids")
    return value
