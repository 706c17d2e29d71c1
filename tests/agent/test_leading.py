"""The leading agent's side of an engine on several nodes, with real links; followers are played by the test.

A fake follower, since no honest one is late, forgets, or tells old words at the moment that a test needs.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest
import zmq

from ckpt_engine.agent.leading import Followers, NodesMissingError
from ckpt_engine.agent.link import FollowerLink
from ckpt_engine.agent.nodes import Keys, NodeSettings
from ckpt_engine.core.deadlines import Deadlines
from ckpt_engine.core.manifest import DIGEST_FORMAT
from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.gate.page import EnginePage, WorkerSlot, verdict
from ckpt_engine.v1 import manager_pb2, weights_pb2, worker_pb2
from tests.ports import free_port
from tests.waiting import until

SECONDS = 60.0
BOOT = b"b" * 16
IDENTITY = weights_pb2.Identity(lineage="run", version=1, root=b"r" * 32)
NEXT = weights_pb2.Identity(lineage="run", version=2, root=b"s" * 32)
INSTALL = worker_pb2.AgentReply(install=worker_pb2.InstallOrder(fence=weights_pb2.Fence(epoch=2), identity=NEXT))


class Follower:
    """One session of a follower's agent: tells what the test says, keeps what it is told."""

    def __init__(self, settings: NodeSettings, rank: int = 1, keys: Keys | None = None) -> None:
        self.commands: list[worker_pb2.NodeCommand] = []
        self.session, self.sequence, self.rank, self.nodes = os.urandom(16), 0, rank, settings.nodes
        self._changed = asyncio.Event()
        self.link = FollowerLink(settings.endpoint, keys or settings.keys(), self._heard, SECONDS)
        self.link.open()

    def _heard(self, command: worker_pb2.NodeCommand) -> None:
        self.commands.append(command)
        self._changed.set()

    def tell(self, **fields: object) -> None:
        self.sequence += 1
        last = self.commands[-1] if self.commands else worker_pb2.NodeCommand()
        usual = {
            "session_id": self.session,
            "sequence": self.sequence,
            "node_rank": self.rank,
            "nodes": self.nodes,
            "kind": "small",
            "transports": ["file", "shared_memory"],
            "leader_session": last.session_id,
            "generation": last.generation,
            "running": last.run,
        }
        self.link.send(worker_pb2.NodeMessage(digest_format=DIGEST_FORMAT, **(usual | fields)))

    async def until(
        self, condition: Callable[[worker_pb2.NodeCommand], bool], **fields: object
    ) -> worker_pb2.NodeCommand:
        """The first command for which it holds; tells again and again meanwhile."""
        async with asyncio.timeout(SECONDS):
            while True:
                for command in self.commands:
                    if condition(command):
                        return command
                self._changed.clear()
                self.tell(**fields)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), 0.2)


def clean(identity: weights_pb2.Identity = IDENTITY, epoch: int = 1) -> list[manager_pb2.WorkerStatus]:
    state = manager_pb2.WORKER_STATE_CLEAN
    return [manager_pb2.WorkerStatus(rank=1, boot_id=BOOT, pid=1, state=state, epoch=epoch, identity=identity)]


def asks(sequence: int, **body: object) -> worker_pb2.WorkerRequest:
    return worker_pb2.WorkerRequest(sequence=sequence, rank=1, boot_id=BOOT, **body)


