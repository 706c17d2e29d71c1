"""Whole updates and refused ones, driven by scripted members over real channels.

What each side says is its own tests' (tests/trainer, tests/agent); when an update is refused, the simulation's.
"""

import asyncio
import sqlite3

import grpc.aio
import pytest
import torch
from scripted_members import (
    WAIT,
    ScriptedReplica,
    ScriptedTrainer,
    get,
    one_update,
    pair,
    problem_of,
    ranks,
    refused,
    some_weights,
)

from ckpt_engine.channel import ManagerStub
from ckpt_engine.digest.boxes import digest_box
from ckpt_engine.manager.service import ManagerServer
from ckpt_engine.v1 import manager_pb2, weights_pb2
from tests.sealing import root
from tests.waiting import until

Code = weights_pb2.Problem.Code


@pytest.mark.parametrize("count", [1, 2])
async def test_an_update_reaches_every_worker_with_what_was_sealed(
    manager: ManagerServer, stub: ManagerStub, count: int
) -> None:
    weights = some_weights()
    trainers = await ranks(stub, *[weights] * count)
    replicas = [ScriptedReplica(stub, "a", workers=2), ScriptedReplica(stub, "b")]
    for trainer in trainers:
        await trainer.stream.until(manager_pb2.PublicationAccepted)
    for replica in replicas:
        await replica.open()

    report = await one_update(trainers, replicas, prepares=True, version=5)
    assert report.ok
    assert (report.identity.lineage, report.identity.version) == ("run", 5)
    assert [outcome.outcome for outcome in report.replicas] == [manager_pb2.OUTCOME_NEW_SERVING] * 2

    sums = [digest_box(weights[name], [0] * weights[name].dim()) for name in sorted(weights)]
    order = replicas[0].installed[0]
    expected = weights_pb2.Digests.FromString(await get(stub, order.workers[1].expected))
    assert list(expected.values) == sums
    plan = weights_pb2.WorkerPlan.FromString(await get(stub, order.workers[0].plan))
    assert {source.rank for source in plan.sources} == set(range(count))
    assert plan.bytes == sum(tensor.nbytes for tensor in weights.values())
    manifest = weights_pb2.Manifest.FromString(b"".join([await get(stub, (await publication(trainers[0])).manifest)]))
    assert report.identity.root == root(manifest, sums)

    # The next one changes the weights and records, merges and compiles nothing.
    changed = {name: tensor + 1 for name, tensor in weights.items()}
    for trainer in trainers:
        trainer.weights = changed
    again = await one_update(trainers, replicas, prepares=False)
    assert (again.ok, again.identity.version) == (True, 6)
    assert again.identity.root != report.identity.root
    assert again.fence.epoch > report.fence.epoch
    assert replicas[0].installed[1].workers[0].plan == order.workers[0].plan


async def publication(trainer: ScriptedTrainer) -> manager_pb2.PublicationAccepted:
    """Publishes the same table again, which is answered like the first time."""
    await trainer.publish()
    accepted: manager_pb2.PublicationAccepted = await trainer.stream.until(manager_pb2.PublicationAccepted)
    return accepted


async def test_a_missing_rank_is_named_after_the_deadline(stub: ManagerStub) -> None:
    first, _ = await ranks(stub, some_weights(), some_weights())
    replica = ScriptedReplica(stub)
    await replica.open()
    problem = await refused(first.update(timeout_seconds=3.0))
    assert problem.code in (Code.CODE_DEADLINE_EXCEEDED, Code.CODE_FAILED_PRECONDITION)
    assert list(problem.ranks) == [1]
    assert replica.installed == []


async def test_disagreeing_ranks_are_refused_naming_tensor_and_ranks(stub: ManagerStub) -> None:
    trainers = await ranks(stub, some_weights(), some_weights(sizes=(8, 6)))
    replica = ScriptedReplica(stub)
    await replica.open()
    for call in [trainer.update(timeout_seconds=WAIT) for trainer in trainers]:
        problem = await refused(call)
        assert problem.code == Code.CODE_INVALID_ARGUMENT
        assert sorted(problem.ranks) == [0, 1]
        assert list(problem.tensors) == ["head.weight"]
    assert replica.installed == []


