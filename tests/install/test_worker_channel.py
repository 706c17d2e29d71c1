"""The worker's end of the channel against real sockets that lose, repeat and delay answers; and a whole worker."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from ckpt_engine.core.manifest import blob_digest
from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.engine.target import ModuleTarget
from ckpt_engine.gate.directory import EngineDirectory
from ckpt_engine.gate.page import EnginePage, verdict
from ckpt_engine.install.channel import WorkerChannel
from ckpt_engine.install.worker import EngineWorker
from ckpt_engine.record.record import record
from ckpt_engine.v1 import manager_pb2, weights_pb2, worker_pb2
from tests.cluster import eventually
from tests.install.install_models import TensorParallel, assert_same, state
from tests.install.install_world import Checkpoint

Request, Reply = worker_pb2.WorkerRequest, worker_pb2.AgentReply
Behaviour = Callable[[Request, int], list[Reply | bytes]]
"""What an agent sends when it gets a request for the n-th time."""


class Agent(threading.Thread):
    """A ROUTER socket in a thread."""

    def __init__(self, endpoint: str, behaviour: Behaviour) -> None:
        super().__init__(daemon=True)
        self.requests: list[Request] = []
        self._behaviour = behaviour
        self._ending = threading.Event()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(endpoint)
        self.start()

    def run(self) -> None:
        seen: dict[int, int] = {}
        while not self._ending.is_set():
            if not self._socket.poll(20):
                continue
            peer, body = self._socket.recv_multipart()
            request = Request.FromString(body)
            self.requests.append(request)
            seen[request.sequence] = seen.get(request.sequence, 0) + 1
            for reply in self._behaviour(request, seen[request.sequence]):
                if isinstance(reply, Reply) and not reply.sequence:
                    reply.sequence = request.sequence
                self._socket.send_multipart([peer, reply if isinstance(reply, bytes) else reply.SerializeToString()])
        self._socket.close()
        self._context.term()

    @property
    def asked(self) -> list[tuple[int, int, bytes]]:
        """Sequence, rank and boot id of each request, in order, once: a slow answer is asked for again."""
        return list(dict.fromkeys((each.sequence, each.rank, each.boot_id) for each in self.requests))

    def stop(self) -> None:
        self._ending.set()
        self.join(60)
        assert not self.is_alive()


def acknowledge(request: Request, times: int) -> list[Reply | bytes]:
    return [Reply(acknowledged=worker_pb2.Acknowledged())]


@pytest.fixture
def directory(tmp_path: Path) -> EngineDirectory:
    return EngineDirectory.create(tmp_path)


@pytest.fixture
def channel(directory: EngineDirectory) -> Iterator[WorkerChannel]:
    channel = WorkerChannel(directory.endpoint, 3, b"b" * 16, attempt_seconds=0.2)
    yield channel
    channel.close()


def question() -> Request:
    return Request(want_prepare=worker_pb2.WantOrder())


def test_an_answer_and_what_the_agent_sees(directory: EngineDirectory, channel: WorkerChannel) -> None:
    agent = Agent(directory.endpoint, acknowledge)
    assert channel.ask(question(), 60).HasField("acknowledged")
    assert channel.ask(question(), 60).sequence == 2
    assert agent.asked == [(1, 3, b"b" * 16), (2, 3, b"b" * 16)]
    agent.stop()


def test_a_lost_answer_is_asked_for_again_under_the_same_sequence(
    directory: EngineDirectory, channel: WorkerChannel
) -> None:
    agent = Agent(directory.endpoint, lambda request, times: acknowledge(request, times) if times == 3 else [])
    assert channel.ask(question(), 60).sequence == 1
    assert [each.sequence for each in agent.requests][:3] == [1, 1, 1]
    agent.stop()


def test_repeated_late_and_broken_answers_are_dropped(directory: EngineDirectory, channel: WorkerChannel) -> None:
    def twice(request: Request, times: int) -> list[Reply | bytes]:
        noise: list[Reply | bytes] = [b"\xff\xff\xff", Reply(sequence=request.sequence + 7)]
        if request.sequence > 1:
            noise.append(Reply(sequence=request.sequence - 1, refused=weights_pb2.Problem(message="late")))
        return [*noise, *acknowledge(request, times), *acknowledge(request, times)]

    agent = Agent(directory.endpoint, twice)
    for sequence in range(1, 6):
        reply = channel.ask(question(), 60)
        assert reply.HasField("acknowledged")
        assert reply.sequence == sequence
    assert len(agent.asked) == 5
    agent.stop()


@pytest.mark.parametrize("listening", [False, True])
def test_nothing_waits_longer_than_its_deadline(
    directory: EngineDirectory, channel: WorkerChannel, listening: bool
) -> None:
    agent = Agent(directory.endpoint, lambda request, times: []) if listening else None
    with pytest.raises(CkptEngineError) as caught:
        channel.ask(question(), 2.0)
    assert caught.value.problem.code == weights_pb2.Problem.CODE_DEADLINE_EXCEEDED
    assert "worker 3 got no answer" in caught.value.problem.message
    if agent is not None:
        assert {each.sequence for each in agent.requests} == {1}
        agent.stop()


def test_an_agent_that_starts_late_or_starts_again_is_found(directory: EngineDirectory, channel: WorkerChannel) -> None:
    first: list[Agent] = []
    late = threading.Timer(0.5, lambda: first.append(Agent(directory.endpoint, acknowledge)))
    late.start()
    assert channel.ask(question(), 60).sequence == 1
    late.join(60)
    first[0].stop()
    second = Agent(directory.endpoint, acknowledge)
    assert channel.ask(question(), 60).sequence == 2
    second.stop()


def test_telling_does_not_wait_and_does_not_disturb_asking(directory: EngineDirectory, channel: WorkerChannel) -> None:
    for _ in range(500):  # nobody listens, and nobody would ever take them
        channel.tell(Request(progress=worker_pb2.WorkerProgress()))
    agent = Agent(directory.endpoint, acknowledge)
    channel.tell(Request(progress=worker_pb2.WorkerProgress()))
    assert channel.ask(question(), 60).sequence == 502
    agent.stop()


def test_it_works_from_other_threads_and_after_a_fork(directory: EngineDirectory, channel: WorkerChannel) -> None:
    agent = Agent(directory.endpoint, acknowledge)
    assert channel.ask(question(), 60).sequence == 1
    other = threading.Thread(target=lambda: channel.ask(question(), 60))
    other.start()
    other.join(60)
    assert channel.ask(question(), 60).sequence == 3
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(write, b"%d" % channel.ask(question(), 60).sequence)
        finally:
            os._exit(0)
    os.close(write)
    assert os.read(read, 10) == b"4"
    os.waitpid(child, 0)
    os.close(read)
    assert channel.ask(question(), 60).sequence == 4
    agent.stop()


def test_a_request_without_a_body_is_refused(channel: WorkerChannel) -> None:
    with pytest.raises(CkptEngineError, match="INVALID_ARGUMENT"):
        channel.ask(Request(), 1)


# -------------------------------------------------------------------------------------------- a whole worker


class Orders:
    """An agent's answers for one worker and one checkpoint; its first answer to anything is lost on the way."""

    def __init__(self, checkpoint: Checkpoint, model: TensorParallel) -> None:
        self.checkpoint = checkpoint
        self.fence = weights_pb2.Fence(cluster="c", epoch=5)
        self.recording = record(checkpoint.manifest, ModuleTarget(model), digest=blob_digest(checkpoint.manifest_bytes))
        self.identity = weights_pb2.Identity(lineage="run", version=9, root=b"r" * 32)
        self.prepared: list[worker_pb2.WorkerPrepared] = []
        self.installed: list[worker_pb2.WorkerInstalled] = []
        self.progress: list[worker_pb2.WorkerProgress] = []

    def answer(self, request: Request, times: int) -> list[Reply | bytes]:
        kind = request.WhichOneof("body")
        reply = Reply(acknowledged=worker_pb2.Acknowledged())
        if kind == "progress":
            self.progress.append(request.progress)
        elif times == 1:
            return []
        elif kind == "want_prepare":
            order = worker_pb2.PrepareOrder(
                fence=self.fence, manifest=self.checkpoint.manifest_bytes, deadline_seconds=30
            )
            reply = Reply(prepare=order)
        elif kind == "prepared":
            self.prepared.append(request.prepared)
        elif kind == "want_install":
            install = worker_pb2.InstallOrder(
                fence=self.fence,
                identity=self.identity,
                plan=self.checkpoint.plan(self.recording).SerializeToString(deterministic=True),
                expected=self.checkpoint.expected(self.recording),
                deadline_seconds=30,
            )
            reply = Reply(install=install)
        elif kind == "installed":
            self.installed.append(request.installed)
        return [reply]