class Leader:
    """What the tests need of a leading agent: its followers, its page, and a count of its answers."""

    def __init__(self, path: Path, settings: NodeSettings, deadlines: Deadlines) -> None:
        self.path, self.settings, self.answers, self.lines = path, settings, 0, []  # type: ignore[var-annotated]
        self.followers = Followers(settings, "small", ["file"], self._answer, self.lines.append, deadlines)
        self.page = EnginePage(path / "page")
        self.near: WorkerSlot | None = None

    async def _answer(self, request: worker_pb2.WorkerRequest) -> worker_pb2.AgentReply:
        self.answers += 1
        if request.HasField("want_install"):
            return INSTALL
        return worker_pb2.AgentReply(acknowledged=worker_pb2.Acknowledged())

    async def serving(self, follower: Follower) -> None:
        """A generation has begun, and all workers are clean with one identity."""
        gathering = asyncio.ensure_future(self.followers.gather(self.page, self.path, SECONDS))
        await follower.until(lambda command: command.run)
        await gathering
        self.near = self.page.claim(0, 2)
        self.near.clean(1, IDENTITY)
        await self.until(follower, lambda: verdict(self.page.read()).open)

    async def until(self, follower: Follower, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(SECONDS):
            while not condition():
                follower.tell(workers=clean())
                await asyncio.sleep(0.05)


Start = Callable[..., Awaitable[tuple[Leader, Follower]]]


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    made: list[tuple[Leader, Follower]] = []

    async def start(lease: float = SECONDS) -> tuple[Leader, Follower]:
        token = tmp_path / "token"
        token.write_text("t" * 64)
        settings = NodeSettings(2, 0, f"localhost:{free_port()}", token)
        leader = Leader(tmp_path, settings, Deadlines().changed(f"lease={lease} heartbeat=0.1 engine_grace=0.2"))
        await leader.followers.open(SECONDS)
        follower = Follower(settings)
        made.append((leader, follower))
        await leader.serving(follower)
        return leader, follower

    yield start
    for leader, follower in made:
        await leader.followers.close()
        follower.link.close()


async def test_an_order_leaves_only_when_the_gate_knows_that_the_far_worker_may_write(start: Start) -> None:
    leader, follower = await start()
    follower.tell(workers=clean(), request=asks(1, want_install=worker_pb2.WantOrder()))
    seen: list[str] = []

    def arrived(command: worker_pb2.NodeCommand) -> bool:
        if command.HasField("reply"):
            seen.append(verdict(leader.page.read()).reason)
        return command.HasField("reply")

    command = await follower.until(arrived, workers=clean())
    assert command.reply.install.fence.epoch == 2
    (reason,) = seen
    assert "worker 1 holds no whole version (epoch 2" in reason
    for _ in range(3):  # words from before the order arrived
        follower.tell(workers=clean())
    await leader.followers.look(0.1)
    assert not verdict(leader.page.read()).open
    assert leader.near is not None
    leader.near.clean(2, NEXT)
    follower.tell(workers=clean(NEXT, 2), request=asks(2, installed=worker_pb2.WorkerInstalled(fence={"epoch": 2})))
    await until(lambda: verdict(leader.page.read()).identity == NEXT)


async def test_a_repeated_question_is_answered_once(start: Start) -> None:
    leader, follower = await start()
    question = asks(5, want_prepare=worker_pb2.WantOrder())
    for _ in range(3):
        follower.tell(workers=clean(), request=question)
    await follower.until(lambda command: command.reply.sequence == 5, workers=clean(), request=question)
    follower.tell(workers=clean(), request=asks(4, want_prepare=worker_pb2.WantOrder()))  # held up on the way
    await follower.until(lambda command: command.reply.sequence == 6, workers=clean(), request=asks(6, want_prepare={}))
    assert leader.answers == 2


async def test_a_follower_that_does_not_look_in_time_holds_nothing(start: Start) -> None:
    leader, follower = await start()
    await leader.followers.look(0.3)
    assert "worker 1" in verdict(leader.page.read()).reason
    await until(lambda: bool(follower.commands[-1].look))
    look = follower.commands[-1].look
    follower.tell(workers=clean(), looked=look)
    await leader.until(follower, lambda: verdict(leader.page.read()).open)

    async def answer() -> None:
        await follower.until(lambda command: command.look > look, workers=clean())
        follower.tell(workers=clean(), looked=look + 1)

    answering = asyncio.ensure_future(answer())
    await leader.followers.look(SECONDS)
    await answering
    assert verdict(leader.page.read()).open


async def test_a_follower_that_is_not_heard_closes_the_gate_and_ends_the_engine(start: Start) -> None:
    leader, _ = await start(lease=2)
    await until(lambda: leader.followers.trouble() == "the agent of node 1 was not heard for 2 s")
    await until(lambda: not verdict(leader.page.read()).open)


async def test_an_agent_that_comes_later_has_no_part_in_what_runs(start: Start) -> None:
    leader, follower = await start(lease=3)
    follower.link.close()
    second = Follower(leader.settings)
    try:
        refused = await second.until(lambda command: command.HasField("refused"))
        assert "node 1 has an agent already" in refused.refused.message
        second.commands.clear()
        taken = await second.until(lambda command: not command.HasField("refused"))
        assert not taken.run
        assert leader.followers.trouble() == "the agent of node 1 was restarted"
        # Its words count for nothing: they are of no part of this engine.
        second.tell(workers=clean(), generation=1, running=True)
        await asyncio.sleep(0.3)
        assert not verdict(leader.page.read()).open
        again = EnginePage(leader.path / "page-2")
        gathering = asyncio.ensure_future(leader.followers.gather(again, leader.path, SECONDS))
        command = await second.until(lambda command: command.run, running=False)
        await gathering
        assert command.generation == 2
        assert leader.followers.trouble() == ""
    finally:
        second.link.close()


async def test_what_ends_elsewhere_ends_everything(start: Start) -> None:
    leader, follower = await start()
    async with asyncio.timeout(SECONDS):
        while not leader.followers.trouble():
            follower.tell(running=False, reason="it exited with status 3")
            await asyncio.sleep(0.05)
    assert leader.followers.trouble() == "node 1: it exited with status 3"
    await leader.followers.end()
    command = await follower.until(lambda command: command is follower.commands[-1] and not command.run, running=False)
    assert not command.run


async def test_nodes_that_do_not_come_are_named(tmp_path: Path) -> None:
    settings = NodeSettings(3, 0, f"127.0.0.1:{free_port()}")
    leader = Leader(tmp_path, settings, Deadlines().changed("heartbeat=0.1 lease=1"))
    await leader.followers.open(SECONDS)
    try:
        with pytest.raises(NodesMissingError, match=r"no agent of node 1, 2 has joined after 0\.5 s"):
            await leader.followers.gather(leader.page, tmp_path, 0.5)
    finally:
        await leader.followers.close()


async def test_nothing_begins_when_nobody_waits_for_it_any_more(tmp_path: Path) -> None:
    """An agent that is told to stop while it waits for its nodes starts no engine on them."""
    settings = NodeSettings(2, 0, f"127.0.0.1:{free_port()}")
    leader = Leader(tmp_path, settings, Deadlines().changed("heartbeat=0.1 lease=60 engine_grace=0.2"))
    await leader.followers.open(SECONDS)
    gathering = asyncio.ensure_future(leader.followers.gather(leader.page, tmp_path, SECONDS))
    await asyncio.sleep(0)
    gathering.cancel()
    await asyncio.gather(gathering, return_exceptions=True)
    follower = Follower(settings)
    try:
        await follower.until(lambda _: len(follower.commands) >= 3)
        assert not any(command.run for command in follower.commands)
    finally:
        follower.link.close()
        await leader.followers.close()


async def test_who_has_another_token_is_not_heard(start: Start, tmp_path: Path) -> None:
    leader, _ = await start()
    other = tmp_path / "other"
    other.write_text("o" * 64)
    stranger = Follower(NodeSettings(2, 1, leader.settings.leader, other))
    without = Follower(NodeSettings(2, 1, leader.settings.leader))
    keys = leader.settings.keys()
    assert keys is not None
    public, secret = zmq.curve_keypair()
    knows_the_leader = Follower(leader.settings, keys=replace(keys, follower_public=public, follower_secret=secret))
    try:
        for _ in range(10):
            stranger.tell()
            without.tell()
            knows_the_leader.tell()
            await asyncio.sleep(0.05)
        assert stranger.commands == without.commands == knows_the_leader.commands == []
    finally:
        stranger.link.close()
        without.link.close()
        knows_the_leader.link.close()


def test_settings_that_cannot_be_are_refused(tmp_path: Path) -> None:
    for arguments, words in (
        ((2, 2, "127.0.0.1:1"), "nodes count from 0 to 1"),
        ((2, 0, ""), "must be HOST:PORT of node 0"),
        ((2, 0, "127.0.0.1:port"), "must be HOST:PORT of node 0"),
        ((1, 0, "127.0.0.1:1"), "are for engines on several --nodes"),
        ((2, 0, "10.0.0.1:7100"), "is reached by other machines"),
        ((0, 0, ""), "must be from 1 to"),
    ):
        with pytest.raises(ValueError, match=words):
            NodeSettings(*arguments)
    with pytest.raises(CkptEngineError, match="cannot be resolved on node 0"):
        NodeSettings(2, 0, "no-such-host.invalid:7100", tmp_path / "token").listening_endpoints()
    short = tmp_path / "short"
    short.write_text("secret\n")
    with pytest.raises(CkptEngineError, match="holds 6 bytes; it takes 32"):
        NodeSettings(2, 0, "127.0.0.1:1", short).keys()
    with pytest.raises(CkptEngineError, match="cannot be read"):
        NodeSettings(2, 0, "127.0.0.1:1", tmp_path / "none").keys()


def test_a_node_token_that_every_user_can_read_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name, mode, warned in (("open", 0o644, True), ("closed", 0o600, False)):
        token = tmp_path / name
        token.write_text("x" * 32)
        token.chmod(mode)
        NodeSettings(2, 0, "127.0.0.1:1", token).keys()
        assert (f"--node-token, {token}" in caplog.text, f"chmod 600 {token}" in caplog.text) == (warned, warned)


GROUP = {"LWS_GROUP_SIZE": "3", "LWS_WORKER_INDEX": "2", "LWS_LEADER_ADDRESS": "wide-0.wide.rl"}
"""What a LeaderWorkerSet tells the third pod of a group."""

TOKEN = Path("token")


@pytest.mark.parametrize(
    ("options", "environment", "found"),
    [
        ((None, None, "", TOKEN), GROUP, NodeSettings(3, 2, "wide-0.wide.rl:7100", TOKEN)),
        ((None, None, "", None), {}, NodeSettings()),
        ((1, None, "", None), GROUP, NodeSettings()),
        ((None, 1, "", TOKEN), GROUP, NodeSettings(3, 1, "wide-0.wide.rl:7100", TOKEN)),
        ((4, None, "", TOKEN), GROUP, NodeSettings(4, 2, "wide-0.wide.rl:7100", TOKEN)),
        ((None, None, "head:7200", TOKEN), GROUP, NodeSettings(3, 2, "head:7200", TOKEN)),
        ((2, 1, "head:7200", TOKEN), GROUP, NodeSettings(2, 1, "head:7200", TOKEN)),
        # A group of one pod has the same command line as a larger one.
        ((None, None, "", TOKEN), {**GROUP, "LWS_GROUP_SIZE": "1", "LWS_WORKER_INDEX": "0"}, NodeSettings()),
        # An older LeaderWorkerSet does not tell the index; the pod's label does.
        (
            (None, 2, "", TOKEN),
            {name: value for name, value in GROUP.items() if name != "LWS_WORKER_INDEX"},
            NodeSettings(3, 2, "wide-0.wide.rl:7100", TOKEN),
        ),
        (
            (None, None, "", TOKEN),
            {**GROUP, "LWS_LEADER_ADDRESS": "fd00::7"},
            NodeSettings(3, 2, "[fd00::7]:7100", TOKEN),
        ),
    ],
)
def test_a_leader_worker_set_says_what_options_do_not(
    options: tuple[int | None, int | None, str, Path | None], environment: dict[str, str], found: NodeSettings
) -> None:
    assert NodeSettings.found(*options, environment) == found


@pytest.mark.parametrize(
    ("options", "change", "words"),
    [
        (
            (None, None, "", TOKEN),
            {"LWS_GROUP_SIZE": None},
            "LWS_GROUP_SIZE is not set, although this pod is of a Lead",
        ),
        (
            (None, None, "", TOKEN),
            {"LWS_WORKER_INDEX": None},
            "give --node-rank or CKPT_ENGINE_NODE_RANK, or `--nodes 1`",
        ),
        ((None, None, "", TOKEN), {"LWS_WORKER_INDEX": "-1"}, "LWS_WORKER_INDEX must be a number, not '-1'"),
        ((None, None, "", TOKEN), {"LWS_GROUP_SIZE": "two"}, "LWS_GROUP_SIZE must be a number, not 'two'"),
        (
            (None, None, "", TOKEN),
            {"LWS_WORKER_INDEX": "3"},
            "--node-rank 3: nodes count from 0 to 2; this pod is of a",
        ),
        (
            (None, None, "", TOKEN),
            {"LWS_LEADER_ADDRESS": None},
            "--leader must be HOST:PORT of node 0.*LWS_GROUP_SIZE='3'",
        ),
        ((None, None, "", TOKEN), {"LWS_LEADER_ADDRESS": ""}, "--leader must be HOST:PORT of node 0"),
        ((None, None, "", TOKEN), {"LWS_GROUP_SIZE": "1"}, "--node-rank 2: nodes count from 0 to 0"),
        ((None, None, "", TOKEN), {"LWS_GROUP_SIZE": "0"}, "--nodes 0 must be from 1 to"),
        ((None, None, "", None), {}, "give all nodes one --node-token.*and options win over that"),
        ((2, None, "", TOKEN), {}, "--node-rank 2: nodes count from 0 to 1.*LWS_WORKER_INDEX='2'"),
        ((1, 2, "", None), {}, "--node-rank 2: nodes count from 0 to 0"),
    ],
)
def test_a_group_that_does_not_fit_is_refused(
    options: tuple[int | None, int | None, str, Path | None], change: dict[str, str | None], words: str
) -> None:
    environment = {name: value for name, value in {**GROUP, **change}.items() if value is not None}
    with pytest.raises(ValueError, match=words):
        NodeSettings.found(*options, environment)


async def test_a_leader_whose_name_is_another_host_s_gives_up(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("t" * 64)
    leader = Leader(tmp_path, NodeSettings(2, 0, "192.0.2.7:7100", tmp_path / "token"), Deadlines())
    with pytest.raises(CkptEngineError, match=r"means 192\.0\.2\.7, which is not an address of this host"):
        await leader.followers.open(0.0)
    await leader.followers.close()


async def test_two_who_ask_for_the_same_share_the_answer(start: Start) -> None:
    leader, follower = await start()
    async with asyncio.timeout(SECONDS):
        ending = [asyncio.ensure_future(leader.followers.end()) for _ in range(2)]
        await follower.until(lambda command: not command.run, running=False)
        await asyncio.gather(*ending)


async def test_nobody_waits_for_an_agent_that_has_closed(start: Start) -> None:
    """Also who asks after it has."""
    leader, follower = await start()
    waiting = asyncio.ensure_future(leader.followers.look(SECONDS))
    await asyncio.sleep(0)
    follower.tell(running=False)
    await leader.followers.close()
    async with asyncio.timeout(SECONDS):
        await asyncio.wait([waiting])
        with pytest.raises(CkptEngineError, match="asks its engine's other nodes nothing more"):
            await leader.followers.look(0.1)
