"""Who speaks for whom: what a hello changes of what the manager knows, and what it leaves."""

from __future__ import annotations

import pytest

from ckpt_engine.core.manifest import DIGEST_FORMAT
from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.machines.events import Peer
from ckpt_engine.machines.manager.members import Members, ShutWays
from ckpt_engine.v1 import manager_pb2, weights_pb2

HOST = weights_pb2.Host(boot_id="host", name="machine")
FIRST, SECOND = Peer("first"), Peer("second")


def replica_hello(session_id: str = "session", agent_epoch: int = 1) -> manager_pb2.ReplicaHello:
    return manager_pb2.ReplicaHello(
        digest_format=DIGEST_FORMAT, name="replica", session_id=session_id, agent_epoch=agent_epoch, host=HOST
    )


def test_a_hello_over_the_same_stream_leaves_what_heartbeats_have_said() -> None:
    """An agent says it again when its engine's description has changed; its next heartbeat may be a while away."""
    members = Members("cluster")
    replica, _ = members.replica_hello(FIRST, replica_hello(), 0.0)
    assert replica.closed_reason
    replica.serving, replica.closed_reason, replica.label_problem = True, "", "do not trust its label"
    again, before = members.replica_hello(FIRST, replica_hello(), 1.0)
    assert before == FIRST
    assert (again.serving, again.closed_reason, again.label_problem) == (True, "", "do not trust its label")
    later, before = members.replica_hello(SECOND, replica_hello(), 2.0)
    assert before == FIRST
    assert not later.serving
    assert later.closed_reason
    assert later.label_problem == ""


def test_an_address_in_another_container_is_another_engine() -> None:
    """Two pods of one machine: both engines listen at 127.0.0.1, each of its own network."""

    def hello(agent_epoch: int, network: str) -> manager_pb2.ReplicaHello:
        made = replica_hello(f"session {agent_epoch}", agent_epoch)
        made.engine.url, made.host.network_namespace = "http://127.0.0.1:8000", network
        return made

    members = Members("cluster")
    members.replica_hello(FIRST, hello(1, "net:[1]"), 0.0)
    members.replica_hello(SECOND, hello(2, "net:[1]"), 1.0)
    with pytest.raises(CkptEngineError, match="with another engine"):
        members.replica_hello(Peer("third"), hello(3, "net:[2]"), 2.0)


def trainer_hello(session_id: str = "session") -> manager_pb2.TrainerHello:
    return manager_pb2.TrainerHello(
        digest_format=DIGEST_FORMAT, lineage="run", rank=0, world_size=1, session_id=session_id, host=HOST
    )


@pytest.mark.parametrize("name", ["", "n" * 256, "a\nb", "\x1b[2J", "\u202eabc", "\0"])
def test_a_name_that_no_terminal_could_show_is_refused(name: str) -> None:
    """An operator reads it in tables and logs."""
    members, replica, trainer = Members("cluster"), replica_hello(), trainer_hello()
    replica.name = trainer.lineage = name
    holder = manager_pb2.HolderHello(
        digest_format=DIGEST_FORMAT, kind="relay", name=name, session_id="session", host=HOST
    )
    for hello in (
        lambda: members.replica_hello(FIRST, replica, 0.0),
        lambda: members.trainer_hello(FIRST, trainer, 0.0),
        lambda: members.holder_hello(FIRST, holder, 0.0),
    ):
        with pytest.raises(CkptEngineError, match="all printable"):
            hello()


def test_a_stream_that_was_replaced_speaks_for_nobody() -> None:
    """What still comes over it, a goodbye even, is not of the member that speaks over another one now."""
    members = Members("cluster")
    members.trainer_hello(FIRST, trainer_hello(), 0.0)
    trainer, before = members.trainer_hello(SECOND, trainer_hello(), 1.0)
    assert before == FIRST
    assert members.by_peer == {SECOND: trainer}
    assert members.lose(FIRST) is None
    assert trainer.peer == SECOND
    third, fourth = Peer("third"), Peer("fourth")
    members.replica_hello(third, replica_hello(), 0.0)
    replica, before = members.replica_hello(fourth, replica_hello(), 1.0)
    assert before == third
    assert members.by_peer == {SECOND: trainer, fourth: replica}
    assert members.lose(third) is None
    assert replica.peer == fourth


