"""Answers one request whose prompt is messages: has it rendered, runs it by ids, and tells its words.

It decides whether a request goes by ids, which is resumed, or is passed on as it came. It decides nothing about legs
(`journey.py`), about which words may be told (`wording.py`), or about their form (`rendering.py`).
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from ckpt_engine.gateway import refusals
from ckpt_engine.gateway.answering import Samples
from ckpt_engine.gateway.continued_chat import passed_chat
from ckpt_engine.gateway.dialect import MalformedError, ParsedRequest
from ckpt_engine.gateway.engine_tokenizer import EngineTokenizer, ask_replica
from ckpt_engine.gateway.fleet import ReplicaNews
from ckpt_engine.gateway.journey import Wishes
from ckpt_engine.gateway.passing import PassedRequest
from ckpt_engine.gateway.placing import Placing
from ckpt_engine.gateway.refusals import RefusedError
from ckpt_engine.gateway.rendering import NotRenderedError, RenderedDialect
from ckpt_engine.gateway.stitching import AnswerPiece, Stitch
from ckpt_engine.gateway.upstream import BrokenError, NotAdmittedError
from ckpt_engine.gateway.wording import Wording
from ckpt_engine.gateway.writing import Writer

MOST_TRIES = 3
"""So many replicas may fail while they render a request; then it is passed on, and the next one answers for itself."""


class RenderedRequest:
    """Answers one request. Call `work` once."""

    def __init__(
        self,
        placing: Placing,
        route: str,
        forms: Mapping[str, type[RenderedDialect]],
        body: Mapping[str, Any],
        wishes: Wishes,
        writer: Writer,
    ) -> None:
        """forms: of the route, by kind of engine."""
        self._placing, self._route, self._forms, self._body = placing, route, forms, body
        self._wishes, self._writer = wishes, writer
        self._work: PassedRequest | RenderedAnswering | None = None

    @property
    def streams(self) -> bool:
        """Whether the caller reads events."""
        return self._body.get("stream") is True

    def so_far(self) -> dict[str, Any]:
        """The partial answer, in ids."""
        return self._work.so_far() if self._work is not None else {}

    async def work(self) -> None:
        """Answers the request. Raises RefusedError, and what the writer raises."""
        try:
            by_ids = self._work = await self._rendered()
            try:
                await by_ids.work()
            except NotRenderedError as error:
                if by_ids.started:
                    raise RefusedError(502, refusals.NOT_RESUMABLE, str(error)) from error
                raise
            except RefusedError as error:
                if by_ids.started or error.reason != refusals.ENGINE_REFUSED:
                    raise
                raise NotRenderedError(f"its engine does not answer it by ids ({error})") from error
        except NotRenderedError as error:
            self._work = passed_chat(self._placing, self._route, self._body, self._wishes, self._writer, str(error))
            await self._work.work()

    async def _rendered(self) -> RenderedAnswering:
        """Has the prompt rendered by the kind of engine that the request would go to anyway. Raises NotRenderedError,
        and RefusedError if no replica serves."""
        placing, want, broken = self._placing, self._wishes.want, list[str]()
        patience = placing.patience(self._wishes.queue_seconds)
        unsuited: dict[str, ReplicaNews] = {}
        while len(broken) < MOST_TRIES:
            member = await placing.place(want, self._wishes.key, patience, unsuited=unsuited)
            engine = member.news.engine
            form = self._forms.get(engine)
            if form is None:
                raise NotRenderedError(f"the gateway has no chats rendered by engines of kind {engine or 'unknown'}")
            if why := form.resists(self._body):
                raise NotRenderedError(why)
            try:
                answer = await ask_replica(placing, member, form.render(self._body), self._wishes.headers)
            except RefusedError as error:
                raise NotRenderedError(f"{member.name} does not render it ({error})") from error
            except NotAdmittedError as error:
                patience = placing.refused(member, error, patience, unsuited)
                placing.check(want, patience)
            except BrokenError as error:
                broken.append(f"{member.name}: {error}")
                placing.failed(member, str(error))
            else:
                return self._by_ids(form, answer, self._wishes.to(frozenset({engine})))
        raise NotRenderedError(f"{MOST_TRIES} replicas failed to render it: {'; '.join(broken)}")

    def _by_ids(self, form: type[RenderedDialect], answer: Mapping[str, Any], wishes: Wishes) -> RenderedAnswering:
        try:
            request = form.rendered(self._body, answer)
        except MalformedError as error:
            raise NotRenderedError(f"what an engine rendered cannot be read ({error})") from error
        if request.not_resumable or request.whole:
            raise NotRenderedError(request.not_resumable or "engines do not stream what it asks for")
        return RenderedAnswering(self._placing, form, request, wishes, self._writer)


class RenderedAnswering(Samples):
    """Answers a rendered request."""

    def __init__(
        self, placing: Placing, dialect: type[RenderedDialect], request: ParsedRequest, wishes: Wishes, writer: Writer
    ) -> None:
        self._dialect = dialect(request, uuid.uuid4().hex, int(time.time()))
        super().__init__(placing, self._dialect, request, wishes, writer)
        tokenizer = EngineTokenizer(placing, wishes)
        self._wordings = [Wording(tokenizer, self._dialect, stitch) for stitch in self._stitches]
        self._opened: set[int] = set()

    @property
    def started(self) -> bool:
        """Whether the caller has received anything of the answer."""
        return bool(self._opened)

    def _judge(self, number: int) -> Callable[[AnswerPiece], Awaitable[None]]:
        return self._wordings[number].judge

    async def _tell(self, number: int, stitch: Stitch, piece: AnswerPiece) -> None:
        words = await self._wordings[number].next()
        if words is None:
            return
        events = [] if number in self._opened else [self._dialect.opening(number, stitch)]
        chunk = self._dialect.chunk(number, stitch, words, stitch.finish is not None)
        events += [chunk] if chunk is not None else []
        if events:
            self._opened.add(number)
            await self._writer.events(events)

    async def _end(self) -> None:
        if self._request.stream:
            await self._writer.events(self._dialect.closing(self._stitches), done=True)
        else:
            messages = [await wording.message() for wording in self._wordings]
            await self._writer.whole(self._dialect.whole(self._stitches, messages))
