"""The ledger: one holder, durable in the order of the calls, refusing rather than guessing."""

import asyncio
import os
import resource
import shutil
import sqlite3
import stat
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Protocol

import pytest

from ckpt_engine.core.deadlines import Deadlines
from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.core.version import Version
from ckpt_engine.machines.events import Found
from ckpt_engine.machines.manager.state import ManagerState
from ckpt_engine.machines.manager.versions import EVERYBODY, Commit, Commits
from ckpt_engine.manager.ledger import Ledger, SealEntry, default_path
from ckpt_engine.manager.ledger_file import APPLICATION_ID, SCHEMA_VERSION
from ckpt_engine.manager.term import Term
from ckpt_engine.v1 import manager_pb2, weights_pb2


class Place(Protocol):
    """Where a test's ledger is. `open` opens it, also again once it was closed."""

    async def open(self, kept_reports: int = 1000) -> Ledger: ...


class InFile:
    def __init__(self, path: Path) -> None:
        self._path = path

    async def open(self, kept_reports: int = 1000) -> Ledger:
        return await Ledger.open(self._path, kept_reports=kept_reports)


class InDatabase:
    def __init__(self, address: str) -> None:
        self._address = address
        self.term: Term | None = None

    async def open(self, kept_reports: int = 1000) -> Ledger:
        if self.term is not None:
            await self.term.release()
            await self.term.close()
        self.term = Term(self._address, 60.0, 10.0)
        await self.term.prepare("")
        assert await self.term.take("127.0.0.1:1") is None
        return await self.term.ledger(kept_reports)


@pytest.fixture(params=["file", "database"])
async def place(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Place]:
    if request.param == "file":
        yield InFile(tmp_path / "ledger.sqlite3")
        return
    found = InDatabase(request.getfixturevalue("postgresql").new_database())
    yield found
    if found.term is not None:
        await found.term.close()


def identity(version: int, lineage: str = "run") -> Version:
    return Version(lineage, version, bytes([version]) * 32)


