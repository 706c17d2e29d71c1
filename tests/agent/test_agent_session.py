"""The whole agent against a manager that a test plays and a small real engine."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from ckpt_engine.agent import session
from ckpt_engine.agent.launched import LaunchSettings
from ckpt_engine.agent.session import AgentSettings
from ckpt_engine.core.deadlines import ENVIRONMENT
from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.machines import events
from ckpt_engine.machines.agent.machine import AgentMachine
from ckpt_engine.v1 import manager_pb2, weights_pb2, worker_pb2
from tests.agent.plain_manager import PlainManager
from tests.agent.running_agent import (
    IDENTITY,
    QUICK,
    SECONDS,
    Beside,
    Start,
    calls,
    fence,
    install,
    prepare,
    ready,
    updated,
)
from tests.waiting import alive


async def test_an_agent_registers_and_says_goodbye(manager: PlainManager, start: Start) -> None:
    agent = start(name="replica-1")
    beat = await ready(manager)
    hello = manager.all(manager_pb2.ReplicaHello)[-1]
    assert hello.name == "replica-1"
    assert hello.agent_epoch == 1
    assert hello.engine.kind == "small"
    assert hello.mode == manager_pb2.MODE_STANDALONE
    assert hello.host.boot_id
    assert {"shared_memory", "file"} <= set(hello.transports)
    assert not beat.serving
    assert beat.workers[0].state == manager_pb2.WORKER_STATE_NONE
    assert beat.workers[0].pid == agent.engine_pid
    pid = agent.engine_pid
    for epoch in (8, 8, 9):  # commands are sent again until they are answered
        manager.send(manager_pb2.Abandon(fence=fence(epoch), reason="it stalls"))
    await agent.until_said("epoch 9: abandoned")
    assert [line.split()[3] for line in agent.lines if "abandoned by the manager: it stalls" in line] == ["8:", "9:"]
    await agent.end()
    assert manager.all(manager_pb2.Goodbye)[0].reason == "the agent was asked to stop"
    assert not alive(pid)
    assert sum("registered with the manager" in line for line in agent.lines) == 1  # not again at the fuller hello


async def test_for_what_a_late_replica_waits_is_said_once_and_not_if_it_is_over_soon(
    manager: PlainManager, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "NOTICE_SECONDS", 0.01)
    agent = start()
    await ready(manager)
    for reason in ("nobody holds it", "nobody holds it", "start a relay on host b"):
        manager.send(manager_pb2.NotBrought(identity=IDENTITY, reason=reason))
        await agent.until_said(f"waits for version 3 of {IDENTITY.lineage}: {reason}")
    assert sum("nobody holds it" in line for line in agent.lines) == 1
    monkeypatch.setattr(session, "NOTICE_SECONDS", 30.0)
    manager.send(manager_pb2.NotBrought(identity=IDENTITY, reason="it is over soon"))
    await prepare(manager, 1)
    assert not any("it is over soon" in line for line in agent.lines)


async def test_an_update_from_prepare_to_outcome(manager: PlainManager, start: Start) -> None:
    agent = start()
    await ready(manager)
    prepared = await prepare(manager, 1)
    assert not prepared.HasField("problem")
    assert manager.blobs[prepared.workers[0].needs.digest]
    manager.send(install(manager, 1))
    outcome = await manager.next(manager_pb2.ReplicaOutcome)
    assert outcome.outcome == manager_pb2.OUTCOME_NEW_SERVING, outcome.problem.message
    assert outcome.after == IDENTITY
    assert outcome.bytes == len(b"plan")
    assert 0 < outcome.pause_seconds <= outcome.sync_seconds
    await manager.until(lambda: manager.all(manager_pb2.ReplicaHeartbeat)[-1].serving)
    assert any(
        line.startswith("update of epoch 1: new weights, serving (version 3), 4 B, pause ") for line in agent.lines
    )

    # Again with the same blobs: they are not fetched a second time, and nothing is recorded anew.
    gets = manager.blob_gets
    manager.send(install(manager, 2))
    # The first outcome may come again meanwhile: this manager acknowledges none.
    await manager.until(lambda: any(each.fence.epoch == 2 for each in manager.all(manager_pb2.ReplicaOutcome)))
    assert manager.blob_gets == gets


async def test_a_lost_manager_is_dialled_until_it_is_back(manager: PlainManager, start: Start) -> None:
    agent = start("--install-seconds", "1")
    await ready(manager)
    await prepare(manager, 1)
    manager.send(install(manager, 1))
    await manager.next(manager_pb2.Progress)
    await manager.stop()
    async with asyncio.timeout(SECONDS):
        while (await calls(agent))[-1:] != ["resume"]:  # noqa: ASYNC110 - the install ends while nobody can be told
            await asyncio.sleep(0.05)
    assert not agent.run.done()
    sessions = manager.sessions
    await manager.start()
    await manager.until(lambda: manager.sessions > sessions)
    hello = (
        await manager.next(manager_pb2.ReplicaHello)
        if len(manager.all(manager_pb2.ReplicaHello)) < 2
        else (manager.all(manager_pb2.ReplicaHello)[-1])
    )
    assert hello.last_outcome.outcome == manager_pb2.OUTCOME_NEW_SERVING
    assert hello.workers[0].state == manager_pb2.WORKER_STATE_CLEAN
    assert hello.workers[0].identity == IDENTITY
    assert sum("no session with the manager" in line for line in agent.lines) == 1


async def test_a_session_that_ends_is_begun_again(manager: PlainManager, start: Start) -> None:
    start()
    await ready(manager)
    manager.end_session()
    await manager.until(lambda: manager.sessions == 2)
    hellos = manager.all(manager_pb2.ReplicaHello)
    assert hellos[0].session_id == hellos[-1].session_id


async def test_a_refused_agent_ends_and_says_why(
    manager: PlainManager, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, and without having loaded an engine that would serve nobody."""
    monkeypatch.setenv(ENVIRONMENT, f"{QUICK} heartbeat=0.2 lease=2")
    manager.refuse = weights_pb2.Problem(
        code=weights_pb2.Problem.CODE_ABORTED, message="replica-1 is served by another agent"
    )
    agent = start(name="replica-1")
    with pytest.raises(CkptEngineError, match="served by another agent"):
        await asyncio.wait_for(asyncio.shield(agent.run), SECONDS)
    assert manager.sessions > 1, "the other agent might have been dead"
    (said,) = [line for line in agent.lines if "refused by the manager" in line]
    assert said.endswith("in case that is an agent that has died")
    assert not any("engine launched" in line for line in agent.lines)


