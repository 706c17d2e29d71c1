"""The worker channel over real sockets: repeated requests, garbage, frames that are too large, workers that die."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Callable

import pytest
import zmq
import zmq.asyncio

from ckpt_engine.agent.channel import AgentChannel
from ckpt_engine.gate.directory import EngineDirectory
from ckpt_engine.v1 import weights_pb2, worker_pb2
from tests.waiting import until

SECONDS = 60.0
FRAME_LIMIT = 1 << 20


class Agent:
    """Answers every request with its own number, so that an answer tells whether it was worked out anew."""

    def __init__(self) -> None:
        self.seen: list[worker_pb2.WorkerRequest] = []
        self.hold: asyncio.Event | None = None

    async def answer(self, request: worker_pb2.WorkerRequest) -> worker_pb2.AgentReply | None:
        self.seen.append(request)
        number = len(self.seen)
        if self.hold is not None:
            await self.hold.wait()
        if request.WhichOneof("body") == "progress":
            return worker_pb2.AgentReply(acknowledged=worker_pb2.Acknowledged())
        if request.rank == 99:
            raise RuntimeError("this worker is not known")
        return worker_pb2.AgentReply(refused=weights_pb2.Problem(message=f"answer {number}"))


class Worker:
    """A worker's side, by hand: the socket as it is, so that a test can send what no real worker would."""

    def __init__(self, context: zmq.asyncio.Context, endpoint: str, kind: int = zmq.DEALER, rank: int = 0) -> None:
        self.socket = context.socket(kind)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(endpoint)
        self.rank = rank
        self.boot_id = os.urandom(16)

    def request(self, sequence: int) -> bytes:
        request = worker_pb2.WorkerRequest(
            sequence=sequence, rank=self.rank, boot_id=self.boot_id, want_install=worker_pb2.WantOrder()
        )
        return request.SerializeToString()

    async def send(self, *frames: bytes) -> None:
        await self.socket.send_multipart(frames)

    async def receive(self, seconds: float = SECONDS) -> worker_pb2.AgentReply:
        frames: list[bytes] = await asyncio.wait_for(self.socket.recv_multipart(), seconds)
        assert len(frames) == 1
        return worker_pb2.AgentReply.FromString(frames[0])

    async def ask(self, sequence: int) -> worker_pb2.AgentReply:
        await self.send(self.request(sequence))
        return await self.receive()


Connect = Callable[..., Worker]


@pytest.fixture
def directory(tmp_path_factory: pytest.TempPathFactory) -> EngineDirectory:
    root = tmp_path_factory.mktemp("engines")
    return EngineDirectory.create(root)


@pytest.fixture
def agent() -> Agent:
    return Agent()


@pytest.fixture
async def channel(directory: EngineDirectory, agent: Agent) -> AsyncIterator[AgentChannel]:
    channel = AgentChannel(directory, agent.answer, frame_limit_bytes=FRAME_LIMIT)
    await channel.start()
    yield channel
    await channel.close()


@pytest.fixture
async def connect(directory: EngineDirectory, channel: AgentChannel) -> AsyncIterator[Connect]:
    context = zmq.asyncio.Context()

    def connect(kind: int = zmq.DEALER, rank: int = 0) -> Worker:
        return Worker(context, directory.endpoint, kind, rank)

    yield connect
    context.destroy(linger=0)


async def test_answers_carry_the_sequence(connect: Connect, directory: EngineDirectory) -> None:
    worker = connect()
    reply = await worker.ask(7)
    assert (reply.sequence, reply.refused.message) == (7, "answer 1")
    assert (await worker.ask(8)).refused.message == "answer 2"
    assert directory.path.stat().st_mode & 0o777 == 0o700


async def test_a_req_socket_is_answered_too(connect: Connect) -> None:
    reply = await connect(zmq.REQ).ask(1)
    assert reply.refused.message == "answer 1"


async def test_a_repeated_request_has_one_effect_and_one_answer(
    connect: Connect, agent: Agent, channel: AgentChannel
) -> None:
    worker = connect()
    first = await worker.ask(1)
    assert await worker.ask(1) == first
    # A worker repeats over a new connection when it suspects the old one: the answer must follow it there.
    again = connect()
    again.boot_id = worker.boot_id
    assert await again.ask(1) == first
    assert len(agent.seen) == 1
    assert channel.counters.repeated == 2


async def test_a_request_repeated_while_it_is_worked_on_is_answered_once(connect: Connect, agent: Agent) -> None:
    agent.hold = asyncio.Event()
    worker = connect()
    await worker.send(worker.request(1))
    await worker.send(worker.request(1))
    await until(lambda: len(agent.seen) == 1)
    await asyncio.sleep(0.05)
    agent.hold.set()
    assert (await worker.receive()).refused.message == "answer 1"
    with pytest.raises(TimeoutError):
        await worker.receive(0.2)
    assert len(agent.seen) == 1


async def test_a_request_that_was_overtaken_is_ignored(connect: Connect, agent: Agent, channel: AgentChannel) -> None:
    worker = connect()
    await worker.ask(5)
    await worker.send(worker.request(4))
    await until(lambda: channel.counters.ignored == 1)
    assert [request.sequence for request in agent.seen] == [5]


