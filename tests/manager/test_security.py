"""Who may call a manager that asks: over real TLS, with tokens and with certificates."""

from __future__ import annotations

import os
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc.aio
import pytest
import trustme
from manager_keys import GRANTS, Keys, calling, token
from scripted_members import ScriptedReplica, ScriptedTrainer, put, refused

from ckpt_engine.channel import ManagerStub
from ckpt_engine.channel import problem_of as client_problem
from ckpt_engine.core.manifest import DIGEST_FORMAT
from ckpt_engine.core.problems import CkptEngineError, code_of
from ckpt_engine.manager.service import SERVICES, ManagerConfig, ManagerServer
from ckpt_engine.security.client import AUTHORITY, CERTIFICATE, KEY, SERVER_NAME, TOKEN_FILE, ClientSecurity
from ckpt_engine.security.grants import TOKEN_CHARACTERS, Grant, Tokens, digest_of
from ckpt_engine.security.server import ServerSecurity
from ckpt_engine.v1 import manager_pb2, weights_pb2


async def test_a_session_speaks_for_the_name_that_its_token_grants(asking: ManagerServer, keys: Keys) -> None:
    async with calling(asking, keys.with_token("replica")) as stub:
        await ScriptedReplica(stub, "one").open()
        problem = await refused(ScriptedReplica(stub, "two").open())
        assert code_of(problem) == "PERMISSION_DENIED"
        assert "may not act as replica 'two': it is granted replica/one" in problem.message
        assert code_of(await refused(ScriptedTrainer(stub, lineage="run-1").open())) == "PERMISSION_DENIED"
    assert [replica.name for replica in asking.status().replicas] == ["one"]
    async with calling(asking, keys.with_token("trainer")) as stub:
        trainer = ScriptedTrainer(stub, lineage="run-1")
        await trainer.open()
        assert code_of(await refused(ScriptedTrainer(stub, lineage="other").open())) == "PERMISSION_DENIED"
        assert code_of(await refused(ScriptedReplica(stub, "one").open())) == "PERMISSION_DENIED"
        assert {trainer.lineage for trainer in asking.status().trainers} == {"run-1"}


async def test_who_is_no_holder_neither_lends_as_one_nor_is_told_what_holders_hold(
    asking: ManagerServer, keys: Keys
) -> None:
    """The table of a relay has what is needed to read it."""

    async def hello(stub: ManagerStub, called: str) -> None:
        session = stub.HolderSession(timeout=60)
        message = manager_pb2.HolderHello(digest_format=DIGEST_FORMAT, kind="relay", name=called, session_id=called)
        await session.write(manager_pb2.HolderMessage(hello=message))
        answer = await session.read()
        assert answer is not grpc.aio.EOF
        session.cancel()

    for role in ("replica", "trainer", "viewer", "operator"):
        async with calling(asking, keys.with_token(role)) as stub:
            # Before its first message: one that is written while the refusal comes ends the call with a text of gRPC.
            assert code_of(await refused(stub.HolderSession(timeout=60).read())) == "PERMISSION_DENIED", role
    async with calling(asking, keys.with_token("holder")) as stub:
        await hello(stub, "node-1")
        problem = await refused(hello(stub, "other"))
        assert "may not act as holder 'other': it is granted holder/node-*" in problem.message
        table = await put(stub, weights_pb2.SourceTable(id="relay node-1"))
    for role in ("viewer", "operator"):
        async with calling(asking, keys.with_token(role)) as stub:
            assert code_of(await refused(stub.GetBlob(table, timeout=60).read())) == "PERMISSION_DENIED", role


async def test_a_session_cannot_change_its_name_later(asking: ManagerServer, keys: Keys) -> None:
    async with calling(asking, keys.with_token("replica")) as stub:
        replica = ScriptedReplica(stub, "one")
        await replica.open()
        replica.name = "two"
        await replica.stream.send(hello=replica.hello())
        await replica.beat()
        assert (await stub.GetStatus(manager_pb2.GetStatusRequest(), timeout=60)).replicas[0].name == "one"
    assert [known.name for known in asking.status().replicas] == ["one"]


