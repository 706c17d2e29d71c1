"""The agent's machine by itself: what must hold from one event to the next."""

from __future__ import annotations

from dataclasses import replace

from ckpt_engine.core.deadlines import Deadlines
from ckpt_engine.core.manifest import DIGEST_FORMAT
from ckpt_engine.machines import events
from ckpt_engine.machines.agent.machine import AgentMachine
from ckpt_engine.v1 import manager_pb2, weights_pb2, worker_pb2

CLUSTER = "cluster"
IDENTITY = weights_pb2.Identity(lineage="run", version=1, root=bytes(32))
WORKER = manager_pb2.WorkerStatus(
    boot_id=b"b" * 16, pid=1, state=manager_pb2.WORKER_STATE_CLEAN, epoch=1, identity=IDENTITY
)
WORDS = events.Words((WORKER,), True, "", IDENTITY)


class Agent:
    """A machine that was started; `commands` are all that it has given."""

    def __init__(self) -> None:
        host = weights_pb2.Host(boot_id="host")
        self.machine = AgentMachine(
            "replica", "session", 1, manager_pb2.MODE_STANDALONE, host, ("shared_memory",), Deadlines()
        )
        self.commands: list[events.AgentCommand] = []
        self.tell(events.Start())
        (self.peer,) = [command.peer for command in self.commands if isinstance(command, events.OpenStream)]

    def tell(self, event: events.AgentEvent, now: float = 0.0) -> list[events.AgentCommand]:
        given = list(self.machine.handle(event, now))
        self.commands += given
        return given

    def welcome(self) -> None:
        welcome = manager_pb2.Welcome(
            digest_format=DIGEST_FORMAT,
            fence=weights_pb2.Fence(cluster=CLUSTER, epoch=1),
            lease_seconds=8,
            heartbeat_seconds=1,
        )
        self.tell(events.Message(self.peer, welcome))

    def engine_ready(self, paused: bool) -> list[events.AgentCommand]:
        return self.tell(events.EngineReady(manager_pb2.Engine(kind="engine"), 1, paused, False))


def test_an_engine_that_gets_ready_between_hello_and_welcome_is_told_to_the_manager() -> None:
    agent = Agent()
    agent.engine_ready(paused=False)
    agent.welcome()
    hellos = [
        command.body
        for command in agent.commands
        if isinstance(command, events.Send) and isinstance(command.body, manager_pb2.ReplicaHello)
    ]
    assert [hello.HasField("engine") for hello in hellos] == [False, True]


def test_requests_are_told_once_there_is_a_page_to_read_them_from() -> None:
    """Otherwise a manager would take the engine for one that was started again."""
    agent = Agent()
    agent.welcome()
    given = agent.engine_ready(paused=False)
    while runs := [each for each in given if isinstance(each, events.Run)]:
        results = [
            replace(WORDS, requests=7, failed_requests=0) if isinstance(each.task, events.ReadWords) else None
            for each in runs
        ]
        given = [
            more
            for each, result in zip(runs, results, strict=True)
            for more in agent.tell(events.Done(each.key, result))
        ]
    agent.tell(events.EngineExited("killed"))
    sent = [each.body for each in agent.commands if isinstance(each, events.Send)]
    beats = [each for each in sent if isinstance(each, manager_pb2.ReplicaHeartbeat)]
    counts = [each.requests if each.HasField("requests") else None for each in beats]
    assert counts[0] is None
    assert 7 in counts
    assert counts[-1] is None


def test_a_refused_resume_is_not_repeated_in_the_same_moment() -> None:
    """Otherwise the agent would never be free for the install that could mend the engine."""
    agent = Agent()
    agent.welcome()
    given = agent.engine_ready(paused=True)
    refused = weights_pb2.Problem(code=weights_pb2.Problem.CODE_INTERNAL, message="refused")
    resumed = 0
    for _ in range(20):
        runs = [command for command in given if isinstance(command, events.Run)]
        if not runs:
            break
        given = []
        for run in runs:
            if isinstance(run.task, events.ResumeEngine):
                resumed += 1
                given += agent.tell(events.Done(run.key, problem=refused))
            else:
                given += agent.tell(events.Done(run.key, WORDS if isinstance(run.task, events.ReadWords) else None))
    else:
        raise AssertionError("it went on without time passing")
    assert resumed == 1


