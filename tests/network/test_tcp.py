"""Chunks over TCP, from one relay's slot to another's, on loopback: bit for bit, or not at all and with a reason."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest
import torch

from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.core.rates import Rate
from ckpt_engine.transport.askers import KeptAskers
from ckpt_engine.transport.base import ChunkAsk, Network
from ckpt_engine.transport.tcp import asker as asker_module
from ckpt_engine.transport.tcp import server, wire
from ckpt_engine.transport.tcp.sockets import receive, shut
from ckpt_engine.v1.weights_pb2 import OfferedRegion, Problem
from tests.cluster import eventually
from tests.network.chunk_owner import CHUNKS, KEY, LOOPBACK, Asking, Owner, changed
from tests.ports import free_address


@pytest.fixture
def owner() -> Iterator[Owner]:
    with Owner() as found:
        yield found


def failure(what: Callable[[], object], code: Problem.Code, words: str | None = None) -> str:
    with pytest.raises(CkptEngineError, match=words) as caught:
        what()
    assert caught.value.problem.code == code, caught.value.problem
    return caught.value.problem.message


def refused(offered: OfferedRegion, code: Problem.Code = Problem.CODE_UNAVAILABLE) -> str:
    return failure(lambda: Asking(offered), code)


# ------------------------------------------------------------------------------------------------------------- answers


def test_chunks_of_every_shape_arrive_bit_for_bit_in_the_order_of_the_questions(owner: Owner) -> None:
    owner.lend(slot=1)
    with Asking(owner.offered) as far:
        for chunk in (3, 2, 1, 0):
            far.asker.ask(chunk)
        for chunk in (3, 2, 1, 0):
            assert far.receive(chunk) == ""
        assert all(far.has(chunk, owner.slot(1)) for chunk in range(len(CHUNKS)))
        assert sum(flow.bytes for flow in far.asker.flows) <= sum(size for runs in CHUNKS for _, size in runs)
        assert int((far.landing != 0).sum()) <= sum(size for runs in CHUNKS for _, size in runs), "and nothing else"


def test_a_chunk_lands_in_runs_of_another_layout(owner: Owner) -> None:
    owner.lend()
    runs = [(5, 600_000), (2 << 20, 7), ((2 << 20) + 9, (1 << 20) - 600_007)]
    with Asking(owner.offered) as far:
        assert far.get(0, runs=runs) == ""
        assert torch.equal(torch.cat([far.landing[at : at + size] for at, size in runs]), owner.slot(0)[: 1 << 20])


def test_nothing_is_sent_before_it_is_verified_and_waiting_is_heard(
    owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "PULSE_SECONDS", 0.01)
    heard = threading.Event()
    read_frame = wire.read_frame

    def noted(data: bytes) -> wire.Frame:
        found = read_frame(data)
        if found.kind == wire.WAIT:
            heard.set()
        return found

    monkeypatch.setattr(wire, "read_frame", noted)
    with Asking(owner.offered) as far, ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(far.get, 1)
        assert heard.wait(60), "for a version that is not known yet"
        lending = owner.lend(verified=[0])
        heard.clear()
        assert heard.wait(60), "for a chunk that is not verified yet"
        assert not far.landing.any()
        lending.verified(1)
        assert waiting.result(60) == ""
        assert far.has(1, owner.slot(0))


def test_what_does_not_come_is_said_at_once_and_the_connection_goes_on(owner: Owner) -> None:
    lending = owner.lend(verified=[0])
    lending.never(1)
    with Asking(owner.offered) as far:
        failure(
            lambda: far.get(1), Problem.CODE_NOT_FOUND, "relay near does not have chunk 1: no source has it as it was"
        )
        failure(lambda: far.get(7, runs=[(0, 1)]), Problem.CODE_NOT_FOUND, "chunk 7 is not among those that it holds")
        failure(lambda: far.get(2, ChunkAsk.NOW), Problem.CODE_NOT_FOUND, "does not have chunk 2 yet")
        lending.verified(1)
        assert far.get(1) == "", "it was brought all the same"
        lending.finish()
        failure(lambda: far.get(2), Problem.CODE_NOT_FOUND, "no source has it as it was sealed")
        lending.end("its filling has failed: a test")
        failure(lambda: far.get(0), Problem.CODE_NOT_FOUND, "its filling has failed: a test")
        far.asker.begin(b"x" * 16, 0, far.landing.numpy().data)
        failure(lambda: far.get(0, ChunkAsk.NOW), Problem.CODE_NOT_FOUND, "does not have this version now")
        assert owner.lender.readers == 1


def test_a_version_in_both_slots_is_sent_from_the_one_that_has_the_chunk(owner: Owner) -> None:
    owner.lend(slot=0, verified=[]).never(0)
    owner.lend(slot=1, verified=[0])
    with Asking(owner.offered) as far:
        assert far.get(0) == ""
        assert far.has(0, owner.slot(1))


# -------------------------------------------------------------------------------------------------------------- grants


@pytest.fixture
def three(owner: Owner) -> Iterator[list[Asking]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(Asking(owner.offered, f"relay {name}")) for name in "abc"]


def test_an_origin_sends_a_chunk_once_and_names_its_reader_to_the_others(
    owner: Owner, three: list[Asking], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also before the chunk is verified."""
    monkeypatch.setattr(server, "PULSE_SECONDS", 0.01)
    lending = owner.lend(verified=[])
    a, b, c = three
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(a.get, 0, ChunkAsk.GRANT)
        eventually("it is granted", 60, lambda: 0 in lending._grants)
        assert b.get(0, ChunkAsk.GRANT) == "relay a"
        lending.verified(0)
        assert first.result(60) == ""
    assert c.get(0, ChunkAsk.GRANT) == "relay a"
    a.asker.close()
    eventually("it has left", 60, lambda: owner.lender.readers == 2)
    assert c.get(0, ChunkAsk.GRANT) == "relay a", "it has the chunk"
    assert not b.landing.any()
    assert not c.landing.any()
    assert c.get(0, ChunkAsk.WAIT) == "", "asked without a grant it is sent as before"


