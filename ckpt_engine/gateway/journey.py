"""One sample's way through the replicas: legs, until one of them finishes the sample. On the gateway's loop.

It decides when a request is resumed and when it is given up. It does not decide what tokens count (`stitching.py`) nor
which replica is asked (`fleet.py`, `choice.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial

from ckpt_engine.gateway import refusals
from ckpt_engine.gateway.dialect import EngineError, Legs, MalformedError, load_event
from ckpt_engine.gateway.fleet import FleetReplica, ReplicaNews, VersionWant, Visit
from ckpt_engine.gateway.json_numbers import dump
from ckpt_engine.gateway.placing import Patience, Placing, UnsuitedError
from ckpt_engine.gateway.poison import Suspects
from ckpt_engine.gateway.refusals import RefusedError
from ckpt_engine.gateway.stitching import ABORT, ABORTED, BROKEN, ERROR, WHOLE, AnswerPiece, OverrunError, Stitch
from ckpt_engine.gateway.upstream import BrokenError, NotAdmittedError, Stream, UnmetError
from ckpt_engine.gateway.versions import Span, lineages

DEATH_LOOK_SECONDS = 0.05
"""How long after a break a replica is probed: an engine that is dying may still be closing its connections."""

LARGE = 1 << 14
"""A leg's prompt of at least so many tokens is encoded on another thread."""

END_SECONDS = 1.0
"""How long an engine may take to end a stream after its last token; after that the connection is not used again."""


@dataclass(frozen=True)
class Wishes:
    """What a caller asks for in headers."""

    want: VersionWant
    key: bytes  # chooses the replica (`choice.py`)
    queue_seconds: float  # how long it waits for a replica
    resume: bool  # false: a leg that breaks ends the request
    headers: Mapping[str, str]  # that go with every leg

    def to(self, engines: frozenset[str]) -> Wishes:
        """The same wishes, for engines of these kinds only; empty: for any."""
        return replace(self, want=replace(self.want, engines=engines))


