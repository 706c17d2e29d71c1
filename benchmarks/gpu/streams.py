"""Clients of one server, as a process of their own: so many streams, each asking for one completion after the other.

    python -m benchmarks.gpu.streams URL MODEL STREAMS TOKENS FILE ROUTE

ROUTE is `/v1/completions`, or SGLang's `/generate`, whose events tell how many tokens there are so far.

Answers (see lines.py) as soon as every stream has had a token, or with the problem; ends at the next line, after it has
written FILE: a JSON list of requests, each

    {"stream": 0, "asked": seconds, "status": 200, "tokens": [[seconds, count], ...], "whole": true, "problem": ""}

Seconds are of CLOCK_MONOTONIC, which all processes of a host share (time.perf_counter on Linux). status: 0 if there was
no answer. tokens: when each event came and how many tokens it had. whole: the server ended it as it should.

It speaks HTTP/1.1 itself: a general client takes so long for a token that 32 streams would see its gaps, not the
server's.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.lines import answer

FIRST_SECONDS = 60.0
"""Until each stream has had a token."""

SILENT_SECONDS = 60.0
"""Between two events of one answer; a server that says nothing for so long has failed."""

REFUSED_SECONDS = 0.05
"""Until a stream that was refused asks again."""

PROMPT_TOKENS = 16
LOWEST, HIGHEST = 5, 500
"""Token ids of prompts: every model has them."""


class Streams:
    """All of them; `requests` is what FILE will have."""

    def __init__(self, url: str, model: str, streams: int, tokens: int, route: str = "/v1/completions") -> None:
        host, port = url.removeprefix("http://").rstrip("/").split(":")
        self._host, self._port, self._model, self._most = host, int(port), model, tokens
        self._streams, self._route = streams, route
        self._begun: set[int] = set()
        self.requests: list[dict[str, Any]] = []
        self.all_begun = asyncio.Event()

    async def one(self, number: int) -> None:
        """Asks until it is cancelled. Answers have other lengths, so that they end one by one."""
        chance = random.Random(number)
        await asyncio.sleep(0.5 * number / self._streams)
        while True:
            prompt = [chance.randint(LOWEST, HIGHEST) for _ in range(PROMPT_TOKENS)]
            request: dict[str, Any] = {"stream": number, "asked": time.perf_counter(), "status": 0, "tokens": []}
            request |= {"whole": False, "problem": ""}
            self.requests.append(request)
            try:
                await self._ask(number, prompt, chance.randint(self._most // 2, self._most), request)
            except (OSError, TimeoutError, ValueError, asyncio.IncompleteReadError) as error:
                request["problem"] = f"{type(error).__name__}: {error}"
            if not request["whole"]:
                await asyncio.sleep(REFUSED_SECONDS)

    async def _ask(self, number: int, prompt: list[int], tokens: int, request: dict[str, Any]) -> None:
        body = json.dumps(self._asked(prompt, tokens)).encode()
        head = (
            f"POST {self._route} HTTP/1.1\r\nHost: {self._host}:{self._port}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        reader, writer = await asyncio.open_connection(self._host, self._port, limit=1 << 20)
        try:
            writer.write(head.encode() + body)
            request["status"] = int((await _line(reader)).split()[1])
            if request["status"] != 200:
                async with asyncio.timeout(SILENT_SECONDS):
                    request["problem"] = (await reader.read(2000)).decode(errors="replace")
                return
            # Each event is a line of its own; sizes of chunks, heads and empty lines begin with something else.
            while line := await _line(reader):
                if not line.startswith(b"data: "):
                    continue
                if line.startswith(b"data: [DONE]"):
                    request["whole"] = not request["problem"]
                    return
                self._event(number, json.loads(line[6:]), request)
            request["problem"] = request["problem"] or "the answer ended before it was whole"
        finally:
            writer.close()

    def _asked(self, prompt: list[int], tokens: int) -> dict[str, Any]:
        if self._route == "/generate":
            sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
            return {"input_ids": prompt, "sampling_params": sampling, "stream": True}
        asked = {"model": self._model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        return {**asked, "stream": True, "return_token_ids": True, "detokenize": False}

    def _event(self, number: int, event: dict[str, Any], request: dict[str, Any]) -> None:
        now = time.perf_counter()
        if "error" in event:
            request["problem"] = json.dumps(event["error"])
        if self._route == "/generate":
            before = sum(count for _, count in request["tokens"])
            count = event.get("meta_info", {}).get("completion_tokens", before) - before
        else:
            count = sum(len(choice.get("token_ids") or ()) for choice in event.get("choices", ()))
        if count:
            request["tokens"].append((now, count))
            self._begun.add(number)
            if len(self._begun) == self._streams:
                self.all_begun.set()


async def _line(reader: asyncio.StreamReader) -> bytes:
    # Python 3.11's wait_for loses a cancellation that comes together with the line; this does not.
    async with asyncio.timeout(SILENT_SECONDS):
        return await reader.readline()


async def run(clients: Streams, streams: int, file: Path) -> None:
    """Until a line comes, or the input ends."""
    running = [asyncio.create_task(clients.one(number)) for number in range(streams)]
    problem = ""
    try:
        await asyncio.wait_for(clients.all_begun.wait(), FIRST_SECONDS)
    except TimeoutError:
        problem = f"not every stream had a token in {FIRST_SECONDS} s; the last request: {clients.requests[-1:]}"
    answer(problem=problem)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    failed = [error for task in running if not task.cancelled() and (error := task.exception()) is not None]
    with file.open("w") as output:
        json.dump(clients.requests, output)
    answer(requests=len(clients.requests), problem="; ".join(map(repr, failed)))


def main() -> None:
    url, model, streams, tokens, file, route = sys.argv[1:]
    asyncio.run(run(Streams(url, model, int(streams), int(tokens), route), int(streams), Path(file)))


if __name__ == "__main__":
    main()
