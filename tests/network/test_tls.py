"""TLS between relays: both show a certificate of one authority, and the locator says which one the owner's is."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme

from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.security.client import AUTHORITY, CERTIFICATE, KEY
from ckpt_engine.transport.base import Network
from tests.network.chunk_owner import CHUNKS, Asking, Owner, changed
from tests.network.test_tcp import refused

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
def owner(keys: Keys) -> Iterator[Owner]:
    """A relay called near that lends a version, encrypted."""
    keys.of("near")
    with Owner(EVERYBODY) as found:
        found.lend()
        yield found


def test_chunks_arrive_encrypted_bit_for_bit(owner: Owner, keys: Keys) -> None:
    keys.of("far")
    with Asking(owner.offered) as far:
        assert isinstance(far.asker._socket, ssl.SSLSocket)
        for chunk in range(len(CHUNKS)):
            far.asker.ask(chunk)
        for chunk in range(len(CHUNKS)):
            assert far.receive(chunk) == ""
        assert all(far.has(chunk, owner.slot(0)) for chunk in range(len(CHUNKS)))
        assert far.asker.end(), "it can be kept"


def test_an_asker_without_a_certificate_or_with_a_strangers_gets_nothing(
    owner: Owner, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys.of("stranger", trustme.CA())
    assert "is gone" in refused(owner.offered)
    for name in (AUTHORITY, CERTIFICATE, KEY):
        monkeypatch.delenv(name)
    with pytest.raises(CkptEngineError, match=f"set {AUTHORITY}, {CERTIFICATE}, {KEY}"):
        Asking(owner.offered)
    assert "is gone" in refused(changed(owner.offered, certificate=b"")), "nothing is said in plain words"


def test_a_certificate_alone_gets_nothing(owner: Owner, keys: Keys) -> None:
    keys.of("far")
    assert "has to show the token" in refused(changed(owner.offered, token=bytes(32)))


def test_an_owner_with_another_certificate_is_not_told_the_token(owner: Owner, keys: Keys) -> None:
    assert "shows another certificate than the relay's" in refused(changed(owner.offered, certificate=bytes(32)))


def test_files_that_do_not_belong_together_are_refused_at_the_start(keys: Keys, tmp_path: Path) -> None:
    keys.of("near")
    key = tmp_path / f"near-{KEY}"
    key.write_bytes(keys.authority.issue_cert("x").private_key_pem.bytes())
    with pytest.raises(CkptEngineError, match="cannot be used together"):
        Owner(EVERYBODY)