class Journey:
    """The legs of one sample. Iterate `pieces` once; closing the iteration cancels the running leg."""

    def __init__(
        self,
        placing: Placing,
        dialect: Legs,
        stitch: Stitch,
        wishes: Wishes,
        judge: Callable[[AnswerPiece], Awaitable[None]] | None = None,
    ) -> None:
        """judge: called with each piece that the stitch has taken, before anything else is done with it. It may finish
        the stitch, and drop tokens of the piece."""
        self._placing, self._dialect, self._stitch, self._wishes = placing, dialect, stitch, wishes
        self._judge = judge
        self._settings, self._metrics = placing.settings, placing.metrics
        self._want = wishes.want
        self._suspects = Suspects(placing.upstream, self._settings.deaths, self._settings.dying)
        self._dry = 0
        self._last_check: object = None
        self._identifier = uuid.uuid4().hex

    async def pieces(self) -> AsyncGenerator[AnswerPiece, None]:
        """Yields pieces for the caller as they come; after the last one the stitch is finished.

        Raises RefusedError if there is no whole answer: the stitch then has the partial one.
        """
        patience = self._placing.patience(self._wishes.queue_seconds)
        unsuited: dict[str, ReplicaNews] = {}
        while self._stitch.finish is None:
            if self._stitch.started and self._stitch.adapter:
                self._want = replace(self._want, model=self._stitch.adapter)
            member = await self._placing.place(self._want, self._wishes.key, patience, self._resumed, unsuited)
            leg = self._stitch.begin(member.name)
            why, silent, url, life, news = "", False, member.news.url, member.life, member.news
            unmet: UnmetError | None = None
            with self._placing.inside(member, self._resumed) as visit:
                try:
                    async with aclosing(self._leg(member, visit)) as pieces:
                        async for piece in pieces:
                            yield piece
                    outcome = WHOLE if self._stitch.finish is not None else ABORTED
                except UnsuitedError as error:
                    self._stitch.legs.pop()
                    unsuited[member.name] = error.news
                    self._placing.check(self._want, patience)
                    outcome = "not_admitted"
                except NotAdmittedError as error:
                    self._stitch.legs.pop()
                    patience = self._placing.refused(member, error, patience, unsuited)
                    self._placing.check(self._want, patience)
                    outcome = "not_admitted"
                except UnmetError as error:
                    unsuited[member.name] = news
                    if leg.count:
                        unmet, outcome = error, ABORTED
                    else:
                        self._stitch.legs.pop()
                        self._may_ask_again(error, patience)
                        outcome = "not_admitted"
                except (BrokenError, EngineError, MalformedError, OverrunError) as error:
                    why, outcome = str(error) or type(error).__name__, BROKEN
                    silent = isinstance(error, BrokenError) and error.silent
                leg.outcome = outcome
                self._metrics.legs.labels(member.name, outcome).inc()
                if outcome in (WHOLE, "not_admitted"):
                    continue
                self._check_last(len(self._stitch.tokens))
            if self._stitch.broken(self._dialect.finish):
                yield AnswerPiece()
                return
            if why:
                self._suspects.add(member, url, life, silent, time.monotonic(), len(self._stitch.tokens))
            if unmet is not None and not self._goes_on_elsewhere(unsuited):
                raise unmet.refusal()
            await self._may_go_on(member, leg.count, why)
            patience = self._placing.patience(self._wishes.queue_seconds)

    @property
    def _resumed(self) -> bool:
        return bool(self._stitch.tokens)

    def _content(self, identifier: str, large: bool = False) -> bytes:
        """Encodes the body of the next leg. May run on any thread."""
        body = self._dialect.leg_body(self._stitch, identifier)
        adapter = self._stitch.adapter
        return dump({**body, "model": adapter} if adapter and self._stitch.started else body, large)

    async def _leg(self, member: FleetReplica, visit: Visit) -> AsyncGenerator[AnswerPiece, None]:
        stitch, number = self._stitch, len(self._stitch.legs)
        identifier = f"{self._identifier}-{number}"
        write = partial(self._content, identifier)
        large = len(stitch.single.prompt) + len(stitch.tokens) >= LARGE
        content = await asyncio.to_thread(write, True) if large else write()
        if stitch.tokens:
            self._metrics.resumes.labels(member.name).inc()
            self._metrics.prefilled_again.labels(member.name).inc(len(stitch.single.prompt) + len(stitch.tokens))
        headers = {**self._wishes.headers, **self._want.gate_headers(), "x-request-id": identifier}
        async with self._placing.upstream.ask(
            member.news.url, self._dialect.route, content, headers, self._wishes.resume
        ) as stream:
            leg = stitch.leg
            if not stitch.started:
                stitch.adapter = stream.adapter
            admitted = self._placing.let_in(member, visit, stream.admitted, self._want)
            leg.bounds, leg.identify, leg.caches, leg.entry = visit.bounds, member.identify, visit.caches, visit.entry
            if admitted is not None and admitted.lineage and not self._want.lineage:
                self._want = replace(self._want, lineage=admitted.lineage)
            async with aclosing(self._read(stream, member, visit)) as pieces:
                async for piece in pieces:
                    yield piece

    async def _read(self, stream: Stream, member: FleetReplica, visit: Visit) -> AsyncGenerator[AnswerPiece, None]:
        """Yields one piece for all events that arrived together: a busy gateway writes less often, and not later."""
        stitch, labelled = self._stitch, member.news.engine in self._placing.engines.labelling
        async with aclosing(stream.events()) as events:
            async for batch in events:
                combined, failure, aborted, delivered = AnswerPiece(), None, False, len(stitch.tokens)
                for data in batch:
                    try:
                        piece = self._take(data, member, labelled)
                    except Exception as error:  # what came before it is the caller's first
                        failure = error
                        break
                    aborted = piece.finish is not None and piece.finish.kind == ABORT
                    if aborted:
                        piece.finish = None
                    combined.add(piece)
                    if aborted or stitch.finish is not None:
                        break
                if combined.says:
                    visit.begin()
                    if self._judge is not None:
                        await self._judge(combined)
                    if stitch.finish is not None:
                        self._check_last(delivered)
                    yield combined
                if failure is not None and stitch.finish is None:
                    raise failure
                if aborted:
                    return
                if stitch.finish is not None:
                    if combined.finish is None:
                        return  # the judge finished it, and the engine would go on
                    with contextlib.suppress(BrokenError, TimeoutError):
                        async with asyncio.timeout(END_SECONDS):
                            async for _ in events:
                                continue
                    return

    def _take(self, data: bytes, member: FleetReplica, labelled: bool) -> AnswerPiece:
        """Adds one event to the stitch."""
        stitch = self._stitch
        piece = self._dialect.piece(stitch, load_event(data), labelled)
        if member.news.mislabels:
            piece.labels = None
        if piece.finish is not None and piece.finish.kind == ERROR:
            raise BrokenError(f"the engine ended it with {piece.finish.reason!r}")
        delivered = len(stitch.tokens)
        piece = stitch.take(piece)
        if cached := piece.about.get("cached_tokens"):
            self._metrics.cached.labels(member.name).inc(cached)
        self._check_versions(member, delivered)
        return piece

    def _check_versions(self, member: FleetReplica, delivered: int) -> None:
        """Drops tokens that the engine labels with a version or lineage that the caller does not accept, before they
        are sent, and raises RefusedError. delivered: tokens that the caller has already."""
        stitch = self._stitch
        labels = stitch.leg.labels
        if not labels:
            return
        # Most events repeat the label of the one before, of the same replica: nothing new to check.
        state = (len(stitch.legs), len(labels), labels[-1].made_by, member.news)
        if state == self._last_check:
            return
        spans = stitch.leg.spans()
        if labels[-1].end > labels[-1].start and labels[-1].end >= stitch.leg.count:
            self._last_check = state  # what the labels say covers all that came
        self._check_spans([span for span in spans if span.exact], delivered)
        runs = lineages(spans) | ({self._want.lineage} if self._want.lineage else set())
        if len(runs) > 1:
            stitch.cut(delivered)
            detail = f"the replica went over to another run ({', '.join(sorted(runs))})"
            raise RefusedError(409, refusals.LINEAGE_CHANGED, detail)

    def _check_last(self, delivered: int) -> None:
        """Checks, at the end of a leg, the tokens that its engine did not label. delivered: as for
        `_check_versions`."""
        stitch, want = self._stitch, self._want
        exact = stitch.leg.count and all(span.exact for span in stitch.leg.spans())
        if exact or (want.any_version and not want.lineage):
            return
        scored = stitch.prompt_span() if stitch.scored and stitch.scored[0] is stitch.leg else None
        self._check_spans([*stitch.leg.spans(), *([scored] if scored else [])], delivered)

    def _check_spans(self, spans: Sequence[Span], delivered: int) -> None:
        for span in spans:
            refusal = self._want.against(span)
            if refusal is not None:
                self._stitch.cut(max(span.first, delivered))
                self._stitch.finish = None
                raise refusal

    def _may_ask_again(self, unmet: UnmetError, patience: Patience) -> None:
        """Raises RefusedError unless a leg of which nothing came may be asked for again."""
        if unmet.may_have_begun and not self._wishes.resume:
            raise unmet.refusal()
        self._placing.check(self._want, patience)

    def _goes_on_elsewhere(self, unsuited: Mapping[str, ReplicaNews]) -> bool:
        """Whether a leg that a gate ended for its versions can go on at another replica at once."""
        resumable = self._wishes.resume and not self._dialect.request.not_resumable
        return resumable and self._placing.has_other(self._want, unsuited)

    async def _may_go_on(self, member: FleetReplica, count: int, why: str) -> None:
        """Decides whether another leg follows one that ended too early. Raises RefusedError if not."""
        stitch, settings = self._stitch, self._settings
        cause = f"{member.name} broke off after {len(stitch.tokens)} tokens ({why or 'aborted'})"
        if why:
            self._placing.failed(member, why)
            await asyncio.sleep(DEATH_LOOK_SECONDS + random.uniform(0, settings.jitter))
        self._dry = 0 if count else self._dry + 1
        if stitch.started and self._dialect.request.not_resumable:
            reason = self._dialect.request.not_resumable
            raise RefusedError(502, refusals.NOT_RESUMABLE, f"{cause}, and the request is not resumable: {reason}")
        if not self._wishes.resume:
            raise RefusedError(502, refusals.RESUME_OFF, f"{cause}, and the caller switched resuming off")
        if why and (dead := await self._suspects.dead()) >= settings.deaths:
            detail = f"{cause}; {dead} engines died or fell silent with this request inside: it is given up"
            raise RefusedError(502, refusals.POISONED, detail)
        if self._dry > settings.dry:
            raise RefusedError(502, refusals.NO_PROGRESS, f"{cause}; {self._dry} legs in a row brought no token")
        if stitch.resumes >= settings.resumes:
            raise RefusedError(502, refusals.TOO_MANY_RESUMES, f"{cause}; it was resumed {stitch.resumes} times")
        if not count and not why:
            await asyncio.sleep(random.uniform(0, settings.jitter))
