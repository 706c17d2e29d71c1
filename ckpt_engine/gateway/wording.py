"""Turns one sample's tokens into words as they come, and ends the sample at a stop string.

It decides which tokens may be told already and which are held back, since they may be the beginning of a stop string.
It decides neither how words look (`rendering.py`) nor which replica makes them (`engine_tokenizer.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from ckpt_engine.gateway.dialect import MalformedError
from ckpt_engine.gateway.engine_tokenizer import EngineTokenizer
from ckpt_engine.gateway.refusals import ENGINE_REFUSED, RefusedError
from ckpt_engine.gateway.rendering import MessagePart, RenderedDialect, TextQuestion
from ckpt_engine.gateway.stitching import STOP, AnswerPiece, Finish, Stitch
from ckpt_engine.gateway.stops import StopFound, StopSearch
from ckpt_engine.gateway.versions import lineages

REST = 4.0
"""For so many times as long as a question about words took, the next one of the sample waits: a parser that goes over a
long output again with each must not take an engine's processor for itself."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _PieceEnd:
    """The end of a piece."""

    tokens: int  # of the sample up to it
    search: StopSearch | None  # at this place
    state: Any = None  # for the text of what follows

    @property
    def length(self) -> int:
        """Characters up to it."""
        return self.search.length if self.search is not None else 0


class Wording:
    """The words of one sample. Call `judge` with each piece before anything else is done with it."""

    def __init__(self, tokenizer: EngineTokenizer, dialect: RenderedDialect, stitch: Stitch) -> None:
        self._tokenizer, self._dialect, self._stitch = tokenizer, dialect, stitch
        stops, keep = dialect.stops()
        self._search = StopSearch(stops, keep) if stops else None
        self._keep = keep
        self._text_state: Any = None
        # The ends of pieces, from the last one on that may be told.
        self._marks = [_PieceEnd(0, self._search.copy() if self._search else None)]
        self._end: int | None = None  # tokens with text before the stop string; None: none was found
        self._rest = ""  # the text of these behind the answer's end
        self._sent = 0  # tokens with words that the caller has
        self._words_state: Any = None
        self._rest_until = 0.0  # monotonic seconds: before, more tokens come together

    async def judge(self, piece: AnswerPiece) -> None:
        """Looks for stop strings in what a piece has brought, which the stitch has taken already. At the first one the
        sample is finished, and the tokens behind it are dropped. Raises RefusedError."""
        stitch, search = self._stitch, self._search
        if search is None:
            return
        before, end = len(stitch.tokens) - len(piece.tokens), self._readable
        floor = min(max(before, stitch.single.min_tokens), end)
        await self._read(search, stitch.tokens[before:floor], False)
        if await self._read(search, stitch.tokens[floor:end], True) is not None:
            await self._stop(before, piece)
            return
        self._marks.append(_PieceEnd(len(stitch.tokens), search.copy(), self._text_state))
        while len(self._marks) > 1 and self._marks[1].length <= search.safe:
            del self._marks[0]

    async def _stop(self, before: int, piece: AnswerPiece) -> None:
        """Reads the tokens that were held back again, one by one, up to the one that completes the stop string."""
        stitch, mark, found, count = self._stitch, self._marks[0], None, self._marks[0].tokens
        assert mark.search is not None
        search, lengths = mark.search.copy(), [mark.length]
        self._text_state = mark.state
        for count in range(mark.tokens + 1, self._readable + 1):
            found = await self._read(search, stitch.tokens[count - 1 : count], count > stitch.single.min_tokens)
            lengths.append(search.length)
            if found is not None:
                break
        assert found is not None, "a text is the same read at once and token by token"
        length = search.length - len(found.rest)
        place = next(place for place, end in enumerate(lengths) if end >= length)
        self._end, self._rest = mark.tokens + place, found.rest[: lengths[place] - length]
        stitch.cut(count)
        del piece.tokens[max(0, count - before) :], piece.records[max(0, count - before) :]
        stitch.end(Finish(STOP, STOP, found.stop))
        if piece.finish is not None:
            piece.finish = stitch.finish  # the engine ended it too

    async def next(self) -> MessagePart | None:
        """The words of the tokens that may be told now; None: there are none.

        Raises RefusedError, and NotRenderedError."""
        stitch, last = self._stitch, self._stitch.finish is not None
        readable = self._readable if last or self._search is None else self._marks[0].tokens
        if not last and (readable <= self._sent or time.monotonic() < self._rest_until):
            return None
        end = len(stitch.tokens) if last else readable
        new, records = stitch.tokens[self._sent : readable], stitch.records[self._sent : end]
        begin = time.monotonic()
        question = self._dialect.words(stitch, new, records, last, self._words_state)
        words = await self._ask(question, self._dialect.words_of)
        now = time.monotonic()
        self._rest_until = now + REST * (now - begin)
        if words.token_ids is not None:
            words.token_ids = stitch.tokens[self._sent : end]
        self._sent, self._words_state = end, words.state
        return self._finished(words) if last else words

    async def message(self) -> MessagePart:
        """The whole message of the finished sample. Raises as `next` does."""
        stitch, end = self._stitch, self._readable
        question = self._dialect.message(stitch, stitch.tokens[:end], stitch.records)
        words = await self._ask(question, self._dialect.message_of)
        if words.token_ids is not None:
            words.token_ids = list(stitch.tokens)
        return self._finished(words)

    @property
    def _readable(self) -> int:
        """How many tokens are text: all but the one that stopped the sample, which engines leave out of it, and those
        of a stop string."""
        if self._end is not None:
            return self._end
        finish, tokens = self._stitch.finish, len(self._stitch.tokens)
        by_token = finish is not None and finish.kind == STOP and not isinstance(finish.stop_reason, str)
        return tokens - 1 if tokens and by_token and not self._keep else tokens

    def _finished(self, words: MessagePart) -> MessagePart:
        if self._rest:
            self._dialect.cut(words, self._rest)
        return words

    async def _read(self, search: StopSearch, tokens: list[int], may_end: bool) -> StopFound | None:
        if not tokens:
            return None
        question = self._dialect.text(self._stitch, tokens, self._text_state)
        text, self._text_state = await self._ask(question, self._dialect.text_of)
        return search.feed(text, may_end)

    async def _ask(self, question: TextQuestion, read: Callable[[Mapping[str, Any]], T]) -> T:
        leg = self._stitch.leg
        answer = await self._tokenizer.ask(question, leg.replica, next(iter(lineages(leg.spans())), ""))
        try:
            return read(answer)
        except MalformedError as error:
            raise RefusedError(
                502, ENGINE_REFUSED, f"the answer to {question.route} cannot be read: {error}"
            ) from error
