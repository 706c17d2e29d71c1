"""Passes requests on unchanged: texts, chats, and what engines do not stream. On the gateway's loop.

They wait for a replica like others, and go to another one as long as no gate has let them in. They are not resumed,
since text cannot be joined without a tokenizer: a request that breaks inside an engine ends with a reason and the ids
so far. It starts again from its beginning if its caller has received nothing of the answer.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ckpt_engine.core.version_stamps import may_end
from ckpt_engine.gateway import refusals
from ckpt_engine.gateway.fleet import FleetReplica, ReplicaNews, Visit
from ckpt_engine.gateway.journey import DEATH_LOOK_SECONDS, Wishes
from ckpt_engine.gateway.json_numbers import dump, finite_json, load_answer
from ckpt_engine.gateway.placing import Placing, UnsuitedError
from ckpt_engine.gateway.poison import Suspects
from ckpt_engine.gateway.refusals import RefusedError
from ckpt_engine.gateway.samples import (
    PASSED_ON,
    has_ended,
    name_versions,
    samples_of,
    says,
    stamp_versions,
    was_aborted,
)
from ckpt_engine.gateway.stitching import ABORTED, BROKEN, WHOLE, Leg
from ckpt_engine.gateway.upstream import BrokenError, NoRouteError, NotAdmittedError, Stream, UnmetError
from ckpt_engine.gateway.versions import GatewayVersion, Span
from ckpt_engine.gateway.writing import Writer

MOST_IDS = 1 << 20
"""Most ids that are remembered of a stream, to report them if it breaks."""

MOST_EARLY = 8
"""Most leading events without content that are held back: until one has content, another engine may still answer."""


class AbortedError(Exception):
    """An engine was paused before the end of its answer, in a mode that ends running requests."""


class PassedRequest:
    """Passes one request on to a replica. Call `work` once."""

    def __init__(
        self,
        placing: Placing,
        route: str,
        body: Mapping[str, Any],
        wishes: Wishes,
        writer: Writer,
        why: str = PASSED_ON,
    ) -> None:
        """why: it is not resumed."""
        self._why = why
        self._placing, self._route, self._body = placing, route, body
        self._wishes, self._writer = wishes, writer
        self._ids: dict[int, list[int]] = {}
        self._started = False  # whether the caller has received anything of the answer
        self._pieces = 0  # events with content, or about as many tokens

    @property
    def streams(self) -> bool:
        """Whether the caller reads events."""
        return self._body.get("stream") is True

    async def work(self) -> None:
        """Answers the request. Raises RefusedError, and what the writer raises."""
        placing, settings = self._placing, self._placing.settings
        content: bytes | None = await self._writer.dump(self._body)
        patience = placing.patience(self._wishes.queue_seconds)
        suspects = Suspects(placing.upstream, settings.deaths, settings.dying)
        unsuited: dict[str, ReplicaNews] = {}
        dry = 0  # tries in a row that brought nothing
        lacking: set[str] = set()  # replicas whose servers have no such route
        while content is not None:
            want = self._wishes.want
            headers = {**self._wishes.headers, **want.gate_headers()}
            member = await placing.place(want, self._wishes.key, patience, self._started, unsuited)
            outcome, cause, news, url, life = "", "", member.news, member.news.url, member.life
            leg, before = Leg(member.name, 0, member.identify), self._pieces
            with placing.inside(member, self._started) as visit:
                try:
                    async with placing.upstream.ask(url, self._route, content, headers, self._wishes.resume) as stream:
                        self._let_in(placing.let_in(member, visit, stream.admitted, want))
                        leg.bounds, leg.caches, leg.entry = visit.bounds, visit.caches, visit.entry
                        await self._relay(stream, member, visit, leg)
                    outcome = WHOLE
                except UnsuitedError as error:
                    unsuited[member.name], outcome = error.news, "not_admitted"
                except UnmetError as error:
                    unsuited[member.name], outcome = news, "not_admitted"
                    elsewhere = self._pieces > before and not self._impediment() and placing.has_other(want, unsuited)
                    if (self._pieces > before and not elsewhere) or (error.may_have_begun and not self._wishes.resume):
                        raise error.refusal() from error
                    if elsewhere:
                        outcome, cause = ABORTED, f"{member.name} ended it ({error})"
                    elif not self._started:
                        self._forget()
                except NoRouteError as error:
                    lacking.add(member.name)
                    if placing.fleet.all_in(lacking, want):
                        detail = f"no replica's server has {self._route}, by its model or its options"
                        raise RefusedError(501, refusals.NO_DIALECT, detail) from error
                    unsuited[member.name], outcome = member.news, "not_admitted"
                except NotAdmittedError as error:
                    patience = placing.refused(member, error, patience, unsuited)
                    outcome = "not_admitted"
                except AbortedError:
                    outcome, cause = ABORTED, f"an update interrupted it at {member.name} (pause mode abort)"
                except BrokenError as error:
                    outcome, cause = BROKEN, f"{member.name} broke off ({error})"
                    placing.failed(member, str(error))
                    suspects.add(member, url, life, error.silent, time.monotonic(), self._pieces)
                finally:
                    if outcome:
                        leg.outcome = outcome
                        placing.metrics.legs.labels(member.name, outcome).inc()
            if outcome == WHOLE:
                return
            if cause:
                dry = 0 if self._pieces > before else dry + 1
                if outcome == BROKEN:
                    await asyncio.sleep(DEATH_LOOK_SECONDS + random.uniform(0, settings.jitter))
                await self._may_try_again(cause, dry, suspects)
                content = await self._next(cause)
                patience = placing.patience(self._wishes.queue_seconds)
            placing.check(want, patience)

    def _let_in(self, admitted: GatewayVersion | None) -> None:
        """Notes under which version a gate let it in."""

    def _impediment(self) -> str:
        """Why a request of which its caller has something cannot go on; empty: it can."""
        return f"a request that is passed on as it came is not resumed{self._because()}"

    async def _next(self, cause: str) -> bytes | None:
        """The body with which it is asked for once more; None: the answer has all that was asked for. cause: why it
        is, for people."""
        self._forget()
        return await self._writer.dump(self._body)

    def _forget(self) -> None:
        """Drops what came of an answer that its caller has not got."""
        self._ids.clear()

    async def _may_try_again(self, cause: str, dry: int, suspects: Suspects) -> None:
        """Raises RefusedError unless an answer that broke off can be asked for once more."""
        settings = self._placing.settings
        if self._started and (why := self._impediment()):
            raise RefusedError(502, refusals.NOT_RESUMABLE, f"{cause}, and {why}")
        if not self._wishes.resume:
            raise RefusedError(502, refusals.RESUME_OFF, f"{cause}, and the caller switched resuming off")
        if (dead := await suspects.dead()) >= settings.deaths:
            detail = f"{cause}; {dead} engines died or fell silent with this request inside: it is given up"
            raise RefusedError(502, refusals.POISONED, detail)
        if dry > settings.dry:
            raise RefusedError(502, refusals.NO_PROGRESS, f"{cause}; {dry} tries in a row brought nothing")

    def _because(self) -> str:
        return "" if self._why == PASSED_ON else f": {self._why}"

    async def _relay(self, stream: Stream, member: FleetReplica, visit: Visit, leg: Leg) -> None:
        """Relays the answer of one engine. Raises AbortedError, RefusedError and BrokenError."""
        self._writer.headers = stream.version_headers
        if stream.content_type.startswith("text/event-stream"):
            await self._relay_events(stream, member, visit, leg)
            return
        body = finite_json(await stream.whole())
        content = _load(body)
        samples = samples_of(content)
        if any(map(was_aborted, samples)):
            raise AbortedError
        believed = not member.news.mislabels
        self._check(name_versions(content, leg, believed, why=self._why), leg)
        if samples:
            if self._writer.stamps:
                stamp_versions(content)
            body = dump(content)
        await self._writer.answer(stream.status, (stream.content_type or "application/json").encode(), body, {})

    async def _relay_events(self, stream: Stream, member: FleetReplica, visit: Visit, leg: Leg) -> None:
        early: list[bytes] = []  # leading events without content, held back
        checked = False
        async for batch in stream.events():
            events: list[bytes] = []
            for data in map(finite_json, batch):
                self._remember(data)
                if self._started and not may_end(data):
                    self._pieces += 1
                    events.append(data)
                    continue
                content = _load(data)
                samples = samples_of(content)
                if any(map(was_aborted, samples)):
                    await self._tell([*early, *events, *_without_end(content)])
                    raise AbortedError
                if any(map(has_ended, samples)):
                    checked = True
                    counts = {number: len(ids) for number, ids in self._ids.items()}
                    believed = not member.news.mislabels
                    self._check(name_versions(content, leg, believed, counts, self._why), leg)
                    if self._writer.stamps:
                        stamp_versions(content)
                    data = dump(content)
                events += self._released(data, says(content), early, visit, leg)
            await self._tell(events)
        if not checked:
            self._check([], leg)
        self._started = True
        await self._tell(early)
        await self._writer.events([], done=True)

    def _released(self, data: bytes, brings: bool, early: list[bytes], visit: Visit, leg: Leg) -> list[bytes]:
        """What the caller gets now: an event, behind those that are held back in `early`; nothing: it is held back too.
        brings: whether it has content."""
        if not (self._started or brings or len(early) == MOST_EARLY):
            early.append(data)
            return []
        visit.begin()
        self._bring(leg)
        events = [*early, data]
        early.clear()
        return events

    def _bring(self, leg: Leg) -> None:
        """Notes that a leg brings something for the caller."""
        self._started = True
        self._pieces += 1

    async def _tell(self, events: Sequence[bytes]) -> None:
        if events and self._started:
            await self._writer.raw(b"".join(b"data: " + data + b"\n\n" for data in events), True)

    def _check(self, spans: Sequence[Span], leg: Leg) -> None:
        """Raises RefusedError if a version that the caller does not accept may have made the answer."""
        want = self._wishes.want
        if want.any_version and not want.lineage:
            return
        if not spans or not all(span.exact for span in spans):
            spans = [leg.span(0, 0)]
        for span in spans:
            if refusal := want.against(span):
                raise refusal

    def _remember(self, data: bytes) -> None:
        if b'"token_ids"' not in data:
            return
        for sample in samples_of(_load(data)):
            number, ids = sample.get("index", 0), sample.get("token_ids")
            if isinstance(number, int) and isinstance(ids, list):
                earlier_ids = self._ids.setdefault(number, [])
                earlier_ids += ids if len(earlier_ids) < MOST_IDS else []

    def so_far(self) -> dict[str, Any]:
        """The partial answer: the ids of each sample, where the engine sent any."""
        choices = [{"index": number, "token_ids": ids} for number, ids in sorted(self._ids.items())]
        return {"choices": choices} if choices else {}


def _load(data: bytes) -> Any:
    """Parses an event; None: it is not JSON."""
    try:
        return load_answer(data)
    except ValueError:
        return None


def _without_end(content: Any) -> list[bytes]:
    """The event without its end; empty if it has no content."""
    if not says(content):
        return []
    for sample in samples_of(content):
        sample["finish_reason"] = None
    return [dump(content)]
