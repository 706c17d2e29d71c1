"""The clients of the benchmark under load, against a small server that refuses, cuts off, and answers in events."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from benchmarks.gpu.streams import Streams, _line

REFUSED = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 9\r\nConnection: close\r\n\r\nan update"
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def event(**choice: Any) -> bytes:
    data = b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(data), data)


async def test_refused_cut_off_and_whole_answers_are_told_apart() -> None:
    """A stream asks again after each; its requests keep their order."""
    done = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
    answers = [
        REFUSED,
        HEAD + event(token_ids=[5, 6]),
        HEAD + event(token_ids=[5]) + event(token_ids=[7, 8, 9], finish_reason="length") + done,
    ]
    asked: list[dict[str, Any]] = []
    over = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        asked.append(json.loads(await reader.readexactly(length)))
        if len(asked) <= len(answers):
            writer.write(answers[len(asked) - 1])
            await writer.drain()
            writer.close()
        else:
            over.set()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    clients = Streams(f"http://127.0.0.1:{port}", "tiny", 1, 40)
    running = asyncio.create_task(clients.one(0))
    try:
        await asyncio.wait_for(over.wait(), 60)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        server.close()
    refused, cut, whole, last = clients.requests
    assert (refused["status"], refused["tokens"], refused["whole"]) == (503, [], False)
    assert "an update" in refused["problem"]
    assert ([count for _, count in cut["tokens"]], cut["whole"]) == ([2], False)
    assert cut["problem"] == "the answer ended before it was whole"
    assert ([count for _, count in whole["tokens"]], whole["whole"], whole["problem"]) == ([1, 3], True, "")
    assert (last["status"], last["problem"]) == (0, "")
    assert clients.all_begun.is_set()
    assert all(body["stream"] and body["return_token_ids"] and 20 <= body["max_tokens"] <= 40 for body in asked)


async def test_sglangs_events_say_how_many_tokens_there_are_so_far() -> None:
    asked: list[dict[str, Any]] = []
    again = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        if asked:
            again.set()
        asked.append({"head": head, **json.loads(await reader.readexactly(length))})
        for tokens in (1, 2, 5):
            data = json.dumps({"output_ids": [7] * tokens, "meta_info": {"completion_tokens": tokens}}).encode()
            writer.write((HEAD if tokens == 1 else b"") + b"data: " + data + b"\n\n")
        writer.write(b"data: [DONE]\n\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    clients = Streams(f"http://127.0.0.1:{port}", "tiny", 1, 40, "/generate")
    running = asyncio.create_task(clients.one(0))
    try:
        await asyncio.wait_for(again.wait(), 60)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        server.close()
    first = clients.requests[0]
    assert ([count for _, count in first["tokens"]], first["whole"], first["problem"]) == ([1, 1, 3], True, "")
    assert asked[0]["head"].startswith(b"POST /generate HTTP/1.1")
    assert 20 <= asked[0]["sampling_params"]["max_new_tokens"] <= 40


async def test_clients_end_also_when_a_token_comes_at_that_moment() -> None:
    """A cancellation that is lost would leave a client asking for ever."""
    for _ in range(20):
        reader = asyncio.StreamReader()

        async def lines(reader: asyncio.StreamReader = reader) -> None:
            while True:
                await _line(reader)

        reading = asyncio.create_task(lines())
        await asyncio.sleep(0.001)
        reader.feed_data(b"data: {}\n")
        await asyncio.sleep(0)
        reading.cancel()
        done, _ = await asyncio.wait([reading], timeout=30)
        assert done, "it goes on reading"
