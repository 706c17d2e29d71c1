"""Requests that are passed on as they came: texts, chats, and what engines do not stream. On the gateway's loop.

They wait for a replica like others, and go to another one as long as none has let them in. They are not resumed: text
cannot be joined without a tokenizer, so what breaks inside an engine ends with a reason and what ids there are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ckpt_engine.gateway import refusals
from ckpt_engine.gateway.fleet import Member
from ckpt_engine.gateway.journey import Wishes
from ckpt_engine.gateway.json_numbers import passed
from ckpt_engine.gateway.placing import Placing
from ckpt_engine.gateway.refusals import RefusedError
from ckpt_engine.gateway.upstream import BrokenError, NotAdmittedError, Stream
from ckpt_engine.gateway.writing import Writer

MOST_IDS = 1 << 20
"""Ids that are remembered of a stream, for the case that it breaks."""


class Passing:
    """Passes one request on. Run `work` once."""

    def __init__(self, placing: Placing, route: str, body: Mapping[str, Any], wishes: Wishes, writer: Writer) -> None:
        self._placing, self._route, self._body = placing, route, body
        self._wishes, self._writer = wishes, writer
        self._ids: dict[int, list[int]] = {}

    @property
    def streams(self) -> bool:
        """Whether the caller reads events."""
        return self._body.get("stream") is True

    async def work(self) -> None:
        """Answers. Raises RefusedError, and what the writer raises."""
        placing, content = self._placing, json.dumps(self._body).encode()
        patience = placing.patience(self._wishes.queue_seconds)
        while True:
            member = await placing.place(self._wishes.want, self._wishes.key, patience)
            with placing.inside(member, False):
                try:
                    async with placing.upstream.ask(
                        member.told.url, self._route, content, self._wishes.headers, self._wishes.resume
                    ) as stream:
                        placing.fleet.answered(member, stream.admitted)
                        await self._relay(stream)
                except NotAdmittedError as error:
                    placing.refused(member, error)
                    placing.metrics.legs.labels(member.name, "not_admitted").inc()
                    placing.check(self._wishes.want, patience)
                    continue
                except BrokenError as error:
                    placing.metrics.legs.labels(member.name, "broken").inc()
                    raise self._broken(member, error) from error
                placing.metrics.legs.labels(member.name, "whole").inc()
                return

    def _broken(self, member: Member, error: BrokenError) -> RefusedError:
        self._placing.failed(member, str(error))
        said = f"{member.name} broke off ({error}), and a request that is passed on as it came is not resumed"
        return RefusedError(502, refusals.NOT_RESUMABLE, said)

    async def _relay(self, stream: Stream) -> None:
        if not stream.content_type.startswith("text/event-stream"):
            body = passed(await stream.whole())
            await self._writer.answer(stream.status, (stream.content_type or "application/json").encode(), body, {})
            return
        async for told in stream.events():
            events = [passed(data) for data in told]
            for data in events:
                self._remember(data)
            await self._writer.raw(b"".join(b"data: " + data + b"\n\n" for data in events), True)
        await self._writer.events([], done=True)

    def _remember(self, data: bytes) -> None:
        if b'"token_ids"' not in data:
            return
        try:
            choices = json.loads(data).get("choices") or []
        except (ValueError, AttributeError):
            return
        for choice in choices:
            known = self._ids.setdefault(choice.get("index", 0), [])
            if len(known) < MOST_IDS:
                known += choice.get("token_ids") or []

    def so_far(self) -> dict[str, Any]:
        """The ids of each sample, where the engine said any."""
        choices = [{"index": number, "token_ids": found} for number, found in sorted(self._ids.items())]
        return {"choices": choices} if choices else {}
