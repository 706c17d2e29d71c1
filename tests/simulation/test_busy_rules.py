"""Single rules of calls that come while something else runs, each in a small story."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ckpt_engine.core.deadlines import CATCH_UP_ATTEMPTS
from ckpt_engine.machines import events
from ckpt_engine.v1 import manager_pb2, worker_pb2
from tests.simulation.engine import Engine
from tests.simulation.manager import ManagerShell
from tests.simulation.members import TrainerShell
from tests.simulation.story import NEW, QUARANTINED, Problem, Story, outcomes, refused
from tests.simulation.weights import Source
from tests.simulation.world import Steps


@pytest.fixture
def story() -> Story:
    return Story()


def manager_of(story: Story) -> ManagerShell:
    assert story.cluster.manager is not None
    return story.cluster.manager


def wait_until(story: Story, over: Callable[[], bool], seconds: float = 5.0) -> None:
    end = story.world.now + seconds
    while not over():
        assert story.world.now < end, manager_of(story).machine.status().phase
        story.wait(0.001)


def sent(story: Story, kind: type) -> list[Any]:
    """What the manager sends of this kind from now on; the list grows."""
    found: list[Any] = []
    manager = manager_of(story)
    before = manager.watch

    def watch(shell: ManagerShell, command: Any) -> None:
        if isinstance(command, events.Send) and isinstance(command.body, kind):
            found.append(command.body)
        before(shell, command)

    manager.watch = watch
    return found


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each write to the ledger takes half a second."""
    original = ManagerShell._written

    def written(self: ManagerShell) -> Steps:
        yield 0.5
        yield from original(self)

    monkeypatch.setattr(ManagerShell, "_written", written)


def test_a_run_that_calls_while_its_update_goes_on_is_told_what_goes_on(story: Story) -> None:
    agent, group = story.replica(), story.ranks()
    first = story.call(group.trainers[0])
    wait_until(story, lambda: "sealing" in manager_of(story).machine.status().phase)
    second = story.call(group.trainers[0])
    story.wait(3.0)
    refused(second[0], Problem.CODE_ABORTED, "another update runs", "version 0 of lineage 'run'")
    assert outcomes(first[0]) == {agent.name: NEW}


def test_bringing_up_that_is_cut_short_before_its_intent_is_on_the_disk_touches_nothing(
    story: Story, slow_disk: None
) -> None:
    """The late replica is told to install only what the update brings that came."""
    story.replica()
    group = story.ranks(kind="snapshot")
    assert story.update(group).ok
    group.train()
    installs = sent(story, manager_pb2.Install)
    story.join_replica(manager_pb2.MODE_STANDALONE)
    wait_until(story, lambda: ": recording" in manager_of(story).machine.status().phase)
    assert "bringing up" in manager_of(story).machine.status().phase
    report = story.update(group)
    assert len(report.replicas) == 2
    assert report.ok
    assert {install.identity.version for install in installs} == {1}


def test_a_late_replica_that_gave_way_often_is_brought_up_all_the_same(story: Story, slow_disk: None) -> None:
    """Updates that are refused end one attempt after the other; none of these has failed for what it was to do."""
    story.relay()
    story.replica()
    group = story.ranks(kind="snapshot")
    identity = story.trained(group, prefetch=manager_pb2.PREFETCH_ALWAYS).identity
    story.join_replica(manager_pb2.MODE_STANDALONE)
    for _ in range(CATCH_UP_ATTEMPTS + 1):
        wait_until(story, lambda: "bringing up" in story.phase and ": recording" in story.phase, 30.0)
        group.train()
        result = story.call(group.trainers[0], version=identity.version)
        wait_until(story, lambda result=result: bool(result))
        refused(result[0], Problem.CODE_FAILED_PRECONDITION, "the weights are not those")
    story.wait(30.0)
    assert [story.held_by(agent) for agent in story.agents.values()] == [identity, identity]


