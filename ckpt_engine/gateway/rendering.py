"""What a rendered dialect is: a route whose prompts are messages, which an engine turns into ids and back. Pure.

It says what to ask an engine's tokenizer and how to read its answers. It decides neither which engine is asked
(`engine_tokenizer.py`) nor which tokens may be told (`wording.py`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ckpt_engine.gateway.dialect import Legs, ParsedRequest
from ckpt_engine.gateway.stitching import Stitch


@dataclass(frozen=True, slots=True)
class TextQuestion:
    """A request that needs an engine's tokenizer and not its weights."""

    route: str
    body: Mapping[str, Any]


@dataclass(slots=True)
class MessagePart:
    """What some tokens of a sample are in the caller's form."""

    message: dict[str, Any]  # fields of a message, or what is added to them; without the role
    token_ids: list[int] | None = None  # None: the caller may not see them
    logprobs: Any = None
    calls: bool = False  # tools are called, here or before
    state: Any = field(default=None, repr=False)  # for the question about the next tokens


class RenderedDialect(Legs):
    """One route of one kind of engine. An instance serves one request, whose legs are of token ids."""

    caller_route: ClassVar[str]
    """Where callers ask; `route` is where the legs go."""

    @classmethod
    @abstractmethod
    def resists(cls, body: Mapping[str, Any]) -> str:
        """Why a request must be passed on as it came; empty: it can be rendered."""

    @classmethod
    @abstractmethod
    def render(cls, body: Mapping[str, Any]) -> TextQuestion:
        """Asks for a request's prompt as ids."""

    @classmethod
    @abstractmethod
    def rendered(cls, body: Mapping[str, Any], answer: Mapping[str, Any]) -> ParsedRequest:
        """Reads the answer to `render`. A request that is not resumable, or is `whole`, is passed on as it came. Raises
        MalformedError."""

    @abstractmethod
    def stops(self) -> tuple[Sequence[str], bool]:
        """The stop strings, and whether they are kept in the answer."""

    @abstractmethod
    def text(self, stitch: Stitch, tokens: Sequence[int], state: Any) -> TextQuestion:
        """Asks for the text that stop strings are looked for in. state: of the answer before; None: there was none."""

    @abstractmethod
    def text_of(self, answer: Mapping[str, Any]) -> tuple[str, Any]:
        """Reads the answer to `text`: the text of the new tokens, and the next state. Raises MalformedError."""

    @abstractmethod
    def words(
        self, stitch: Stitch, tokens: Sequence[int], records: Sequence[Any], last: bool, state: Any
    ) -> TextQuestion:
        """Asks for what new tokens add to the message. last: no more follow, and the stitch has its finish."""

    @abstractmethod
    def words_of(self, answer: Mapping[str, Any]) -> MessagePart:
        """Reads the answer to `words`. Raises MalformedError, and NotRenderedError if it lacks what was asked for."""

    @abstractmethod
    def message(self, stitch: Stitch, tokens: Sequence[int], records: Sequence[Any]) -> TextQuestion:
        """Asks for the whole message of a sample that has ended."""

    @abstractmethod
    def message_of(self, answer: Mapping[str, Any]) -> MessagePart:
        """Reads the answer to `message`. Raises as `words_of` does."""

    @abstractmethod
    def cut(self, words: MessagePart, rest: str) -> None:
        """Takes `rest`, which stands behind the answer's end, from the end of the last words."""

    @abstractmethod
    def opening(self, number: int, stitch: Stitch) -> dict[str, Any]:
        """The first event of sample `number`, with the role."""

    @abstractmethod
    def chunk(self, number: int, stitch: Stitch, words: MessagePart, last: bool) -> dict[str, Any] | None:
        """The event with these words; None: they are not worth one."""

    @abstractmethod
    def closing(self, stitches: Sequence[Stitch]) -> list[dict[str, Any]]:
        """The events at the end of a stream, before its [DONE]."""

    @abstractmethod
    def whole(self, stitches: Sequence[Stitch], messages: Sequence[MessagePart]) -> Any:
        """The whole answer, for a caller that does not stream."""


class NotRenderedError(Exception):
    """An engine does not turn this request into ids, or its ids into what the caller asked for."""