def test_an_engine_that_loaded_another_release_than_its_agent_is_told_before_anything_is_installed() -> None:
    """The agent was upgraded and started again, the engine was not."""
    answer = prepared_by([0], digest_format=0)
    assert answer.problem.code == weights_pb2.Problem.CODE_FAILED_PRECONDITION
    assert answer.problem.message.startswith("worker 0 of replica 'replica' makes digests of format 1, ")
    assert not answer.workers
    assert not prepared_by([0], digest_format=DIGEST_FORMAT).HasField("problem")


def test_an_engine_that_has_more_workers_than_it_says_is_told_and_breaks_nothing() -> None:
    answer = prepared_by([0, 1], digest_format=DIGEST_FORMAT)
    assert answer.problem.message == ("the engine says that it has 1 workers, but workers [1] recorded its loader")


def prepared_by(ranks: list[int], **said: int) -> manager_pb2.Prepared:
    """What an agent answers when these workers of its engine have recorded the loader."""
    agent = Agent()
    agent.welcome()
    agent.engine_ready(paused=False)
    fence = weights_pb2.Fence(cluster=CLUSTER, epoch=2)
    prepare = manager_pb2.Prepare(fence=fence, manifest=manager_pb2.BlobRef(digest=b"m" * 32), deadline_seconds=60)
    given = agent.tell(events.Message(agent.peer, prepare))
    for _ in range(20):
        runs = [command for command in given if isinstance(command, events.Run)]
        given = []
        for run in runs:
            if isinstance(run.task, events.PrepareEngine):
                for rank in ranks:
                    prepared = worker_pb2.WorkerPrepared(fence=fence, needs=b"needs", **said)
                    request = worker_pb2.WorkerRequest(rank=rank, boot_id=bytes([rank]) * 16, prepared=prepared)
                    agent.tell(events.WorkerAsked(rank, request))
            results = {events.ReadWords: WORDS, events.FetchBlobs: (b"manifest",)}
            results[events.PutBlobs] = (manager_pb2.BlobRef(digest=b"n" * 32),)
            given += agent.tell(events.Done(run.key, results.get(type(run.task))))
    (answer,) = [
        command.body
        for command in agent.commands
        if isinstance(command, events.Send) and isinstance(command.body, manager_pb2.Prepared)
    ]
    return answer


def test_an_install_whose_time_is_over_before_it_begins_goes_back() -> None:
    """The agent was stopped for longer than its deadline while it read the words."""
    agent = Agent()
    agent.welcome()
    agent.engine_ready(paused=False)
    fence = weights_pb2.Fence(cluster=CLUSTER, epoch=2)
    install = manager_pb2.Install(
        fence=fence, identity=IDENTITY, workers=[manager_pb2.WorkerInstall(rank=0)], deadline_seconds=8
    )
    given = agent.tell(events.Message(agent.peer, install))
    (run,) = [command for command in given if isinstance(command, events.Run)]
    given = agent.tell(events.Done(run.key, WORDS), now=9.0)
    assert not [run for run in given if isinstance(run, events.Run) and isinstance(run.task, events.FetchBlobs)]
    (outcome,) = [
        command.body
        for command in given
        if isinstance(command, events.Send) and isinstance(command.body, manager_pb2.ReplicaOutcome)
    ]
    assert outcome.problem.code == weights_pb2.Problem.CODE_DEADLINE_EXCEEDED
    assert outcome.after == IDENTITY


def test_guesses_of_a_draft_are_counted_from_the_version_on() -> None:
    """The engine counts from its start on. What it says after a version came is of that version."""
    agent = Agent()
    agent.engine_ready(paused=False)
    replica = agent.machine.replica
    following = weights_pb2.Identity(lineage="run", version=2, root=bytes(32))
    for counted, identity, expected in (
        (None, IDENTITY, None),
        ((10, 9), IDENTITY, (0, 0)),
        ((30, 25), IDENTITY, (20, 16)),
        ((30, 25), None, (0, 0)),  # in the middle of the install
        ((32, 25), following, (0, 0)),
        ((42, 26), following, (10, 1)),
        (None, following, None),
    ):
        guesses = None if counted is None else manager_pb2.Guesses(guessed=counted[0], accepted=counted[1])
        replica.take_words(events.Words((WORKER,), True, "", identity, guesses))
        found = replica.guesses
        assert (None if found is None else (found.guessed, found.accepted)) == expected
