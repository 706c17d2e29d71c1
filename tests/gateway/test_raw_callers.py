"""Callers of every kind on a real socket, byte for byte: old HTTP, chunks, pipelines, huge heads, and some who do not
read what they asked for."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest

from ckpt_engine.gateway.server import running_gateway
from ckpt_engine.gateway.settings import GatewaySettings
from ckpt_engine.http_server import HttpServer
from tests.gateway.misbehaving import BODY, WHOLE, Engine, told
from tests.waiting import until

ROUTE = b"POST /v1/completions HTTP/1.1"
CONTENT = json.dumps(BODY).encode()
STREAM = json.dumps({**BODY, "stream": True}).encode()


@contextlib.asynccontextmanager
async def serving(engine: Engine, **settings: Any) -> AsyncIterator[int]:
    """The port of a gateway before this engine."""
    async with contextlib.AsyncExitStack() as stack:
        made = GatewaySettings(replicas=(engine.listen(stack),), probe=0.2, **settings)
        gateway = await stack.enter_async_context(running_gateway(made))
        bound = socket.create_server(("127.0.0.1", 0))
        server = HttpServer(gateway.application(), made.security, 60)
        task = asyncio.ensure_future(server.serve(sockets=[bound]))
        try:
            await until(lambda: not gateway.why_not_ready())
            yield bound.getsockname()[1]
        finally:
            server.should_exit = True
            await task


async def sent(port: int, data: bytes) -> bytes:
    """All that comes back until the gateway closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        async with asyncio.timeout(60):
            return await reader.read()
    finally:
        writer.close()


def request(content: bytes, *headers: bytes, line: bytes = ROUTE, last: bool = True) -> bytes:
    named = [line, b"Host: x", b"Content-Length: %d" % len(content), *headers, *([b"Connection: close"] * last)]
    return b"\r\n".join((*named, b"", content))


def sound() -> Engine:
    return Engine(lambda _number, body: told(body))


async def test_a_stream_over_http_1_0_has_no_chunks() -> None:
    async with serving(sound()) as port:
        answer = await sent(port, request(STREAM, line=b"POST /v1/completions HTTP/1.0", last=False))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"chunked" not in head.lower()
    events = body.decode().split("\n\n")
    assert all(event.startswith("data: ") for event in events[:-1])
    assert events[-2:] == ["data: [DONE]", ""]


async def test_requests_one_after_the_other_without_waiting() -> None:
    engine = sound()
    async with serving(engine) as port:
        answer = await sent(port, request(CONTENT, last=False) * 2 + request(CONTENT))
    assert answer.count(b"HTTP/1.1 200 OK") == answer.count(json.dumps(WHOLE, separators=(",", ":")).encode()) == 3
    assert len(engine.asked) == 3


async def test_a_body_in_chunks() -> None:
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in CONTENT)
    async with serving(sound()) as port:
        head = b"\r\n".join((ROUTE, b"Host: x", b"Transfer-Encoding: chunked", b"Connection: close", b"", b""))
        answer = await sent(port, head + chunks + b"0\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200 OK")


@pytest.mark.parametrize(
    ("content", "headers", "status", "said"),
    [
        (gzip.compress(CONTENT), [b"Content-Encoding: gzip"], 415, "content-encoding: gzip"),
        (b"", [], 400, "there is no body"),
        (b'{"prompt": [1, 2.5]}', [], 400, "number 1 of it is 2.5"),
        (b'{"prompt": "' + b"\xe9" + b'"}', [], 400, "not JSON"),
        (b"a" * 1001, [], 413, "--body-bytes"),
    ],
    ids=["compressed", "no body", "no id", "no UTF-8", "too large"],
)
async def test_what_cannot_be_read_is_refused(content: bytes, headers: list[bytes], status: int, said: str) -> None:
    """And the connection is closed where more would follow."""
    engine = sound()
    async with serving(engine, body_bytes=1000) as port:
        answer = await sent(port, request(content, *headers, last=status != 413))
    assert answer.startswith(b"HTTP/1.1 %d " % status), answer
    assert said in answer.decode()
    assert not engine.asked


