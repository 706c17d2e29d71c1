"""A connection to the manager on which nothing arrives any more, and nothing is refused: it is given up."""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from ckpt_engine.channel import open_blocking_channel
from ckpt_engine.core.deadlines import ENVIRONMENT
from tests.faults.far_host import NOBODY, FarHost, far_host
from tests.faults.proxy import Loop, Proxy
from tests.network.hosts import ip

NEW_NETWORK = 0x40000000  # CLONE_NEWNET


class Echo(grpc.GenericRpcHandler):
    """A session on which everything comes back."""

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        return grpc.stream_stream_rpc_method_handler(lambda messages, context: messages)


def listening(host: FarHost) -> socket.socket:
    """A socket of the far host. The calling thread stays in that host's network, and so do threads that it starts."""
    with Path("/run/netns", host.namespace).open() as network:
        if ctypes.CDLL(None, use_errno=True).setns(network.fileno(), NEW_NETWORK):
            pytest.skip(f"no thread can join another network here: {os.strerror(ctypes.get_errno())}")
    return socket.create_server((host.address, 0))


@contextmanager
def session_to(host: FarHost) -> Iterator[Any]:
    """Calls to a server on the far host."""
    server = grpc.server(ThreadPoolExecutor(2), handlers=(Echo(),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with ThreadPoolExecutor(1) as there, there.submit(listening, host).result(60) as listener:
        address = f"{host.address}:{listener.getsockname()[1]}"
        door = Proxy(Loop(), ("127.0.0.1", port), listener=listener)
        with open_blocking_channel(address) as channel:
            yield channel.stream_stream("/manager/Session")
        door.close()
    server.stop(0)


def test_a_connection_on_which_nothing_arrives_is_given_up_and_the_next_one_is_new(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """TCP alone would send again for a quarter of an hour, and wait longer each time, also after the way is free."""
    monkeypatch.setenv(ENVIRONMENT, "lease=1 heartbeat=0.2")
    with far_host() as host, session_to(host) as session:
        said: queue.Queue[bytes] = queue.Queue()
        said.put(b"hello")
        heard = session(_all(said), timeout=60)
        assert next(heard) == b"hello"
        assert patience_with(host.address) == [1000], "a lease, in milliseconds; gRPC's own is 20 s"
        ip("neigh", "replace", host.address, "lladdr", NOBODY, "dev", host.device, "nud", "permanent")
        said.put(b"is anybody there?")
        with pytest.raises(grpc.RpcError) as caught:
            next(heard)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        ip("neigh", "del", host.address, "dev", host.device)
        said.put(b"this is for nobody")  # its reader ends
        assert next(session(iter([b"hello"]), timeout=60, wait_for_ready=True)) == b"hello"


def patience_with(address: str) -> list[int]:
    """TCP_USER_TIMEOUT of each of this process's connections to an address."""
    found = []
    for number in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
            peer = connection.getpeername()  # gRPC's are of both families
            if isinstance(peer, tuple) and str(peer[0]).removeprefix("::ffff:") == address:
                found.append(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT))
    return found


def _all(said: queue.Queue[bytes]) -> Iterator[bytes]:
    while True:
        yield said.get(timeout=120)