async def test_each_call_needs_its_grant(asking: ManagerServer, keys: Keys) -> None:
    async with calling(asking, keys.with_token("viewer")) as stub:
        assert (await stub.GetStatus(manager_pb2.GetStatusRequest(), timeout=60)).fence.cluster
        calls = [
            stub.Sleep(manager_pb2.SleepRequest(), timeout=60),
            stub.Wake(manager_pb2.WakeRequest(), timeout=60),
            stub.EvictReplica(manager_pb2.EvictReplicaRequest(name="one"), timeout=60),
            stub.RetryReplica(manager_pb2.RetryReplicaRequest(name="one"), timeout=60),
            stub.HoldReplica(manager_pb2.HoldReplicaRequest(name="one"), timeout=60),
            stub.ReleaseReplica(manager_pb2.ReleaseReplicaRequest(name="one"), timeout=60),
            stub.HasBlob(manager_pb2.BlobRef(), timeout=60),
            put(stub, weights_pb2.Manifest()),
            stub.GetBlob(manager_pb2.BlobRef(), timeout=60).read(),
            stub.UpdateWeights(manager_pb2.UpdateWeightsRequest(lineage="run-1"), timeout=60).read(),
            stub.Rollback(manager_pb2.RollbackRequest(version=1), timeout=60).read(),
            stub.LocateVersion(manager_pb2.LocateVersionRequest(), timeout=60),
        ]
        for call in calls:
            assert code_of(await refused(call)) == "PERMISSION_DENIED", call
    async with calling(asking, keys.with_token("trainer")) as stub:
        other = manager_pb2.UpdateWeightsRequest(lineage="other")
        assert code_of(await refused(stub.UpdateWeights(other, timeout=60).read())) == "PERMISSION_DENIED"
        back = manager_pb2.RollbackRequest(lineage="run-1", version=1)
        assert code_of(await refused(stub.Rollback(back, timeout=60).read())) == "PERMISSION_DENIED"
        evict = manager_pb2.EvictReplicaRequest(name="one")
        assert code_of(await refused(stub.EvictReplica(evict, timeout=60))) == "PERMISSION_DENIED"
    async with calling(asking, keys.with_token("operator")) as stub:
        assert code_of(await refused(stub.EvictReplica(evict, timeout=60))) == "NOT_FOUND"
        assert code_of(await refused(stub.Rollback(back, timeout=60).read())) == "NOT_FOUND"
    wait = manager_pb2.WaitForUpdateRequest(lineage="run-1", version=1)
    for role in GRANTS:  # it only tells
        async with calling(asking, keys.with_token(role)) as stub:
            assert code_of(await refused(stub.WaitForUpdate(wait, timeout=60))) == "NOT_FOUND"


async def test_without_a_token_or_with_a_wrong_one_nobody_is_let_in(asking: ManagerServer, keys: Keys) -> None:
    for security in (keys.as_client({}), keys.with_token("stranger")):
        async with calling(asking, security) as stub:
            problem = await refused(stub.GetStatus(manager_pb2.GetStatusRequest(), timeout=60))
            assert code_of(problem) == "UNAUTHENTICATED"
            assert token("stranger") not in problem.message
            assert code_of(await refused(ScriptedReplica(stub, "one").open())) == "UNAUTHENTICATED"


async def test_both_sides_say_what_is_wrong_with_tls(
    asking: ManagerServer, config: ManagerConfig, keys: Keys, tmp_path: Path
) -> None:
    async def why(server: ManagerServer, security: ClientSecurity) -> str:
        async with calling(server, security) as stub:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.GetStatus(manager_pb2.GetStatusRequest(), timeout=60)
            return client_problem(caught.value).message

    other = tmp_path / "other"
    other.mkdir()
    stranger = Keys(other, trustme.CA())
    assert f"not one that {AUTHORITY} signed" in await why(asking, stranger.with_token("viewer"))
    misnamed = keys.as_client({SERVER_NAME: "another.host"})
    assert f"not one that {AUTHORITY} signed for this address" in await why(asking, misnamed)
    async with ManagerServer(replace(config, ledger=tmp_path / "plain.sqlite")) as plain:
        assert "the manager does not speak TLS" in await why(plain, keys.as_client({}))


async def test_an_expired_certificate_is_refused(config: ManagerConfig, keys: Keys) -> None:
    past = datetime.now(UTC) - timedelta(days=1)
    server = ServerSecurity(*keys.issue("server", not_after=past))
    async with ManagerServer(replace(config, security=server)) as expired:
        async with calling(expired, keys.as_client({})) as stub:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.GetStatus(manager_pb2.GetStatusRequest(), timeout=60)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_certificates_of_both_sides_without_tokens(config: ManagerConfig, keys: Keys) -> None:
    security = ServerSecurity(*keys.issue("server"), authority=keys.authority_file)

    def holder(common_name: str) -> ClientSecurity:
        certificate, key = keys.issue("client", common_name)
        return keys.as_client({CERTIFICATE: str(certificate), KEY: str(key)})

    async with ManagerServer(replace(config, security=security)) as server:
        async with calling(server, holder("replica/one")) as stub:
            await ScriptedReplica(stub, "one").open()
            assert code_of(await refused(ScriptedReplica(stub, "two").open())) == "PERMISSION_DENIED"
        async with calling(server, holder("a laptop")) as stub:
            problem = await refused(stub.GetStatus(manager_pb2.GetStatusRequest(), timeout=60))
            assert code_of(problem) == "UNAUTHENTICATED"
            assert "must be a grant" in problem.message
        async with calling(server, keys.as_client({})) as stub:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.GetStatus(manager_pb2.GetStatusRequest(), timeout=60)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_the_message_of_a_caller_without_a_token_is_not_read(asking: ManagerServer, keys: Keys) -> None:
    """A large one would lie in the manager's memory before it is refused: the answer comes before it was sent."""
    credentials = keys.as_client({}).credentials()
    assert credentials is not None
    async with grpc.aio.secure_channel(asking.address, credentials) as channel:
        method = f"/{SERVICES[0]}/UpdateWeights"
        call = channel.stream_stream(method, lambda data: data, lambda data: data)(timeout=60)
        assert await call.code() is grpc.StatusCode.UNAUTHENTICATED  # nothing was written