def test_a_grant_of_a_reader_that_has_gone_is_void(
    owner: Owner, three: list[Asking], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "PULSE_SECONDS", 0.01)
    lending = owner.lend(verified=[1])
    a, b, c = three
    a.asker.ask(0, ChunkAsk.GRANT)
    a.asker.ask(1, ChunkAsk.GRANT)
    eventually("it is granted", 60, lambda: 0 in lending._grants)
    assert b.get(0, ChunkAsk.GRANT) == "relay a"
    a.asker.close()
    eventually("it has left", 60, lambda: owner.lender.readers == 2)
    lending.verified(0)
    assert c.get(0, ChunkAsk.GRANT) == ""
    assert b.get(0, ChunkAsk.GRANT_ANOTHER) == "relay c"
    assert b.get(1, ChunkAsk.GRANT) == ""


def test_a_reader_that_gives_up_a_version_gives_up_its_grants(owner: Owner, three: list[Asking]) -> None:
    lending = owner.lend(verified=[0])
    a, b, _ = three
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(a.get, 1, ChunkAsk.GRANT)
        eventually("it is granted", 60, lambda: 1 in lending._grants)
        lending.never(1)
        failure(lambda: waiting.result(60), Problem.CODE_NOT_FOUND)
    assert 1 not in lending._grants
    lending.verified(1)
    assert b.get(1, ChunkAsk.GRANT) == ""


