"""Passes on requests of OpenAI's `/v1/responses`, whose streams have events with names and no [DONE].

It decides what counts as the end of such an answer. Everything else is as for other requests that are passed on
(passing.py). What engines store of answers lies in one replica; routes with an answer's id are not passed on.

Engines do not tell an answer that an update cut off (pause mode abort) from one that is whole: vLLM calls both
completed. So an answer counts as cut off if the replica had such an update meanwhile, by the news of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ckpt_engine.core.version_stamps import stamp
from ckpt_engine.gateway.fleet import FleetReplica, Visit
from ckpt_engine.gateway.json_numbers import dump, finite_json, load_object
from ckpt_engine.gateway.passing import AbortedError, PassedRequest
from ckpt_engine.gateway.samples import PASSED_ON
from ckpt_engine.gateway.stitching import Leg
from ckpt_engine.gateway.upstream import BrokenError, Stream
from ckpt_engine.gateway.versions import version_summary

RESPONSES_ROUTE = "/v1/responses"

_FIRST = ("response.created", "response.queued", "response.in_progress")
"""Events without content: until another one comes, another engine may still answer."""
_LAST = ("response.completed", "response.incomplete", "response.failed", "response.cancelled", "error")


class PassedResponse(PassedRequest):
    """See PassedRequest."""

    async def _relay(self, stream: Stream, member: FleetReplica, visit: Visit, leg: Leg) -> None:
        self._writer.headers = stream.version_headers
        if stream.content_type.startswith("text/event-stream"):
            await self._relay_names(stream, member, visit, leg)
            return
        body = finite_json(await stream.whole())
        if visit.cut:
            raise AbortedError
        self._check([], leg)
        content = load_object(body)
        if content:
            body = dump(self._with_versions(content, leg))
        await self._writer.answer(stream.status, (stream.content_type or "application/json").encode(), body, {})

    async def _relay_names(self, stream: Stream, member: FleetReplica, visit: Visit, leg: Leg) -> None:
        events: list[bytes] = []  # that the caller has not got: all of them, until one has content
        ended = False
        async for batch in stream.events(done=False):
            for data in map(finite_json, batch):
                content = load_object(data)
                name = str(content.get("type", ""))
                if name in _LAST:
                    await self._tell(events)
                    if visit.cut:
                        raise AbortedError
                    self._check([], leg)
                    events, ended = [] if self._started else events, True
                    if isinstance(content.get("response"), dict):
                        data = dump({**content, "response": self._with_versions(content["response"], leg)})
                elif name not in _FIRST:
                    visit.begin()
                    self._pieces += 1
                events.append(_event(name, data))
            if visit.has_token and not ended:
                self._started = True
                await self._tell(events)
                events = []
        if not ended:
            raise BrokenError(f"{member.news.url}: the stream ended before its last event")
        await self._writer.raw(b"".join(events), False)

    async def _tell(self, events: Sequence[bytes]) -> None:
        if events and self._started:
            await self._writer.raw(b"".join(events), True)

    def _with_versions(self, response: Mapping[str, Any], leg: Leg) -> dict[str, Any]:
        """The response with `ckpt_engine`, as samples of other routes have it."""
        summary = version_summary([leg.span(0, 0)])
        summary["spans"] = [{**each, "count": None} for each in summary["spans"]]
        one = {"replica": leg.replica, "first": 0, "count": None, "ended": "whole"}
        about = {**summary, "resumes": 0, "legs": [one], "not_resumable": PASSED_ON}
        content = {**response, "ckpt_engine": about}
        if self._writer.stamps:
            stamp(content, summary["min_version"], summary["max_version"])
        return content


def _event(name: str, data: bytes) -> bytes:
    return (b"event: " + name.encode() + b"\n" if name else b"") + b"data: " + data + b"\n\n"
