"""TLS on both sides of a gateway: callers' over a real socket, with tokens, and engines' behind https."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import trustme

from ckpt_engine.http_client import connections
from ckpt_engine.security.grants import digest_of
from tests.gateway.gateways import running_gateway
from tests.gateway.misbehaving import BODY, WHOLE, Engine, asking, told

TOKEN, LOOKER = "secret-of-somebody-who-asks", "secret-of-somebody-who-looks"


def issue(authority: trustme.CA, path: Path) -> tuple[Path, Path]:
    issued = authority.issue_cert("127.0.0.1")
    certificate, key = path / "server.crt", path / "server.key"
    certificate.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    key.write_bytes(issued.private_key_pem.bytes())
    return certificate, key


def trusting(authority: trustme.CA) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # nobody but this one
    authority.configure_trust(context)
    return context


@pytest.fixture
def ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[trustme.CA]:
    """An authority that gateways of this test trust, here and in other processes."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.crt")
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.crt"))
    connections.authorities.cache_clear()
    yield authority
    connections.authorities.cache_clear()


async def test_callers_over_tls_with_tokens_and_an_engine_behind_https(ours: trustme.CA, tmp_path: Path) -> None:
    certificate, key = issue(ours, tmp_path)
    tokens = tmp_path / "tokens"
    tokens.write_text(f"client {digest_of(TOKEN).hex()}\nviewer {digest_of(LOOKER).hex()}\n")
    engine = Engine(lambda _number, body: told(body), (certificate, key))
    async with asking(engine):  # another gateway, in this process; the engine runs as long
        options = [
            "--certificate",
            str(certificate),
            "--key",
            str(key),
            "--tokens",
            str(tokens),
            "--queue-seconds",
            "20",
        ]
        url = f"https://127.0.0.1:{engine.port}"
        await asyncio.to_thread(ask_over_tls, ours, tmp_path / "gateway.log", [*options, "--replica", url])
    assert not any("authorization" in headers for headers in engine.headers)


def ask_over_tls(ours: trustme.CA, log: Path, options: list[str]) -> None:
    with running_gateway(log, *options) as gateway:
        gateway.url = gateway.url.replace("http:", "https:")
        gateway.verify = trusting(ours)
        gateway.ready()
        asks = {"authorization": f"Bearer {TOKEN}"}
        assert gateway.post("/v1/completions", BODY, **asks).json()["choices"][0]["token_ids"] == WHOLE
        streamed = gateway.post("/v1/completions", {**BODY, "stream": True}, **asks).text
        events = [json.loads(line[6:]) for line in streamed.split("\n\n") if line.startswith("data: {")]
        assert [token for event in events for token in event["choices"][0]["token_ids"]] == WHOLE
        assert streamed.endswith("data: [DONE]\n\n")

        for headers, status in (
            ({}, 401),
            ({"authorization": f"Bearer {TOKEN}x"}, 401),
            ({"authorization": TOKEN}, 401),
        ):
            answer = gateway.post("/v1/completions", BODY, **headers)
            assert (answer.status_code, answer.json()["reason"]) == (status, "unauthenticated")
        looked = gateway.post("/v1/completions", BODY, authorization=f"Bearer {LOOKER}")
        assert looked.status_code == 403
        assert "client" in looked.json()["detail"]

        with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
            httpx.get(f"{gateway.url}/livez", verify=trusting(trustme.CA()))
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{gateway.url.replace('https:', 'http:')}/livez")


async def test_an_engine_with_a_certificate_of_somebody_else_is_not_asked(ours: trustme.CA, tmp_path: Path) -> None:
    engine = Engine(lambda _number, body: told(body), issue(trustme.CA(), tmp_path))
    async with asking(engine, unready_after=60.0) as client:
        answer = await client.post("/v1/completions", json=BODY, headers={"x-ckpt-engine-queue-seconds": "0"})
    problem = answer.json()
    assert (answer.status_code, problem["reason"]) == (503, "no_replica")
    assert f"https://127.0.0.1:{engine.port}" in problem["detail"]
    assert "certificate verify failed" in problem["detail"]
    assert not engine.asked