def test_three_orphans_cost_their_origin_one_more_copy(owner: Owner, three: list[Asking]) -> None:
    lending = owner.lend()
    with Asking(owner.offered, "relay dead") as dead:
        assert dead.get(0, ChunkAsk.GRANT) == ""
    assert [each.get(0, ChunkAsk.GRANT) for each in three] == ["relay dead"] * 3
    assert [each.get(0, ChunkAsk.GRANT_ANOTHER) for each in three] == ["", "relay a", "relay a"]
    assert sum(each.has(0, owner.slot(0)) for each in three) == 1
    three[0].asker.close()
    assert [each.get(0, ChunkAsk.GRANT_ANOTHER) for each in three[1:]] == ["", "relay b"]
    # The owner counts what it has sent after the asker has it.
    eventually("three copies are counted", 60, lambda: sum(map(len, lending._flows.values())) == 3)
    with Asking(owner.offered, "relay late") as late:
        assert late.get(0, ChunkAsk.GRANT_ANOTHER) == "relay b", "it was sent to none before"


# ---------------------------------------------------------------------------------------------- slots that are retired


def test_a_slot_is_retired_once_its_readers_are_done(owner: Owner) -> None:
    """The asker reads what it was sent only after a while; until then the slot is held."""
    size = 12 << 20
    owner.lend(chunks=[[(0, size)], [(0, size)]])
    with Asking(owner.offered) as far, ThreadPoolExecutor(1) as threads:
        for _ in range(4):
            far.asker.ask(0)
        eventually("it is sent something", 60, lambda: owner.held == 1)
        retiring = threads.submit(owner.lender.retire, 0)
        assert far.receive(0, [(0, size)]) == ""
        for _ in range(3):
            with contextlib.suppress(CkptEngineError):
                far.receive(0, [(0, size)])
        assert retiring.result(60) == 0
        assert torch.equal(far.landing[:size], owner.slot(0)[:size])


def test_a_reader_that_takes_too_long_is_overruled_and_nothing_more_is_sent_to_it() -> None:
    size = 15 << 20
    with Owner(Network("127.0.0.1:0", "127.0.0.1", 0.0)) as owner:
        owner.lend(chunks=[[(0, size)]] * 9)
        with Asking(owner.offered) as far:
            for chunk in range(9):  # more than all buffers on the way take
                far.asker.ask(chunk)
            eventually("it is sent something", 60, lambda: owner.held == 1)
            time.sleep(0.3)
            assert owner.lender.retire(0) == 1
            owner.slot(0).fill_(0)

            def receive_all() -> None:
                for chunk in range(9):
                    far.receive(chunk, [(0, size)])

            failure(
                receive_all, Problem.CODE_UNAVAILABLE, "ends the connection: another version is brought into its place"
            )


def test_a_reader_that_dies_holds_nothing(owner: Owner) -> None:
    owner.lend(chunks=[[(0, 15 << 20)]] * 9)
    far = Asking(owner.offered)
    for chunk in range(9):
        far.asker.ask(chunk)
    eventually("it is sent something", 60, lambda: owner.held == 1)
    far.asker.close()
    eventually("it holds nothing", 60, lambda: owner.held == 0)
    assert owner.lender.retire(0) == 0


def test_a_reader_that_takes_nothing_holds_up_none_of_the_others(owner: Owner) -> None:
    owner.lend(chunks=[[(0, 15 << 20)]])
    with Asking(owner.offered) as deaf, Asking(owner.offered) as far:
        for _ in range(9):
            deaf.asker.ask(0)
        eventually("it is sent something", 60, lambda: owner.held == 1)
        assert far.get(0, runs=[(0, 15 << 20)]) == ""


# ----------------------------------------------------------------------------------------------- owners that are wrong


def test_an_owner_that_dies_is_noticed_at_once(owner: Owner) -> None:
    owner.lend(verified=[0])
    with Asking(owner.offered) as far, ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(far.get, 1)
        time.sleep(0.05)
        owner.lender.close()
        failure(lambda: waiting.result(60), Problem.CODE_UNAVAILABLE, "this relay is being stopped|relay near is gone")
        failure(lambda: far.get(0), Problem.CODE_UNAVAILABLE, "the connection to relay near has ended")
    assert "relay near (127.0.0.1:" in refused(owner.offered)


