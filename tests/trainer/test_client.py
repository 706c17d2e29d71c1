"""Clients that are no trainer rank, on a real manager with replicas: what they tell, wait for, and refuse."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from plain_replica import PlainReplica
from torch import nn
from typer.testing import CliRunner

from ckpt_engine import AsyncClient, CkptEngineError, Client, ErrorCode, Trainer
from ckpt_engine.cli import app_for
from ckpt_engine.core.message_json import as_dict
from ckpt_engine.options import UpdateOptions, options_message, options_of
from ckpt_engine.v1 import manager_pb2
from tests.cluster import eventually
from tests.ports import free_address

Start = Callable[..., PlainReplica]


def refused(call: Callable[[], object]) -> CkptEngineError:
    with pytest.raises(CkptEngineError) as caught:
        call()
    return caught.value


def test_a_client_tells_what_there_is_and_operates_replicas(manager: str, replica: Start) -> None:
    with Client(manager) as client, Trainer(manager, lineage="run") as trainer:
        first = refused(lambda: client.wait_for_replicas(1, timeout=0.5))
        assert first.code is ErrorCode.DEADLINE_EXCEEDED
        assert "0 of 1 replicas were up after 0.5 s" in str(first)
        replica("one")
        replica("two", pool="judge")
        assert client.wait_for_replicas(1, timeout=60) == ["one"]
        assert client.wait_for_replicas(1, pool="judge", timeout=60) == ["two"]
        assert [each.name for each in client.replicas()] == ["one", "two"]
        assert [each.name for each in client.replicas("")] == ["one"]
        assert client.versions() == []

        trainer.publish(nn.Linear(6, 4))
        report = trainer.update_weights(3, timeout=60)
        assert report.ok
        assert client.wait("run", 3).root == report.root
        assert refused(lambda: client.wait("run", 4)).code is ErrorCode.NOT_FOUND
        (seen,) = client.versions("run")
        assert (seen.identity.version, seen.identity.root.hex()) == (3, report.root)
        assert (list(seen.holders), list(seen.replicas)) == (["rank 0"], ["one"]), "its copy stays as it was sealed"
        assert client.versions("other") == []

        assert client.hold("one", "a look").reason == "a look"
        (held,) = client.replicas("")
        assert held.hold.reason == "a look"
        assert "it is to serve" in client.release("one") or "it holds" in client.release("one")
        assert "nothing is to be done" in client.retry("one")
        unknown = refused(lambda: client.hold("three"))
        assert (unknown.code, unknown.problem.replica) == (ErrorCode.NOT_FOUND, "three")
        assert client.evict("two", "it is not needed") is True
        assert [each.name for each in client.replicas()] == ["one"]
    with Client(manager) as client:
        assert refused(lambda: client.forget("nothing")).code is ErrorCode.NOT_FOUND


def test_commands_list_replicas_and_versions(manager: str, replica: Start) -> None:
    def run(*arguments: str) -> str:
        ended = CliRunner().invoke(app_for(arguments), [*arguments, "--manager", manager], catch_exceptions=False)
        assert ended.exit_code == 0, ended.output
        return ended.stdout

    assert "none" in run("version", "list")
    assert json.loads(run("version", "list", "--json")) == []
    replica("one")
    replica("two", pool="judge")
    with Trainer(manager, lineage="run") as trainer:
        trainer.publish(nn.Linear(6, 4))
        trainer.wait_for_replicas(1)
        identity = trainer.update_weights(3, timeout=60).message.identity
    (told,) = json.loads(run("version", "list", "--lineage", "run", "--json"))
    assert told == {"identity": as_dict(identity), "holders": [], "replicas": ["one"]}
    assert ["run", "3", identity.root.hex()[:12], "-", "one"] in [
        line.split() for line in run("version", "list").splitlines()
    ]
    assert [each["name"] for each in json.loads(run("replica", "list", "--json"))] == ["one", "two"]
    shown = run("replica", "list", "--pool", "judge")
    assert "two" in shown
    assert "one" not in shown.split()


def test_a_watch_tells_all_replicas_whenever_one_changes(manager: str, replica: Start) -> None:
    seen: list[set[str]] = []
    there = threading.Event()

    def watch() -> None:
        with Client(manager) as client:
            for replicas in client.watch("a test"):
                seen.append({*replicas})
                if {"one", "two"} in seen and seen[-1] == {"two"}:
                    there.set()
                    return

    threading.Thread(target=watch, daemon=True).start()
    replica("one")
    replica("two")
    # What changes in one moment is told at once, so what is to be seen is waited for.
    eventually("both are seen", 60, lambda: {"one", "two"} in seen)
    with Client(manager) as client:
        client.evict("one")
    assert there.wait(60)


def test_the_same_on_an_event_loop_beside_other_work(manager: str, replica: Start) -> None:
    replica("one")

    async def use() -> None:
        turns = 0

        async def beside() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0.01)

        working = asyncio.ensure_future(beside())
        async with AsyncClient(manager) as client:
            assert await client.wait_for_replicas(1, timeout=60) == ["one"]
            before = turns
            with pytest.raises(CkptEngineError, match="1 of 2 replicas"):
                await client.wait_for_replicas(2, timeout=0.5)
            assert turns > before, "the loop went on"
            async for replicas in client.watch():
                assert {*replicas} == {"one"}
                break
            with pytest.raises(CkptEngineError) as caught:
                await client.rollback(7)
            assert caught.value.code is ErrorCode.NOT_FOUND
            with pytest.raises(CkptEngineError, match="level 'deep' is not a number of"):
                await client.sleep("deep")  # type: ignore[arg-type]
        working.cancel()

    asyncio.run(use())


def test_a_manager_that_comes_later_is_waited_for_and_one_that_does_not_is_named(tmp_path: Any, replica: Start) -> None:
    address = free_address()
    with Client(address) as client:
        gone = refused(client.status)
        assert gone.code is ErrorCode.UNAVAILABLE
        assert address in str(gone)
        begun = time.monotonic()
        late = refused(lambda: client.wait_for_replicas(1, timeout=1.0))
        assert late.code is ErrorCode.UNAVAILABLE
        assert time.monotonic() - begun >= 1.0
    assert refused(lambda: Client("no address")).code is ErrorCode.INVALID_ARGUMENT


def test_a_client_that_is_closed_says_so_and_one_is_made_before_its_loop_runs(manager: str) -> None:
    client = Client(manager)
    client.close()
    client.close()
    assert "this client is closed: make another one" in str(refused(client.status))
    later = AsyncClient(manager)  # as programs do that have it as a global

    async def use() -> None:
        assert not (await later.status()).replicas
        await later.close()
        with pytest.raises(CkptEngineError, match="this client is closed"):
            await later.status()

    asyncio.run(use())
    asyncio.run(AsyncClient(manager).close())
    assert refused(lambda: AsyncClient("no address")).code is ErrorCode.INVALID_ARGUMENT


def test_what_is_waited_for_is_said_after_a_while(
    manager: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("ckpt_engine.replica_wait.NOTICE_SECONDS", 0.2)
    with Client(manager) as client:
        refused(lambda: client.wait_for_replicas(2, pool="judge", timeout=1.5))
    (said,) = [record.message for record in caplog.records if record.name == "ckpt_engine.client"]
    assert said.startswith("0 of 2 replicas are up in pool 'judge'; waiting up to ")
    caplog.clear()
    with Client(address := free_address()) as client:
        refused(lambda: client.wait_for_replicas(1, timeout=1.5))
    (said,) = [record.message for record in caplog.records if record.name == "ckpt_engine.client"]
    assert address in said


def test_options_are_checked_before_anything_is_dialled(manager: str) -> None:
    client = Client(free_address())
    for options, words in (
        ({"pause_mode": "stop"}, "pause_mode 'stop' is none of keep, abort, wait, in_place"),
        ({"prefech": "never"}, "there is no option 'prefech': did you mean 'prefetch'?"),
        ({"min_replicas": -1}, "min_replicas -1 is not a number of replicas"),
        ({"replicas": "one"}, "replicas is a list of names"),
        ({"timeout": 0}, "a timeout"),
        ({"until": "later"}, "until 'later' is none of installed, held"),
        ({"dry_run": "no"}, "dry_run 'no' is neither True nor False"),
        ({"pool": "a b"}, "a pool's name"),
    ):
        error = refused(lambda options=options: client.update_from_directory("/x", **options))  # type: ignore[misc]
        assert error.code is ErrorCode.INVALID_ARGUMENT
        assert words in str(error), options
    client = Client(manager)
    for more in ({"min_replicas": 1}, {"prefetch": "always"}, {"until": "held"}, {"dry_run": True}):
        error = refused(lambda more=more: client.rollback(1, **more))  # type: ignore[misc]
        assert f"a rollback has no option {next(iter(more))}" in str(error)


def test_options_travel_and_come_back() -> None:
    options: UpdateOptions = {
        "pause_mode": "in_place",
        "timeout": 9.0,
        "replicas": ["one"],
        "pool": "judge",
        "min_replicas": 0,
        "prefetch": "never",
        "until": "installed",
        "dry_run": True,
        "draft": "update",
        "strategy": "all",
    }
    message = options_message(options)
    assert message == manager_pb2.UpdateOptions(
        pause_mode=manager_pb2.PAUSE_MODE_IN_PLACE,
        timeout_seconds=9.0,
        replicas=["one"],
        pool="judge",
        min_replicas=0,
        prefetch=manager_pb2.PREFETCH_NEVER,
        until=manager_pb2.UNTIL_INSTALLED,
        dry_run=True,
        draft=manager_pb2.DRAFT_UPDATE,
        strategy="all",
    )
    assert options_of(message) == options
    assert options_message({}, "mine").pool == "mine"
    assert options_message({"pool": ""}, "mine").pool == ""
    with pytest.raises(CkptEngineError, match="until 9 means nothing here"):
        options_of(manager_pb2.UpdateOptions(until=9))  # type: ignore[arg-type]


def test_an_error_has_a_code_also_of_a_release_that_knows_more() -> None:
    for code in ErrorCode:
        problem = CkptEngineError(type(refused_problem())(code=f"CODE_{code.value}", message="x"))
        assert problem.code is code
    assert CkptEngineError(type(refused_problem())(code=99, message="x")).code is ErrorCode.INTERNAL


def refused_problem() -> Any:
    return refused(lambda: options_message({"prefetch": "x"})).problem  # type: ignore[typeddict-item]