def test_a_worker_prepares_and_installs_over_the_channel(
    directory: EngineDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPT_ENGINE_DEADLINES", "worker_attempt=0.2")
    model, like = TensorParallel(1, 2), TensorParallel(1, 2)
    checkpoint = Checkpoint(model.checkpoint(), seed=4)
    orders = Orders(checkpoint, like)
    agent = Agent(directory.endpoint, orders.answer)
    worker = EngineWorker(directory.path, 0, 1, ModuleTarget(model))
    page = EnginePage(directory.page)
    assert verdict(page.read()).reason == "worker 0 holds no weights yet"
    assert worker.prepare()
    assert orders.prepared[0].needs == orders.recording.needs_bytes
    assert not worker.install(6)  # the engine was told another epoch
    assert not orders.installed
    assert worker.install(5)
    eventually("the report comes, which is asked for again", 60, lambda: orders.installed)
    assert orders.installed[0].report.verified == len(orders.recording.needs)
    assert orders.progress[0].bytes_total == orders.installed[0].report.bytes
    assert verdict(page.read()).identity == orders.identity
    like.load_weights(checkpoint.weights.items())
    assert_same(state(model), state(like))
    worker.discard()
    assert not verdict(page.read()).open
    worker.close()
    agent.stop()
    checkpoint.close()


def test_a_refused_worker_does_nothing_and_a_deserted_one_does_not_raise(
    directory: EngineDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPT_ENGINE_DEADLINES", "worker_ask=0.5")
    model = TensorParallel()
    before = state(model)
    worker = EngineWorker(directory, 0, 1, ModuleTarget(model))
    assert not worker.prepare()
    assert not worker.install()
    refusal = weights_pb2.Problem(code=weights_pb2.Problem.CODE_ABORTED, message="overtaken")
    agent = Agent(directory.endpoint, lambda request, times: [Reply(refused=refusal)])
    assert not worker.prepare()
    assert not worker.install()
    assert_same(state(model), before)
    assert EnginePage(directory.page).read()[0].state == manager_pb2.WORKER_STATE_NONE
    agent.stop()
    worker.close()