def test_an_owner_that_says_nothing_is_a_timeout(owner: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asker_module, "SILENCE_SECONDS", 0.2)
    monkeypatch.setattr(server, "PULSE_SECONDS", 3600.0)
    with Asking(owner.offered) as far:
        failure(lambda: far.get(0), Problem.CODE_DEADLINE_EXCEEDED, "relay near said nothing for 0.2 s while chunk 0")


def test_an_owner_that_waits_for_a_stopped_source_is_a_timeout(owner: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asker_module, "STUCK_SECONDS", 0.1)
    monkeypatch.setattr(server, "PULSE_SECONDS", 0.02)
    lending = owner.lend(verified=[])
    with Asking(owner.offered) as far, ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(far.get, 0)
        for _ in range(20):
            time.sleep(0.02)
            lending.moved()
        assert not waiting.done(), "it makes progress"
        failure(
            lambda: waiting.result(60),
            Problem.CODE_DEADLINE_EXCEEDED,
            "has not got chunk 0, nor anything else, for 0.1 s",
        )


def test_an_asker_is_told_to_leave(owner: Owner) -> None:
    owner.lend(verified=[])
    with Asking(owner.offered) as far, ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(far.get, 0)
        time.sleep(0.05)
        assert far.asker.at_most() is None
        far.asker.leave("it is left for another")
        failure(lambda: waiting.result(60), Problem.CODE_UNAVAILABLE, ": it is left for another$")
        assert not far.asker.end()


ANSWERS = (
    (wire.FRAME.pack(99, 0), Problem.CODE_DATA_LOSS, "gives no answer of kind 99"),
    (wire.FRAME.pack(wire.DATA, wire.FRAME_BYTES + 1), Problem.CODE_DATA_LOSS, "does not speak as relays do"),
    (wire.frame(wire.YES), Problem.CODE_DATA_LOSS, "sent an answer of kind 1"),
    (wire.frame(wire.TO, b"\xff\xfe"), Problem.CODE_DATA_LOSS, "is not UTF-8"),
    (wire.place(0, [(0, 10)]), Problem.CODE_DATA_LOSS, "sent an answer of kind 7"),
    (wire.frame(wire.DELTA, wire.LENGTH.pack(5)), Problem.CODE_DATA_LOSS, "sent an answer of kind 10"),
    (wire.refusal(wire.WHOLE, "why not"), Problem.CODE_DATA_LOSS, "sent an answer of kind 11"),
    (wire.frame(wire.DATA, bytes(11)), Problem.CODE_UNAVAILABLE, "more than it was asked for"),
    (
        wire.frame(wire.DATA, bytes(5)) + wire.refusal(wire.NOT, "no"),
        Problem.CODE_UNAVAILABLE,
        "ends the connection: no",
    ),
    (wire.refusal(wire.GONE, "bye"), Problem.CODE_UNAVAILABLE, "ends the connection: bye"),
    (wire.FRAME.pack(wire.DATA, 10) + bytes(4), Problem.CODE_UNAVAILABLE, "is gone, while chunk 0"),
    (wire.frame(wire.DATA, bytes(10)), None, "nothing is wrong"),
)


