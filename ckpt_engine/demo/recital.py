"""Asks the demo's replicas to go on from the opening words, greedily, through the gateway."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import httpx

from ckpt_engine.demo import task
from ckpt_engine.demo.servers import server_of
from ckpt_engine.gateway.choice import key_of, ranked

ANSWER_SECONDS = 60.0


@dataclass(frozen=True)
class Recital:
    """One replica's answer."""

    replica: str
    version: int  # that made the tokens, by the gateway's answer
    continuation: bytes
    matching: int  # how many of the first bytes are the text's
    seconds: float

    @property
    def matches(self) -> bool:
        """Whether the replica went on exactly as the text does, as far as it was asked to."""
        return self.matching == task.CONTINUATION_BYTES


async def recite(engine: str, gateway: str, replicas: Sequence[str]) -> list[Recital]:
    """Asks every replica (by name) at the same time, through the gateway at this URL. Raises httpx.HTTPError."""
    async with httpx.AsyncClient(timeout=ANSWER_SECONDS, trust_env=False) as client:
        return await asyncio.gather(
            *(_ask(client, engine, gateway, session_of(name, replicas)) for name in sorted(replicas))
        )


def session_of(name: str, replicas: Sequence[str]) -> str:
    """A session that the gateway assigns to this replica, as long as no replica has more than its share."""
    sessions = (f"recital-{number}" for number in count())
    return next(session for session in sessions if ranked(key_of(session, ()), replicas)[0] == name)


async def _ask(client: httpx.AsyncClient, engine: str, url: str, session: str) -> Recital:
    text = task.text()
    prompt = list(text[: task.PROMPT_BYTES])
    started = time.monotonic()
    headers, server = {"x-session-id": session}, server_of(engine)
    route, body = server.question(prompt)
    response = await client.post(f"{url}{route}", json=body, headers=headers)
    response.raise_for_status()
    tokens, about = server.answer(response.json())
    continuation = bytes(tokens)
    expected = text[task.PROMPT_BYTES : task.PROMPT_BYTES + task.CONTINUATION_BYTES]
    pairs = zip(continuation, expected, strict=False)
    matching = next(
        (index for index, (about, due) in enumerate(pairs) if about != due), min(len(tokens), len(expected))
    )
    replica, seconds = about["legs"][-1]["replica"], time.monotonic() - started
    return Recital(replica, about["max_version"], continuation, matching, seconds)
