"""gRPC's own texts do not reach people: each failure names the manager's address, what happened and what to do.

Real sockets and processes: what listens there is no manager, or the manager is killed or stopped in a call.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
import trustme

from ckpt_engine.client import AsyncClient, Client
from ckpt_engine.connection import connection_problem
from ckpt_engine.core.deadlines import Deadlines
from ckpt_engine.core.problems import CkptEngineError, ErrorCode, code_of
from tests.cluster import Cluster, eventually, running_cluster

RAW = re.compile(
    "StatusCode|RpcError|failed to connect to all|last error|Socket closed|RST_STREAM|GOAWAY|http2|FD Shutdown|"
    "Deadline Exceeded|C-ares|errno|Channel closed|OPENSSL|Locally cancelled"
)

LIMITS = Deadlines(status=30.0)


@pytest.fixture
def listener() -> Iterator[Callable[[Callable[[socket.socket], object]], str]]:
    """Opens a port at which every connection is handed to a function, and says its address."""
    servers: list[socket.socket] = []

    def listen(answer: Callable[[socket.socket], object]) -> str:
        server = socket.create_server(("127.0.0.1", 0))
        servers.append(server)

        def accept() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                threading.Thread(target=serve, args=(connection,), daemon=True).start()

        def serve(connection: socket.socket) -> None:
            with connection:
                answer(connection)

        threading.Thread(target=accept, daemon=True).start()
        return f"127.0.0.1:{server.getsockname()[1]}"

    yield listen
    for server in servers:
        server.shutdown(socket.SHUT_RDWR)
        server.close()


def http1(connection: socket.socket) -> None:
    connection.recv(65536)
    connection.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")


def said(address: str) -> list[CkptEngineError]:
    """What both clients raise for a status, with the whole traceback free of gRPC's texts."""

    async def ask() -> None:
        async with AsyncClient(address, deadlines=LIMITS) as client:
            await client.status()

    errors = []
    for call in (lambda: Client(address, deadlines=LIMITS).status(), lambda: asyncio.run(ask())):
        with pytest.raises(CkptEngineError) as caught:
            call()
        readable(caught.value, address)
        errors.append(caught.value)
    return errors


def readable(error: CkptEngineError, address: str) -> None:
    assert error.problem.message.startswith(f"manager {address}: ")
    assert not RAW.search(str(error)), error
    printed = "".join(traceback.format_exception(error))
    assert "RpcError" not in printed.partition("\n")[2].rpartition("CkptEngineError")[2]
    assert not re.search("failed to connect|Socket closed|StatusCode", printed), printed


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (None, "nothing listens there: start the manager"),
        (http1, "does not speak gRPC: name the port"),
        (lambda connection: connection.sendall(b"SSH-2.0-OpenSSH_9.6\r\n"), "speak gRPC"),
    ],
    ids=["nothing", "http1", "ssh"],
)
def test_what_listens_there_is_no_manager(
    listener: Callable[[Callable[[socket.socket], object]], str],
    answer: Callable[[socket.socket], object] | None,
    words: str,
) -> None:
    if answer is None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            address = f"127.0.0.1:{server.getsockname()[1]}"
    else:
        address = listener(answer)
    for error in said(address):
        assert error.code in (ErrorCode.UNAVAILABLE, ErrorCode.INVALID_ARGUMENT)
        assert words in error.problem.message


def test_a_host_that_does_not_resolve() -> None:
    for error in said("no-such-host.invalid:50051"):
        assert "this host name is not known here: check its spelling" in error.problem.message


@pytest.mark.parametrize(
    ("status", "details", "code", "words"),
    [
        ("UNAVAILABLE", "FD Shutdown", "UNAVAILABLE", "the connection was lost"),
        ("INTERNAL", "Internal error from Core", "UNAVAILABLE", "the connection was lost"),
        ("INTERNAL", "Received RST_STREAM with error code 2", "UNAVAILABLE", "the connection was lost"),
        ("UNAVAILABLE", "GOAWAY received; Error code: 2; Debug Text: bye", "UNAVAILABLE", "the connection was lost"),
        ("UNAVAILABLE", "Received http2 header with status: 503", "UNAVAILABLE", "a proxy or web server answers"),
        ("UNKNOWN", "Received http2 header with status: 400", "INVALID_ARGUMENT", "name the port of"),
        ("CANCELLED", "Channel closed!", "ABORTED", "was cancelled"),
        ("INTERNAL", "Exception deserializing response!", "INTERNAL", "to one version"),
        ("UNKNOWN", "Unexpected <class 'KeyError'>", "INTERNAL", "the manager's log says why"),
        ("DATA_LOSS", "anything", "INTERNAL", "the manager's log says why"),
    ],
)
def test_texts_of_grpc_that_are_seldom_met(status: str, details: str, code: str, words: str) -> None:
    problem = connection_problem(grpc.StatusCode[status], details)
    assert code_of(problem) == code
    assert words in problem.message
    assert details not in problem.message
    assert not RAW.search(problem.message)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with running_cluster(tmp_path, http="") as running:
        yield running


