"""Leading and following agents as machines, each alone: what they tell, wait for, start and end."""

from __future__ import annotations

from typing import Any

import pytest

from ckpt_engine.core.deadlines import Deadlines
from ckpt_engine.core.manifest import DIGEST_FORMAT
from ckpt_engine.machines.events import Message, Peer, Reply, Send, Start, Stop, TimerFired, WorkerAsked
from ckpt_engine.machines.nodes.events import (
    LEADER,
    AllHere,
    Begin,
    EndPart,
    EndParts,
    FollowerMessage,
    GatherNodes,
    Look,
    Looked,
    NodesMissing,
    PartEnded,
    PartFailed,
    PartsEnded,
    PartStarted,
    ShowWord,
    StartPart,
)
from ckpt_engine.machines.nodes.follower import FollowerMachine
from ckpt_engine.machines.nodes.leader import LeaderMachine
from ckpt_engine.v1 import manager_pb2, weights_pb2, worker_pb2

DEADLINES = Deadlines().changed("lease=8 heartbeat=1 worker_reply=10 worker_attempt=2")
BOOT = b"b" * 16
IDENTITY = weights_pb2.Identity(lineage="run", version=1, root=b"r" * 32)
INSTALL = worker_pb2.AgentReply(install=worker_pb2.InstallOrder(fence=weights_pb2.Fence(epoch=2)))
LEADING = b"l" * 16


def only(kind: type[Any], commands: list[Any]) -> list[Any]:
    return [command for command in commands if isinstance(command, kind)]


class Leader:
    """The machine of node 0 of some nodes, and its followers' messages. Time passes only when a test says so."""

    def __init__(self, nodes: int = 2) -> None:
        self.machine = LeaderMachine(LEADING, nodes, "host:7100", "host", "small", ["file"], DEADLINES)
        self.now, self.nodes, self.sequence, self.generation = 100.0, nodes, 0, 0
        self.feed(Start())

    def feed(self, event: Any) -> list[Any]:
        return self.machine.handle(event, self.now)

    def hear(self, rank: int = 1, session: bytes = b"s" * 16, peer: str = "peer", **fields: Any) -> list[Any]:
        self.sequence += 1
        usual: dict[str, Any] = {"leader_session": LEADING, "generation": self.generation, "nodes": self.nodes}
        usual |= {"session_id": session, "sequence": self.sequence, "node_rank": rank, "kind": "small"}
        usual |= {"digest_format": DIGEST_FORMAT, "transports": ["file", "ucx"]}
        message = worker_pb2.NodeMessage(**(usual | fields))
        return self.feed(FollowerMessage(Peer(peer), message, (b"n" * 16, b"")))

    def begin(self) -> None:
        """All are there, and the engine's parts run."""
        for rank in range(1, self.nodes):
            self.hear(rank, peer=f"peer {rank}")
        assert only(AllHere, self.feed(GatherNodes(60.0)))
        told = only(Send, self.feed(Begin(5000)))
        self.generation += 1
        assert [each.body.run for each in told] == [True] * (self.nodes - 1)
        assert {each.body.master_port for each in told} == {5000}
        self.hear(running=True, workers=[clean()])


def clean() -> manager_pb2.WorkerStatus:
    return manager_pb2.WorkerStatus(
        rank=1, boot_id=BOOT, pid=7, state=manager_pb2.WORKER_STATE_CLEAN, epoch=1, identity=IDENTITY
    )


def asks(sequence: int, **body: Any) -> worker_pb2.WorkerRequest:
    return worker_pb2.WorkerRequest(sequence=sequence, rank=1, boot_id=BOOT, **(body or {"want_install": {}}))


# --------------------------------------------------------------------------------------------------------- leader


def test_a_start_waits_for_all_nodes_and_names_those_that_are_missing() -> None:
    leader = Leader(3)
    assert not only(AllHere, leader.feed(GatherNodes(20.0)))
    leader.hear(1)
    (missing,) = only(NodesMissing, leader.feed(TimerFired(("gather",))))
    assert missing.reason.startswith("no agent of node 2 has joined after 20 s: start its agent with --nodes 3 ")
    leader.feed(GatherNodes(20.0))
    assert only(AllHere, leader.hear(2, peer="other"))


