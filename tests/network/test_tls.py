"""TLS between relays: both show a certificate of one authority, and the table says which one the owner's is."""

from __future__ import annotations

import contextlib
import ssl
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import trustme

from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.security.client import AUTHORITY, CERTIFICATE, KEY
from ckpt_engine.transport.base import Network
from ckpt_engine.transport.tcp import asking
from ckpt_engine.transport.tcp.fetcher import TcpFetcher
from ckpt_engine.v1.relay_pb2 import TcpLocator
from ckpt_engine.v1.weights_pb2 import Region, SourceTable
from tests.install.install_world import Checkpoint
from tests.network.lanes import lanes
from tests.network.test_tcp import assert_same, filled, odd, region_of, relay
from tests.relay.relay_world import seal, tables

EVERYBODY = Network("0.0.0.0:0", "127.0.0.1", 5.0)
"""Others reach it, so it has to be encrypted."""


class Keys:
    """An authority and certificates of it, as a process's environment has them."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path, self.monkeypatch, self.authority = path, monkeypatch, trustme.CA()

    def of(self, name: str, authority: trustme.CA | None = None) -> None:
        """This process is `name` from now on."""
        issued = (
            self.authority.issue_cert(common_name=f"holder/{name}") if authority is None else authority.issue_cert(name)
        )
        for variable, content in (
            (AUTHORITY, self.authority.cert_pem.bytes()),
            (CERTIFICATE, b"".join(blob.bytes() for blob in issued.cert_chain_pems)),
            (KEY, issued.private_key_pem.bytes()),
        ):
            file = self.path / f"{name}-{variable}"
            file.write_bytes(content)
            self.monkeypatch.setenv(variable, str(file))


@pytest.fixture
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Keys:
    return Keys(tmp_path, monkeypatch)


@pytest.fixture
def lent(keys: Keys) -> Iterator[tuple[Checkpoint, SourceTable]]:
    """A version that a relay called near holds and lends, encrypted."""
    keys.of("near")
    checkpoint = Checkpoint(odd(), None)
    with contextlib.closing(relay("near", network=EVERYBODY)) as near:
        yield checkpoint, filled(near, 0, seal(checkpoint, []), tables(checkpoint)).table


def test_weights_arrive_encrypted_bit_for_bit(lent: tuple[Checkpoint, SourceTable], keys: Keys) -> None:
    checkpoint, table = lent
    recorded = seal(checkpoint, [])
    keys.of("far")
    with contextlib.closing(relay("far", network=EVERYBODY)) as far:
        held = filled(far, 0, recorded, [table])
        assert (held.filled.missing, held.filled.faults) == ((), ())
        assert_same(held, checkpoint.weights)
        assert all(isinstance(lane._socket, ssl.SSLSocket) for lane in lanes() if lane._thread.is_alive())


def test_what_is_passed_on_is_encrypted_and_wants_a_certificate(keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    keys.of("near")
    with contextlib.closing(relay("near", network=EVERYBODY)) as near:
        region = near.passes_on
        assert region is not None
        filling = near._ways.pass_on(0, b"k" * 16, [[(0, 100)]])
        assert filling is not None
        near._arena.reserve(0, 100, "a test")
        near._arena.tensor(0, 0, (100,), torch.uint8).fill_(3)
        filling.verified(0)
        keys.of("far")
        passed = asking.ChunkReader(region, "relay near", b"k" * 16, time.monotonic() + 30)
        assert isinstance(passed._socket, ssl.SSLSocket)
        passed.ask(0)
        found = bytearray(100)
        passed.receive(0, [memoryview(found)], lambda: None)
        assert found == b"\3" * 100
        passed.close()
        for variable in (CERTIFICATE, KEY, AUTHORITY):
            monkeypatch.delenv(variable)
        with pytest.raises(CkptEngineError, match="wants a certificate of this one"):
            asking.ChunkReader(region, "relay near", b"k" * 16, time.monotonic() + 30)


def refused(region: Region) -> str:
    with pytest.raises(CkptEngineError) as caught:
        TcpFetcher().connect(region, torch.zeros(region.size, dtype=torch.uint8), 10.0)
    return caught.value.problem.message


def test_who_shows_no_certificate_or_a_strangers_reads_nothing(
    lent: tuple[Checkpoint, SourceTable], keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    region = region_of(lent[1])
    keys.of("stranger", trustme.CA())
    assert "is gone" in refused(region)
    for name in (AUTHORITY, CERTIFICATE, KEY):
        monkeypatch.delenv(name)
    assert f"set {AUTHORITY}, {CERTIFICATE}, {KEY}" in refused(region)
    plain = TcpLocator.FromString(region.locator)
    plain.certificate = b""
    region.locator = plain.SerializeToString()
    assert "is gone" in refused(region), "nothing is said in plain words to who does not ask for encryption"


def test_a_certificate_alone_reads_nothing(lent: tuple[Checkpoint, SourceTable], keys: Keys) -> None:
    region = region_of(lent[1])
    keys.of("far")
    wrong = TcpLocator.FromString(region.locator)
    wrong.token = bytes(32)
    region.locator = wrong.SerializeToString()
    assert "has to show the token" in refused(region)


def test_who_answers_with_another_certificate_is_not_told_the_token(
    lent: tuple[Checkpoint, SourceTable], keys: Keys
) -> None:
    region = region_of(lent[1])
    other = TcpLocator.FromString(region.locator)
    other.certificate = bytes(32)
    region.locator = other.SerializeToString()
    assert "shows another certificate than that relay's" in refused(region)


def test_files_that_do_not_belong_together_are_refused_at_the_start(keys: Keys, tmp_path: Path) -> None:
    keys.of("near")
    key = tmp_path / f"near-{KEY}"
    key.write_bytes(keys.authority.issue_cert("x").private_key_pem.bytes())
    with pytest.raises(CkptEngineError, match="cannot be used together"):
        relay("near", network=EVERYBODY)