def test_a_replica_that_does_not_hear_that_bringing_up_is_given_up_is_told_again(
    story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its engine takes long to pause, and the update that came waits for its outcome."""
    story.replica()
    group = story.ranks(kind="snapshot")
    assert story.update(group).ok
    group.train()
    original, pauses = Engine.call, []

    def call(self: Engine, task: Any) -> Steps:
        if isinstance(task, events.PauseEngine) and not pauses:
            pauses.append(task)
            yield 1.9
        yield from original(self, task)

    monkeypatch.setattr(Engine, "call", call)
    abandons = sent(story, manager_pb2.Abandon)
    story.join_replica(manager_pb2.MODE_STANDALONE)
    wait_until(story, lambda: bool(pauses))
    report = story.update(group)
    assert len(abandons) > 1
    assert report.ok
    assert len(report.replicas) == 2


@pytest.mark.parametrize("hangs", [events.PrepareEngine, events.InstallEngine], ids=["getting ready", "installing"])
def test_an_update_does_not_wait_for_a_late_replica_of_which_a_worker_is_stopped(
    story: Story, monkeypatch: pytest.MonkeyPatch, hangs: type
) -> None:
    """Whoever brings it up would wait for as long as that may take; the others get their weights at once."""
    first, group = story.replica(), story.ranks(kind="snapshot")
    late = story.replica()
    assert story.update(group).ok
    group.train()
    original, hanging = Engine.call, []

    def call(self: Engine, task: Any) -> Steps:
        installs = late.machine.replica.operation is not None and late.machine.replica.operation.kind == "install"
        if self is late.engine and installs and isinstance(task, hangs):
            hanging.append(task)
            yield task.seconds
        yield from original(self, task)

    monkeypatch.setattr(Engine, "call", call)
    story.engine_again(late)
    wait_until(story, lambda: bool(hanging), 20.0)
    assert "bringing up" in manager_of(story).machine.status().phase
    result = story.call(group.trainers[0], timeout_seconds=15.0)
    before = story.held_by(first)
    wait_until(story, lambda: story.held_by(first) != before, story.deadlines.resume + 2.0)
    story.wait(20.0)
    assert outcomes(result[0])[first.name] == NEW


def late_that_reads(story: Story, monkeypatch: pytest.MonkeyPatch, read: Callable[..., Steps]) -> Any:
    """A replica that is brought up, of which a worker has begun to read: before it does it goes through `read`."""
    story.replica()
    late, group = story.replica(), story.ranks(kind="snapshot")
    assert story.update(group).ok
    group.train()
    original, began = Engine._read, []

    def reading(self: Engine, worker: Any, order: Any, end: float) -> Steps:
        if self is late.engine and not began:
            began.append(worker)
            yield from read(self, worker, order)
        yield from original(self, worker, order, end)

    monkeypatch.setattr(Engine, "_read", reading)
    story.engine_again(late)
    wait_until(story, lambda: bool(began), 20.0)
    assert "bringing up" in manager_of(story).machine.status().phase
    return group


def test_an_update_waits_for_a_late_replica_whose_workers_read(story: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    """The update seals over what they read; it has more time than they take, and they tell how far they are."""
    done = []

    def read(self: Engine, worker: Any, order: Any) -> Steps:
        for number in range(6):
            yield story.deadlines.resume - 0.5
            progress = worker_pb2.WorkerProgress(
                fence=order.fence, stage=manager_pb2.STAGE_TRANSFER, bytes_done=number + 1
            )
            yield from self._ask(worker, worker_pb2.WorkerRequest(progress=progress), 0.1)
        done.append(worker)

    group = late_that_reads(story, monkeypatch, read)
    seals = sent(story, manager_pb2.Seal)
    result = story.call(group.trainers[0], timeout_seconds=18.0)
    wait_until(story, lambda: bool(seals), 12.0)
    assert done
    wait_until(story, lambda: bool(result), 15.0)
    assert result[0].ok
    assert len(result[0].replicas) == 2


@pytest.mark.parametrize("told", [0, 1], ids=["at the first byte", "in the middle"])
def test_an_update_does_not_wait_for_a_late_replica_of_which_a_worker_stops_reading(
    monkeypatch: pytest.MonkeyPatch, told: int
) -> None:
    """It has its order, so nobody can call it back; it tells nothing new. It is named, and mended when it goes on."""
    story = Story(catch_up=20.0)

    def read(self: Engine, worker: Any, order: Any) -> Steps:
        progress = worker_pb2.WorkerProgress(fence=order.fence, stage=manager_pb2.STAGE_TRANSFER, bytes_done=1)
        for _ in range(told):
            yield from self._ask(worker, worker_pb2.WorkerRequest(progress=progress), 0.1)
        yield 30.0

    group = late_that_reads(story, monkeypatch, read)
    first, late = story.agents.values()

    def update() -> None:
        wait_until(story, lambda: "bringing up" in story.phase and story.phase.endswith("installing"))
        before = story.held_by(first)
        result = story.call(group.trainers[0], timeout_seconds=8.0)
        wait_until(story, lambda: story.held_by(first) != before, story.deadlines.resume + 2.0)
        wait_until(story, lambda: bool(result), 9.0)
        assert outcomes(result[0]) == {first.name: NEW, late.name: QUARANTINED}
        (problem,) = (each.problem.message for each in result[0].replicas if each.replica == late.name)
        said.append(problem)

    said: list[str] = []
    update()
    assert "its agent said last that it does not serve: worker" in said[0]
    group.train()
    update()  # its agent still has the first order, so it does not even say that it was told of another one
    story.wait(40.0)
    group.train()
    assert outcomes(story.update(group)) == {first.name: NEW, late.name: NEW}


def stalled(story: Story, monkeypatch: pytest.MonkeyPatch, kind: str, hangs: str) -> tuple[list[Any], list[Any]]:
    """A call for two replicas, of which the second stops while a worker reads, or while it gets ready; the results so
    far, and what was asked back. It ends when the first one holds the version."""
    first, stops = story.replica(), story.replica()
    group = story.ranks(kind=kind)
    assert story.trained(group).ok
    group.train()
    read, prepare = Engine._read, Engine._get_ready

    def reading(self: Engine, worker: Any, order: Any, end: float) -> Steps:
        yield 40.0 if self is stops.engine and hangs == "reading" else 0.0
        yield from read(self, worker, order, end)

    def readying(self: Engine, worker: Any, order: Any) -> Steps:
        yield 40.0 if self is stops.engine and hangs == "getting ready" else 0.0
        yield from prepare(self, worker, order)

    if kind == "live":
        story.engine_again(stops)  # it is to get ready once more, and nothing else brings it weights
    monkeypatch.setattr(Engine, "_read", reading)
    monkeypatch.setattr(Engine, "_get_ready", readying)
    before, abandons = story.held_by(first), sent(story, manager_pb2.Abandon)
    results = story.call(group.trainers[0], timeout_seconds=18.0)
    wait_until(story, lambda: story.held_by(first) != before)
    return results, abandons


@pytest.mark.parametrize(
    ("kind", "hangs", "ends"),
    [
        ("snapshot", "reading", QUARANTINED),  # what it reads stays sealed
        ("live", "reading", None),  # what it reads may change as soon as the call returns
        ("live", "getting ready", QUARANTINED),  # no order has left, so it goes back; it holds no weights yet
    ],
)
def test_a_worker_that_is_stopped_holds_a_call_to_its_deadline_only_if_it_reads_live_memory(
    monkeypatch: pytest.MonkeyPatch, kind: str, hangs: str, ends: manager_pb2.Outcome | None
) -> None:
    story = Story(stall=4.0)
    results, abandons = stalled(story, monkeypatch, kind, hangs)
    first, stops = story.agents
    story.wait(story.deadlines.stall + story.deadlines.resume + 1.0)
    assert abandons
    if ends is None:
        assert not results
        story.wait(10.0)
    assert outcomes(results[0]) == {first: NEW, stops: ends or QUARANTINED}
    (problem,) = (each.problem.message for each in results[0].replicas if each.replica == stops)
    assert ("told anything new for 4 s" in problem) == (ends is not None)


def test_an_agent_that_was_restarted_does_not_answer_for_a_worker_that_still_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is asked to go back and gives no order itself, but the worker has one of the agent before."""
    story = Story(stall=4.0)
    results, abandons = stalled(story, monkeypatch, "live", "reading")
    _, name = story.agents
    before = story.agents[name]
    assert before.engine is not None
    workers = before.engine.workers
    story.until(lambda: all(worker.order[0] for worker in workers))
    story.restart_agent(before, 0.2)
    story.wait(story.deadlines.stall + story.deadlines.resume + 3.0)
    assert story.agents[name] is not before
    assert abandons
    assert not results
    story.wait(10.0)
    assert outcomes(results[0])[name] == QUARANTINED


def test_a_worker_that_reads_slowly_and_tells_how_far_it_is_is_not_asked_back(monkeypatch: pytest.MonkeyPatch) -> None:
    story = Story(stall=4.0)
    first, slow = story.replica(), story.replica()
    group = story.ranks(kind="snapshot")
    assert story.trained(group).ok
    group.train()
    original = Engine._read

    def read(self: Engine, worker: Any, order: Any, end: float) -> Steps:
        for number in range(4 if self is slow.engine else 0):
            yield story.deadlines.stall - 0.5
            done = min(number, 1)  # later ones only tell that it goes on, as while it verifies
            progress = worker_pb2.WorkerProgress(fence=order.fence, stage=manager_pb2.STAGE_TRANSFER, bytes_done=done)
            yield from self._ask(worker, worker_pb2.WorkerRequest(progress=progress), 0.1)
        yield from original(self, worker, order, end)

    monkeypatch.setattr(Engine, "_read", read)
    abandons = sent(story, manager_pb2.Abandon)
    report = story.update(group, seconds=18.0, timeout_seconds=18.0)
    assert not abandons
    assert outcomes(report) == {first.name: NEW, slow.name: NEW}


def test_who_does_not_prepare_costs_the_others_half_of_the_time(story: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that is stopped does not record its loader; the rest of the time is enough for the others."""
    first, group = story.replica(), story.ranks()
    hung = story.replica()
    original = Engine.call

    def call(self: Engine, task: Any) -> Steps:
        if self is hung.engine and isinstance(task, events.PrepareEngine):
            yield task.seconds
        yield from original(self, task)

    monkeypatch.setattr(Engine, "call", call)
    report = story.update(group, timeout_seconds=4.0)
    assert outcomes(report) == {first.name: NEW, hung.name: QUARANTINED}
    (problem,) = (each.problem.message for each in report.replicas if each.replica == hung.name)
    assert problem.startswith("its engine's loader was not recorded within 2.0 s")


def test_members_of_other_runs_do_not_disturb_an_update(story: Story) -> None:
    """They come, publish and say hello again, while a rank of the same number seals."""
    agent, group = story.replica(), story.ranks("run")
    first = story.call(group.trainers[0])
    wait_until(story, lambda: "sealing" in manager_of(story).machine.status().phase)
    manager = manager_of(story)
    known = manager.streams.keys() | set()
    other = TrainerShell(story.cluster, Source("another run", 0, 1, "live", "model B", 2), "session")
    (peer,) = manager.streams.keys() - known
    manager.feed(events.Message(peer, other.machine._hello()))
    story.wait(3.0)
    assert outcomes(first[0]) == {agent.name: NEW}
    assert first[0].ok


def test_a_report_is_recorded_once_whatever_comes_meanwhile(story: Story, slow_disk: None) -> None:
    """Each message comes twice, so an outcome comes again when the report is on its way to the disk."""
    agent, group = story.replica(), story.ranks()
    manager = manager_of(story)
    recorded = []
    before = manager.watch

    def watch(shell: ManagerShell, command: Any) -> None:
        if isinstance(command, events.Run) and isinstance(command.task, events.RecordOutcome):
            recorded.append(command.task.report.fence.epoch)
        before(shell, command)

    manager.watch = watch
    story.faults.duplicate = 1.0
    for _ in range(2):
        assert outcomes(story.update(group)) == {agent.name: NEW}
        group.train()
    assert len(recorded) == len(set(recorded)) == 2


def test_a_replica_that_says_hello_again_is_told_at_once_to_sleep(story: Story) -> None:
    """It may have missed what it was told before."""
    agent = story.replica()
    manager = manager_of(story)
    (peer,) = manager.streams
    commands = sent(story, manager_pb2.SleepWake)
    manager.sleep_or_wake(False, [agent.name])
    wait_until(story, lambda: len(commands) == 1)
    manager.feed(events.Message(peer, agent.machine._hello()))
    assert len(commands) == 2
    assert commands[0].fence == commands[1].fence


@pytest.mark.parametrize("phase", ["sealing", "installing"])
def test_a_member_that_has_seen_higher_epochs_ends_only_what_has_touched_nothing(story: Story, phase: str) -> None:
    """The ledger was rolled back. Members would not obey the epoch; those that install already do."""
    agent = story.replica()
    manager = manager_of(story)
    (peer,) = manager.streams
    group = story.ranks()
    result = story.call(group.trainers[0])
    wait_until(story, lambda: manager.machine.status().phase.endswith(phase))
    hello = agent.machine._hello()
    hello.epoch = manager.machine.status().fence.epoch + 100
    manager.feed(events.Message(peer, hello))
    story.wait(4.0)
    if phase == "sealing":
        refused(result[0], Problem.CODE_UNAVAILABLE, "rolled back", "try again")
        assert not story.ledger.intents
    else:
        assert outcomes(result[0]) == {agent.name: NEW}
    group.train()
    report = story.update(group)
    assert outcomes(report) == {agent.name: NEW}
    assert report.fence.epoch > hello.epoch
