"""Answers one request whose prompts are token ids: generates its samples and writes them to the caller. On the
gateway's loop. journey.py decides which replica generates a sample, and when another one goes on with it."""

from __future__ import annotations

import asyncio
import time
import uuid
from contextlib import aclosing
from typing import Any

from ckpt_engine.gateway.dialect import Dialect, ParsedRequest
from ckpt_engine.gateway.journey import Journey, Wishes
from ckpt_engine.gateway.placing import Placing
from ckpt_engine.gateway.stitching import AnswerPiece, Stitch
from ckpt_engine.gateway.writing import Writer


class Answering:
    """Answers one request. Call `work` once. `so_far` returns the incomplete answer, also after `work` failed or was
    cancelled."""

    def __init__(
        self, placing: Placing, dialect: type[Dialect], asked: ParsedRequest, wishes: Wishes, writer: Writer
    ) -> None:
        self._placing, self._wishes, self._writer = placing, wishes, writer
        self._asked = asked
        self._dialect = dialect(asked, uuid.uuid4().hex, int(time.time()))
        self._stitches = [Stitch(single) for single in asked.singles]
        self._arrived = time.monotonic()
        self._first = False

    @property
    def streams(self) -> bool:
        """Whether the caller reads events."""
        return self._asked.stream

    async def work(self) -> None:
        """Generates and writes the answer. Raises RefusedError, and what the writer raises."""
        if len(self._stitches) == 1:
            await self._sample(0, self._stitches[0])
        else:
            await self._samples()
        if self._asked.stream:
            await self._writer.events(self._dialect.closing(self._stitches), done=True)
        else:
            await self._writer.whole(self._dialect.whole(self._stitches))

    async def _samples(self) -> None:
        """Generates all samples at the same time; the first one that fails ends the others."""
        try:
            async with asyncio.TaskGroup() as group:
                for number, stitch in enumerate(self._stitches):
                    group.create_task(self._sample(number, stitch))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from errors

    async def _sample(self, number: int, stitch: Stitch) -> None:
        journey = Journey(self._placing, self._dialect, stitch, self._wishes)
        async with aclosing(journey.pieces()) as pieces:
            async for piece in pieces:
                if not self._first and stitch.tokens:
                    self._first = True
                    self._placing.metrics.first_token.observe(time.monotonic() - self._arrived)
                if self._asked.stream:
                    await self._tell(number, stitch, piece)

    async def _tell(self, number: int, stitch: Stitch, piece: AnswerPiece) -> None:
        over = stitch.finish is not None
        await self._writer.events([self._dialect.chunk(number, stitch, piece, over)])

    def so_far(self) -> dict[str, Any]:
        """An incomplete answer: the token ids of each sample, and the versions that generated them; {} if there are
        none."""
        if not any(stitch.tokens for stitch in self._stitches):
            return {}
        return {"choices": [_told(self._dialect, number, each) for number, each in enumerate(self._stitches)]}


def _told(dialect: Dialect, number: int, stitch: Stitch) -> dict[str, Any]:
    said = {"index": number, "token_ids": list(stitch.tokens), "finish_reason": None}
    if stitch.finish is not None:
        said["finish_reason"] = stitch.finish.said
    return {**said, "ckpt_engine": dialect.about_versions(stitch)}
