"""Asks engines to turn messages into ids and ids into text: small requests that any replica can answer.

It decides how long such a request may take and where it is asked again when a replica fails. It does not decide what is
asked (`rendering.py`), and counts nothing as a leg: no token comes of it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from ckpt_engine.gateway import refusals
from ckpt_engine.gateway.choice import choose
from ckpt_engine.gateway.fleet import FleetReplica, ReplicaNews
from ckpt_engine.gateway.journey import LARGE, Wishes
from ckpt_engine.gateway.json_numbers import dump, load_answer
from ckpt_engine.gateway.placing import Placing
from ckpt_engine.gateway.refusals import RefusedError
from ckpt_engine.gateway.rendering import TextQuestion
from ckpt_engine.gateway.upstream import BrokenError, NotAdmittedError

ANSWER_SECONDS = 30.0
"""How long one replica may take for one answer. A parser goes over a whole output again."""

MOST_TRIES = 8
"""So many replicas, or times, one question is asked at most."""


async def ask_replica(
    placing: Placing, member: FleetReplica, question: TextQuestion, headers: Mapping[str, str]
) -> Any:
    """Asks one replica. Raises NotAdmittedError, BrokenError (also if it takes too long or does not answer with an
    object), and RefusedError if the engine refuses the question."""
    url = member.news.url
    large = max(len(question.body.get(name) or ()) for name in ("prompt_token_ids", "tokens")) >= LARGE
    content = await asyncio.to_thread(dump, question.body, True) if large else dump(question.body)
    try:
        async with (
            asyncio.timeout(ANSWER_SECONDS),
            placing.upstream.ask(url, question.route, content, headers) as found,
        ):
            answer = load_answer(await found.whole())
    except TimeoutError as error:
        raise BrokenError(f"{url}{question.route}: no answer within {ANSWER_SECONDS:g} s", True) from error
    except ValueError as error:
        raise BrokenError(f"{url}{question.route}: the answer is not JSON") from error
    if not isinstance(answer, dict):
        raise BrokenError(f"{url}{question.route}: the answer is not an object")
    return answer


class EngineTokenizer:
    """The questions of one request."""

    def __init__(self, placing: Placing, wishes: Wishes) -> None:
        """wishes: of the request, for engines of the kind that rendered it."""
        self._placing, self._wishes = placing, wishes

    async def ask(self, question: TextQuestion, prefer: str = "", lineage: str = "") -> Any:
        """Asks the replica `prefer`, else any whose weights are of this lineage (empty: of any), in whatever state: it
        need not generate.

        Raises RefusedError if the engine refuses the question, or no replica answers it for as long as the request may
        wait for one.
        """
        placing = self._placing
        patience = placing.patience(self._wishes.queue_seconds)
        unsuited: dict[str, ReplicaNews] = {}
        why = "none is known"
        for _ in range(MOST_TRIES):
            while (member := self._member(prefer, lineage, unsuited)) is None and time.monotonic() < patience.end:
                await placing.look()
            if member is None:
                break
            try:
                return await ask_replica(placing, member, question, self._wishes.headers)
            except NotAdmittedError as error:
                patience = placing.refused(member, error, patience, unsuited)
                why = f"{member.name}: {error}"
            except BrokenError as error:
                placing.failed(member, str(error))
                why = f"{member.name}: {error}"
        detail = f"no replica answered {question.route}, the last one asked: {why}"
        raise RefusedError(503, refusals.NO_REPLICA, detail, {"retry-after": "1"})

    def _member(self, prefer: str, lineage: str, unsuited: Mapping[str, ReplicaNews]) -> FleetReplica | None:
        now, engines = time.monotonic(), self._wishes.want.engines
        able = {
            name: member
            for name, member in self._placing.fleet.members.items()
            if member.news.url
            and member.news.engine in engines
            and now >= member.shunned_until
            and unsuited.get(name) is not member.news
        }
        if prefer in able:
            return able[prefer]
        runs = {name: member.news.identity.lineage if member.news.identity else "" for name, member in able.items()}
        loads = {name: member.load for name, member in able.items() if runs[name] in ("", lineage) or not lineage}
        return able[choose(self._wishes.key, loads)] if loads else None