async def test_http_asks_for_a_token_except_for_probes(asking: ManagerServer, keys: Keys) -> None:
    async with keys.browser(asking) as browser:
        assert (await browser.get("/healthz")).status_code == 200
        for route in ("/v1/replicas", "/metrics", "/openapi.json", "/docs"):
            answer = await browser.get(route)
            assert answer.status_code == 401, route
            assert answer.headers["www-authenticate"] == "Bearer"
            assert answer.json()["code"] == "UNAUTHENTICATED"
        shown = {"Authorization": f"Bearer {token('viewer')}"}
        assert (await browser.get("/v1/replicas", headers=shown)).json() == {"replicas": []}
        assert (await browser.get("/v1/replicas", headers={"Authorization": "Bearer x"})).status_code == 401


async def test_other_machines_are_served_only_if_somebody_asks_who_calls(config: ManagerConfig, keys: Keys) -> None:
    for field in ("listen", "http"):
        with pytest.raises(CkptEngineError, match=r"other machines reach 0\.0\.0\.0"):
            await ManagerServer(replace(config, **{field: "0.0.0.0:0"})).start()  # type: ignore[arg-type]
    for security in (ServerSecurity(insecure=True), keys.asking):
        async with ManagerServer(replace(config, listen="0.0.0.0:0", security=security)):
            continue


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"tokens": Path("tokens")}, "need TLS"),
        ({"certificate": Path("server.crt")}, "belong together"),
        ({"certificate": Path("nowhere"), "key": Path("server.key")}, "nowhere cannot be read"),
        ({"certificate": Path("tokens"), "key": Path("server.key")}, "not a certificate and its key"),
    ],
)
async def test_settings_that_cannot_protect_are_refused(
    config: ManagerConfig, keys: Keys, settings: dict[str, Path], complaint: str
) -> None:
    keys.issue("server")
    assert keys.tokens.exists()
    security = ServerSecurity(**{key: keys.path / path for key, path in settings.items()})  # type: ignore[arg-type]
    with pytest.raises(CkptEngineError, match=complaint):
        await ManagerServer(replace(config, security=security)).start()


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("replica/one", "line 2 of the tokens file is not GRANT"),
        ("viewer, operator 00", "it has 3 words, not two"),
        ("king 00", "'king' is not a grant"),
        ("replica 00", "'replica' is not a grant"),
        ("viewer 00ff", "the digest has 2 bytes"),
        ("viewer my-secret-token-in-plain-words", "line 2 of the tokens file is not GRANT"),
    ],
)
def test_a_tokens_file_is_understood_or_refused_without_repeating_it(line: str, complaint: str) -> None:
    with pytest.raises(CkptEngineError, match=complaint) as caught:
        Tokens.parse(f"# first\n{line}\n")
    assert "my-secret-token" not in str(caught.value)


def test_patterns_cover_names_and_nothing_else() -> None:
    grant = Grant.parse("replica/rollout-*")
    assert grant.covers("replica", "rollout-1")
    assert not grant.covers("replica", "judge")
    assert not grant.covers("trainer", "rollout-1")
    with pytest.raises(CkptEngineError, match="names no token"):
        Tokens.parse("# nobody\n")


def test_a_token_that_can_be_guessed_lets_nobody_in() -> None:
    """The manager has only its digest, so it is seen when it is shown."""
    short, long = "x" * (TOKEN_CHARACTERS - 1), "x" * TOKEN_CHARACTERS
    tokens = Tokens.parse(f"viewer {digest_of(short).hex()}\noperator {digest_of(long).hex()}")
    assert tokens.caller(short) is None
    assert tokens.caller(long) is not None
    assert Tokens.parse(f"viewer {digest_of('').hex()}").caller("") is None


def test_a_client_refuses_half_a_setting_and_shows_no_secret(keys: Keys) -> None:
    secret = keys.with_token("viewer")
    assert token("viewer") not in repr(secret)
    file = str(keys.write("two", b"two words"))
    for environment, complaint in (
        ({CERTIFICATE: file}, "belong together"),
        ({TOKEN_FILE: file}, "over TLS only"),
        ({AUTHORITY: file, TOKEN_FILE: file}, "must hold one word"),
        ({AUTHORITY: file, TOKEN_FILE: str(keys.write("short", b"x" * (TOKEN_CHARACTERS - 1)))}, "has 23 characters"),
        ({AUTHORITY: os.devnull}, "is empty"),
        ({AUTHORITY: "/nowhere/ca.crt"}, "cannot be read"),
    ):
        with pytest.raises(CkptEngineError, match=complaint):
            ClientSecurity.from_environment(environment)
