"""Deltas over TCP and TLS: carried whole, unread, only where they are asked for, and what they say may be refused."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from ckpt_engine.core.problems import CkptEngineError, data_loss
from ckpt_engine.transport.base import ChunkAnswer, ChunkDeltaError, DeltaAnswer
from ckpt_engine.transport.tcp import wire
from tests.network.chunk_owner import CHUNKS, KEY, LOOPBACK, Asking, Owner
from tests.network.test_tls import EVERYBODY, Keys

ROOT = bytes(range(32))

BODY = random.Random(3).randbytes(wire.FRAME_BYTES + 77)
"""More than one frame, and less than chunk 3 has."""


class Taker:
    """Keeps the deltas that come for a filling; refuses that of chunk 1."""

    root = ROOT

    def __init__(self) -> None:
        self.bodies: dict[int, bytes] = {}

    def apply(self, number: int, body: bytes) -> None:
        if number == 1:
            raise data_loss("a delta cannot be read: a test")
        self.bodies[number] = body


class Maker:
    """Has deltas of chunks 1 and 3."""

    def __init__(self) -> None:
        self.questions: list[tuple[int, bytes]] = []
        self.rates: list[float | None] = []

    def make(self, number: int, root: bytes, rate: float | None) -> DeltaAnswer:
        self.questions.append((number, root))
        self.rates.append(rate)
        return {1: DeltaAnswer(b"short"), 3: DeltaAnswer(BODY)}.get(number, DeltaAnswer(why="a test has none"))


def answer(far: Asking, chunk: int) -> ChunkAnswer:
    return far.asker.receive(chunk, CHUNKS[chunk], lambda: None)


@pytest.mark.parametrize("kind", ["TCP", "TLS"])
def test_a_delta_comes_where_it_is_asked_for(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys, maker, taker = Keys(tmp_path, monkeypatch), Maker(), Taker()
    if kind == "TLS":
        keys.of("near")
    with Owner(EVERYBODY if kind == "TLS" else LOOPBACK) as owner:
        owner.lend(deltas=maker.make)
        if kind == "TLS":
            keys.of("far")
        with Asking(owner.offered) as far:
            far.asker.begin(KEY, 0, far.landing.numpy().data, taker)
            for chunk, based in ((3, True), (0, True), (1, True), (3, False)):
                far.asker.ask(chunk, based=based)
            found = answer(far, 3)
            assert (found.is_delta, found.why_whole) == (True, "")
            assert 0 < found.network_bytes - len(BODY) < 100
            assert taker.bodies == {3: BODY}
            assert not far.landing.any(), "it is the taker that writes"
            found = answer(far, 0)
            assert (found.is_delta, found.why_whole) == (False, "a test has none")
            assert far.has(0, owner.slot(0))
            with pytest.raises(ChunkDeltaError, match="relay near sent chunk 1 as a delta, and a delta cannot be read"):
                answer(far, 1)
            assert not answer(far, 3).is_delta
            assert far.has(3, owner.slot(0)), "the connection goes on"
            far.asker.ask(2, based=True)
            assert answer(far, 2).why_whole
            assert far.asker.end(), "it can be kept"
            far.asker.begin(KEY, 0, far.landing.numpy().data)
            far.asker.ask(3, based=True)
            assert not answer(far, 3).is_delta, "nothing takes deltas in this filling"
    assert maker.questions == [(3, ROOT), (0, ROOT), (1, ROOT), (2, ROOT)]
    assert maker.rates[0] is None, "nothing was measured yet"
    assert maker.rates[-1] is not None


def test_what_is_not_lent_any_more_is_not_sent_as_a_delta_either() -> None:
    """What a delta was made of may have been overwritten before it was ready."""
    with Owner() as owner:

        def replaced(number: int, root: bytes, rate: float | None) -> DeltaAnswer:
            lending.is_lent = False
            return DeltaAnswer(BODY)

        lending, taker = owner.lend(deltas=replaced), Taker()
        with Asking(owner.offered) as far:
            far.asker.begin(KEY, 0, far.landing.numpy().data, taker)
            far.asker.ask(3, based=True)
            with pytest.raises(CkptEngineError, match="another version is brought into its place"):
                answer(far, 3)
            assert not taker.bodies


def test_an_owner_without_deltas_says_so() -> None:
    with Owner() as owner:
        owner.lend()
        with Asking(owner.offered) as far:
            far.asker.begin(KEY, 0, far.landing.numpy().data, Taker())
            far.asker.ask(0, based=True)
            assert answer(far, 0).why_whole == "it sends no deltas"


def test_a_delta_longer_than_its_chunk_ends_the_connection() -> None:
    with Owner() as owner:
        owner.lend(deltas=lambda number, root, rate: DeltaAnswer(BODY))
        with Asking(owner.offered) as far:
            far.asker.begin(KEY, 0, far.landing.numpy().data, Taker())
            far.asker.ask(0, based=True)
            with pytest.raises(CkptEngineError, match=f"chunk 0 has {len(BODY)} bytes, and all of it {1 << 20}"):
                answer(far, 0)
