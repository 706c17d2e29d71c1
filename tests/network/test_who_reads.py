"""Who reads a relay over TCP and may not, or no more: not one byte of weights, and a reason."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Iterator

import psutil
import pytest
import torch

from ckpt_engine.addresses import split_address
from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.relay.slots import Slots
from ckpt_engine.transport.base import Network
from ckpt_engine.transport.tcp import connection, wire
from ckpt_engine.transport.tcp.fetcher import TcpFetcher
from ckpt_engine.v1.relay_pb2 import TcpLocator
from ckpt_engine.v1.weights_pb2 import Problem, Region, SourceTable
from tests.install.install_world import Checkpoint
from tests.network.test_tcp import LOOPBACK, filled, odd, region_of, relay
from tests.ports import free_address
from tests.relay.relay_world import seal, tables


@pytest.fixture
def near() -> Iterator[Slots]:
    with contextlib.closing(relay("near")) as found:
        yield found


def lent(owner: Slots, add: int = 0) -> SourceTable:
    """A version in its first slot. add: to all weights."""
    checkpoint = Checkpoint({name: (weight + add).to(weight.dtype) for name, weight in odd().items()}, None)
    return filled(owner, 0, seal(checkpoint, []), tables(checkpoint)).table


def refused(region: Region) -> str:
    with pytest.raises(CkptEngineError) as caught:
        TcpFetcher().connect(region, torch.zeros(region.size, dtype=torch.uint8), 10.0)
    return caught.value.problem.message


def test_a_relay_that_took_the_place_of_another_is_not_taken_for_it() -> None:
    """The reader was told to read one that has been started again since, at the same address and port."""
    checkpoint = Checkpoint(odd(), None)
    recorded = seal(checkpoint, [])
    address = free_address()
    network = Network(address, "127.0.0.1", 5.0)
    with contextlib.closing(relay("near", network=network)) as first:
        table = filled(first, 0, recorded, tables(checkpoint)).table
    with contextlib.closing(relay("near", network=network)) as again:
        filled(again, 0, recorded, tables(checkpoint))
        with contextlib.closing(relay("far")) as far, pytest.raises(CkptEngineError) as caught:
            filled(far, 0, recorded, [table])
    message = caught.value.problem.message
    assert "relay near was asked: " in message
    assert f"the relay at {address} does not let us read: " in message
    assert "this relay has other memory by now: the one that offered it has ended" in message


def test_the_token_of_another_relay_opens_nothing(near: Slots) -> None:
    region = region_of(lent(near))
    with contextlib.closing(relay("other")) as other:
        stolen = TcpLocator.FromString(region_of(lent(other)).locator)
        mine = TcpLocator.FromString(region.locator)
        mine.token = stolen.token
        region.locator = mine.SerializeToString()
        assert "has to show the token" in refused(region)


def test_what_was_said_once_reads_nothing_of_the_next_version(near: Slots) -> None:
    """Somebody repeats what a reader said, byte by byte: the number of the lending has ended with the version."""
    locator = TcpLocator.FromString(region_of(lent(near)).locator)
    address = split_address(locator.addresses[0])
    hello = wire.hello(locator.slot, locator.arena, locator.token)
    with socket.create_connection(address, timeout=30) as reader:
        reader.sendall(hello + wire.question(wire.HOLD))
        assert wire.read_frame(connection.receive(reader, wire.FRAME.size)).kind == wire.YES
        said = wire.read_frame(connection.receive(reader, wire.FRAME.size))
        read = wire.question(wire.READ, connection.receive(reader, said.size), [(0, 4096)])
    lent(near, add=1)
    with socket.create_connection(address, timeout=30) as replayed:
        replayed.sendall(hello + read)
        kinds = []
        for _ in range(2):
            kind, size = wire.read_frame(connection.receive(replayed, wire.FRAME.size))
            words = connection.receive(replayed, size) if size else b""
            kinds.append(kind)
    assert kinds == [wire.YES, wire.GONE]
    assert b"has been given up" in words


def test_a_relay_that_was_told_nothing_listens_for_this_host_only(caplog: pytest.LogCaptureFixture) -> None:
    def listening() -> set[tuple[str, int]]:
        found = psutil.Process().net_connections("inet")
        return {tuple(each.laddr) for each in found if each.status == psutil.CONN_LISTEN}

    caplog.set_level(logging.INFO)
    before = listening()
    with contextlib.closing(relay("near", network=LOOPBACK)):
        assert {host for host, _ in listening() - before} == {"127.0.0.1"}
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    with contextlib.closing(relay("near", network=Network("0.0.0.0:0", "127.0.0.1", 5.0, insecure=True))):
        assert {host for host, _ in listening() - before} == {"0.0.0.0"}
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert "listening on 0.0.0.0" in warning
    assert "not encrypted" in warning


def test_a_resolver_that_does_not_answer_is_waited_for_no_longer_than_the_relay(
    near: Slots, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fake: no resolver here can be made to hang."""
    region, over = region_of(lent(near)), threading.Event()
    locator = TcpLocator.FromString(region.locator)
    locator.addresses[:] = [locator.addresses[0].replace("127.0.0.1", "node-7.example")]
    region.locator = locator.SerializeToString()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *arguments, **options: over.wait(60) and [])
    monkeypatch.setattr(connection, "ASK_SECONDS", 0.05)
    try:
        with pytest.raises(CkptEngineError) as caught:
            TcpFetcher().connect(region, torch.zeros(region.size, dtype=torch.uint8), 10.0)
    finally:
        over.set()
    assert caught.value.problem.code == Problem.DEADLINE_EXCEEDED
    said = caught.value.problem.message
    assert "the resolver did not say within 0.0" in said  # less than what was there, since some is gone by then
    assert "s where node-7.example is" in said
