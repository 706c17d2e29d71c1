"""A member that a manager turns away: for good if none has ever welcomed it, else it asks again."""

from __future__ import annotations

import pytest

from ckpt_engine.core.deadlines import Deadlines
from ckpt_engine.core.manifest import DIGEST_FORMAT
from ckpt_engine.machines import events
from ckpt_engine.machines.session import DENIED, PATIENCE
from ckpt_engine.machines.trainer.machine import TrainerMachine
from ckpt_engine.v1 import manager_pb2, weights_pb2

Problem = weights_pb2.Problem
Code = Problem.Code


class Member:
    """A trainer rank's machine, and what it said last about its session."""

    def __init__(self, welcomed: bool) -> None:
        self.machine = TrainerMachine("run", 0, 1, "session", weights_pb2.Host(), Deadlines(lease=8.0))
        self.peer = events.Peer("manager-1")
        self.said = self.feed(events.Start())
        if welcomed:
            fence = weights_pb2.Fence(cluster="cluster")
            self.feed(
                events.Message(
                    self.peer, manager_pb2.Welcome(digest_format=DIGEST_FORMAT, fence=fence, lease_seconds=8.0)
                )
            )

    def feed(self, event: events.TrainerEvent) -> list[events.TrainerCommand]:
        return self.machine.handle(event, 0.0)

    def ended(self, event: events.TrainerEvent) -> events.SessionEnded:
        (said,) = [each for each in self.feed(event) if isinstance(each, events.SessionEnded)]
        return said


@pytest.mark.parametrize("code", sorted(DENIED), ids=Code.Name)
@pytest.mark.parametrize("welcomed", [False, True])
def test_a_stream_that_ends_with_a_refusal(code: Code, welcomed: bool) -> None:
    member = Member(welcomed)
    said = member.ended(events.PeerLost(member.peer, "no grant", code))
    assert said.final is not welcomed, "a manager that was restarted with other grants may get them back"
    assert (said.problem.code, said.problem.message) == (code, "no grant")


@pytest.mark.parametrize("code", [Problem.CODE_UNAVAILABLE, Problem.CODE_ABORTED, Problem.CODE_INTERNAL], ids=Code.Name)
def test_a_stream_that_breaks_is_dialled_again(code: Code) -> None:
    member = Member(welcomed=False)
    said = member.ended(events.PeerLost(member.peer, "reset", code))
    assert not said.final
    assert said.problem.code == Problem.CODE_UNAVAILABLE, "an engine may be launched meanwhile"


@pytest.mark.parametrize("code", sorted(DENIED), ids=Code.Name)
def test_a_table_that_may_not_be_stored(code: Code) -> None:
    member = Member(welcomed=False)
    member.feed(events.PeerLost(member.peer, "reset"))
    member.feed(events.PublishTable(b"table"))
    member.feed(events.TimerFired(("session", "reconnect")))
    problem = Problem(code=code, message="no grant")
    assert member.ended(events.Done(("put", 1), problem=problem)).final


def test_a_name_that_somebody_else_holds_is_waited_for() -> None:
    member = Member(welcomed=False)
    refused = manager_pb2.Refused(problem=Problem(code=Problem.CODE_ABORTED, message="taken"))
    said = member.ended(events.Message(member.peer, refused))
    assert (said.final, said.patience) == (False, PATIENCE * 8.0)


@pytest.mark.parametrize("its", [0, DIGEST_FORMAT + 1])
def test_a_manager_that_makes_other_digests_is_given_up_and_asked_again(its: int) -> None:
    """It took this member in: one of an older release looks at no format."""
    member = Member(welcomed=False)
    welcome = manager_pb2.Welcome(digest_format=its, fence=weights_pb2.Fence(cluster="cluster"), lease_seconds=8.0)
    given = member.feed(events.Message(member.peer, welcome))
    assert [each for each in given if isinstance(each, events.ClosePeer)]
    assert not [each for each in given if isinstance(each, events.SessionOpened)]
    (said,) = [each for each in given if isinstance(each, events.SessionEnded)]
    assert not said.final
    assert f"the manager makes digests of format {its or 1}" in said.problem.message
    assert [each.key for each in given if isinstance(each, events.SetTimer)] == [("session", "reconnect")]