async def test_a_caller_that_goes_away_may_call_again(manager: ManagerServer, stub: ManagerStub) -> None:
    trainers = await ranks(stub, some_weights(), some_weights())
    replica = ScriptedReplica(stub)
    await replica.open()
    gone = trainers[0].update()
    await until(lambda: manager.status().phase != "idle", "the call is known")
    gone.cancel()
    await until(lambda: manager.status().phase == "idle", "it is known to have gone")
    assert (await one_update(trainers, [replica], prepares=True)).ok


async def test_a_ledger_that_cannot_be_written_refuses_before_anything_is_touched(
    manager: ManagerServer, stub: ManagerStub
) -> None:
    trainer, replica = await pair(stub)
    with sqlite3.connect(manager.ledger.name) as damage:
        damage.execute("DROP TABLE intents")
    damage.close()
    call = trainer.update()
    await replica.prepare()
    await trainer.seal()
    problem = await refused(call)
    assert problem.code == Code.CODE_FAILED_PRECONDITION
    assert f"the ledger {manager.ledger.name} cannot be used" in problem.message
    await replica.stream.send(heartbeat=replica.heartbeat())
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(replica.stream.until(manager_pb2.Install), 0.5)


async def test_sleep_and_wake_reach_the_replica(stub: ManagerStub) -> None:
    replica = ScriptedReplica(stub)
    await replica.open()
    for wake in (False, True):
        call = (
            stub.Wake(manager_pb2.WakeRequest(tags=["weights"]), timeout=60)
            if wake
            else stub.Sleep(manager_pb2.SleepRequest(level=2), timeout=60)
        )
        order = await replica.stream.until(manager_pb2.SleepWake)
        assert (order.wake, order.level, list(order.tags)) == ((True, 0, ["weights"]) if wake else (False, 2, []))
        await replica.stream.send(sleep_wake_done=manager_pb2.SleepWakeDone(fence=order.fence))
        (result,) = (await call).results
        assert result.replica == "replica"
        assert not result.HasField("problem")
    problem = await refused(stub.Sleep(manager_pb2.SleepRequest(replicas=["nobody"]), timeout=60))
    assert problem.code == Code.CODE_NOT_FOUND


async def test_a_long_problem_still_arrives(stub: ManagerStub) -> None:
    """Trailing metadata is small; a tensor's name is not, if somebody wants."""
    trainer, name = ScriptedTrainer(stub), "x" * 20_000
    trainer.hold({name: torch.zeros(4)})
    trainer.table.shards[0].stop[0] = 3
    await trainer.open()
    await trainer.publish()
    await ScriptedReplica(stub).open()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await trainer.update(timeout_seconds=WAIT)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    problem = problem_of(caught.value)
    assert problem.message.startswith("missing part [3:4] of tensor xxx")
    assert list(problem.ranks) == [0]


async def test_an_engine_that_fails_to_prepare_is_left_out_and_the_others_are_updated(
    stub: ManagerStub,
) -> None:
    """Its fault says nothing about the weights: one sick engine must not hold up all others."""
    trainer, sick, well = ScriptedTrainer(stub), ScriptedReplica(stub, "sick"), ScriptedReplica(stub, "well")
    await trainer.join(some_weights())
    for replica in (sick, well):
        await replica.open()
    call = trainer.update()
    prepare = await sick.stream.until(manager_pb2.Prepare)
    why = weights_pb2.Problem(code=Code.CODE_INTERNAL, message="the engine answered 500")
    await sick.stream.send(prepared=manager_pb2.Prepared(fence=prepare.fence, problem=why))
    await well.prepare()
    await trainer.seal()
    await well.install()
    report = (await call)[-1].report
    assert not report.ok
    by_name = {outcome.replica: outcome for outcome in report.replicas}
    assert by_name["well"].outcome == manager_pb2.OUTCOME_NEW_SERVING
    assert by_name["sick"].outcome != manager_pb2.OUTCOME_NEW_SERVING
    assert "the engine answered 500" in by_name["sick"].problem.message


