"""Runs the samples of one request, and answers one whose prompts are token ids. On the gateway's loop."""

from __future__ import annotations

import asyncio
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any

from ckpt_engine.gateway.dialect import Dialect, Legs, ParsedRequest
from ckpt_engine.gateway.journey import Journey, Wishes
from ckpt_engine.gateway.placing import Placing
from ckpt_engine.gateway.stitching import AnswerPiece, Stitch
from ckpt_engine.gateway.writing import Writer


class Samples(ABC):
    """The samples of one request. Run `work` once. `so_far` has the partial answer, also after `work` failed or was
    cancelled."""

    def __init__(self, placing: Placing, dialect: Legs, request: ParsedRequest, wishes: Wishes, writer: Writer) -> None:
        self._placing, self._wishes, self._writer = placing, wishes, writer
        self._request, self._legs = request, dialect
        self._stitches = [Stitch(single) for single in request.singles]
        self._arrival = time.monotonic()
        self._first = False

    @property
    def streams(self) -> bool:
        """Whether the caller reads events."""
        return self._request.stream

    async def work(self) -> None:
        """Answers the request. Raises RefusedError, and what the writer raises."""
        if len(self._stitches) == 1:
            await self._sample(0, self._stitches[0])
        else:
            await self._samples()
        await self._end()

    @abstractmethod
    async def _tell(self, number: int, stitch: Stitch, piece: AnswerPiece) -> None:
        """Tells the caller of a stream what a piece of sample `number` brought."""

    @abstractmethod
    async def _end(self) -> None:
        """Tells the caller the end of the stream, or the whole answer."""

    def _judge(self, number: int) -> Callable[[AnswerPiece], Awaitable[None]] | None:
        """See Journey."""
        return None

    async def _samples(self) -> None:
        """Runs all samples at once. The first that fails ends the others."""
        try:
            async with asyncio.TaskGroup() as group:
                for number, stitch in enumerate(self._stitches):
                    group.create_task(self._sample(number, stitch))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from errors

    async def _sample(self, number: int, stitch: Stitch) -> None:
        journey = Journey(self._placing, self._legs, stitch, self._wishes, self._judge(number))
        async with aclosing(journey.pieces()) as pieces:
            async for piece in pieces:
                if not self._first and stitch.tokens:
                    self._first = True
                    self._placing.metrics.first_token.observe(time.monotonic() - self._arrival)
                if self._request.stream:
                    await self._tell(number, stitch, piece)

    def so_far(self) -> dict[str, Any]:
        """The partial answer: the token ids of each sample, and the versions that made them."""
        if not any(stitch.tokens for stitch in self._stitches):
            return {}
        return {"choices": [_partial_choice(self._legs, number, each) for number, each in enumerate(self._stitches)]}


class Answering(Samples):
    """Answers a request in the form in which its engine is asked."""

    def __init__(
        self, placing: Placing, dialect: type[Dialect], request: ParsedRequest, wishes: Wishes, writer: Writer
    ) -> None:
        self._dialect = dialect(request, uuid.uuid4().hex, int(time.time()))
        super().__init__(placing, self._dialect, request, wishes, writer)

    async def _tell(self, number: int, stitch: Stitch, piece: AnswerPiece) -> None:
        finished = stitch.finish is not None
        await self._writer.events([self._dialect.chunk(number, stitch, piece, finished)])

    async def _end(self) -> None:
        if self._request.stream:
            await self._writer.events(self._dialect.closing(self._stitches), done=True)
        else:
            await self._writer.whole(self._dialect.whole(self._stitches))


def _partial_choice(dialect: Legs, number: int, stitch: Stitch) -> dict[str, Any]:
    choice = {"index": number, "token_ids": list(stitch.tokens), "finish_reason": None}
    if stitch.finish is not None:
        choice["finish_reason"] = stitch.finish.reason
    return {**choice, "ckpt_engine": dialect.about_versions(stitch)}
