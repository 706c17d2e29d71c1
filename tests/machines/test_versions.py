"""Which replica is to hold what, and that a manager which is restarted knows it from its ledger."""

from __future__ import annotations

import pytest

from ckpt_engine.core.version import Version
from ckpt_engine.machines.events import Published, StoredSeal
from ckpt_engine.machines.manager.goal import Goal, HeldVersion
from ckpt_engine.machines.manager.versions import EVERYBODY, Commit, Commits, Versions, everybody
from ckpt_engine.v1 import manager_pb2

PUBLISHED = Published(manager_pb2.BlobRef(digest=b"m" * 32), (), 1, 1)


def identity(version: int, lineage: str = "run") -> Version:
    return Version(lineage, version, bytes([version]) * 32)


class Manager:
    """What a manager keeps of versions, in memory and in its ledger."""

    def __init__(self) -> None:
        self.versions = Versions()
        self.last: dict[str, Commit] = {}
        self.desired: dict[str, Commit] = {}
        self.epoch = 0

    def install(self, what: Version, *names: str, late: bool = False) -> None:
        """Into these replicas; none: all without a pool. late: one of them gets what it was to hold already."""
        self.epoch += 1
        selection = frozenset() if late else frozenset(names or (EVERYBODY,))
        mode = manager_pb2.PAUSE_MODE_KEEP
        held = HeldVersion(what, None) if late else None
        order = Goal(what.lineage, what.number, PUBLISHED, (), {}, mode, None, selection, end=0.0, held=held)
        if selection:
            self.last[what.lineage] = Commit(self.epoch, what)
        self.desired |= dict.fromkeys(selection, Commit(self.epoch, what))
        self.versions.begin(what, self.epoch, order, StoredSeal(0, None))

    def restarted(self) -> Versions:
        return Versions.from_ledger(Commits(self.epoch, tuple(self.last.values()), self.desired))


def held(versions: Versions) -> dict[str, tuple[str, int] | None]:
    """What replicas a, b and c are to hold."""
    found = {name: versions.of(name) for name in "abc"}
    return {name: each and (each.identity.lineage, each.identity.number) for name, each in found.items()}


@pytest.mark.parametrize("late", [False, True])
def test_a_replica_that_a_commit_does_not_select_keeps_what_it_was_to_serve(late: bool) -> None:
    """Also after a restart. late: one of those that were chosen was brought up once more, which is no news."""
    manager = Manager()
    manager.install(identity(1))
    manager.install(identity(2), "a", "b")
    if late:
        manager.install(identity(2), "a", late=True)
    assert held(manager.versions) == {"a": ("run", 2), "b": ("run", 2), "c": ("run", 1)}
    assert held(manager.restarted()) == held(manager.versions)
    manager.install(identity(2), "c")
    assert held(manager.versions) == dict.fromkeys("abc", ("run", 2))
    assert held(manager.restarted()) == held(manager.versions)


def test_a_replicas_newest_commit_says_whether_its_draft_keeps_its_weights() -> None:
    versions = Versions()
    for number, names, keeps in ((1, frozenset((EVERYBODY,)), True), (2, frozenset("a"), False)):
        mode, what = manager_pb2.PAUSE_MODE_KEEP, identity(number)
        goal = Goal("run", number, PUBLISHED, (), {}, mode, None, names, end=0.0, keeps_draft=keeps)
        versions.begin(what, number, goal, StoredSeal(0, None))
    assert [versions.keeps_draft(name) for name in "ab"] == [False, True]
    assert not Versions().keeps_draft("a")


def test_the_ledger_keeps_the_seals_of_intents_without_an_answer() -> None:
    versions, seal = Versions(), StoredSeal(1, None)
    one, two, three, four = (identity(1, lineage) for lineage in ("one", "two", "three", "four"))

    def keeps(epoch: int, what: Version) -> set[Version]:
        return set(versions.intent(epoch, what, 1.0, (what.lineage,), None, seal).keeps)

    assert keeps(1, one) == {one}
    assert keeps(2, two) == {one, two}
    versions.refuse(1)
    assert keeps(3, three) == {two, three}
    versions.doubt(2, two, frozenset({"two"}))
    assert keeps(4, four) == {two, three, four}
    versions.read_again(Commits())
    assert keeps(5, four) == {three, four}, "the answer to another one than was doubted may still come"
    assert not versions.intent(6, two, 1.0, (), None, seal).keeps
    versions.refuse(4)
    versions.select(Commit(5, four), {"four"}, is_last=True)
    assert versions.pending == {3: three}


def test_runs_with_replicas_of_their_own_do_not_meet_also_after_a_restart() -> None:
    manager = Manager()
    manager.install(identity(1, "one"), "a")
    manager.install(identity(1, "two"), "b")
    manager.install(identity(1, "one"), "a", late=True)
    assert held(manager.versions) == {"a": ("one", 1), "b": ("two", 1), "c": None}
    assert held(manager.restarted()) == held(manager.versions)
    manager.install(identity(2, "two"))
    assert held(manager.versions) == dict.fromkeys("abc", ("two", 2))
    assert held(manager.restarted()) == held(manager.versions)


def test_pools_do_not_meet_also_after_a_restart() -> None:
    manager = Manager()
    manager.versions.pools |= {"a": "actor", "b": "judge"}
    manager.install(identity(1, "one"), everybody("actor"))
    manager.install(identity(1, "two"), everybody("judge"))
    manager.install(identity(1, "three"))
    assert held(manager.versions) == {"a": ("one", 1), "b": ("two", 1), "c": ("three", 1)}
    manager.install(identity(2, "one"), everybody("actor"))
    again = manager.restarted()
    again.pools |= {"a": "actor", "b": "judge"}
    assert held(again) == held(manager.versions) == {"a": ("one", 2), "b": ("two", 1), "c": ("three", 1)}
    assert again.served_lineages() == {"one", "two", "three"}


def test_what_one_pool_got_is_not_for_another_one() -> None:
    """A frozen pool: its replicas are to serve what their own pool got, whatever their run's other pool gets."""
    manager = Manager()
    manager.versions.pools |= {"a": "actor", "b": "evaluation"}
    manager.install(identity(1), everybody("actor"))
    manager.install(identity(1), everybody("evaluation"))
    assert held(manager.versions) == {"a": ("run", 1), "b": ("run", 1), "c": None}
    manager.install(identity(2), everybody("actor"))
    assert held(manager.versions) == {"a": ("run", 2), "b": ("run", 1), "c": None}


def test_a_replica_that_comes_back_in_another_pool_is_to_hold_what_that_one_got() -> None:
    manager = Manager()
    manager.versions.register("a", "actor")
    manager.install(identity(1, "one"), everybody("actor"))
    manager.install(identity(1, "two"))
    manager.install(identity(2, "one"), "a")  # by its name, later than the other pool's
    assert held(manager.versions)["a"] == ("one", 2)
    manager.versions.register("a", "")
    assert held(manager.versions)["a"] == ("two", 1)
