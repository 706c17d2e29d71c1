"""A ledger in PostgreSQL: who may write, what is refused, and what is said of a database that is not there."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from ckpt_engine.core.problems import CkptEngineError, ErrorCode
from ckpt_engine.core.version import Version
from ckpt_engine.manager.ledger import SealEntry
from ckpt_engine.manager.ledger_address import ledger_of, name_of
from ckpt_engine.manager.ledger_database import SCHEMA_VERSION, Database, Lead, LostTermError
from ckpt_engine.manager.term import Term
from ckpt_engine.shell.tasks import TaskFailedError
from ckpt_engine.v1 import manager_pb2
from tests import postgresql as servers
from tests.postgresql import PASSWORD, USER, Server
from tests.waiting import until

OLDEST_TABLES = """
CREATE SCHEMA ckpt_engine;
SET search_path = ckpt_engine;
CREATE TABLE cluster (
    id TEXT NOT NULL, made DOUBLE PRECISION NOT NULL, epoch BIGINT NOT NULL, tables INTEGER NOT NULL
);
CREATE TABLE intents (
    epoch BIGINT PRIMARY KEY, lineage TEXT NOT NULL, version BIGINT NOT NULL, root BYTEA NOT NULL,
    time DOUBLE PRECISION NOT NULL, selection TEXT NOT NULL, late INTEGER NOT NULL
);
CREATE TABLE outcomes (epoch BIGINT PRIMARY KEY, report BYTEA NOT NULL, time DOUBLE PRECISION NOT NULL);
CREATE TABLE meant (replica TEXT PRIMARY KEY, epoch BIGINT NOT NULL, lineage TEXT NOT NULL);
CREATE TABLE highest (lineage TEXT PRIMARY KEY, version BIGINT NOT NULL, root BYTEA NOT NULL);
CREATE TABLE holds (replica TEXT PRIMARY KEY, since DOUBLE PRECISION NOT NULL, reason TEXT NOT NULL);
CREATE TABLE deployments (number BIGINT PRIMARY KEY, undecided BIGINT NOT NULL, deployment BYTEA NOT NULL);
CREATE TABLE term (
    number BIGINT NOT NULL, holder TEXT NOT NULL, leader TEXT NOT NULL, until TIMESTAMPTZ NOT NULL
);
INSERT INTO cluster VALUES ('1c2a7a4e-62c9-4f46-9d0b-6a2a1f3f2d11', 0, 7, 1);
INSERT INTO intents VALUES (7, 'run', 1, decode(repeat('00', 32), 'hex'), 0, '[""]', 0);
INSERT INTO meant VALUES ('', 7, 'run');
INSERT INTO highest VALUES ('run', 1, decode(repeat('00', 32), 'hex'));
INSERT INTO term VALUES (3, 'older', 'a:1', clock_timestamp() + interval '1 hour');
"""
"""A ledger with tables of version 1, of a manager that leads."""

ONE, TWO = Version("run", 1, bytes(32)), Version("run", 2, bytes(32))


@asynccontextmanager
async def asking(address: str, seconds: float = 60.0, answer_seconds: float = 10.0) -> AsyncIterator[Term]:
    term = Term(address, seconds, answer_seconds)
    try:
        await term.prepare("")
        yield term
    finally:
        await term.close()


def database_of(address: str) -> str:
    return address.rpartition("/")[2]


async def test_one_has_the_term_and_the_others_are_told_which(postgresql: Server) -> None:
    address = postgresql.new_database()
    async with asking(address) as first, asking(address) as second:
        assert await first.take("a:1") is None
        lead = await second.take("b:1")
        assert lead is not None
        assert (lead.number, lead.leader) == (1, "a:1")
        assert 0 < lead.seconds <= 60
        assert first.held
        assert not second.held
        await first.release()
        assert not first.held
        assert not first.lost.is_set()
        assert await second.take("b:1") is None


async def test_a_manager_whose_term_was_taken_writes_nothing_more(postgresql: Server) -> None:
    """Every write: by the database's clock, whatever the manager believes."""
    address = postgresql.new_database()
    async with asking(address) as first, asking(address) as second:
        assert await first.take("a:1") is None
        ledger = await first.ledger()
        await ledger.record_intent(1, ONE, [""])
        postgresql.run("UPDATE ckpt_engine.term SET until = clock_timestamp()", database_of(address))
        report = manager_pb2.UpdateReport()
        report.fence.epoch = 1
        writes: list[Callable[[], object]] = [
            lambda: ledger.spend_epoch(9),
            lambda: ledger.record_intent(9, TWO, ["a"], None, SealEntry(8, b"record"), [ONE, TWO]),
            lambda: ledger.record_outcome(report),
            lambda: ledger.record_hold("a", ""),
            lambda: ledger.record_release("a"),
            lambda: ledger.record_forgotten("run", 9),
        ]
        for write in writes:  # the term has ended, and nobody else has one yet
            with pytest.raises(LostTermError, match=r"term in the ledger .* has ended"):
                await write()  # type: ignore[misc]
        assert await second.take("b:1") is None
        for write in writes:
            with pytest.raises(LostTermError, match="another one may lead by now"):
                await write()  # type: ignore[misc]
        theirs = await second.ledger()
        assert theirs.epoch == 1
        assert await theirs.holds() == {}
        assert [each.report for each in await theirs.history()] == [None]
        for each in (ledger, theirs):
            await each.close()