def test_a_start_waits_for_parts_of_the_engine_before() -> None:
    leader = Leader()
    leader.begin()
    assert not only(PartsEnded, leader.feed(EndParts()))
    assert not only(AllHere, leader.feed(GatherNodes(20.0)))
    (missing,) = only(NodesMissing, leader.feed(TimerFired(("gather",))))
    assert "node 1 still has a part of the engine before" in missing.reason
    leader.feed(EndParts())
    assert only(PartsEnded, leader.hear(running=False))
    assert only(AllHere, leader.feed(GatherNodes(20.0)))


def test_who_waits_for_parts_to_end_does_not_wait_for_ever() -> None:
    leader = Leader()
    leader.begin()
    leader.feed(EndParts())
    assert only(PartsEnded, leader.feed(TimerFired(("end",))))
    leader.begin()
    leader.feed(EndParts())
    leader.now += DEADLINES.lease + 1
    assert only(PartsEnded, leader.feed(TimerFired(("beat",)))), "nobody hears what does not speak"


def test_an_order_leaves_after_its_word_is_dirty_and_only_in_its_generation() -> None:
    leader = Leader()
    leader.begin()
    (question,) = only(WorkerAsked, leader.hear(running=True, workers=[clean()], request=asks(1)))
    assert not only(WorkerAsked, leader.hear(running=True, workers=[clean()], request=asks(1))), "it is being answered"
    shown, sent = leader.feed(Reply(question.request, INSTALL))
    assert shown == ShowWord(1, BOOT, True, manager_pb2.WORKER_STATE_DIRTY, 2)
    assert (sent.peer, sent.body.rank, sent.body.boot_id) == ("peer", 1, BOOT)
    assert sent.body.reply.sequence == 1
    again = leader.hear(running=True, workers=[clean()], request=asks(1))
    assert [each.body.HasField("reply") for each in only(Send, again)] == [True, False]
    (late,) = only(WorkerAsked, leader.hear(running=True, workers=[clean()], request=asks(2)))
    leader.feed(EndParts())
    leader.hear(running=False)
    leader.begin()
    assert leader.feed(Reply(late.request, INSTALL)) == []


def test_an_order_for_a_node_that_another_agent_has_by_now_does_not_leave() -> None:
    leader = Leader()
    leader.begin()
    (question,) = only(WorkerAsked, leader.hear(running=True, workers=[clean()], request=asks(1)))
    leader.now += DEADLINES.lease + 1
    leader.hear(session=b"t" * 16)
    assert leader.feed(Reply(question.request, INSTALL)) == []
    assert leader.machine.trouble(leader.now) == "the agent of node 1 was restarted"


def test_a_question_that_got_no_answer_may_be_asked_again() -> None:
    leader = Leader()
    leader.begin()
    (question,) = only(WorkerAsked, leader.hear(running=True, workers=[clean()], request=asks(1)))
    leader.feed(Reply(question.request, None))
    assert only(WorkerAsked, leader.hear(running=True, workers=[clean()], request=asks(1)))


def test_a_look_ends_when_all_have_looked_or_are_lost() -> None:
    leader = Leader()
    assert leader.feed(Look(1, 2.0))[-1] == Looked(1), "there is no engine"
    leader.begin()
    assert not only(Looked, leader.feed(Look(2, 2.0)))
    assert only(Looked, leader.hear(running=True, workers=[clean()], looked=2)) == [Looked(2)]
    leader.feed(Look(3, 2.0))
    lost = leader.feed(TimerFired(("look", 3)))
    assert [word.alive for word in only(ShowWord, lost)] == [False]
    assert only(Looked, lost) == [Looked(3)]
    leader.feed(Look(4, 2.0))
    assert only(Looked, leader.feed(EndParts())) == [Looked(4)]


@pytest.mark.parametrize("other", [{"generation": 0}, {"leader_session": b"m" * 16}], ids=lambda each: next(iter(each)))
def test_words_of_another_engine_do_not_count(other: dict[str, Any]) -> None:
    leader = Leader()
    leader.begin()
    leader.feed(Look(1, 2.0))
    dirty = clean()
    dirty.state = manager_pb2.WORKER_STATE_DIRTY
    heard = leader.hear(running=True, workers=[dirty], looked=1, request=asks(1), **other)
    assert [type(each) for each in heard] == [Send], "it is told what there is to be"
    assert leader.machine.trouble(leader.now) == ""


def test_who_is_not_heard_is_lost() -> None:
    leader = Leader()
    leader.begin()
    leader.now += DEADLINES.lease + 1
    assert [word.alive for word in only(ShowWord, leader.feed(TimerFired(("beat",))))] == [False]
    assert leader.machine.trouble(leader.now) == "the agent of node 1 was not heard for 8 s"