async def test_requests_of_one_worker_are_handled_in_order(connect: Connect, agent: Agent) -> None:
    agent.hold = asyncio.Event()
    worker = connect()
    await worker.send(worker.request(1))
    await worker.send(worker.request(2))
    await until(lambda: len(agent.seen) == 1)
    await asyncio.sleep(0.05)
    assert len(agent.seen) == 1, "the second must wait for the first"
    agent.hold.set()
    assert (await worker.receive()).sequence == 2, "nobody waits for the first any more"


async def test_a_worker_that_was_started_anew_begins_anew(connect: Connect, agent: Agent) -> None:
    old, new = connect(), connect()
    await old.ask(41)
    assert (await new.ask(1)).refused.message == "answer 2"


async def test_workers_do_not_wait_for_each_other(connect: Connect, agent: Agent) -> None:
    slow, quick = connect(rank=0), connect(rank=1)
    agent.hold = asyncio.Event()
    await slow.send(slow.request(1))
    await until(lambda: len(agent.seen) == 1)
    hold, agent.hold = agent.hold, None
    assert (await quick.ask(1)).refused.message == "answer 2"
    hold.set()
    assert (await slow.receive()).refused.message == "answer 1"


GARBAGE: dict[str, Callable[[Worker], list[bytes]]] = {
    "no protobuf": lambda worker: [b"\xff\xff\xff garbage"],
    "empty": lambda worker: [b""],
    "no body": lambda worker: [worker_pb2.WorkerRequest(sequence=1, boot_id=worker.boot_id).SerializeToString()],
    "no boot id": lambda worker: [worker_pb2.WorkerRequest(want_install=worker_pb2.WantOrder()).SerializeToString()],
    "two bodies": lambda worker: [worker.request(1), worker.request(2)],
    "many frames": lambda worker: [b"", b"", worker.request(1)],
    "truncated": lambda worker: [worker.request(1)[:-3]],
}


@pytest.mark.parametrize("what", GARBAGE)
async def test_garbage_is_counted_and_ignored(what: str, connect: Connect, agent: Agent, channel: AgentChannel) -> None:
    worker = connect()
    await worker.send(*GARBAGE[what](worker))
    await until(lambda: channel.counters.ignored == 1)
    assert agent.seen == []
    assert (await worker.ask(1)).refused.message == "answer 1"


async def test_a_frame_over_the_limit_costs_its_sender_the_connection_only(connect: Connect, agent: Agent) -> None:
    greedy, modest = connect(rank=0), connect(rank=1)
    await modest.ask(1)
    await greedy.send(b"x" * (FRAME_LIMIT + 1))
    assert (await modest.ask(2)).refused.message == "answer 2"
    assert (await greedy.ask(1)).refused.message == "answer 3", "it connects again and is answered"
    assert len(agent.seen) == 3


async def test_an_answer_that_fails_leaves_the_channel_open(
    connect: Connect, agent: Agent, channel: AgentChannel
) -> None:
    unknown, known = connect(rank=99), connect(rank=0)
    await unknown.send(unknown.request(1))
    await until(lambda: channel.counters.failed == 1)
    assert (await known.ask(1)).refused.message == "answer 2"
    # Unanswered, so a repetition is worked on again instead of being met with silence for ever.
    await unknown.send(unknown.request(1))
    await until(lambda: channel.counters.failed == 2)


WORKER = """
    import sys, zmq
    socket = zmq.Context().socket(zmq.DEALER)
    socket.connect(sys.argv[1])
    socket.send(bytes.fromhex(sys.argv[2]))
    socket.recv()
"""


async def test_a_worker_that_dies_before_its_answer(
    connect: Connect, agent: Agent, channel: AgentChannel, directory: EngineDirectory
) -> None:
    agent.hold = asyncio.Event()
    survivor = connect()
    command = [sys.executable, "-c", textwrap.dedent(WORKER), directory.endpoint, survivor.request(1).hex()]
    dying = await asyncio.create_subprocess_exec(*command, stderr=subprocess.DEVNULL)
    await until(lambda: len(agent.seen) == 1)
    dying.send_signal(signal.SIGKILL)
    await dying.wait()
    agent.hold.set()
    await until(lambda: channel.counters.requests == 1)
    # Whoever speaks for that boot id next still gets the answer that was worked out.
    assert (await survivor.ask(1)).refused.message == "answer 1"
    assert len(agent.seen) == 1


async def test_a_worker_asks_before_the_agent_listens(directory: EngineDirectory, agent: Agent) -> None:
    context = zmq.asyncio.Context()
    try:
        worker = Worker(context, directory.endpoint)
        await worker.send(worker.request(1))
        await asyncio.sleep(0.1)
        channel = AgentChannel(directory, agent.answer)
        await channel.start()
        assert (await worker.receive()).refused.message == "answer 1"
        await channel.close()
        await channel.close()
        assert not directory.socket.exists()
    finally:
        context.destroy(linger=0)


async def test_a_socket_that_a_killed_agent_left_is_taken_over(directory: EngineDirectory, agent: Agent) -> None:
    script = "import os, sys, zmq; s = zmq.Context().socket(zmq.ROUTER); s.bind(sys.argv[1]); os.kill(os.getpid(), 9)"
    dead = await asyncio.create_subprocess_exec(sys.executable, "-c", script, directory.endpoint)
    await dead.wait()
    assert "agent.sock" in os.listdir(directory.path)
    channel = AgentChannel(directory, agent.answer)
    await channel.start()
    context = zmq.asyncio.Context()
    try:
        assert (await Worker(context, directory.endpoint).ask(1)).refused.message == "answer 1"
    finally:
        context.destroy(linger=0)
        await channel.close()
