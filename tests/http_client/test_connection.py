"""Our own HTTP towards engines, before sockets that answer what they are told to, to the byte."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

import pytest

from ckpt_engine.gateway.writing import within
from ckpt_engine.http_client import connection as http1
from ckpt_engine.http_client import connections
from ckpt_engine.http_client.connection import ConnectError, SilentError, UnreachableError, WireError, request_head
from ckpt_engine.http_client.connections import Connections, origin_of
from tests.ports import free_port
from tests.waiting import until

SECONDS = 60.0
Play = Callable[["Peer"], Awaitable[None]]

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n6;x=y\r\n world\r\n0\r\n\r\n"
COUNTED = b"HTTP/1.1 200 OK\r\nContent-Length: 11\r\n\r\nhello world"
UNTIL_CLOSED = b"HTTP/1.1 200 OK\r\n\r\nhello world"


class Peer:
    """The far end of one connection. asked: what came before it answered."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def asked(self) -> bytes:
        head = await self.reader.readuntil(b"\r\n\r\n")
        size = [int(line[15:]) for line in head.split(b"\r\n") if line.startswith(b"content-length:")]
        return head + await self.reader.readexactly(size[0] if size else 0)

    async def says(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()


@contextlib.asynccontextmanager
async def before(play: Play) -> AsyncIterator[tuple[Connections, str, list[Peer]]]:
    """Connections, the URL of a server each of whose connections plays this, and those connections."""
    peers: list[Peer] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peers.append(Peer(reader, writer))
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await play(peers[-1])
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    made = Connections(SECONDS)
    try:
        yield made, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/engine", peers
    finally:
        made.close()
        server.close()


async def answer_of(connection: http1.Connection, seconds: float) -> bytes:
    await connection.ask(request_head("GET", "/x", "host", {}, None), b"", seconds)
    return await connection.read_all(11, seconds)


def always(*answers: bytes) -> Play:
    async def play(peer: Peer) -> None:
        for answer in answers:
            await peer.asked()
            await peer.says(answer)

    return play


@pytest.mark.parametrize("answer", [CHUNKED, COUNTED, UNTIL_CLOSED, b"HTTP/1.1 103 Early\r\nlink: x\r\n\r\n" + CHUNKED])
async def test_bodies_of_every_length(answer: bytes) -> None:
    async with before(always(answer)) as (made, url, _):
        found = await made.get(url, "/x", SECONDS)
    assert (found.status, found.content) == (200, b"hello world")
    assert "link" not in found.headers


async def test_an_answer_byte_by_byte() -> None:
    async def slowly(peer: Peer) -> None:
        await peer.asked()
        for place in range(len(CHUNKED)):
            await peer.says(CHUNKED[place : place + 1])
            await asyncio.sleep(0)

    async with before(slowly) as (made, url, _):
        assert (await made.get(url, "/x", SECONDS)).text == "hello world"


async def test_what_is_sent() -> None:
    seen: list[bytes] = []

    async def play(peer: Peer) -> None:
        seen.append(await peer.asked())
        await peer.says(COUNTED)

    async with before(play) as (made, url, _):
        connection = await made.ask("POST", url, "/x", {"a": "b"}, b"{}", SECONDS)
        assert await connection.read_all(11, SECONDS) == b"hello world"
    host = url.split("/")[2]
    assert seen == [f"POST /engine/x HTTP/1.1\r\nhost: {host}\r\na: b\r\ncontent-length: 2\r\n\r\n{{}}".encode()]


def test_a_header_cannot_end_its_line() -> None:
    with pytest.raises(ValueError, match="end of a line"):
        request_head("POST", "/x", "host", {"traceparent": "a\r\nx-evil: 1"}, None)


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections that have nothing to do are kept, however slow this machine is."""
    monkeypatch.setattr(connections, "KEPT_SECONDS", SECONDS)


@pytest.mark.usefixtures("kept")
async def test_a_connection_is_used_again_only_after_a_whole_answer() -> None:
    async with before(always(COUNTED, CHUNKED, COUNTED)) as (made, url, peers):
        for _ in range(2):
            await made.get(url, "/x", SECONDS)
        assert len(peers) == 1
        connection = await made.ask("GET", url, "/x", {}, None, SECONDS)
        made.done(url, connection)  # its body was not read
        await made.get(url, "/x", SECONDS)
        assert len(peers) == 2


@pytest.mark.usefixtures("kept")
async def test_a_connection_that_was_closed_here_is_not_used_again() -> None:
    """Also before the loop has told it that it is gone."""
    async with before(always(COUNTED, COUNTED)) as (made, url, peers):
        await made.get(url, "/x", SECONDS)
        ((free,),) = made._free.values()
        free.close()  # as it does itself when nobody has asked for long enough
        connection = await made.ask("GET", url, "/x", {}, None, SECONDS)
        assert connection is not free
        assert len(peers) == 2


@pytest.mark.parametrize("closing", [b"HTTP/1.1 200 OK\r\nConnection: close\r\n", b"HTTP/1.0 200 OK\r\n"])
async def test_a_connection_that_is_to_close_is_not_used_again(closing: bytes) -> None:
    async with before(always(closing + b"Content-Length: 0\r\n\r\n")) as (made, url, peers):
        for _ in range(2):
            await made.get(url, "/x", SECONDS)
        assert len(peers) == 2


async def test_a_connection_that_its_server_closed_is_not_used_again() -> None:
    async with before(always(COUNTED)) as (made, url, peers):
        for _ in range(3):
            await made.get(url, "/x", SECONDS)
            await until(lambda: not made._free)  # the server closes each after one answer
        assert len(peers) == 3


async def test_a_connection_without_work_closes_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "KEPT_SECONDS", 0.01)
    closed = asyncio.Event()

    async def play(peer: Peer) -> None:
        await peer.asked()
        await peer.says(COUNTED)
        assert await peer.reader.read() == b""
        closed.set()

    async with before(play) as (made, url, _):
        await made.get(url, "/x", SECONDS)
        await asyncio.wait_for(closed.wait(), SECONDS)


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 200 OK\r\n",
        CHUNKED[:-5],
        COUNTED[:-1],
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nhello\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: upgrade\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx: " + b"a" * (http1.MOST_HEAD_BYTES + 1) + b"\r\n\r\n",
    ],
)
async def test_what_is_no_whole_answer_is_an_error(answer: bytes) -> None:
    async with before(always(answer)) as (made, url, _):
        with pytest.raises(WireError) as error:
            await made.get(url, "/x", SECONDS)
        assert not isinstance(error.value, (ConnectError, SilentError))
        assert not made._free


@pytest.mark.parametrize(
    "begins",
    [b"HTTP/1.1 200 OK\r\nx: ", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nx: ", CHUNKED[:-5] + b"1;"],
)
async def test_a_line_that_never_ends_is_an_error(begins: bytes) -> None:
    async def play(peer: Peer) -> None:
        await peer.asked()
        await peer.says(begins)
        for _ in range(64):
            await peer.says(b"a" * 4096)

    async with before(play) as (made, url, _):
        with pytest.raises(WireError, match=f"more than {http1.MOST_HEAD_BYTES} bytes that are not an answer"):
            await made.get(url, "/x", SECONDS)


@pytest.mark.usefixtures("kept")
async def test_a_connection_that_was_kept_and_ends_without_a_byte_is_asked_for_again() -> None:
    """An engine closes it while the request is on its way. What breaks on a new connection, after a first byte, or for
    a caller who wants nothing asked twice, is told."""
    seen: list[bytes] = []

    async def play(peer: Peer) -> None:
        seen.append(await peer.asked())
        if len(seen) != 3:
            await peer.says(COUNTED)
            seen.append(await peer.asked())
            await peer.says(b"H" if len(seen) == 5 else b"")

    async with before(play) as (made, url, peers):
        asking = partial(made.ask, "POST", url, "/x", {})
        connection = await asking(b"first", SECONDS)
        assert await connection.read_all(11, SECONDS) == b"hello world"
        made.done(url, connection)
        with pytest.raises(WireError, match="before the answer did"):
            await asking(b"second", SECONDS)
        assert len(peers) == 2
        assert [each[-1:] for each in seen] == [b"t", b"d", b"d"], "once on the one that was kept, once on a new one"

        connection = await asking(b"fourth", SECONDS)
        assert await connection.read_all(11, SECONDS) == b"hello world"
        made.done(url, connection)
        with pytest.raises(WireError, match="before the answer did"):
            await asking(b"fifth", SECONDS)
        assert len(peers) == 3, "a byte of the answer had come"

        connection = await asking(b"sixth", SECONDS)
        assert await connection.read_all(11, SECONDS) == b"hello world"
        made.done(url, connection)
        connection = await asking(b"seventh", SECONDS, again=False)
        assert len(peers) == 5
        assert sum(each.endswith(b"seventh") for each in seen) == 1, "on a new connection at once"


@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize(("body", "kind"), [(b"{}", WireError), (None, UnreachableError)])
async def test_what_an_engine_died_with_inside_is_not_said_to_be_outside(
    body: bytes | None, kind: type[WireError]
) -> None:
    """Of a question it does not matter: that nobody is there any more is what it was to find out."""
    server: asyncio.Server

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = Peer(reader, writer)
        await peer.asked()
        await peer.says(COUNTED)
        await peer.asked()
        server.close()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    made, url = Connections(SECONDS), f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    await made.get(url, "/x", SECONDS)
    with pytest.raises(WireError) as error:
        await made.ask("POST", url, "/x", {}, body, SECONDS)
    assert type(error.value) is kind
    made.close()


async def test_a_small_answer_has_a_limit_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of time, however often some of it comes, and of size."""

    async def drops(peer: Peer) -> None:
        await peer.asked()
        await peer.says(b"HTTP/1.1 200 OK\r\n\r\n")
        for _ in range(100):
            await peer.says(b"a")
            await asyncio.sleep(0.005)

    async with before(drops) as (made, url, _):
        with pytest.raises(SilentError):
            await made.get(url, "/x", 0.05)
    monkeypatch.setattr(connections, "MOST_SMALL_BYTES", 10)
    async with before(always(COUNTED)) as (made, url, _):
        with pytest.raises(WireError, match="more than 10 bytes"):
            await made.get(url, "/x", SECONDS)


async def test_what_follows_an_answer_is_none_to_the_next_request() -> None:
    async with before(always(COUNTED + CHUNKED)) as (made, url, peers):
        for _ in range(2):
            assert (await made.get(url, "/x", SECONDS)).text == "hello world"
        assert len(peers) == 2


async def test_an_answer_that_is_too_long() -> None:
    async with before(always(COUNTED)) as (made, url, _):
        connection = await made.ask("GET", url, "/x", {}, None, SECONDS)
        with pytest.raises(WireError, match="more than 10 bytes"):
            await connection.read_all(10, SECONDS)


@pytest.mark.parametrize("begins", [b"", CHUNKED[:60]])
async def test_silence(begins: bytes) -> None:
    async def play(peer: Peer) -> None:
        await peer.asked()
        await peer.says(begins)
        await peer.reader.read()

    async with before(play) as (made, url, _):
        connection = await made._open(origin_of(url), SECONDS)
        with pytest.raises(SilentError, match=r"nothing came for 0\.05 s"):
            await answer_of(connection, 0.05)


async def test_a_silence_is_said_to_be_as_long_as_it_was() -> None:
    """A connection that was kept had another limit, whose timer goes on."""

    async def play(peer: Peer) -> None:
        await peer.asked()
        await peer.says(COUNTED)
        await peer.reader.read()

    async with before(play) as (made, url, _):
        connection = await made.ask("GET", url, "/x", {}, None, SECONDS)
        assert await connection.read_all(11, SECONDS) == b"hello world"
        assert connection.keep_idle(0.01)
        with pytest.raises(SilentError, match=r"nothing came for 0\.05 s"):
            await answer_of(connection, 0.05)


async def test_nobody_there() -> None:
    made = Connections(SECONDS)
    with pytest.raises(UnreachableError):
        await made.get(f"http://127.0.0.1:{free_port()}", "/x", SECONDS)
    odd = ("http://replica-\u4e00", "http://127.0.0.1/a b", "http://127.0.0.1/a\nb", "http://127.0.0.1/\u00e9")
    for url in ("ftp://127.0.0.1", "http://", "http://127.0.0.1:99999", *odd):
        with pytest.raises(ConnectError, match=r"is not an? (HTTP )?URL") as error:
            await made.get(url, "/x", SECONDS)
        assert repr(url) in str(error.value)
        assert not isinstance(error.value, UnreachableError)


async def test_a_connection_that_ends_before_anything_was_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop that is busy hears of the connection and of its end at once."""

    async def play(peer: Peer) -> None:
        """Closes at once."""

    loop = asyncio.get_running_loop()
    connect = loop.create_connection

    async def late(*given: Any, **named: Any) -> Any:
        found = await connect(*given, **named)
        await until(lambda: found[1].closed)
        return found

    monkeypatch.setattr(loop, "create_connection", late)
    async with before(play) as (made, url, _):
        with pytest.raises(ConnectError, match="ended before anything was asked") as error:
            await made.get(url, "/x", SECONDS)
        assert not isinstance(error.value, UnreachableError)
        assert not made._all


async def test_no_tls_there_is_no_death() -> None:
    async def play(peer: Peer) -> None:
        await peer.reader.read(1)
        await peer.says(COUNTED)

    async with before(play) as (made, url, _):
        with pytest.raises(ConnectError, match="no TLS with it") as error:
            await made.get(url.replace("http:", "https:"), "/x", SECONDS)
        assert not isinstance(error.value, UnreachableError)


async def test_an_engine_waits_for_whoever_reads_slowly() -> None:
    """The gateway holds a bounded part of what an engine would send."""
    size, sent = 64 << 20, 0

    async def play(peer: Peer) -> None:
        nonlocal sent
        await peer.asked()
        await peer.says(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size)
        while sent < size:
            await peer.says(bytes(1 << 20))
            sent += 1 << 20

    async with before(play) as (made, url, _):
        connection = await made.ask("GET", url, "/x", {}, None, SECONDS)
        before_now = -1
        while sent != before_now:  # until the server cannot send more
            before_now = sent
            await asyncio.sleep(0.05)
        assert connection._held < 8 * http1.MOST_HELD_BYTES
        assert sent < size
        assert len(await connection.read_all(size, SECONDS)) == size


async def test_within_waits_for_what_has_to_wait_and_not_for_ever() -> None:
    loop, done = asyncio.get_running_loop(), []

    async def at_once() -> None:
        done.append("at once")

    async def later() -> None:
        await asyncio.sleep(0)
        await asyncio.sleep(0.001)
        done.append("later")

    async def fails() -> None:
        await asyncio.sleep(0)
        raise OSError("gone")

    async def never() -> None:
        try:
            await loop.create_future()
        finally:
            done.append("never")

    await within(0.0, at_once())
    await within(SECONDS, later())
    with pytest.raises(OSError, match="gone"):
        await within(SECONDS, fails())
    with pytest.raises(TimeoutError):
        await within(0.01, never())
    assert done == ["at once", "later", "never"]
    waiting = asyncio.ensure_future(within(SECONDS, never()))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert done[-2:] == ["never", "never"]
