"""Which relay counts, as its hellos and answers come and go."""

from __future__ import annotations

import pytest

from ckpt_engine.core.deadlines import Deadlines
from ckpt_engine.core.manifest import DIGEST_FORMAT
from ckpt_engine.core.placements import Placement
from ckpt_engine.core.version import Version
from ckpt_engine.machines.events import Peer, Published
from ckpt_engine.machines.manager.course import Course
from ckpt_engine.machines.manager.goal import Goal
from ckpt_engine.machines.manager.placing import PlacedFilling, RelayPlacing
from ckpt_engine.machines.manager.recipients import Recipients, with_words
from ckpt_engine.machines.manager.relay_facts import KnownNeeds
from ckpt_engine.machines.manager.state import ManagerState
from ckpt_engine.v1 import manager_pb2, weights_pb2

IDENTITY = Version("run", 1, b"root")
RECORD = manager_pb2.BlobRef(digest=b"record")
OLDER = Version("run", 0, b"before")


class Update:
    """An update that fills one relay."""

    def __init__(self) -> None:
        self.state = ManagerState.from_ledger("cluster", 0, Deadlines())
        self.state.spent = 2
        published = Published(manager_pb2.BlobRef(digest=b"manifest"), (), 1, 1)
        order = Goal("run", 1, published, ("r",), {}, manager_pb2.PAUSE_MODE_UNSPECIFIED, None, frozenset(("r",)), 60.0)
        self.course = Course(self.state, order)
        self.placing = RelayPlacing(self.course, Recipients(self.state, order, self.course.fence), IDENTITY, RECORD)
        command = manager_pb2.FillRelay(fence=self.course.fence.message(), identity=IDENTITY.message())
        self.placing._fillings["relay a"] = PlacedFilling("relay a", ("r",), command=command)

    def hello(self, *held: tuple[Version, bytes], session: str = "first") -> None:
        hello = manager_pb2.HolderHello(
            digest_format=DIGEST_FORMAT,
            kind="relay",
            name="a",
            session_id=session,
            filling=manager_pb2.Filling(memory_bytes=1),
        )
        for identity, table in held:
            hello.held.add(identity=identity.message(), table=manager_pb2.BlobRef(digest=table))
        holder, _ = self.state.members.holder_hello(Peer(f"stream {session}"), hello, 0.0)
        self.placing.note_return(holder)

    def answer(self, table: bytes) -> None:
        holder = self.state.members.holders["relay a"]
        self.placing.take(holder, manager_pb2.RelayFilled(identity=IDENTITY.message(), table=table))

    def lose(self) -> None:
        holder = self.state.members.holders["relay a"]
        assert holder.peer is not None
        self.state.members.lose(holder.peer)
        self.placing.lost(holder)

    @property
    def counts(self) -> bool:
        assert bool(self.placing.held()) != bool(self.placing.missing())
        return bool(self.placing.held())

    def commands(self) -> int:
        """How many are sent to it when all is sent again, and what has come up since."""
        self.state.out.clear()
        self.placing.send(1.0)
        self.placing.advance(1.0)
        return len(self.state.out)


@pytest.fixture
def update() -> Update:
    made = Update()
    made.hello((OLDER, b"old"))
    return made


def test_it_counts_once_its_hello_names_the_table_of_its_answer(update: Update) -> None:
    update.answer(b"new")
    assert not update.counts
    update.hello((OLDER, b"new"))
    assert not update.counts, "that is another version"
    update.hello((IDENTITY, b"old"), (OLDER, b"new"))
    assert not update.counts, "it holds the version for other needs, where the next one will be filled"
    update.hello((IDENTITY, b"new"))
    assert update.counts


def test_a_hello_alone_is_nothing(update: Update) -> None:
    update.hello((IDENTITY, b"new"))
    assert not update.counts
    assert update.commands() == 1
    update.answer(b"new")
    assert update.counts
    assert update.commands() == 0


def test_another_process_is_told_again_and_the_same_one_is_not(update: Update) -> None:
    update.hello((IDENTITY, b"new"))
    update.answer(b"new")
    update.lose()
    assert not update.counts
    update.hello((IDENTITY, b"new"))
    assert update.counts
    update.lose()
    update.hello(session="second")
    assert not update.counts
    assert update.commands() == 1


def test_one_that_is_back_is_not_gone(update: Update) -> None:
    update.lose()
    update.hello()
    update.placing.drop("relay a", "it did not come back")
    assert update.placing.missing()
    update.lose()
    update.placing.drop("relay a", "it did not come back")
    assert not update.placing.missing()
    assert not update.placing.held()
    update.placing.why["relay a"] = "relay a is filled for r: prefetch is 'always'"
    assert update.placing.describe() == "relay a is left out: it did not come back"
    update.hello((IDENTITY, b"new"))
    update.answer(b"new")
    assert not update.placing.held(), "what was left out stays out"


