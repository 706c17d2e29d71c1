"""What members of a collective do in the simulated world: workers, and trainer ranks inside `update_weights`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from ckpt_engine.core.arming import Word
from ckpt_engine.core.problems import CkptEngineError, aborted, data_loss, precondition, unavailable
from ckpt_engine.machines import events
from ckpt_engine.v1 import manager_pb2, worker_pb2
from tests.simulation.collective import Communicator, Part
from tests.simulation.weights import SLICES, SourceGoneError
from tests.simulation.world import BrokenPromiseError, Steps

if TYPE_CHECKING:
    from tests.simulation.engine import Engine, Worker
    from tests.simulation.members import TrainerShell


def worker_joins(engine: Engine, worker: Worker, order: worker_pb2.ReadyOrder) -> Steps:
    """Makes the communicator that it is to have ready, or raises UNAVAILABLE; the one before is gone either way."""
    part = order.collective
    if worker.communicator is not None and worker.communicator[0] == part.communicator:
        return
    worker.communicator = None
    end = engine.world.now + order.deadline_seconds
    place = _place(engine, worker, part, order.fence.epoch, end)
    try:
        made = yield from place.joins(part.communicator, list(part.members), worker, min(3.0, order.deadline_seconds))
        worker.communicator = part.communicator, made
    except CkptEngineError as error:
        yield from place.tell("leave", f"failed: {error.problem.message}")
        raise
    finally:
        place.over()


def _place(engine: Engine, worker: Worker, part: worker_pb2.CollectiveOrder, epoch: int, end: float) -> Part:
    return Part(
        engine.truth.collectives,
        part.members[part.member],
        epoch,
        part.meeting,
        engine.host.name,
        end,
        alive=lambda: engine.alive and worker.alive,
        frozen=lambda: worker.frozen,
        ready=lambda: engine.paused and (worker.state, worker.epoch) != (manager_pb2.WORKER_STATE_DIRTY, epoch),
    )


def worker_part(engine: Engine, worker: Worker, order: worker_pb2.InstallOrder, end: float) -> Steps:
    """Votes, and after *go* receives all that it needs. Raises CkptEngineError; before *go* it has written nothing."""
    part = _place(engine, worker, order.collective, order.fence.epoch, end)
    problem = None
    try:
        if worker.communicator is None or worker.communicator[0] != order.collective.communicator:
            raise precondition("its communicator is not there")
        if not (yield from part.arm(order.collective.arm_seconds)):
            assert part.participant is not None
            raise aborted(f"nothing was written: {part.participant.why}")
        yield from _receive(engine, worker, order, part, worker.communicator[1])
    except CkptEngineError as error:
        problem, worker.communicator = error.problem, None
        raise
    finally:
        engine.world.spawn(part.ended(problem))


def _freeze(engine: Engine, worker: Worker, chance: float, least: float, most: float) -> Steps:
    if engine.world.chance(chance):
        worker.frozen = True
        yield engine.world.between(least, most)
        worker.frozen = False


def _receive(engine: Engine, worker: Worker, order: worker_pb2.InstallOrder, part: Part, made: Communicator) -> Steps:
    if engine.truth.collectives.words.get(order.fence.epoch) is not Word.GO:
        raise BrokenPromiseError(f"{part.name} begins epoch {order.fence.epoch} without go")
    yield from _freeze(engine, worker, engine.faults.write_late, 1.0, 25.0)
    plan, expected = json.loads(order.collective.plan), json.loads(order.expected)
    worker.state, worker.epoch = manager_pb2.WORKER_STATE_DIRTY, order.fence.epoch
    for index in range(SLICES):
        yield from _freeze(engine, worker, engine.faults.read_late, 0.2, 6.0)
        if engine.world.chance(engine.faults.worker_late):
            raise unavailable("the simulator made this worker fail in the middle")
        worker.weights[index] = yield from part.receives(made, plan[str(index)], index)
    if {str(index): tag for index, tag in enumerate(worker.weights)} != expected:
        raise data_loss("what was received is not what was sealed")
    worker.state, worker.identity = manager_pb2.WORKER_STATE_CLEAN, order.identity


def rank_part(trainer: TrainerShell, task: events.RunPart) -> Steps:
    """A rank's part, on its thread: votes, and after *go* sends all that others need of it."""
    world, members = trainer.world, list(task.collective.members)
    end = world.now + task.seconds
    part = Part(
        trainer.cluster.truth.collectives,
        members[task.member],
        task.epoch,
        task.collective.meeting,
        trainer.source.host.name,
        end,
        alive=lambda: trainer.alive,
        frozen=lambda: trainer.frozen,
        ready=lambda: trainer.calling,
        clock=lambda: world.now * trainer._rate + trainer._began,
    )
    trainer.part = part
    ballot = trainer.booth.ballots.open(task.epoch, members) if part.booth is trainer.booth else None
    problem = None
    try:
        if not trainer.calling or trainer.sealed_in_call != task.sealed:
            raise precondition("this rank is not in the call in which it sealed")
        yield from _send(trainer, task, part, (end - world.now) / 2)
    except CkptEngineError as error:
        problem, trainer.communicator = error.problem, None
    yield from part.ended(problem)
    trainer.part = None
    return events.PartTaken(problem, () if ballot is None else ballot.blamed)


def _send(trainer: TrainerShell, task: events.RunPart, part: Part, seconds: float) -> Steps:
    members, named = list(task.collective.members), task.collective.communicator
    (blob,) = yield from trainer.fetch((task.collective.plan,))
    plan = json.loads(blob)
    if trainer.communicator is None or trainer.communicator[0] != named:
        trainer.communicator = None
        trainer.communicator = named, (yield from part.joins(named, members, trainer, min(3.0, seconds)))
    if not (yield from part.arm(seconds)):
        assert part.participant is not None
        raise aborted(f"nothing was sent: {part.participant.why}")
    readers = [name for name in members if name not in plan.values()]
    for index in range(SLICES):
        for reader in readers if plan[str(index)] == part.name else []:
            try:
                yield from part.sends(trainer.communicator[1], reader, index, lambda: trainer.source.read(index))  # noqa: B023
            except SourceGoneError as error:
                raise unavailable(str(error)) from error