@pytest.mark.parametrize(("answer", "code", "words"), ANSWERS, ids=[words for _, _, words in ANSWERS])
def test_what_an_owner_must_not_answer(answer: bytes, code: Problem.Code | None, words: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as door, Owner() as real, ThreadPoolExecutor(1) as threads:

        def serve() -> None:
            with door.accept()[0] as connection:
                hello = wire.read_hello(receive(connection, wire.HELLO.size))
                receive(connection, hello.name)
                connection.sendall(wire.frame(wire.YES))
                asked = wire.read_question(receive(connection, wire.QUESTION.size))
                assert asked == (wire.CHUNK, ChunkAsk.WAIT, False, False, 0, KEY)
                connection.sendall(answer)

        serving = threads.submit(serve)
        with Asking(changed(real.offered, addresses=[f"127.0.0.1:{door.getsockname()[1]}"])) as far:
            if code is None:
                assert far.get(0, runs=[(0, 10)]) == ""
            else:
                failure(lambda: far.get(0, runs=[(0, 10)]), code, words)
                assert not far.asker.end()
            assert not far.landing.any()
        serving.result(60)


def test_a_chunk_lands_only_in_the_slot(owner: Owner) -> None:
    owner.lend()
    for runs in ([], [(0, 0)], [(16 << 20, 1)], [((16 << 20) - 5, 10)]):
        with Asking(owner.offered) as far:
            failure(lambda: far.get(0, runs=runs), Problem.CODE_INVALID_ARGUMENT, "is to land in runs")  # noqa: B023


# ---------------------------------------------------------------------------------------------- askers that are wrong


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [("token", bytes(32), "has to show the token"), ("arena", bytes(16), "has other memory by now")],
)
def test_an_asker_without_the_token_gets_nothing(owner: Owner, field: str, value: bytes, words: str) -> None:
    owner.lend()
    fields: dict[str, Any] = {field: value}
    said = refused(changed(owner.offered, **fields))
    assert said.startswith("relay near (127.0.0.1:")
    assert words in said
    with Owner() as other:
        assert "has to show the token" in refused(changed(owner.offered, token=other.locator.token))
    assert owner.lender.readers == 0


def test_a_relay_that_took_the_place_of_another_is_not_taken_for_it() -> None:
    network = Network(free_address(), "127.0.0.1", 5.0)
    with Owner(network) as first:
        offered = first.offered
    with Owner(network):
        assert "has other memory by now: the one that offered it has ended" in refused(offered)


@pytest.mark.parametrize(
    "change",
    [{"token": b""}, {"arena": b"x"}, {"certificate": b"x"}, {"addresses": []}, {"addresses": ["127.0.0.1:1"] * 9}],
)
def test_an_inconsistent_locator_is_refused(owner: Owner, change: dict[str, Any]) -> None:
    refused(changed(owner.offered, **change), Problem.CODE_INVALID_ARGUMENT)


def test_a_relay_of_another_version_is_told_so(owner: Owner) -> None:
    with socket.create_connection(server_address(owner)) as old:
        old.sendall(struct.pack("<4sB3xI16s32s", b"ckwt", 1, 0, bytes(16), bytes(32)))
        frame = wire.read_frame(receive(old, wire.FRAME.size))
        assert frame.kind == wire.NO
        assert b"it speaks version 1 of relays' protocol, and this relay version 3" in receive(old, frame.size)


def server_address(owner: Owner) -> tuple[str, int]:
    host, _, port = owner.locator.addresses[0].rpartition(":")
    return host, int(port)


def test_garbage_and_silence_cost_none_but_themselves(owner: Owner) -> None:
    owner.lend()
    hello = wire.hello(owner.locator.arena, owner.locator.token, "relay far")
    said = [b"GET / HTTP/1.1\r\n" * 10, os.urandom(4096), hello + os.urandom(24 * 40), hello[:7], hello[:-3], b""]
    said += [hello + wire.question(wire.RELEASE, KEY), hello + wire.question(wire.CHUNK, KEY, 2**32 - 1)]
    with contextlib.ExitStack() as stack:
        for each in said:
            stranger = stack.enter_context(socket.create_connection(server_address(owner)))
            with contextlib.suppress(OSError):
                stranger.sendall(each)
        with Asking(owner.offered) as far:
            assert far.get(0) == ""
    eventually("all have gone", 60, lambda: owner.lender.readers == 0)


