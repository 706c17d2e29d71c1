"""Updates by a collective, as members see them that speak the wire contract alone."""

import asyncio
from typing import Any

from scripted_members import ScriptedReplica, ScriptedTrainer, get, refused, some_weights

from ckpt_engine.channel import ManagerStub
from ckpt_engine.core.collective_plan import KEY_BYTES, read_collective_plan
from ckpt_engine.manager.service import ManagerServer
from ckpt_engine.v1 import manager_pb2, weights_pb2


async def publishing(
    stub: ManagerStub, ranks: int, weights: dict[str, Any], beside: bool = False
) -> list[ScriptedTrainer]:
    """Ranks that offer their rows for collectives. beside: over shared memory, too."""
    trainers = [ScriptedTrainer(stub, rank, ranks) for rank in range(ranks)]
    for trainer in trainers:
        trainer.hold(weights)
        locator = weights_pb2.NcclLocator(host="127.0.0.1", port=4000 + trainer.rank).SerializeToString()
        offers = trainer.table.regions[0].offers
        if not beside:
            del offers[:]
        offers.add(transport="nccl", locator=locator)
        await trainer.open()
    for trainer in trainers:
        await trainer.publish()
    for trainer in trainers:
        await trainer.stream.until(manager_pb2.PublicationAccepted)
    return trainers


async def replica(stub: ManagerStub, name: str, *transports: str, workers: int = 1) -> ScriptedReplica:
    made = ScriptedReplica(stub, name, workers)
    made.transports = list(transports or ("shared_memory", "nccl"))
    await made.open()
    return made


async def take_part(trainer: ScriptedTrainer, **ended: Any) -> manager_pb2.TakePart:
    """Answers the next order to take part."""
    order: manager_pb2.TakePart = await trainer.stream.until(manager_pb2.TakePart)
    await trainer.stream.send(took_part=manager_pb2.TookPart(fence=order.fence, **ended))
    return order


async def update(
    trainers: list[ScriptedTrainer], replicas: list[ScriptedReplica], new: list[ScriptedReplica], **ended: Any
) -> tuple[manager_pb2.UpdateReport, list[manager_pb2.TakePart]]:
    """One update. new: those that are asked what they need."""
    calls = [trainer.update() for trainer in trainers]
    await asyncio.gather(*(each.prepare() for each in new))
    await asyncio.gather(*(trainer.seal() for trainer in trainers))
    parts = await asyncio.gather(*(take_part(trainer, **ended) for trainer in trainers))
    await asyncio.gather(*(each.install() for each in replicas))
    reports = [(await call)[-1].report for call in calls]
    return reports[0], list(parts)


async def test_all_members_are_told_the_same(manager: ManagerServer, stub: ManagerStub) -> None:
    weights = some_weights()
    trainers = await publishing(stub, 2, weights)
    replicas = [await replica(stub, "a", workers=2), await replica(stub, "b")]
    report, parts = await update(trainers, replicas, replicas)
    assert report.ok
    assert report.collective == "a and b are updated by a collective: the trainer publishes for it alone"
    told = parts[0].collective
    names = ["rank 0", "rank 1", "a, worker 0", "a, worker 1", "b, worker 0"]
    assert list(told.members) == names
    installs = [each.installed[0] for each in replicas]
    assert [told] * 3 == [parts[1].collective, *(install.collective for install in installs)]
    assert [part.member for part in parts] == [0, 1]
    assert [[worker.member for worker in install.workers] for install in installs] == [[2, 3], [4]]

    meeting = weights_pb2.CollectiveMeeting.FromString(told.meeting)
    assert (meeting.host, meeting.port, len(meeting.key)) == ("127.0.0.1", 4000, KEY_BYTES)
    schedule, dtypes = read_collective_plan(await get(stub, told.plan))
    assert [member.name for member in schedule.members] == names
    assert len(dtypes) == len(weights)
    plan = weights_pb2.WorkerPlan.FromString(await get(stub, installs[1].workers[0].plan))
    assert {source.transport for source in plan.sources} == {"nccl"}
    assert schedule.received(4) >= plan.bytes == sum(tensor.nbytes for tensor in weights.values())

    again, parts = await update(trainers, replicas, [])
    assert again.ok
    assert parts[0].collective == told  # the communicator and the key, too
    slept = asyncio.ensure_future(stub.Sleep(manager_pb2.SleepRequest(replicas=["b"], level=1), timeout=60))
    order = await replicas[1].stream.until(manager_pb2.SleepWake)
    await replicas[1].stream.send(sleep_wake_done=manager_pb2.SleepWakeDone(fence=order.fence))
    await slept
    _, parts = await update(trainers, replicas, [])
    assert parts[0].collective == told, "who sleeps keeps the communicator"
    third = await replica(stub, "c")
    more, parts = await update(trainers, [*replicas, third], [third])
    assert more.ok
    assert parts[0].collective.communicator != told.communicator
    assert weights_pb2.CollectiveMeeting.FromString(parts[0].collective.meeting).key != meeting.key


async def test_after_one_that_failed_all_make_another_one(manager: ManagerServer, stub: ManagerStub) -> None:
    (trainer,) = trainers = await publishing(stub, 1, some_weights())
    replicas = [await replica(stub, "a")]
    problem = weights_pb2.Problem(code=weights_pb2.Problem.CODE_ABORTED, message="a, worker 0 was lost")
    report, (first,) = await update([trainer], replicas, replicas, problem=problem, blamed=["a, worker 0"])
    assert "it did not end well: a, worker 0 was lost" in report.collective
    _, (second,) = await update(trainers, replicas, [])
    assert second.collective.communicator != first.collective.communicator


async def test_who_cannot_take_part_is_left_out_with_the_reason(manager: ManagerServer, stub: ManagerStub) -> None:
    trainers = await publishing(stub, 1, some_weights())
    able, unable = await replica(stub, "a"), await replica(stub, "b", "shared_memory")
    report, _ = await update(trainers, [able], [able, unable])
    assert report.collective.endswith("for it alone; b cannot use nccl")
    outcomes = {each.replica: each for each in report.replicas}
    assert outcomes["a"].outcome == manager_pb2.OUTCOME_NEW_SERVING
    assert "none reads over it alone" in outcomes["b"].problem.message
    assert "b cannot use nccl" in outcomes["b"].problem.message


async def test_weights_on_a_gpu_are_refused_to_workers_on_cpus_before_anything_is_touched(
    manager: ManagerServer, stub: ManagerStub
) -> None:
    (trainer,) = await publishing(stub, 1, some_weights())
    locator = weights_pb2.NcclLocator(host="127.0.0.1", port=4000, gpu=bytes(16)).SerializeToString()
    trainer.table.regions[0].offers[0].locator = locator
    await trainer.publish()
    await trainer.stream.until(manager_pb2.PublicationAccepted)
    only = await replica(stub, "a")
    call = trainer.update()
    await only.prepare()
    problem = await refused(call)
    said = "a, worker 0 computes on a CPU (host here), and the weights of rank 0 lie on a GPU"
    assert problem.message.count(said) == 1
    assert not only.installed


async def test_nobody_is_in_a_collective_who_reads_the_weights_himself(
    manager: ManagerServer, stub: ManagerStub
) -> None:
    (trainer,) = await publishing(stub, 1, some_weights(), beside=True)
    only = await replica(stub, "a")
    call = trainer.update()
    await only.prepare()
    await trainer.seal()
    install = await only.install()
    report = (await call)[-1].report
    assert report.ok
    assert not install.HasField("collective")
    assert report.collective == "no collective: every replica reads the weights itself or has a relay"
