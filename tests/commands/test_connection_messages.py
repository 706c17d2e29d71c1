"""What stands between a user and the manager is said in one sentence with the remedy."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
import torch
import trustme
from click.testing import Result
from safetensors.torch import save_file

from ckpt_engine import Deadlines, Trainer
from ckpt_engine.commands.asking import failure_exit
from ckpt_engine.connection import checked_address, connection_problem
from ckpt_engine.core.problems import CkptEngineError, code_of, precondition
from ckpt_engine.manager.service import ManagerConfig, ManagerServer, running_manager
from ckpt_engine.security.client import AUTHORITY, TOKEN_FILE
from ckpt_engine.security.grants import digest_of
from ckpt_engine.security.server import ServerSecurity
from ckpt_engine.trainer.background import Background
from ckpt_engine.trainer.call import CallInFlight
from ckpt_engine.v1 import weights_pb2
from tests.cluster import eventually

Run = Callable[..., Result]
Problem = weights_pb2.Problem

VIEWER = "a-token-that-may-only-look-at-things"


@pytest.fixture
def nobody() -> str:
    """An address at which nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    return f"127.0.0.1:{port}"


@pytest.fixture
def secured(config: ManagerConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A manager over TLS that asks for tokens; the environment knows its authority and a viewer's token."""
    authority = trustme.CA()
    issued = authority.issue_cert("localhost", "127.0.0.1")
    issued.private_key_pem.write_to_path(tmp_path / "key")
    for blob in issued.cert_chain_pems:
        blob.write_to_path(tmp_path / "certificate", append=True)
    authority.cert_pem.write_to_path(tmp_path / "authority")
    (tmp_path / "tokens").write_text(f"viewer {digest_of(VIEWER).hex()}\n")
    (tmp_path / "token").write_text(VIEWER)
    monkeypatch.setenv(AUTHORITY, str(tmp_path / "authority"))
    monkeypatch.setenv(TOKEN_FILE, str(tmp_path / "token"))
    security = ServerSecurity(tmp_path / "certificate", tmp_path / "key", tokens=tmp_path / "tokens")
    with running_manager(replace(config, security=security)) as address:
        yield address


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("nowhere", "must be HOST:PORT, not 'nowhere'; such as 127.0.0.1:50051"),
        ("127.0.0.1", "must be HOST:PORT"),
        ("manager:grpc", "must be HOST:PORT"),
        ("manager:0", "must be HOST:PORT"),
        ("manager:70000", "must be HOST:PORT"),
        ("", "must be HOST:PORT, not ''"),
        ("::1:50051", "an IPv6 host stands in brackets"),
        ("http://10.0.0.1:8080/v1", "not the URL 'http://10.0.0.1:8080/v1': try '10.0.0.1:8080'"),
        ("grpc://manager:50051", "try 'manager:50051', with the port of `ckpt-engine manager --listen`"),
    ],
)
def test_an_address_that_is_none_is_not_dialled(run: Run, address: str, words: str) -> None:
    with pytest.raises(CkptEngineError) as caught:
        Trainer(address, lineage="run")
    assert words in caught.value.problem.message
    for command in (["status"], ["replica", "sleep"], ["replica", "retry", "x"], ["lineage", "list"]):
        result = run(*command, "--manager", address)
        assert result.exit_code == 1
        assert words in result.stderr
        assert "Traceback" not in result.output


@pytest.mark.parametrize(
    "address", ["127.0.0.1:1", "manager.rl.svc:50051", "[::1]:50051", "unix:/run/manager", "dns:///manager:50051"]
)
def test_an_address_that_may_be_one_is_dialled(address: str) -> None:
    assert checked_address(address) == address


