"""An agent's calls to an engine, before sockets that answer what they are told to: which of them count as answered."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from ckpt_engine.agent.http import EngineClient
from ckpt_engine.engine.adapter import EngineCallError
from tests.ports import free_port


def said(status: str, body: str = "{}") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()


@contextlib.asynccontextmanager
async def engine(answer: bytes, stays: bool = False) -> AsyncIterator[tuple[EngineClient, list[bytes]]]:
    """A client of a server that answers every connection so, and what each connection was asked. stays: it then says
    nothing more, and keeps the connection."""
    asked: list[bytes] = []
    over = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        size = [int(line[15:]) for line in head.split(b"\r\n") if line.startswith(b"content-length:")]
        asked.append(head + await reader.readexactly(sum(size)))
        writer.write(answer)
        with contextlib.suppress(ConnectionError):
            await writer.drain()
            if stays:
                await over.wait()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    client = EngineClient(f"http://127.0.0.1:{port}", {"x-token": "secret"})
    try:
        yield client, asked
    finally:
        over.set()
        client.close()
        server.close()


async def test_each_call_has_a_connection_of_its_own_and_says_so() -> None:
    async with engine(said("200 OK", '{"a": 1}'), stays=True) as (client, asked):
        for _ in range(2):
            answer = await client.call("POST", "/x", 60, {"tags": ["weights"]}, {"level": 2, "tag": ["a", "b/c"]})
            assert answer.json() == {"a": 1}
        assert len(asked) == 2
        head, _, body = asked[0].partition(b"\r\n\r\n")
        lines = head.decode().split("\r\n")
        assert lines[0] == "POST /x?level=2&tag=a&tag=b%2Fc HTTP/1.1"
        assert {"connection: close", "x-token: secret", "content-type: application/json"} <= set(lines)
        assert body == b'{"tags": ["weights"]}'


@pytest.mark.parametrize(
    ("answer", "answered", "status", "says"),
    [
        (said("404 Not Found", '{"detail": "no such route"}'), True, 404, "POST /pause: 404 no such route"),
        (said("500 Internal Server Error", "went wrong"), True, 500, "POST /pause: 500 went wrong"),
        (said("307 Temporary Redirect", ""), True, 307, "POST /pause: 307 "),
        (said("504 Gateway Timeout", '{"detail": "workers are silent"}'), False, 0, "POST /pause: workers are silent"),
        (b"", False, 0, "POST /pause: no answer within 60.0 s: the connection ended before the answer did"),
        (said("200 OK", "{}")[:-1], False, 0, "POST /pause: no answer within 60.0 s: the connection ended before"),
        (b"SSH-2.0-OpenSSH\r\n", False, 0, "POST /pause: no answer within 60.0 s: its answer is not HTTP"),
    ],
)
async def test_who_refuses_has_answered_and_who_breaks_off_has_not(
    answer: bytes, answered: bool, status: int, says: str
) -> None:
    async with engine(answer) as (client, _):
        with pytest.raises(EngineCallError) as raised:
            await client.call("POST", "/pause", 60)
    assert (raised.value.answered, raised.value.status) == (answered, status)
    assert str(raised.value).startswith(says)


@pytest.mark.parametrize("answer", [b"", said("200 OK", "{}")[:-1]])
async def test_one_that_says_no_more_is_given_up_at_the_deadline(answer: bytes) -> None:
    async with engine(answer, stays=True) as (client, _):
        with pytest.raises(EngineCallError, match=r"POST /pause: no answer within 0\.3 s: ") as raised:
            await client.call("POST", "/pause", 0.3)
    assert not raised.value.answered


async def test_nobody_there_is_no_answer() -> None:
    client = EngineClient(f"http://127.0.0.1:{free_port()}")
    with pytest.raises(
        EngineCallError, match=r"GET /health: no answer within 60\.0 s: nothing listens there"
    ) as raised:
        await client.call("GET", "/health", 60)
    assert not raised.value.answered