async def test_a_pause_mode_that_one_engine_does_not_have_refuses_the_update_for_all(
    manager: ManagerServer, stub: ManagerStub
) -> None:
    """Before anything is planned, and naming the replica: no engine is paused in a way that nobody asked for."""
    trainer = ScriptedTrainer(stub)
    await trainer.join(some_weights())
    able, unable = ScriptedReplica(stub, "able"), ScriptedReplica(stub, "unable")
    able.engine.pause_modes.extend([manager_pb2.PAUSE_MODE_KEEP, manager_pb2.PAUSE_MODE_WAIT])
    unable.engine.pause_modes.extend([manager_pb2.PAUSE_MODE_KEEP])
    for replica in (able, unable):
        await replica.open()
    problem = await refused(trainer.update(pause_mode=manager_pb2.PAUSE_MODE_WAIT))
    assert problem.code == Code.CODE_INVALID_ARGUMENT
    assert problem.replica == "unable"
    assert "cannot be paused in mode 'wait'; it can in: keep" in problem.message
    assert (await one_update([trainer], [able, unable], prepares=True, pause_mode=manager_pb2.PAUSE_MODE_KEEP)).ok


async def keep_less(replica: ScriptedReplica, kept: dict[str, str]) -> None:
    """Answers the next Prepare: its model keeps narrower dtypes than are published."""
    order: manager_pb2.Prepare = await replica.stream.until(manager_pb2.Prepare)
    problem = weights_pb2.Problem(code=Code.CODE_INVALID_ARGUMENT, message="published in float32", kept=kept)
    answer = manager_pb2.Prepared(fence=order.fence, manifest_digest=order.manifest.digest, problem=problem)
    await replica.stream.send(prepared=answer)


@pytest.mark.parametrize("adapts", [True, False])
async def test_ranks_that_have_sealed_nothing_are_told_what_replicas_keep(stub: ManagerStub, adapts: bool) -> None:
    """However much that is; later, who keeps less is left out."""
    trainer, fits = ScriptedTrainer(stub), ScriptedReplica(stub, "fits")
    await trainer.join(some_weights())
    less = [ScriptedReplica(stub, name) for name in ("first", "second")]
    for replica in (fits, *less):
        await replica.open()
    kept = [{f"layers.#.of.replica.{n}.tensor.{'x' * i}": "bfloat16" for i in range(100)} for n in (1, 2)]
    request = manager_pb2.UpdateWeightsRequest(
        lineage="run",
        session_id=trainer.session_id,
        adapts=adapts,
        options=manager_pb2.UpdateOptions(timeout_seconds=WAIT),
    )
    call = stub.UpdateWeights(request, timeout=60)
    events: list[manager_pb2.UpdateEvent] = []

    async def collect() -> None:
        async for event in call:
            events.append(event)  # noqa: PERF401 - those before a refusal count

    collecting = asyncio.ensure_future(collect())
    for replica, told in zip(less, kept, strict=True):
        await keep_less(replica, told)
    await fits.prepare()
    if adapts:
        problem = await refused(collecting)
        assert not problem.kept, "they are too many for the status of a call"
        assert dict(events[-1].refusal.kept) == kept[0] | kept[1]
        assert events[-1].refusal.message == problem.message
        assert problem.message.startswith("published in float32")
        assert fits.installed == []
    else:
        await trainer.seal()
        await fits.install()
        await collecting
        outcomes = {each.replica: each for each in events[-1].report.replicas}
        assert outcomes["fits"].outcome == manager_pb2.OUTCOME_NEW_SERVING
        for replica in less:
            assert outcomes[replica.name].problem.message.startswith("published in float32")
            assert not outcomes[replica.name].problem.kept
        status = await stub.GetStatus(manager_pb2.GetStatusRequest())
        assert not any(each.unfit.kept for each in status.replicas)