async def test_a_database_clock_that_is_set_back_keeps_nobody_from_leading(
    postgresql: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No test may set the clock of its machine. What a clock that was set back leaves is a term that ends in an hour;
    the managers' own clock is a fake, so that nothing here waits for it."""
    now = 1000.0
    monkeypatch.setattr("ckpt_engine.manager.term._now", lambda: now)
    address = postgresql.new_database()
    moment = "SELECT until FROM ckpt_engine.term"
    set_back = "UPDATE ckpt_engine.term SET until = until + interval '1 hour'"
    async with asking(address) as first, asking(address) as second:
        assert await first.take("a:1") is None
        await first._stop_keeping()
        ledger = await first.ledger()
        postgresql.run(set_back, database_of(address))
        lead = await second.take("b:1")
        assert lead is not None
        assert lead.seconds > 3600
        now += 59.9
        assert await second.take("b:1") is not None, "it may still lead, by its own clock"
        assert first.held
        first._terms.renew(60.0)
        postgresql.run(set_back, database_of(address))
        now += 0.2
        assert await second.take("b:1") is not None, "it was renewed"
        now += 59.9
        assert await second.take("b:1") is not None
        now += 0.2
        assert await second.take("b:1") is None, "nobody has renewed it for a term"
        assert "term of a:1 was not renewed for 60 s" in caplog.text
        assert "was that clock set back?" in caplog.text
        (until,) = postgresql.run(moment, database_of(address))
        with pytest.raises(LostTermError):
            await ledger.spend_epoch(9)
        assert await first.take("a:1") is not None
        assert postgresql.run(moment, database_of(address)) == [until]
        await ledger.close()


async def test_what_was_written_is_there_before_another_leads(postgresql: Server) -> None:
    """A write that began in a term and goes on after its end holds the term's row: the next manager waits for it."""
    address = postgresql.new_database()
    async with asking(address, seconds=1.0) as first, asking(address) as second:
        assert await first.take("a:1") is None
        await first._stop_keeping()  # a renewal that waits for the row as well may come first
        ledger = await first.ledger()
        in_it, go_on = asyncio.Event(), asyncio.Event()
        loop = asyncio.get_running_loop()

        def slow(run: object) -> None:
            loop.call_soon_threadsafe(in_it.set)
            asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result(60)

        writing = asyncio.ensure_future(ledger._write(7, slow))
        await in_it.wait()
        ended = "SELECT 1 FROM ckpt_engine.term WHERE until <= clock_timestamp()"
        await until(lambda: postgresql.run(ended, database_of(address)), "the term has ended")
        taking = asyncio.ensure_future(second.take("b:1"))
        await asyncio.sleep(0.3)
        assert not taking.done(), "it does not read past a write that may still count"
        go_on.set()
        await writing
        assert await taking is None
        theirs = await second.ledger()
        assert theirs.epoch == 7
        for each in (ledger, theirs):
            await each.close()


async def test_a_term_that_took_long_to_get_is_renewed_at_once(
    postgresql: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock of the test's own, which moves only while the database is asked."""
    now = 0.0
    monkeypatch.setattr("ckpt_engine.manager.term._now", lambda: now)
    address = postgresql.new_database()
    moment = "SELECT until FROM ckpt_engine.term"
    async with asking(address) as term:
        take, ends = term._terms.take, []

        def slow(*arguments: Any) -> Lead | None:
            nonlocal now
            lead = take(*arguments)
            ends.extend(postgresql.run(moment, database_of(address)))
            now += 55.0
            return lead

        monkeypatch.setattr(term._terms, "take", slow)
        assert await term.take("a:1") is None
        await until(lambda: postgresql.run(moment, database_of(address)) > ends, "it was renewed")


async def test_a_term_is_renewed_and_ends_by_the_managers_own_clock(postgresql: Server) -> None:
    """The database stops: nothing tells the manager that its term has ended."""
    address = postgresql.new_database()
    async with asking(address, seconds=4.0, answer_seconds=1.0) as term:
        assert await term.take("a:1") is None
        moment = "SELECT until FROM ckpt_engine.term"
        first = postgresql.run(moment, database_of(address))
        await until(lambda: postgresql.run(moment, database_of(address)) > first, "it was renewed")
        with stopped([postgresql.pid, *backends(address)]):
            await asyncio.wait_for(term.lost.wait(), 60)
            assert not term.held


@contextmanager
def stopped(processes: list[int]) -> Iterator[None]:
    try:
        for each in processes:
            with suppress(ProcessLookupError):  # a connection's process that has ended meanwhile
                os.kill(each, signal.SIGSTOP)
        yield
    finally:
        for each in processes:
            with suppress(ProcessLookupError):
                os.kill(each, signal.SIGCONT)


def backends(address: str) -> list[int]:
    """The server's processes for a database, as the system knows them: the server may not answer."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            words = path.read_bytes()
            if words.startswith(b"postgres: ") and database_of(address).encode() in words:
                found.append(int(path.parent.name))
    return found


async def test_a_stopped_or_ended_server_is_waited_for_and_then_named() -> None:
    with servers.running() as server:
        address = server.new_database()
        async with asking(address, answer_seconds=2.0) as term:
            assert await term.take("a:1") is None
            ledger = await term.ledger()
            await ledger.spend_epoch(3)
            server.stop()
            with pytest.raises(CkptEngineError, match=r"does not answer: .* 2 s were waited for it: start") as caught:
                await ledger.spend_epoch(4)
            assert caught.value.code == ErrorCode.UNAVAILABLE
            assert PASSWORD not in str(caught.value)
            server.start()
            await ledger.spend_epoch(5)  # over a new connection, in the same term
            await ledger.close()


def test_a_commit_without_an_answer_may_have_taken_effect() -> None:
    with servers.running() as server:
        database = Database(server.new_database(), 2.0)
        with pytest.raises(TaskFailedError, match="does not answer") as caught:
            database.transaction(lambda connection: server.stop())
        assert not caught.value.answered
        with pytest.raises(CkptEngineError, match="does not answer") as before:
            database.transaction(lambda connection: connection.execute("SELECT 1"))
        assert not isinstance(before.value, TaskFailedError)
        server.start()
        database.close()


async def test_a_replica_of_the_database_that_lost_something_is_noticed(postgresql: Server) -> None:
    """As after a failover to an asynchronous replica: the term may still be there, and what came after it not."""
    address = postgresql.new_database()
    async with asking(address) as term:
        assert await term.take("a:1") is None
        ledger = await term.ledger()
        await ledger.spend_epoch(9)
        postgresql.run("UPDATE ckpt_engine.cluster SET epoch = 5", database_of(address))
        for _ in range(2):
            with pytest.raises(CkptEngineError, match="was rolled back while this manager ran: it had spent epoch 9"):
                await ledger.spend_epoch(10)
        await ledger.close()


@pytest.mark.parametrize("noticed_by", ["a write", "a renewal"])
async def test_a_leader_whose_writes_are_lost_gives_its_term_up(
    postgresql: Server, noticed_by: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Also of writes that spent no epoch. `tests/faults/test_lost_databases.py` has a real replica take over."""
    address = postgresql.new_database()
    async with asking(address, seconds=60.0 if noticed_by == "a write" else 3.0) as first, asking(address) as second:
        assert await first.take("a:1") is None
        ledger = await first.ledger()
        await ledger.record_hold("one", "")
        await ledger.record_hold("two", "")
        assert not first.lost.is_set()
        postgresql.run("UPDATE ckpt_engine.term SET writes = writes - 1", database_of(address))
        for _ in range(2 if noticed_by == "a write" else 0):
            with pytest.raises(LostTermError, match="lacks at least the last 1 writes of this manager"):
                await ledger.record_hold("three", "")
        await asyncio.wait_for(first.lost.wait(), 60)
        assert not first.held
        assert caplog.text.count("was rolled back: a replica of the database, or a copy, took over") == 1
        await ledger.close()
        await first.release()
        assert await second.take("b:1") is None, "it needs not wait for the term's end"
        theirs = await second.ledger()
        assert {*await theirs.holds()} == {"one", "two"}
        await theirs.close()


async def test_a_number_given_twice_does_not_make_two_leaders(postgresql: Server) -> None:
    """A replica of the database knows nothing of the last term, and gives its number to another manager."""
    address = postgresql.new_database()
    async with asking(address) as first, asking(address) as second:
        assert await first.take("a:1") is None
        ledger = await first.ledger()
        postgresql.run("UPDATE ckpt_engine.term SET number = 0, holder = '', until = 'epoch'", database_of(address))
        assert await second.take("b:1") is None
        assert postgresql.run("SELECT number FROM ckpt_engine.term", database_of(address)) == [(1,)]
        with pytest.raises(LostTermError):
            await ledger.spend_epoch(1)
        await ledger.close()


async def test_a_database_that_forgets_commits_is_refused(postgresql: Server) -> None:
    address = postgresql.new_database()
    postgresql.run(f"ALTER DATABASE {database_of(address)} SET synchronous_commit = off")
    with pytest.raises(CkptEngineError, match=r"has synchronous_commit=off: .* Set synchronous_commit=on for this"):
        async with asking(address):
            pass


async def test_tables_of_a_newer_release_and_another_cluster_are_refused(postgresql: Server) -> None:
    address = postgresql.new_database()
    async with asking(address) as term:
        assert await term.take("a:1") is None
        ledger = await term.ledger()
        assert ledger.fresh
        assert len(ledger.cluster) == 36
        await ledger.close()
        other = "1c2a7a4e-62c9-4f46-9d0b-6a2a1f3f2d11"
        with pytest.raises(CkptEngineError, match=f"is that of cluster {ledger.cluster}, not {other}"):
            await term.prepare(other)
        await term.prepare(ledger.cluster)
    postgresql.run(f"UPDATE ckpt_engine.cluster SET tables = {SCHEMA_VERSION + 1}", database_of(address))
    with pytest.raises(CkptEngineError, match="upgrade ckpt-engine"):
        async with asking(address):
            pass


@pytest.mark.parametrize(
    "since",
    ["", "ADD seconds DOUBLE PRECISION NOT NULL DEFAULT 0", "ADD writes BIGINT NOT NULL DEFAULT 0"],
    ids=["oldest", "with seconds", "with writes"],
)
async def test_tables_of_version_1_are_migrated(
    postgresql: Server, since: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those that have some of the second version already. The term of a manager that did not store its length is
    not taken from it while it lasts by the database's clock."""
    now = 1000.0
    monkeypatch.setattr("ckpt_engine.manager.term._now", lambda: now)
    address = postgresql.new_database()
    postgresql.run(OLDEST_TABLES, database_of(address))
    if since:
        postgresql.run(f"ALTER TABLE ckpt_engine.term {since}", database_of(address))
    async with asking(address) as first, asking(address) as second:
        assert postgresql.run("SELECT tables FROM ckpt_engine.cluster", database_of(address)) == [(SCHEMA_VERSION,)]
        for _ in range(3):
            lead = await first.take("b:1")
            assert lead is not None, "the older manager leads"
            assert (lead.number, lead.leader) == (3, "a:1")
            now += 600.0
        postgresql.run("UPDATE ckpt_engine.term SET until = clock_timestamp()", database_of(address))
        assert await first.take("b:1") is None
        ledger = await first.ledger()
        assert not ledger.fresh
        assert (ledger.cluster, ledger.epoch) == ("1c2a7a4e-62c9-4f46-9d0b-6a2a1f3f2d11", 7)
        assert [each.identity for each in await ledger.history()] == [ONE]
        await ledger.record_intent(8, TWO, [""], None, SealEntry(7, b"record"), [ONE, TWO])
        assert await ledger.seals([TWO]) == {TWO: SealEntry(7, b"record")}
        lead = await second.take("c:1")
        assert lead is not None
        assert lead.length == 60.0
        await ledger.close()


async def test_two_that_begin_at_once_make_one_ledger(postgresql: Server) -> None:
    address = postgresql.new_database()
    terms = [Term(address, 60.0, 10.0) for _ in range(4)]
    await asyncio.gather(*(term.prepare("") for term in terms))
    leads = await asyncio.gather(*(term.take(f"{number}:1") for number, term in enumerate(terms)))
    assert sum(lead is None for lead in leads) == 1
    for term in terms:
        await term.close()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda address: address.replace(quote(PASSWORD, safe=""), "wrong-secret"), "password authentication failed"),
        (lambda address: f"{address}x", "does not exist"),
        (lambda address: address.replace(f":{address.rpartition(':')[2]}", ":1/x"), "does not answer"),
        (lambda address: address.replace("%20", "%zz"), "is not the address of a PostgreSQL database"),
        (lambda address: address.replace(quote("@", safe=""), "@"), "more than one '@'"),
        (lambda address: f"{address}?sslmod=require", "is not the address of a PostgreSQL database"),
    ],
)
async def test_a_wrong_address_is_refused_without_its_secret(
    postgresql: Server, change: Callable[[str], str], words: str
) -> None:
    with pytest.raises(CkptEngineError) as caught:
        async with asking(change(postgresql.new_database()), answer_seconds=2.0):
            pass
    message = caught.value.problem.message
    assert words in message
    for secret in (PASSWORD, quote(PASSWORD, safe=""), "wrong-secret", "wo%2Frd", "ss@wo"):
        assert secret not in message


@pytest.mark.parametrize(
    "name", ["PostgreSQL://u:secret@h/d", "postgresql+psycopg://u:secret@h/d", "host=h password=secret"]
)
def test_what_was_meant_as_a_database_is_no_file(name: str) -> None:
    with pytest.raises(CkptEngineError, match="begins with postgresql://") as caught:
        ledger_of(name)
    assert "secret" not in str(caught.value)


def test_a_file_is_a_file() -> None:
    assert ledger_of("state/a=b.sqlite3") == Path("state/a=b.sqlite3")


def test_the_name_of_a_ledger_has_no_secret() -> None:
    assert (
        name_of(f"postgresql://{USER}:secret@db:5433/ledger?sslmode=require") == f"postgresql://{USER}@db:5433/ledger"
    )
    assert name_of("postgresql://a,b/ledger") == "postgresql://a,b/ledger"
    assert name_of("postgresql:///ledger?host=/run/postgresql") == "postgresql:///ledger"


async def test_psycopg_is_named_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckpt_engine.extras.find_spec", lambda name: None)
    with pytest.raises(CkptEngineError, match=r"needs psycopg, .* pip install 'ckpt-engine\[postgresql\]'"):
        Term("postgresql://db/ledger", 6.0, 5.0)