# -------------------------------------------------------------------------------------------------------- follower


class Follower:
    """A machine of node 1 that its leader has told to run."""

    def __init__(self) -> None:
        self.machine = FollowerMachine(b"f" * 16, 1, 2, "host:7100", "small", ["file"], DEADLINES)
        self.feed(Start())

    def feed(self, event: Any) -> list[Any]:
        return self.machine.handle(event, 0.0)

    def command(self, **fields: Any) -> list[Any]:
        usual = {"session_id": LEADING, "generation": 1, "run": True, "master_address": "host", "master_port": 5}
        return self.feed(Message(LEADER, worker_pb2.NodeCommand(**(usual | fields))))

    def run(self) -> None:
        assert only(StartPart, self.command()) == [StartPart("host", 5)]
        self.feed(PartStarted())


def told(commands: list[Any]) -> worker_pb2.NodeMessage:
    """The last message."""
    return only(Send, commands)[-1].body  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (PartFailed("it exited with status 3"), "it exited with status 3"),
        (TimerFired(("lease",)), "the leader was not heard for 8 s"),
        (Message(LEADER, worker_pb2.NodeCommand(session_id=b"m" * 16)), "the leader was restarted"),
        (Message(LEADER, worker_pb2.NodeCommand(session_id=LEADING, generation=1)), "the leader ends the engine"),
        (Stop("the agent was asked to stop"), "the agent was asked to stop"),
    ],
    ids=["failed", "silent", "anew", "ends", "stop"],
)
def test_a_part_ends_for_a_reason_that_the_leader_is_told(event: Any, reason: str) -> None:
    follower = Follower()
    follower.run()
    assert only(EndPart, follower.feed(event)) == [EndPart()]
    assert not only(EndPart, follower.feed(TimerFired(("beat",)))), "once"
    message = told(follower.feed(PartEnded()))
    assert (message.running, message.reason) == (False, reason)


def test_a_generation_is_begun_once_and_the_next_one_after_its_end() -> None:
    follower = Follower()
    follower.run()
    assert only(EndPart, follower.command(generation=2)) == [EndPart()]
    assert not only(StartPart, follower.command(generation=2)), "the one before still ends"
    assert only(StartPart, follower.feed(PartEnded()))
    assert told(follower.feed(PartStarted("no such model"))).reason == "no such model"
    assert not only(StartPart, follower.command(generation=2))
    assert only(StartPart, follower.command(generation=3))


def test_a_part_that_was_starting_when_the_agent_stops_is_ended() -> None:
    follower = Follower()
    follower.command()
    assert not only(EndPart, follower.feed(Stop("stop")))
    assert only(EndPart, follower.feed(PartStarted()))


def test_a_look_of_another_leader_is_answered_whatever_the_one_before_has_asked() -> None:
    """A leader that is started anew counts its looks from one. What it takes for the answer to its first look must not
    be what was said of the last look of the leader before it."""
    follower = Follower()
    follower.run()
    assert told(follower.command(look=50)).looked == 50
    other = {"session_id": b"m" * 16}
    follower.command(**other)
    follower.feed(PartEnded())
    assert told(follower.feed(PartStarted())).looked == 0
    assert told(follower.command(look=1, **other)).looked == 1


def test_a_question_is_repeated_until_it_is_answered_or_its_time_is_over() -> None:
    follower = Follower()
    follower.run()
    assert told(follower.feed(WorkerAsked(1, asks(1)))).request.sequence == 1
    assert told(follower.feed(TimerFired(("ask", 1)))).request.sequence == 1
    reply = worker_pb2.AgentReply(sequence=1)
    assert not only(Reply, follower.command(rank=2, boot_id=BOOT, reply=reply))
    assert only(Reply, follower.command(rank=1, boot_id=BOOT, reply=reply)) == [Reply(1, reply)]
    follower.feed(WorkerAsked(2, asks(2)))
    assert only(Reply, follower.feed(TimerFired(("answer", 2)))) == [Reply(2, None)]
    assert follower.feed(TimerFired(("ask", 2))) == []


def test_a_node_that_makes_other_digests_is_not_taken_in() -> None:
    leader = Leader()
    (sent,) = only(Send, leader.hear(digest_format=1))
    assert "node 1 makes digests of format 1" in sent.body.refused.message
    assert not only(AllHere, leader.feed(GatherNodes(60.0)))
    assert only(AllHere, leader.hear())