def test_a_reason_is_said_once() -> None:
    """A worker and its relay are often cut off for the same reason."""
    why = "they share no process ids; run both in one container"
    told = with_words(weights_pb2.Problem(message=f"it cannot read rank 0: {why}"), f"no relay reaches rank 0; {why}")
    assert told.message == f"it cannot read rank 0: {why}; no relay reaches rank 0"


def asking(update: Update, name: str) -> None:
    """A relay of another host takes part, and asks relay a, which is an origin."""
    hello = manager_pb2.HolderHello(
        digest_format=DIGEST_FORMAT,
        kind="relay",
        name=name,
        session_id=name,
        filling=manager_pb2.Filling(memory_bytes=1),
    )
    hello.filling.chunks.offers.add(transport="tcp", locator=name.encode())
    update.state.members.holder_hello(Peer(f"stream {name}"), hello, 0.0)
    relay = f"relay {name}"
    update.placing._fillings[relay] = PlacedFilling(relay, (f"replica {name}",), Placement(origins=("relay a",)))


def table_of(update: Update, name: str) -> dict[str, bool]:
    """By relay in the table of another one: whether it is an origin."""
    return {each.relay: each.origin for each in update.placing._table(f"relay {name}").relays}


def test_a_table_names_no_relay_that_came_later(update: Update) -> None:
    """So no two relays ask each other, whichever of them has which table."""
    update.placing._fillings["relay a"].placement = Placement(children=("relay b", "relay c"))
    asking(update, "b")
    asking(update, "c")
    both = {"relay a": True, "relay b": False, "relay c": False}
    assert table_of(update, "b") == table_of(update, "c") == both
    asking(update, "d")
    assert table_of(update, "d") == both | {"relay d": False}
    assert table_of(update, "b") == both


def test_a_relay_that_is_left_out_is_asked_no_more(update: Update) -> None:
    update.placing._fillings["relay a"].placement = Placement(children=("relay b",))
    asking(update, "b")
    update.placing.leave_out("relay a", weights_pb2.Problem(message="it is too small"))
    assert table_of(update, "b") == {"relay b": False}


def test_a_relay_that_no_other_can_ask_is_a_leaf(update: Update) -> None:
    asking(update, "b")
    holder = update.state.members.holders["relay b"]
    assert holder.filling is not None
    holder.filling.ClearField("chunks")
    (entry,) = [each for each in update.placing._table("relay b").relays if each.relay == "relay b"]
    assert entry.leaf


def test_an_origin_that_is_chosen_otherwise_by_now_is_no_reason_to_begin_again(update: Update) -> None:
    """Only one that is left out, or another process by now, is: what it is asked for would not come."""
    update.placing._fillings["relay a"].placement = Placement(children=("relay b",))
    asking(update, "b")
    asking(update, "spare")
    filling = update.placing._fillings["relay b"]
    update.placing._give_order(filling, update.placing._origins(filling), 1.0)
    filling.placement = Placement(origins=("relay spare",))
    assert not update.placing._step(filling, 1.0)
    update.placing.leave_out("relay a", weights_pb2.Problem(message="it is too small"))
    assert update.placing._step(filling, 1.0)
    assert (filling.attempts, filling.command is not None and filling.command.attempt) == (1, 1)


def test_an_origin_holds_what_any_relay_needs_that_asks_one(update: Update, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one's origin may be lost, and then it asks this one."""
    named: list[set[str]] = []
    monkeypatch.setattr(KnownNeeds, "near", lambda self, relays: named.append({each.source for each in relays}) or [])
    update.placing._fillings["relay a"].placement = Placement(children=("relay b",))
    asking(update, "b")
    asking(update, "c")
    update.placing._wants(update.placing._fillings["relay a"])
    update.placing._wants(update.placing._fillings["relay b"])
    assert named == [{"relay a", "relay b", "relay c"}, {"relay b"}]


def test_many_relays_share_the_tables_that_they_are_told(update: Update, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table for each, of all, would take a minute for 512 relays."""
    written: list[str] = []
    wants = RelayPlacing._wants
    monkeypatch.setattr(
        RelayPlacing, "_wants", lambda self, filling: written.append(filling.relay) or wants(self, filling)
    )
    names = [f"h{number:02}" for number in range(40)]
    update.placing._fillings["relay a"].placement = Placement(children=tuple(f"relay {name}" for name in names))
    for name in names:
        asking(update, name)
    tables = [table_of(update, name) for name in ("a", *names)]
    assert [len(table) for table in tables] == [41] * 41
    assert len(written) == 41