def in_a_watch(address: str, meanwhile: Callable[[], object]) -> list[CkptEngineError]:
    """What a stream of each client ends with, of which both have had an answer before `meanwhile`."""
    errors: list[CkptEngineError] = []
    told = threading.Barrier(3)

    def watch() -> None:
        with Client(address) as client:
            stream = client.watch("one")
            next(stream)
            told.wait(60)
            with pytest.raises(CkptEngineError) as caught:
                list(stream)
            errors.append(caught.value)

    async def watch_on_a_loop() -> None:
        async with AsyncClient(address) as client:
            stream = client.watch("two")
            await anext(stream)
            await asyncio.to_thread(told.wait, 60)
            with pytest.raises(CkptEngineError) as caught:
                async for _ in stream:
                    pass
            errors.append(caught.value)

    threads = [threading.Thread(target=watch), threading.Thread(target=lambda: asyncio.run(watch_on_a_loop()))]
    for thread in threads:
        thread.start()
    told.wait(60)
    meanwhile()
    for thread in threads:
        thread.join(120)
    assert len(errors) == 2
    return errors


def test_a_manager_that_is_killed_in_a_call(cluster: Cluster) -> None:
    for error in in_a_watch(cluster.address, cluster.manager.kill):
        readable(error, cluster.address)
        assert error.code == ErrorCode.UNAVAILABLE
        assert "the connection was lost before an answer came" in error.problem.message
        assert "set CKPT_ENGINE_AUTHORITY" not in error.problem.message, "it was spoken to"


def test_a_manager_that_is_stopped_does_not_answer_in_time(cluster: Cluster) -> None:
    with Client(cluster.address, deadlines=Deadlines(status=1.0)) as client:
        # Only a connection that stands waits for its deadline; a new one is given up by itself.
        eventually("it answers", 60, lambda: answered(client))
        os.kill(cluster.manager.pid, signal.SIGSTOP)
        try:
            with pytest.raises(CkptEngineError) as caught:
                client.status()
        finally:
            os.kill(cluster.manager.pid, signal.SIGCONT)
    readable(caught.value, cluster.address)
    assert caught.value.code == ErrorCode.DEADLINE_EXCEEDED
    assert "no answer came in time: the manager is busy or stopped" in caught.value.problem.message


def answered(client: Client) -> bool:
    try:
        return bool(client.status().fence.cluster)
    except CkptEngineError:
        return False


def test_a_client_that_is_closed_in_a_call_says_so(manager: str) -> None:
    client = Client(manager)
    stream = client.watch("one")
    next(stream)
    client.close()
    with pytest.raises(CkptEngineError) as caught:
        list(stream)
    readable(caught.value, manager)
    assert caught.value.code == ErrorCode.ABORTED

    async def close_meanwhile() -> None:
        client = AsyncClient(manager)

        async def watch() -> None:
            async for _ in client.watch("two"):
                told.set()

        told = asyncio.Event()
        watching = asyncio.create_task(watch())
        await asyncio.wait_for(told.wait(), 60)
        await client.close()
        with pytest.raises(CkptEngineError, match="this client was closed") as caught:
            await asyncio.wait_for(watching, 60)
        assert caught.value.code == ErrorCode.ABORTED

    asyncio.run(close_meanwhile())


def test_tls_against_plain_text_prints_no_line_of_grpc(manager: str, tmp_path: Path) -> None:
    """In a program of a user, which gRPC otherwise tells of failed handshakes on standard error."""
    trustme.CA().cert_pem.write_to_path(tmp_path / "authority")
    code = "import sys, ckpt_engine\nckpt_engine.Client(sys.argv[1]).status()\n"
    environment = {**os.environ, "CKPT_ENGINE_AUTHORITY": str(tmp_path / "authority")}
    environment.pop("GRPC_VERBOSITY", None)
    done = subprocess.run(
        [sys.executable, "-c", code, manager], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1
    assert f"manager {manager}: the manager does not speak TLS: unset CKPT_ENGINE_AUTHORITY" in done.stderr
    assert not RAW.search(done.stderr), done.stderr
    assert "ssl_transport_security" not in done.stderr