def test_strangers_make_room_and_there_is_an_end_to_connections(owner: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    owner.lend()
    with contextlib.ExitStack() as stack:
        for _ in range(server.MOST_STRANGERS + 10):
            stack.enter_context(socket.create_connection(server_address(owner)))
        assert stack.enter_context(Asking(owner.offered)).get(0) == ""
        strangers = server.MOST_STRANGERS + 2
        eventually("the first ones are gone", 60, lambda: len(owner.lender._connections) <= strangers)
        monkeypatch.setattr(server, "MOST_CONNECTIONS", 1)
        assert "is gone" in refused(owner.offered)


def test_five_hundred_relays_are_served_and_leave_no_descriptor_and_no_thread(owner: Owner) -> None:
    owner.lend()
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    with contextlib.ExitStack() as stack:
        askers = [stack.enter_context(Asking(owner.offered, f"relay {number}")) for number in range(500)]
        assert [each.get(1) for each in askers] == [""] * 500
        assert owner.lender.readers == 500
    eventually("all have left", 60, lambda: owner.lender.readers == 0)
    eventually("no descriptor is left", 60, lambda: len(os.listdir("/proc/self/fd")) < before[0] + 10)
    eventually("no thread is left", 60, lambda: threading.active_count() < before[1] + 10)


# ------------------------------------------------------------------------------------------------------------ PLACE


class Raw:
    """An asker that can read the owner's memory itself, said by hand."""

    def __init__(self, owner: Owner) -> None:
        self.connection = socket.create_connection(server_address(owner), timeout=60)
        self.connection.sendall(wire.hello(owner.locator.arena, owner.locator.token, "relay raw"))
        assert self.answer() == (wire.YES, b"")

    def say(self, kind: int, chunk: int = 0, how: ChunkAsk = ChunkAsk.WAIT, placed: bool = False) -> None:
        self.connection.sendall(wire.question(kind, KEY, chunk, how, placed))

    def answer(self) -> tuple[int, bytes]:
        frame = wire.read_frame(receive(self.connection, wire.FRAME.size))
        return frame.kind, receive(self.connection, frame.size) if frame.size else b""


def test_an_owner_says_where_a_chunk_lies_and_keeps_it_there_until_it_is_released(owner: Owner) -> None:
    owner.lend(slot=1, verified=[0, 1])
    raw = Raw(owner)
    with contextlib.closing(raw.connection), Asking(owner.offered) as other, ThreadPoolExecutor(1) as threads:
        for chunk in (0, 1):
            raw.say(wire.CHUNK, chunk, ChunkAsk.GRANT, placed=True)
            kind, content = raw.answer()
            assert kind == wire.PLACE
            assert wire.read_place(content) == (1, [*CHUNKS[chunk]])
        retiring = threads.submit(owner.lender.retire, 1)
        raw.say(wire.RELEASE, 0)
        time.sleep(0.05)
        assert not retiring.done()
        raw.say(wire.RELEASE, 1)
        assert retiring.result(60) == 0
        owner.lend(slot=1, verified=[0])
        raw.say(wire.CHUNK, 0, ChunkAsk.GRANT, placed=True)
        assert raw.answer()[0] == wire.PLACE
        assert other.get(0, ChunkAsk.GRANT) == "relay raw"
        raw.say(wire.LEAVE)
        eventually("its grant is void", 60, lambda: other.get(0, ChunkAsk.GRANT) == "")
        assert owner.lender.retire(1) == 0
        raw.say(wire.RELEASE)
        assert raw.answer() == (wire.NO, b"it gives back a chunk that it was not lent")


def test_a_chunk_in_too_many_runs_or_too_many_at_a_time_is_sent(owner: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    owner.lend()
    monkeypatch.setattr(server, "MOST_PLACES", 1)
    monkeypatch.setattr(wire, "MOST_RUNS", 100)
    raw = Raw(owner)
    with contextlib.closing(raw.connection):
        for chunk, kind in ((2, wire.DATA), (1, wire.PLACE), (1, wire.DATA)):
            raw.say(wire.CHUNK, chunk, placed=True)
            assert raw.answer()[0] == kind


# -------------------------------------------------------------------------------------------------- rates, connections


def test_what_is_sent_and_received_counts_from_when_it_was_there(owner: Owner) -> None:
    told: list[Rate] = []
    size = 12 << 20
    lending = owner.lend(chunks=[[(0, size)]], verified=[], passed=told.append)
    assert lending.sent is None
    with Asking(owner.offered) as far, ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(far.get, 0, ChunkAsk.WAIT, [(0, size)])
        time.sleep(0.05)
        began = time.monotonic()
        lending.verified(0)
        assert waiting.result(60) == ""
        (flow,) = far.asker.flows
        assert began <= flow.start < flow.stop
        assert 0 < flow.bytes <= size
        eventually("it was sent", 60, lambda: lending.sent is not None)
        ((sent,),) = lending._flows.values()
        assert began <= sent.start < sent.stop
        assert not told
        assert far.asker.end()
        eventually("the last one has left", 60, lambda: told == [lending.sent])
        assert told == [Rate(sent.bytes / (sent.stop - sent.start), sent.stop - sent.start)]


def test_one_connection_is_kept_from_filling_to_filling(owner: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    owner.lend()
    landing = bytearray(16 << 20)
    kept = KeptAskers("relay far")

    def fill() -> int:
        asker = kept.take(owner.offered, "relay near", time.monotonic() + 10)
        asker.begin(KEY, 0, memoryview(landing))
        asker.ask(0)
        assert asker.receive(0, CHUNKS[0], lambda: None).relay == ""
        kept.put_back(asker)
        return id(asker)

    first = fill()
    assert fill() == first
    assert owner.lender.readers == 1
    for connection in list(owner.lender._connections):
        shut(connection)
    eventually("it was cut", 60, lambda: owner.lender.readers == 0)
    fill()
    assert owner.lender.readers == 1, "a new one, and no problem"
    two = [kept.take(owner.offered, "relay near", time.monotonic() + 10) for _ in range(2)]
    for each in two:
        each.begin(KEY, 0, memoryview(landing))
        kept.put_back(each)
    eventually("one is kept", 60, lambda: owner.lender.readers == 1)
    asker = kept.take(owner.offered, "relay near", time.monotonic() + 10)
    asker.begin(KEY, 0, memoryview(landing))
    asker.ask(0)
    kept.put_back(asker)
    eventually("an answer is still to come, so it is not kept", 60, lambda: owner.lender.readers == 0)
    fill()
    monkeypatch.setattr("ckpt_engine.transport.askers.IDLE_SECONDS", 0.0)
    fill()
    kept.close()
    kept.close()
    eventually("all are closed", 60, lambda: owner.lender.readers == 0)
    failure(
        lambda: kept.take(owner.offered, "relay near", time.monotonic() + 10), Problem.CODE_UNAVAILABLE, "being stopped"
    )
    failure(
        lambda: KeptAskers("a").take(OfferedRegion(), "relay x", 0.0), Problem.CODE_UNAVAILABLE, "over no transport"
    )


def test_an_owner_closes_connections_that_ask_for_nothing(owner: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "SEND_SECONDS", 0.05)
    monkeypatch.setattr(server, "IDLE_TURNS", 2)
    with Asking(owner.offered) as far:
        eventually("it was closed", 60, lambda: owner.lender.readers == 0)
        assert not far.asker.end()


def open_in(process: int) -> set[str]:
    folder, found = f"/proc/{process}/fd", set()
    for number in os.listdir(folder):
        with contextlib.suppress(FileNotFoundError):  # closed since it was listed
            found.add(os.readlink(f"{folder}/{number}"))
    return found


def test_a_forked_child_does_not_hide_its_parents_death(owner: Owner) -> None:
    owner.lend(verified=[])
    with Asking(owner.offered) as far, ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(far.get, 0)
        time.sleep(0.05)
        child = os.fork()
        if not child:
            signal.pause()
        try:
            sockets = [far.asker._socket, owner.lender._listener, *owner.lender._connections]
            ours = {os.readlink(f"/proc/self/fd/{each.fileno()}") for each in sockets}
            assert len(ours) == 3
            eventually("it has forgotten them", 60, lambda: not ours & open_in(child))
            owner.lender.close()
            failure(lambda: waiting.result(60), Problem.CODE_UNAVAILABLE)
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def test_a_host_that_cannot_be_dialled_costs_one_filling_its_patience(
    owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As behind a firewall that drops: nothing is refused, nothing is heard."""
    monkeypatch.setattr(asker_module, "ASK_SECONDS", 0.2)
    with contextlib.ExitStack() as stack:
        hole = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):  # none is accepted, and then none is let in
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(hole.getsockname())
        offered = changed(owner.offered, addresses=[f"127.0.0.1:{hole.getsockname()[1]}"])
        assert "did not answer within" in refused(offered, Problem.CODE_DEADLINE_EXCEEDED)
        assert "is not asked again before 300 s are over" in refused(offered)


def test_a_resolver_that_does_not_answer_is_waited_for_no_longer_than_the_relay(
    owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fake: no resolver here can be made to hang."""
    ended = threading.Event()
    offered = changed(owner.offered, addresses=["node-7.example:7"])
    monkeypatch.setattr(socket, "getaddrinfo", lambda *arguments, **options: ended.wait(60) and [])
    monkeypatch.setattr(asker_module, "ASK_SECONDS", 0.05)
    try:
        said = refused(offered, Problem.CODE_DEADLINE_EXCEEDED)
    finally:
        ended.set()
    assert "node-7.example was not resolved within 0.0" in said  # less than what was there, since some is gone by then


def test_the_next_address_is_tried_and_ipv6_is_one(owner: Owner) -> None:
    dead = free_address()
    with Owner(Network("[::1]:0", "::1", 5.0)) as six:
        six.lend()
        with Asking(changed(six.offered, addresses=[dead, six.lender.address])) as far:
            assert far.asker._socket.family == socket.AF_INET6
            assert far.get(0) == ""
            assert far.has(0, six.slot(0))
    assert "cannot be reached" in refused(changed(owner.offered, addresses=[dead]))


# ------------------------------------------------------------------------------------------------------------ listening


@pytest.mark.parametrize(
    ("listen", "words"),
    [("0.0.0.0:0", "what they are sent is not encrypted"), ("127.0.0.1", "--listen '127.0.0.1' is not an address")],
)
def test_where_a_relay_does_not_listen(owner: Owner, listen: str, words: str) -> None:
    memory = owner.arena.lendable()
    before = len(os.listdir("/proc/self/fd"))
    failure(
        lambda: server.TcpChunkLender(memory, Network(listen, "10.0.0.1", 5.0)), Problem.CODE_INVALID_ARGUMENT, words
    )
    assert len(os.listdir("/proc/self/fd")) <= before
    failure(
        lambda: server.TcpChunkLender(memory, Network(owner.lender.address, "127.0.0.1", 5.0)),
        Problem.CODE_UNAVAILABLE,
        "cannot listen there",
    )


def test_a_relay_listens_for_this_host_only_unless_it_is_told(caplog: pytest.LogCaptureFixture) -> None:
    def listening() -> set[Sequence[object]]:
        found = psutil.Process().net_connections("inet")
        return {tuple(each.laddr) for each in found if each.status == psutil.CONN_LISTEN}

    caplog.set_level(logging.INFO)
    before = listening()
    with Owner(LOOPBACK):
        assert {host for host, _ in listening() - before} == {"127.0.0.1"}
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    with Owner(Network("0.0.0.0:0", "127.0.0.1", 5.0, insecure=True)):
        assert {host for host, _ in listening() - before} == {"0.0.0.0"}
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert "listening on 0.0.0.0" in warning
    assert "not encrypted" in warning