def test_when_members_were_heard_last_counts_once_all_have_lost_their_sessions() -> None:
    members = Members("cluster")
    assert members.last_heard() is None, "nobody was there"
    rank, _ = members.hello(FIRST, trainer_hello(), 1.0)
    members.hello(SECOND, replica_hello(), 2.0)
    members.lose(FIRST)
    assert members.last_heard() is None, "one has a session"
    members.lose(SECOND)
    assert members.last_heard() == 2.0
    members.forget(rank)
    assert members.last_heard() == 2.0
    members.forget(members.replica("replica"))
    assert members.last_heard() is None, "those that said goodbye are not waited for"


def test_a_replica_without_a_name_is_refused() -> None:
    members = Members("cluster")
    with pytest.raises(CkptEngineError, match="a replica's name has from 1 to 255 bytes"):
        members.replica_hello(
            FIRST, manager_pb2.ReplicaHello(digest_format=DIGEST_FORMAT, session_id="session", host=HOST), 0.0
        )
    assert not members.replicas
    assert not members.by_peer


def test_a_hello_tells_what_could_not_be_opened_if_the_outcome_was_lost_and_only_then() -> None:
    members, hello = Members("cluster"), replica_hello()
    hello.workers.add(rank=0, boot_id=b"process")
    members.replica_hello(FIRST, hello, 0.0)
    hello.last_outcome.fence.epoch = 7
    hello.last_outcome.unopened.add(transport="file", locator=b"there", reason="no", boot_id=b"process")
    hello.last_outcome.unopened.add(transport="file", locator=b"there", reason="no", boot_id=b"one before it")
    replica, _ = members.replica_hello(SECOND, hello, 1.0)
    assert [each.boot_id for each in replica.shut.unopened(replica.boot_ids())] == [b"process"]
    assert replica.shut.forget()
    replica, _ = members.replica_hello(FIRST, hello, 2.0)
    assert replica.shut.of(b"process") == (), "it is to be tried again, and has told nothing new"


@pytest.mark.parametrize("its", [0, 1, DIGEST_FORMAT + 1])
@pytest.mark.parametrize("kind", ["replica", "trainer", "relay"])
def test_who_makes_other_digests_is_refused_with_words(kind: str, its: int) -> None:
    """What a release of another format seals, holds or installs could only be found to be damaged."""
    hellos = {"replica": replica_hello(), "trainer": trainer_hello()}
    relay = manager_pb2.HolderHello(kind="relay", name="h1", session_id="session", host=HOST)
    hello = hellos.get(kind, relay)
    members = Members("cluster")
    hello.digest_format = DIGEST_FORMAT
    members.hello(FIRST, hello, 0.0)
    hello.digest_format = its
    with pytest.raises(CkptEngineError, match=f"makes digests of format {its or 1}, and its manager of") as caught:
        members.hello(SECOND, hello, 1.0)
    assert caught.value.problem.code == weights_pb2.Problem.CODE_FAILED_PRECONDITION, (
        "it goes on as it is and asks again"
    )
    assert {"replica": "replica 'replica'", "trainer": "rank 0", "relay": "relay h1"}[kind] in str(caught.value)
    assert SECOND not in members.by_peer


def test_what_a_new_worker_could_not_open_is_kept_before_it_is_known_itself() -> None:
    """Its agent's heartbeat, which names the worker, may come a little later; then gone ones are forgotten."""
    shut = ShutWays()
    ways = [
        weights_pb2.Unopened(boot_id=boot, transport="shared_memory", locator=b"region", reason="it is gone")
        for boot in (b"old", b"new")
    ]
    old, new = (manager_pb2.WorkerStatus(boot_id=each.boot_id) for each in ways)
    shut.note([old], ways[:1])
    shut.note([old], ways[1:])
    assert shut.unopened([b"old", b"new"]) == ways
    shut.note([new], [])
    assert shut.unopened([b"old", b"new"]) == ways[1:]