async def test_a_new_ledger_has_a_cluster_and_keeps_it(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite3"
    ledger = await Ledger.open(path)
    cluster = ledger.cluster
    assert len(cluster) == 36
    assert ledger.epoch == 0
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    await ledger.record_intent(4, identity(1))
    await ledger.spend_epoch(9)
    await ledger.spend_epoch(5)
    await ledger.close()
    again = await Ledger.open(path)
    assert (again.cluster, again.epoch) == (cluster, 9)
    for suffix in ("-wal", "-shm"):
        side = path.with_name(path.name + suffix)
        assert not side.exists() or stat.S_IMODE(side.stat().st_mode) == 0o600
    await again.close()


async def test_what_was_stored_survives_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite3"
    program = (
        "import asyncio, os, sys, pathlib\n"
        "from ckpt_engine.manager.ledger import Ledger\n"
        "from ckpt_engine.core.version import Version\n"
        "async def main():\n"
        "    ledger = await Ledger.open(pathlib.Path(sys.argv[1]))\n"
        "    await ledger.record_intent(7, Version('run', 3, b'r' * 32))\n"
        "    os.kill(os.getpid(), 9)\n"
        "asyncio.run(main())\n"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", program, str(path))
    assert await asyncio.wait_for(process.wait(), 60) == -9
    ledger = await Ledger.open(path)
    assert ledger.epoch == 7
    (intent,) = (await ledger.commits()).last
    assert (intent.epoch, intent.identity.number, intent.identity.root) == (7, 3, b"r" * 32)
    record = await ledger.record(7)
    assert record is not None
    assert record.report is None
    await ledger.close()


async def test_a_directory_that_is_not_there_is_no_place_for_a_ledger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A typing mistake would begin another cluster, and nobody would notice."""
    with pytest.raises(CkptEngineError, match=r"there is no directory .*lbi\. Correct --ledger, or make the"):
        await Ledger.open(tmp_path / "lbi" / "ledger.sqlite3")
    assert not (tmp_path / "lbi").exists()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for fresh in (True, False):
        ledger = await Ledger.open()
        assert (ledger.name, ledger.fresh) == (str(default_path()), fresh)
        await ledger.close()


async def test_a_second_holder_is_refused_and_told_who_holds_it(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite3"
    ledger = await Ledger.open(path)
    (tmp_path / "other-name").symlink_to(path)
    for name in (path, tmp_path / "other-name"):
        with pytest.raises(CkptEngineError, match=f"ledger {path} is in use by pid {os.getpid()}"):
            await Ledger.open(name)
    await ledger.close()
    await (await Ledger.open(path)).close()


async def test_history_is_paged_newest_first(place: Place) -> None:
    ledger = await place.open()
    for epoch in range(1, 6):
        await ledger.record_intent(epoch, identity(epoch))
        if epoch != 3:
            report = manager_pb2.UpdateReport(ok=epoch % 2 == 0, seconds=epoch)
            report.fence.epoch = epoch
            await ledger.record_outcome(report)
    assert [record.epoch for record in await ledger.history(limit=2)] == [5, 4]
    page = await ledger.history(before=4, limit=10)
    assert [(record.epoch, record.report is None) for record in page] == [(3, True), (2, False), (1, False)]
    assert page[1].report is not None
    assert page[1].report.seconds == 2
    assert await ledger.record(6) is None
    await ledger.close()


async def test_each_lineage_keeps_its_last_intent(place: Place) -> None:
    ledger = await place.open()
    await ledger.record_intent(1, identity(1, "a"))
    await ledger.record_intent(2, identity(8, "b"))
    await ledger.record_intent(3, identity(2, "a"))
    last = (await ledger.commits()).last
    assert [(each.epoch, each.identity.lineage, each.identity.number) for each in last] == [(2, "b", 8), (3, "a", 2)]
    await ledger.close()


async def test_a_newer_schema_and_a_foreign_file_are_refused_untouched(tmp_path: Path) -> None:
    newer = tmp_path / "newer.sqlite3"
    await (await Ledger.open(newer)).close()
    with sqlite3.connect(newer) as connection:
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    connection.close()
    with pytest.raises(CkptEngineError, match="upgrade"):
        await Ledger.open(newer)

    foreign = tmp_path / "foreign.sqlite3"
    with sqlite3.connect(foreign) as connection:
        connection.execute("CREATE TABLE theirs (x)")
    connection.close()
    before = foreign.read_bytes()
    with pytest.raises(CkptEngineError, match="another program"):
        await Ledger.open(foreign)
    assert foreign.read_bytes() == before

    text = tmp_path / "text"
    text.write_text("not a database, but long enough to look at " * 100)
    with pytest.raises(CkptEngineError, match="cannot be used"):
        await Ledger.open(text)
    with pytest.raises(CkptEngineError, match="is a directory: name a file in it"):
        await Ledger.open(tmp_path)


async def test_a_full_disk_refuses_in_words(tmp_path: Path) -> None:
    ledger = await Ledger.open(tmp_path / "ledger.sqlite3")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        with pytest.raises(CkptEngineError) as caught:
            await ledger.record_intent(1, identity(1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.problem.code == weights_pb2.Problem.CODE_FAILED_PRECONDITION
    assert "ledger.sqlite3 cannot be used" in caught.value.problem.message
    await ledger.record_intent(2, identity(2))  # and goes on when there is room again
    assert [record.epoch for record in await ledger.history()] == [2]
    await ledger.close()


def test_the_file_says_what_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert APPLICATION_ID.to_bytes(4, "big") == b"ckpt"
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert default_path() == tmp_path / "ckpt-engine" / "ledger.sqlite3"


async def test_its_size_is_bounded_and_lineages_keep_their_last_intent(place: Place) -> None:
    ledger = await place.open(kept_reports=10)
    await ledger.record_intent(1, identity(1, "first"))
    for epoch in range(2, 60):
        await ledger.record_intent(epoch, identity(epoch))
        report = manager_pb2.UpdateReport(seconds=epoch)
        report.fence.epoch = epoch
        await ledger.record_outcome(report)
    kept = [record.epoch for record in await ledger.history(limit=100)]
    assert kept == [*range(59, 49, -1), 1]
    assert [commit.identity.lineage for commit in (await ledger.commits()).last] == ["first", "run"]
    await ledger.close()


async def test_a_manager_that_lost_its_lock_writes_nothing_more(tmp_path: Path) -> None:
    """As on a file system that forgets locks: the lock's file is gone, and a second manager opens the same ledger."""
    path = tmp_path / "ledger.sqlite3"
    first = await Ledger.open(path)
    path.with_name(path.name + ".lock").unlink()
    second = await Ledger.open(path)
    await second.spend_epoch(5)
    for write in (first.spend_epoch(9), first.record_intent(9, identity(1)), first.record_outcome(report_of(9))):
        with pytest.raises(CkptEngineError, match="another manager has taken the ledger"):
            await write
    assert await second.history() == []
    await first.close()
    await second.close()
    again = await Ledger.open(path)
    assert again.epoch == 5
    await again.close()


async def test_a_ledger_whose_file_was_exchanged_is_not_written_to(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite3"
    await (await Ledger.open(path)).close()
    old = tmp_path / "old.sqlite3"
    shutil.copy(path, old)
    ledger = await Ledger.open(path)
    await ledger.spend_epoch(3)
    old.rename(path)
    with pytest.raises(CkptEngineError, match="put in its place"):
        await ledger.spend_epoch(4)
    path.unlink()
    with pytest.raises(CkptEngineError, match="was removed"):
        await ledger.spend_epoch(4)
    await ledger.close()


async def test_a_new_ledger_takes_the_place_of_a_lost_one(tmp_path: Path) -> None:
    path, cluster = tmp_path / "ledger.sqlite3", "1c2a7a4e-62c9-4f46-9d0b-6a2a1f3f2d11"
    ledger = await Ledger.open(path, cluster=cluster)
    assert ledger.cluster == cluster
    await ledger.close()
    await (await Ledger.open(path, cluster=cluster)).close()
    other = cluster.replace("1c", "2d", 1)
    with pytest.raises(CkptEngineError, match=f"is that of cluster {cluster}, not {other}"):
        await Ledger.open(path, cluster=other)
    with pytest.raises(CkptEngineError, match="which is a UUID"):
        await Ledger.open(tmp_path / "fresh.sqlite3", cluster="x'); DROP TABLE cluster; --")


async def test_a_ledger_of_the_schema_before_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite3"
    ledger = await Ledger.open(path)
    await ledger.record_intent(7, identity(3))
    await ledger.close()
    with sqlite3.connect(path) as connection:
        connection.executescript(
            "ALTER TABLE cluster DROP COLUMN generation; ALTER TABLE intents DROP COLUMN selection; "
            "ALTER TABLE intents DROP COLUMN late; "
            "DROP TABLE meant; DROP TABLE highest; DROP TABLE holds; DROP TABLE deployments; "
            "DROP TABLE seals; PRAGMA user_version = 1;"
        )
    connection.close()
    again = await Ledger.open(path)
    assert (again.cluster, again.epoch) == (ledger.cluster, 7)
    commit = Commit(7, identity(3))
    assert await again.commits() == Commits(7, (commit,), {EVERYBODY: commit})
    assert await again.highest() == [identity(3)]
    await again.spend_epoch(8)
    await again.close()


async def test_a_ledger_of_schema_3_knows_whom_updates_were_for(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite3"
    ledger = await Ledger.open(path)
    await ledger.record_intent(1, identity(1, "all"))
    await ledger.record_intent(2, identity(2, "some"), ("a", "b"))
    await ledger.record_intent(3, identity(1, "one"), ("b",))
    await ledger.close()
    connection = sqlite3.connect(path)
    connection.executescript(
        "ALTER TABLE intents DROP COLUMN late; DROP TABLE meant; DROP TABLE highest; DROP TABLE holds; "
        "DROP TABLE deployments; DROP TABLE seals; "
        "PRAGMA user_version = 3;"
    )
    connection.close()
    again = await Ledger.open(path)
    desired = (await again.commits()).desired
    assert desired == {
        EVERYBODY: Commit(1, identity(1, "all")),
        "a": Commit(2, identity(2, "some")),
        "b": Commit(3, identity(1, "one")),
    }
    await again.close()


async def test_a_ledger_of_schema_6_holds_nothing_and_can(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite3"
    await (await Ledger.open(path)).close()
    connection = sqlite3.connect(path)
    connection.executescript("DROP TABLE holds; DROP TABLE deployments; DROP TABLE seals; PRAGMA user_version = 6;")
    connection.close()
    again = await Ledger.open(path)
    assert await again.holds() == {}
    await again.record_hold("a", "")
    assert list(await again.holds()) == ["a"]
    await again.close()


async def test_what_operators_hold_outlives_the_manager(place: Place) -> None:
    ledger = await place.open()
    first = await ledger.record_hold("a", "")
    second = await ledger.record_hold("a", "it's odd")
    other = await ledger.record_hold("b", "")
    assert (second.since, second.reason) == (first.since, "it's odd")
    await ledger.close()
    again = await place.open()
    assert await again.holds() == {"a": second, "b": other}
    await again.record_release("a")
    await again.record_release("unknown")
    assert await again.holds() == {"b": other}
    await again.close()


async def test_a_manager_that_was_overtaken_holds_nothing(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite3"
    ledger = await Ledger.open(path)
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE cluster SET generation = generation + 1")
    connection.close()
    for call in (ledger.record_hold("a", ""), ledger.record_release("a")):
        with pytest.raises(CkptEngineError, match="another manager has taken the ledger"):
            await call
    await ledger.close()


async def test_a_number_never_gets_another_root_and_the_highest_outlives_its_intent(place: Place) -> None:
    ledger = await place.open(kept_reports=1)
    await ledger.record_intent(1, identity(5))
    await ledger.record_intent(2, identity(4))  # a machine that goes back on purpose: the highest number stays
    for epoch in range(3, 6):
        await ledger.record_intent(epoch, identity(1, "other"))
        await ledger.record_outcome(report_of(epoch))
    await ledger.close()
    again = await place.open()
    assert [record.identity.number for record in await again.history() if record.identity.lineage == "run"] == [4]
    assert await again.highest() == [identity(1, "other"), identity(5)]
    for version in (4, 5):
        other = Version("run", version, bytes(31) + b"x")
        with pytest.raises(CkptEngineError, match=f"version {version} of lineage 'run' has the root"):
            await again.record_intent(9, other)
    assert [commit.identity for commit in (await again.commits()).last] == [identity(4), identity(1, "other")]
    await again.close()


async def test_it_keeps_every_commit_that_some_replica_is_to_serve(place: Place) -> None:
    """However many updates of the others came since. Attempts to carry out a commit are no commits."""
    ledger = await place.open(kept_reports=2)
    await ledger.record_intent(1, identity(1), ("a",))
    for epoch in range(2, 9):
        await ledger.record_intent(epoch, identity(epoch), ("b",))
        await ledger.record_outcome(report_of(epoch))
    for epoch in range(9, 14):
        await ledger.record_intent(epoch, identity(1))
        await ledger.record_outcome(report_of(epoch))
    first, last = Commit(1, identity(1)), Commit(8, identity(8))
    assert await ledger.commits() == Commits(13, (last,), {"a": first, "b": last})
    await ledger.close()


async def test_a_ledger_that_did_not_keep_all_commits_falls_back_on_its_lineage(tmp_path: Path) -> None:
    """Of the software before, which deleted the commit when attempts to carry it out filled its reports."""
    path = tmp_path / "ledger.sqlite3"
    ledger = await Ledger.open(path)
    await ledger.record_intent(1, identity(1), (EVERYBODY, "a"))
    await ledger.close()
    connection = sqlite3.connect(path)
    connection.execute("UPDATE intents SET epoch = 9, late = 1, selection = '[\"\"]'")
    connection.commit()
    connection.close()
    again = await Ledger.open(path)
    commit = Commit(9, identity(1))
    assert await again.commits() == Commits(9, (commit,), {EVERYBODY: commit})
    await again.close()


async def test_how_the_last_update_to_a_version_ended(place: Place) -> None:
    """The report of a late replica does not take its place, and the roots of all of them are known after a restart."""
    ledger = await place.open()
    for epoch, version, meant in ((1, 1, [EVERYBODY]), (2, 2, [EVERYBODY]), (3, 1, [EVERYBODY]), (4, 1, [])):
        await ledger.record_intent(epoch, identity(version), meant)
        if epoch != 2:
            await ledger.record_outcome(report_of(epoch))
    await ledger.close()
    again = await place.open()
    known = await again.last_update("run", 1)
    assert (known.epoch, known.report) == (3, report_of(3))
    assert await again.last_update("run", 2) == Found(2, None, (1, 2))
    assert await again.last_update("run", 3) == Found(None, None, (1, 2))
    assert await again.last_update("other", 1) == Found(None, None, ())
    assert await again.identities() == [identity(2), identity(1)]
    await again.close()


async def test_what_was_promised_is_on_the_disk(tmp_path: Path) -> None:
    """A power cut cannot be provoked here; this is what SQLite needs to be told so that a commit waits for the disk."""
    ledger = await Ledger.open(tmp_path / "ledger.sqlite3")
    settings = await ledger._read(
        lambda run: [run.execute(f"PRAGMA {name}").fetchone()[0] for name in ("synchronous", "journal_mode")]
    )
    await ledger.close()
    assert settings == [2, "wal"]  # FULL


async def test_what_a_version_was_for_outlives_the_manager(place: Place) -> None:
    """Else a restarted manager would bring it to replicas that its update had left out."""
    ledger = await place.open()
    await ledger.record_intent(1, identity(1, "all"), (EVERYBODY,))
    await ledger.record_intent(2, identity(2), ("a", "b"))
    await ledger.record_intent(3, identity(1, "other"), ("b",))
    await ledger.record_intent(4, identity(2))  # a late replica
    await ledger.close()
    again = await place.open()
    versions = ManagerState.from_ledger("", 4, Deadlines(), await again.commits()).versions
    await again.close()
    held = {name: latest.identity.lineage for name in ("a", "b", "c") if (latest := versions.of(name))}
    assert held == {"a": "run", "b": "other", "c": "all"}


def report_of(epoch: int) -> manager_pb2.UpdateReport:
    report = manager_pb2.UpdateReport()
    report.fence.epoch = epoch
    return report


async def test_a_forgotten_lineage_is_served_to_nobody_and_keeps_its_numbers(place: Place) -> None:
    ledger = await place.open()
    gone, other = Version("gone", 4, bytes(32)), Version("other", 1, bytes(32))
    await ledger.record_intent(1, gone, ["a", "b", ""])
    await ledger.record_intent(2, other, ["b"])
    await ledger.record_intent(3, gone, ["c"])
    await ledger.record_forgotten("gone", 2)
    desired = (await ledger.commits()).desired
    assert {name: commit.epoch for name, commit in desired.items()} == {"b": 2, "c": 3}, "what came after it stays"
    await ledger.record_forgotten("gone", 3)
    await ledger.close()
    again = await place.open()
    assert set((await again.commits()).desired) == {"b"}
    assert gone in await again.highest()
    assert gone in await again.identities()
    with pytest.raises(CkptEngineError, match="has the root"):
        await again.record_intent(4, Version("gone", 4, bytes([1]) * 32), ["a"])
    await again.close()


async def test_a_deployment_is_written_with_each_of_its_commits(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite3"
    ledger = await Ledger.open(path)
    await ledger.record_intent(1, identity(1), (EVERYBODY,))
    row = manager_pb2.Deployment(number=2, state=manager_pb2.Deployment.STATE_UNDECIDED, participants=["a", "b"])
    row.waves.add(epoch=2, replicas=["a"])
    await ledger.record_intent(2, identity(2), ("a",), row)
    await ledger.close()
    again = await Ledger.open(path)
    commits = await again.commits()
    assert commits.deployments == (row,)
    assert commits.desired == {EVERYBODY: Commit(1, identity(1)), "a": Commit(2, identity(2))}
    later = manager_pb2.Deployment()
    later.CopyFrom(row)
    later.waves.add(epoch=3, replicas=["b"])
    with pytest.raises(CkptEngineError, match="has the root"):
        await again.record_intent(3, Version("run", 2, b"other" * 6), ("b",), later)
    assert (await again.commits()).deployments == (row,), "what is not committed is not in the row"
    row.paused = True
    await again.record_deployment(row)
    assert (await again.commits()).deployments == (row,)
    row.state = manager_pb2.Deployment.STATE_UNDONE
    await again.record_intent(4, identity(1), (EVERYBODY,), row)
    assert (await again.commits()).deployments == (row,), "its number is the highest, and is not to be called again"
    await again.record_intent(5, identity(3), (EVERYBODY,))
    assert (await again.commits()).deployments == ()
    await again.close()


async def test_an_undone_deployment_of_the_highest_number_outlives_its_report(place: Place) -> None:
    ledger = await place.open(kept_reports=2)
    undone = manager_pb2.Deployment(number=2, state=manager_pb2.Deployment.STATE_UNDONE)
    await ledger.record_intent(1, identity(1), (EVERYBODY,))
    await ledger.record_intent(2, identity(2), ("a",), undone)
    await ledger.record_intent(3, identity(1), (EVERYBODY,), undone)
    for epoch in range(2, 10):
        if epoch > 3:
            await ledger.record_intent(epoch, Version("other", epoch, bytes(32)), (EVERYBODY,))
        await ledger.record_outcome(report_of(epoch))
    assert (await ledger.commits()).deployments == (undone,)
    await ledger.record_intent(10, identity(3), (EVERYBODY,))
    await ledger.record_outcome(report_of(10))
    assert (await ledger.commits()).deployments == ()
    await ledger.close()


async def test_how_a_version_was_sealed_is_stored_with_its_commit(place: Place) -> None:
    ledger = await place.open()
    one, two, three = (identity(number) for number in (1, 2, 3))
    record = bytes(range(256)) * 999
    await ledger.record_intent(1, one, (EVERYBODY,), None, SealEntry(7, record), (one,))
    await ledger.record_intent(2, two, (EVERYBODY,), None, SealEntry(8, b"two"), (one, two))
    await ledger.record_intent(3, two)  # an attempt
    assert await ledger.seals([one, two, three]) == {one: SealEntry(7, record), two: SealEntry(8, b"two")}
    other = Version("run", 2, b"other" * 6)
    assert await ledger.seals([other]) == {}
    with pytest.raises(CkptEngineError, match="take a higher version"):
        await ledger.record_intent(4, other, (EVERYBODY,), None, SealEntry(9, b"other"), (other,))
    await ledger.close()
    again = await place.open()
    assert await again.seals([one, two]) == {one: SealEntry(7, record), two: SealEntry(8, b"two")}
    await again.record_intent(5, one, (EVERYBODY,), None, SealEntry(0, b"of a relay"), (one, two))  # a rollback
    assert (await again.seals([one]))[one] == SealEntry(7, record)
    await again.record_intent(6, three, (EVERYBODY,), None, SealEntry(9, None), (one, three))
    assert await again.seals([one, two, three]) == {one: SealEntry(7, record), three: SealEntry(9, None)}
    await again.record_intent(7, three, (EVERYBODY,), None, SealEntry(10, b"three"), (one, three))  # sealed once more
    assert (await again.seals([three]))[three] == SealEntry(10, b"three")
    await again.record_forgotten("run", 6)
    assert await again.seals([one, two, three]) == {three: SealEntry(10, b"three")}, "it was committed again since"
    await again.record_forgotten("run", 7)
    assert await again.seals([one, two, three]) == {}
    await again.close()


async def test_a_record_that_is_too_large_does_not_hinder_its_commit(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("ckpt_engine.manager.ledger.MOST_RECORD_BYTES", 100)
    ledger = await place.open()
    large, small = identity(1), identity(2)
    await ledger.record_intent(1, large, (EVERYBODY,), None, SealEntry(7, os.urandom(200)), (large,))
    assert await ledger.seals([large]) == {large: SealEntry(7, None)}
    assert "the sealed record of version 1 of lineage 'run'" in caplog.text
    assert "the ledger takes 100" in caplog.text
    await ledger.record_intent(2, small, (EVERYBODY,), None, SealEntry(8, b"x" * 1000), (large, small))
    assert (await ledger.seals([small]))[small] == SealEntry(8, b"x" * 1000), "it is stored compressed"
    await ledger.close()


async def test_a_damaged_record_counts_as_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "ledger.sqlite3"
    ledger = await Ledger.open(path)
    await ledger.record_intent(1, identity(1), (EVERYBODY,), None, SealEntry(7, b"record"), (identity(1),))
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE seals SET record = x'00ff'")
    connection.close()
    assert await ledger.seals([identity(1)]) == {identity(1): SealEntry(7, None)}
    assert "is damaged, and not used" in caplog.text
    await ledger.close()