async def test_a_machine_that_raises_ends_the_agent_and_its_engine(
    manager: PlainManager, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The defect is put in; there is none that could be provoked."""
    original = AgentMachine._message

    def message(self: AgentMachine, body: object, now: float) -> None:
        if isinstance(body, manager_pb2.Abandon):
            self._session.send(manager_pb2.Goodbye(reason="half of what was decided"))
            raise ZeroDivisionError("a defect of ours")
        original(self, body, now)

    agent = start()
    await ready(manager)
    pid = agent.engine_pid
    monkeypatch.setattr(AgentMachine, "_message", message)
    manager.send(manager_pb2.Abandon(fence=fence(1)))
    with pytest.raises(CkptEngineError, match="the agent failed on Abandon") as caught:
        await asyncio.wait_for(asyncio.shield(agent.run), SECONDS)
    assert caught.value.problem.code == weights_pb2.Problem.CODE_INTERNAL
    assert not manager.all(manager_pb2.Goodbye)
    assert not alive(pid)


async def test_a_worker_waits_for_no_machine_that_raised(
    manager: PlainManager, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The defect is put in. The worker's question comes first, and would be waited for much longer than the test."""
    original = AgentMachine._take

    def take(self: AgentMachine, event: events.AgentEvent, now: float) -> None:
        if isinstance(event, events.WorkerAsked):
            return
        if isinstance(event, events.Message) and isinstance(event.body, manager_pb2.Abandon):
            raise ZeroDivisionError("a defect of ours")
        original(self, event, now)

    agent = start()
    await ready(manager)
    monkeypatch.setattr(AgentMachine, "_take", take)
    question = asyncio.ensure_future(agent.agent._answer_worker(worker_pb2.WorkerRequest()))
    await asyncio.sleep(0)
    manager.send(manager_pb2.Abandon(fence=fence(1)))
    assert await asyncio.wait_for(question, agent.agent.settings.deadlines.worker_reply / 2) is None
    assert await asyncio.wait_for(agent.agent._answer_worker(worker_pb2.WorkerRequest()), 0.1) is None
    with pytest.raises(CkptEngineError, match="a defect of ours"):
        await asyncio.wait_for(asyncio.shield(agent.run), SECONDS)


async def test_a_manager_that_is_away_keeps_no_engine_from_starting(manager: PlainManager, start: Start) -> None:
    await manager.stop()
    agent = start()
    await agent.until_said("engine ready")


async def test_a_killed_engine_is_reported_and_comes_back_empty(manager: PlainManager, start: Start) -> None:
    agent = start()
    await ready(manager)
    await updated(manager, 1)
    await manager.until(lambda: manager.all(manager_pb2.ReplicaHeartbeat)[-1].serving)
    boot_id = manager.all(manager_pb2.ReplicaHeartbeat)[-1].workers[0].boot_id
    os.kill(agent.engine_pid, signal.SIGKILL)
    await manager.until(
        lambda: any("killed by SIGKILL" in beat.closed_reason for beat in manager.all(manager_pb2.ReplicaHeartbeat))
    )

    def empty_again() -> bool:
        beat = manager.all(manager_pb2.ReplicaHeartbeat)[-1]
        return bool(beat.workers) and beat.workers[0].boot_id != boot_id

    await manager.until(empty_again)
    beat = manager.all(manager_pb2.ReplicaHeartbeat)[-1]
    assert beat.workers[0].state == manager_pb2.WORKER_STATE_NONE
    assert not beat.serving


async def test_a_killed_engine_in_the_middle_of_an_install(manager: PlainManager, start: Start) -> None:
    agent = start("--install-seconds", "20")
    await ready(manager)
    await prepare(manager, 1)
    manager.send(install(manager, 1))
    dirty = manager_pb2.WORKER_STATE_DIRTY
    await manager.until(
        lambda: any(b.workers and b.workers[0].state == dirty for b in manager.all(manager_pb2.ReplicaHeartbeat))
    )
    os.kill(agent.engine_pid, signal.SIGKILL)
    outcome = await manager.next(manager_pb2.ReplicaOutcome)
    assert outcome.outcome == manager_pb2.OUTCOME_QUARANTINED
    assert outcome.problem.code == weights_pb2.Problem.CODE_UNAVAILABLE


async def test_an_engine_that_hangs_in_an_install_is_replaced(
    manager: PlainManager, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENVIRONMENT, f"{QUICK} unanswered=0.5")
    agent = start("--install-hangs")
    boot_id = (await ready(manager)).workers[0].boot_id
    await prepare(manager, 1)
    order = install(manager, 1)
    order.deadline_seconds = 2.0
    manager.send(order)
    outcome = await manager.next(manager_pb2.ReplicaOutcome)
    assert outcome.outcome == manager_pb2.OUTCOME_QUARANTINED
    assert outcome.problem.code == weights_pb2.Problem.CODE_DEADLINE_EXCEEDED

    def anew() -> bool:
        beat = manager.all(manager_pb2.ReplicaHeartbeat)[-1]
        return bool(beat.workers) and beat.workers[0].boot_id != boot_id

    await manager.until(anew)
    assert any("it is replaced" in line for line in agent.lines)


async def test_an_engine_that_is_not_ours_is_never_ended(
    manager: PlainManager, start: Start, beside: Beside, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENVIRONMENT, f"{QUICK} unanswered=0.2")
    url, engine = await beside("--install-hangs")
    agent = start(url=url)
    await ready(manager)
    await prepare(manager, 1)
    order = install(manager, 1)
    order.deadline_seconds = 2.0
    manager.send(order)
    assert (await manager.next(manager_pb2.ReplicaOutcome)).outcome == manager_pb2.OUTCOME_QUARANTINED
    await agent.until_said("it was not started by us")
    assert engine.returncode is None


async def test_stopping_waits_for_an_install_in_an_engine_that_stays(
    manager: PlainManager, start: Start, beside: Beside
) -> None:
    url, engine = await beside("--install-seconds", "1")
    agent = start(url=url)
    await ready(manager)
    await prepare(manager, 1)
    manager.send(install(manager, 1))
    await manager.next(manager_pb2.Progress)
    await agent.end()
    assert manager.all(manager_pb2.ReplicaOutcome)[-1].outcome == manager_pb2.OUTCOME_NEW_SERVING
    assert engine.returncode is None


async def test_a_directory_is_sealed_for_its_readers(manager: PlainManager, start: Start, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    from ckpt_engine.core.manifest import canonical
    from ckpt_engine.host.facts import this_host
    from ckpt_engine.source.directory import directory_source

    save_file({"w": torch.arange(12.0)}, str(tmp_path / "model.safetensors"))
    source = directory_source(tmp_path, host=this_host())
    source.seal()
    table = manager.put(canonical(source.table()))
    atoms = weights_pb2.Atoms(table_digest=table.digest, atoms=[weights_pb2.Atom(shard=0, start=[0], stop=[12])])
    start()
    await ready(manager)
    seal = manager_pb2.SealForReaders(
        fence=fence(1), table=table, atoms=manager.put(canonical(atoms)), deadline_seconds=10
    )
    manager.send(seal)
    sealed = await manager.next(manager_pb2.Sealed)
    assert not sealed.HasField("problem"), sealed.problem.message
    digests = weights_pb2.Digests.FromString(manager.blobs[sealed.digests.digest])
    assert list(digests.values) == source.digest(atoms)
    source.close()


def test_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(ValueError, match="HOST:PORT"):
        AgentSettings("nowhere", "small", LaunchSettings("small"))
    with pytest.raises(ValueError, match="either launches its engine or"):
        AgentSettings("host:1", "small", LaunchSettings("small"), url="http://127.0.0.1:1")
    with pytest.raises(ValueError, match="either launches its engine or"):
        AgentSettings("host:1", "small")
