"""The agents of one engine's nodes as readers: functions of bytes that the other side sent."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from ckpt_engine.agent.following import FollowingAgent
from ckpt_engine.agent.leading import Followers
from ckpt_engine.agent.nodes import NodeSettings
from ckpt_engine.core.deadlines import Deadlines
from ckpt_engine.core.manifest import DIGEST_FORMAT
from ckpt_engine.gate.page import EnginePage, verdict
from ckpt_engine.machines.events import Message
from ckpt_engine.machines.nodes.events import LEADER, EndPart, PartEnded, PartStarted, StartPart
from ckpt_engine.v1 import manager_pb2, weights_pb2, worker_pb2

IDENTITY = weights_pb2.Identity(lineage="run", version=1, root=b"r" * 32)
WORD = manager_pb2.WorkerStatus(
    rank=1, boot_id=b"b" * 16, pid=3, state=manager_pb2.WORKER_STATE_CLEAN, epoch=1, identity=IDENTITY
)
SESSION = b"s" * 16


def node_message(sequence: int = 1, leader: bytes = b"", generation: int = 0) -> worker_pb2.NodeMessage:
    return worker_pb2.NodeMessage(
        digest_format=DIGEST_FORMAT,
        session_id=SESSION,
        sequence=sequence,
        node_rank=1,
        nodes=2,
        kind="small",
        leader_session=leader,
        generation=generation,
        workers=[WORD] if generation else [],
        request=worker_pb2.WorkerRequest(
            sequence=1, rank=1, boot_id=b"b" * 16, installed=worker_pb2.WorkerInstalled(fence={"epoch": 1})
        ),
    )


MESSAGES = [node_message(sequence=2, leader=b"l" * 16, generation=1).SerializeToString()]
NODE_COMMANDS = [
    worker_pb2.NodeCommand(
        session_id=b"l" * 16,
        generation=1,
        run=True,
        master_address="127.0.0.1",
        master_port=1,
        look=3,
        rank=1,
        boot_id=b"b" * 16,
        reply=worker_pb2.AgentReply(sequence=1, acknowledged=worker_pb2.Acknowledged()),
    ).SerializeToString(),
    worker_pb2.NodeCommand(refused=weights_pb2.Problem(message="no")).SerializeToString(),
]


async def _acknowledge(request: worker_pb2.WorkerRequest) -> worker_pb2.AgentReply:
    return worker_pb2.AgentReply(acknowledged=worker_pb2.Acknowledged())


@contextlib.contextmanager
def leader() -> Iterator[Callable[[bytes], None]]:
    """An engine that runs on two nodes; the input is one more message of the other. Whatever it says, the gate opens
    for nothing but what the worker here holds, too."""
    loop = asyncio.new_event_loop()
    with tempfile.TemporaryDirectory() as folder:
        page = EnginePage(Path(folder) / "page")
        page.claim(0, 2).clean(1, IDENTITY)
        settings = NodeSettings(2, 0, "127.0.0.1:1")
        followers = Followers(settings, "small", (), _acknowledge, lambda line: None, Deadlines())
        followers._machine._session = b"l" * 16  # as the seeds name it

        async def hear(data: bytes) -> None:
            followers._receive(b"peer", worker_pb2.NodeMessage.FromString(data))
            await asyncio.sleep(0)
            assert followers._loop.problem is None, "its machine raised"

        async def begin() -> None:
            await hear(node_message().SerializeToString())
            await followers.gather(page, Path(folder), 5.0)

        loop.run_until_complete(begin())

        def take(data: bytes) -> None:
            loop.run_until_complete(hear(data))
            followers.trouble()
            found = verdict(page.read())
            assert not found.open or found.identity == IDENTITY

        try:
            yield take
        finally:
            loop.run_until_complete(asyncio.wait_for(followers.close(), 30))
            for task in asyncio.all_tasks(loop):
                task.cancel()
            loop.run_until_complete(asyncio.sleep(0))
            loop.close()
            page.close()


@contextlib.contextmanager
def follower() -> Iterator[Callable[[bytes], None]]:
    """A follower without an engine; the input is a command of its leader."""
    settings = NodeSettings(2, 1, "127.0.0.1:1")
    options = ("--tensor-parallel", "2")
    agent = FollowingAgent(settings, "reference", options, "model", (), Deadlines(), lambda line: None)

    def take(data: bytes) -> None:
        for command in agent._machine.handle(Message(LEADER, worker_pb2.NodeCommand.FromString(data)), 0.0):
            if isinstance(command, StartPart | EndPart):
                agent._machine.handle(PartStarted() if isinstance(command, StartPart) else PartEnded(), 0.0)

    yield take