def test_a_manager_that_is_down(
    run: Run, nobody: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckpt_engine.trainer.background.NOTICE_SECONDS", 0.0)
    words = "nothing listens there: start the manager (`ckpt-engine manager`), or name its address (--manager or"
    result = run("status", "--manager", nobody)
    assert result.exit_code == 1
    assert result.stderr.startswith(f"manager {nobody}: {words}")
    assert len(result.stderr.splitlines()) == 1
    with Trainer(nobody, lineage="run", deadlines=Deadlines(connect=0.6)) as trainer:
        trainer.publish({"a": torch.ones(2)})
        eventually("it knows why it has no session", 60, lambda: trainer._background._lost)
        with pytest.raises(CkptEngineError) as caught:
            trainer.update_weights()
    said = caught.value.problem.message
    assert said.startswith(f"no session with a manager at {nobody}: {words}")
    assert said.count("no session") == 1
    assert "trying again" not in said, "it does not"
    assert f"no session with the manager at {nobody}: {words}" in caplog.text
    assert "there is still no session; waiting up to" in caplog.text, "what waits says for what"
    assert caplog.text.count(words) == 1, "and why once"


def test_an_update_from_a_terminal_does_not_wait_for_long(
    run: Run, nobody: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    for seconds in (0.5, 30.0):  # a busy machine may take longer than the first to be refused a connection
        monkeypatch.setattr("ckpt_engine.commands.update.CONNECT_SECONDS", seconds)
        result = run("update", "--manager", nobody, "--checkpoint", str(tmp_path))
        assert result.exit_code == 1
        if told := "nothing listens there: start the manager" in result.stderr:
            break
    assert told, result.stderr


def test_a_rank_that_nobody_started_is_named_to_those_that_wait(
    manager: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckpt_engine.trainer.background.NOTICE_SECONDS", 0.1)
    told = threading.Event()
    monkeypatch.setattr(Background, "_tell_what_it_waits_for", telling(told))
    weights = {"a": torch.ones(2)}
    limits = Deadlines(settle=0.1)
    with ThreadPoolExecutor(1) as other, Trainer(manager, 0, 2, "run", deadlines=limits) as first:
        first.publish(weights)
        waiting = other.submit(first.update_weights)
        assert told.wait(60)
        said = caplog.text
        with Trainer(manager, rank=1, world_size=2, lineage="run") as second:
            second.publish(weights)
            for update in (second.update_weights, waiting.result):  # both ranks are there, and no replica is
                with pytest.raises(CkptEngineError, match="0 replicas that receive weights are connected"):
                    update()
    assert "the update has not begun yet: gathering ranks of lineage 'run': rank 1 has no session" in said


def telling(told: threading.Event) -> Callable[[Background, CallInFlight], Awaitable[None]]:
    """What a trainer does, and then the event."""
    does = Background._tell_what_it_waits_for

    async def tell(self: Background, call: CallInFlight) -> None:
        await does(self, call)
        told.set()

    return tell


@pytest.mark.parametrize("command", [["update", "--checkpoint", "."], ["agent", "--engine", "vllm"]])
def test_an_address_that_is_none_is_told_before_torch_is_loaded(command: list[str]) -> None:
    code = (
        "import sys\n"
        f"sys.argv = ['ckpt-engine', *{command!r}, '--manager', 'nowhere']\n"
        "from ckpt_engine.cli import main\n"
        "try:\n    main()\nexcept SystemExit as ended:\n    assert ended.code in (1, 2)\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "must be HOST:PORT, not 'nowhere'" in done.stderr


def test_a_token_that_may_not_publish_ends_at_once(secured: str, caplog: pytest.LogCaptureFixture) -> None:
    with Trainer(secured, lineage="run", deadlines=Deadlines(connect=600.0)) as trainer:
        trainer.publish({"a": torch.ones(2)})
        with pytest.raises(CkptEngineError, match=r"token on line 1 .* may not act as trainer") as caught:
            trainer.update_weights()
    assert caught.value.problem.code == Problem.CODE_PERMISSION_DENIED
    assert "granted viewer" in caught.value.problem.message


def test_clients_that_speak_no_tls_hear_of_it(run: Run, secured: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(AUTHORITY)
    monkeypatch.delenv(TOKEN_FILE)
    result = run("status", "--manager", secured)
    assert result.exit_code == 1
    assert f"or it serves TLS (then set {AUTHORITY})" in result.stderr


def test_another_authority_ends_at_once(secured: str, tmp_path: Path) -> None:
    trustme.CA().cert_pem.write_to_path(tmp_path / "authority")
    with Trainer(secured, lineage="run", deadlines=Deadlines(connect=600.0)) as trainer:
        trainer.publish({"a": torch.ones(2)})
        with pytest.raises(CkptEngineError, match=f"not one that {AUTHORITY} signed") as caught:
            trainer.update_weights()
    assert caught.value.problem.code == Problem.CODE_UNAUTHENTICATED


def test_the_http_port_is_told_from_the_grpc_port(
    run: Run, config: ManagerConfig, caplog: pytest.LogCaptureFixture
) -> None:
    started, ended = threading.Event(), threading.Event()
    address = ""

    async def serve() -> None:
        nonlocal address
        async with ManagerServer(config) as server:
            address = server.http_address
            started.set()
            await asyncio.to_thread(ended.wait)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        assert started.wait(60)
        result = run("status", "--manager", address)
    finally:
        ended.set()
        thread.join()
    assert result.exit_code == 1
    assert "does not speak gRPC: name the port of `ckpt-engine manager --listen`" in result.stderr
    assert "a request to an HTTP port was not HTTP" in caplog.text, "the manager says it, too"


@pytest.mark.parametrize(
    ("details", "code", "words"),
    [
        ("Trying to connect an http1.x server", "INVALID_ARGUMENT", "not the one of --http"),
        ("DNS resolution failed for nosuch:1: C-ares status is not ARES_SUCCESS", "UNAVAILABLE", "check its spelling"),
        ("connect: Connection timed out (110)", "UNAVAILABLE", "firewalls"),
        ("connect: No route to host (113)", "UNAVAILABLE", "no way leads to this host"),
        ("SSL routines:OPENSSL_internal:WRONG_VERSION_NUMBER", "UNAUTHENTICATED", "does not speak TLS"),
        ("TLSV1_ALERT_CERTIFICATE_REQUIRED", "UNAUTHENTICATED", "asks for a certificate"),
        ("Hostname Verification Check failed: not in peer certificate", "UNAUTHENTICATED", "CKPT_ENGINE_SERVER_NAME"),
    ],
)
def test_the_words_of_grpc_are_read(details: str, code: str, words: str) -> None:
    """These need a network, or another machine's server."""
    problem = connection_problem(grpc.StatusCode.UNAVAILABLE, f"failed to connect to all addresses; {details}")
    assert code_of(problem) == code
    assert words in problem.message


def test_another_service_is_told_as_such() -> None:
    problem = connection_problem(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
    assert "it is not a manager of ckpt-engine, or an older one" in problem.message


def test_what_a_manager_refuses_names_the_replica_once(capsys: pytest.CaptureFixture[str]) -> None:
    failure_exit("m:1", precondition("nothing can be read", replica="r1"))
    failure_exit("m:1", precondition("there is no replica 'r1'", replica="r1"))
    failure_exit("m:1", precondition("it is asleep: `ckpt-engine replica wake a`", replica="a"))
    assert capsys.readouterr().err.splitlines() == [
        "manager m:1: replica r1: nothing can be read",
        "manager m:1: there is no replica 'r1'",
        "manager m:1: replica a: it is asleep: `ckpt-engine replica wake a`",
    ]