CHUNKED = b"%x\r\n%b\r\n0\r\n\r\n" % (len(CONTENT), CONTENT)
LENGTH = b"%d" % len(CONTENT)


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        ([b"Content-Length: " + LENGTH, b"Transfer-Encoding: chunked"], CHUNKED),
        ([b"Transfer-Encoding: chunked", b"Content-Length: " + LENGTH], CHUNKED),
        ([b"Content-Length: 0", b"Transfer-Encoding: chunked"], CHUNKED),
        ([b"Content-Length: " + LENGTH, b"transfer-encoding:\r\n chunked"], CHUNKED),
        ([b"Content-Length: " + LENGTH, b"Transfer-Encoding: identity"], CONTENT),
        ([b"Content-Length: " + LENGTH, b"Transfer-Encoding: xchunked"], CONTENT),
        ([b"Content-Length: " + LENGTH, b"Transfer-Encoding : chunked"], CHUNKED),
        ([b"Transfer-Encoding: chunked", b"Transfer-Encoding: identity"], CHUNKED),
        ([b"Content-Length: " + LENGTH, b"Content-Length: 3"], CONTENT),
        ([b"Content-Length: " + LENGTH + b", 3"], CONTENT),
        ([b"Content-Length: " + LENGTH + b"\r\n 3"], CONTENT),
        ([b"Content-Length:\r\n 3", b"Content-Length: " + LENGTH], CONTENT),
        ([b"Content-Length: +" + LENGTH], CONTENT),
        ([b"Content-Length: -1"], CONTENT),
        ([b"Content-Length: 0x10"], CONTENT),
        ([b"Content-Length : " + LENGTH], CONTENT),
        ([b"Content-Length: " + b"9" * 30], CONTENT),
        ([b"Content-Length:"], CONTENT),
    ],
)
async def test_a_body_whose_length_is_said_in_two_ways_is_refused_and_what_follows_is_none(
    headers: list[bytes], body: bytes
) -> None:
    """Where a server before this one takes the other length, a part of the body is somebody else's next request."""
    engine = sound()
    head = b"\r\n".join((ROUTE, b"Host: x", *headers, b"", b""))
    async with serving(engine) as port:
        answer = await sent(port, head + body + request(CONTENT))
        about_itself = head.replace(ROUTE, b"POST /readyz HTTP/1.1")
        other = await sent(port, about_itself + body + request(CONTENT))
    for each in (answer, other):
        assert each.count(b"HTTP/1.1 ") == 1, each
        assert each.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 413 ", b"HTTP/1.1 501 ")), each
        assert b"connection: close" in each.lower(), each
    assert not engine.asked


async def test_a_length_that_is_said_twice_alike_is_one() -> None:
    engine = sound()
    async with serving(engine) as port:
        answer = await sent(port, request(CONTENT, b"Content-Length: " + LENGTH))
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert len(engine.asked) == 1


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_client_that_writes_all_before_it_reads_is_told_that_it_is_too_much(chunked: bool) -> None:
    """A connection that is closed while its client still writes is reset, and what was answered is lost."""
    content = b"a" * (32 << 20)
    async with serving(sound(), body_bytes=1000) as port:
        said = (
            b"\r\n".join(
                (ROUTE, b"Host: x", b"Transfer-Encoding: chunked", b"", b"%x" % len(content), content, b"0", b"", b"")
            )
            if chunked
            else request(content)
        )

        def ask() -> bytes:
            with socket.create_connection(("127.0.0.1", port), timeout=60) as caller:
                caller.sendall(said)
                return caller.recv(1 << 16)

        answer = await asyncio.to_thread(ask)
    assert answer.startswith(b"HTTP/1.1 413 "), answer


async def test_one_that_waits_to_be_told_to_send_its_body_is_told_at_once_that_it_is_too_much() -> None:
    head = b"\r\n".join((ROUTE, b"Host: x", b"Content-Length: 2000", b"Expect: 100-continue", b"", b""))
    async with serving(sound(), body_bytes=1000) as port:
        answer = await sent(port, head)
    assert answer.startswith(b"HTTP/1.1 413 "), answer


async def test_a_body_that_does_not_come_is_not_waited_for() -> None:
    async with serving(sound(), idle=1.0) as port:
        answer = await sent(port, b"\r\n".join((ROUTE, b"Host: x", b"Content-Length: 100", b"", b"{")))
    assert answer.startswith(b"HTTP/1.1 408 "), answer
    assert b"1 bytes of it did" in answer


async def test_a_head_without_end_is_not_kept() -> None:
    engine = sound()
    async with serving(engine) as port:
        with contextlib.suppress(ConnectionResetError):  # it may close while the rest is on its way
            answer = await sent(port, request(CONTENT, b"X: " + b"a" * (1 << 20)))
            assert answer.startswith(b"HTTP/1.1 400 ")
    assert not engine.asked


@pytest.mark.slow
async def test_callers_who_do_not_read_hold_their_engine_up_and_are_let_go() -> None:
    """What the gateway keeps for one of them is bounded; the engine is free again after --idle-seconds."""
    made, most = 0, 10_000

    async def much(body: dict[str, Any]) -> AsyncIterator[bytes]:
        nonlocal made
        for _ in range(most):
            made += 1
            await asyncio.sleep(0)  # an engine makes one token after the other
            yield b"data: " + json.dumps({"choices": [{"text": "a" * 65536, "token_ids": [1]}]}).encode() + b"\n\n"

    engine = Engine(lambda _number, body: much(body))
    asks = json.dumps({**BODY, "max_tokens": most, "stream": True}).encode()
    async with serving(engine, idle=1.0) as port:
        callers = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        for _, writer in callers:
            writer.write(request(asks))
        await until(lambda: engine.inside > 0)
        await until(lambda: engine.inside == 0)
        assert made < most
        for _, writer in callers:
            writer.close()
