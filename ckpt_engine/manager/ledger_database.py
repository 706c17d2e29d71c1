"""A PostgreSQL database that several managers share as their ledger: its connections, its tables, and its term.

Decides when a connection is given up and made again, which databases are refused, and that only the manager with the
term writes. It does not decide when a manager asks for the term (`term.py`), nor what is stored (`ledger.py`).

The *term* is one row: its number, the manager that has it, how long it lasts from a renewal, and until when by the
database's clock. Every writing transaction locks that row, and requires that the term is still its manager's and has
not ended. So whatever a manager wrote is there before another one takes the term, and nothing of it comes later. No
lock outlives its transaction, and the server ends a transaction that is left open: a manager that was stopped in one
blocks no other.

That clock may be set back, and a term that is not renewed would then last for as long. So a manager may also take a
term whose row it has seen unchanged for the whole of it by its own clock (`term.py`), if the row is still that one. Its
holder has stopped by its own clock then, and can write nothing, since each write asks the row for its holder.

The row also counts the writes of its term. If the database has fewer of them than its manager has made, a replica of
the database took over that had not received all: the ledger was rolled back, and what that manager knows of it is no
longer so. It gives its term up, and the one that has the next term reads the ledger again.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypeVar, cast

from ckpt_engine.core.problems import CkptEngineError, precondition, unavailable
from ckpt_engine.extras import require
from ckpt_engine.manager.ledger_address import name_of, secrets_of
from ckpt_engine.manager.ledger_file import cluster_id
from ckpt_engine.manager.ledger_store import StatementResult, Statements
from ckpt_engine.shell.tasks import TaskFailedError

if TYPE_CHECKING:
    import psycopg

SCHEMA_VERSION = 2
"""Of the tables in a database; those in a file have their own."""

SCHEMA = "ckpt_engine"
"""The database's schema that the tables are in, so that they meet no others."""

OLDEST_SERVER = 130000
"""The oldest PostgreSQL that is accepted, as its server_version_num."""

PAUSE = 0.2
"""Seconds before a lost database is dialled again."""

NOT_DURABLE = {"synchronous_commit": "off", "fsync": "off"}
"""Settings under which PostgreSQL reports a commit that a power cut may undo."""

_SEALS = """
CREATE TABLE IF NOT EXISTS seals (
    lineage TEXT NOT NULL, version BIGINT NOT NULL, root BYTEA NOT NULL, fill BIGINT NOT NULL, record BYTEA,
    PRIMARY KEY (lineage, version)
);
"""
_TABLES = f"""
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
{_SEALS}
CREATE TABLE term (
    number BIGINT NOT NULL, holder TEXT NOT NULL, leader TEXT NOT NULL, until TIMESTAMPTZ NOT NULL,
    seconds DOUBLE PRECISION NOT NULL, writes BIGINT NOT NULL
);
INSERT INTO term VALUES (0, '', '', 'epoch', 0, 0);
"""

_MIGRATIONS = {
    1: f"""
ALTER TABLE term ADD COLUMN IF NOT EXISTS seconds DOUBLE PRECISION NOT NULL DEFAULT 0;
ALTER TABLE term ADD COLUMN IF NOT EXISTS writes BIGINT NOT NULL DEFAULT 0;
{_SEALS}
""",
}
"""The script from each version of the tables to the next one. Some databases say 1 and have parts of version 2."""

_HOLDS = "holder = %s AND until > clock_timestamp()"

T = TypeVar("T")


class LostTermError(CkptEngineError):
    """Raised by a write of a manager whose term has ended, or was taken over."""


@dataclass(frozen=True)
class Lead:
    """What the term's row says."""

    number: int
    leader: str  # the address under which members reach the manager that has it; empty: none ever had it
    seconds: float  # that it lasts from now on; 0 or less: it has ended
    length: float  # seconds for which it was taken, or renewed last; 0: by a manager that did not store it
    renewal: tuple[str, datetime]  # what each renewal changes: the row's holder, and its end by the database's clock


class Database:
    """Connections to one database, one at a time, made when they are needed. Used on one thread.

    Every method raises FAILED_PRECONDITION for a database that must not or cannot be used, UNAVAILABLE if it does not
    answer within `seconds`.
    """

    def __init__(self, address: str, seconds: float) -> None:
        """address: a connection URI, as of libpq. seconds: how long one transaction may take, with all attempts to
        reach the database again. Raises INVALID_ARGUMENT for an address that is none, FAILED_PRECONDITION if psycopg is
        not installed."""
        require("postgresql", "psycopg", what="a ledger in PostgreSQL")
        self._address = address
        self._seconds = seconds
        self._connection: psycopg.Connection[tuple[Any, ...]] | None = None
        self.name = name_of(address)

    def transaction(self, statements: Callable[[psycopg.Connection[tuple[Any, ...]]], T]) -> T:
        """Runs statements in one transaction. If the database is lost, dials it again and runs them again, until they
        are done or the time has passed. Raises TaskFailedError instead of another error once a COMMIT was sent of which
        no answer came: the transaction may have taken effect."""
        import psycopg

        end = time.monotonic() + self._seconds
        commit_sent = False
        while True:
            try:
                with self._connected(end) as connection, connection.transaction():
                    result = statements(connection)
                    commit_sent = True
                return result
            except psycopg.Error as error:
                self.close()
                problem = None if _may_pass(error) else self._unusable(error)
                if problem is None and time.monotonic() + PAUSE >= end:
                    problem = unavailable(
                        f"the ledger {self.name} does not answer: {self._words(error)}. {self._seconds:g} s were "
                        "waited for it: start PostgreSQL, or correct --ledger; of a replicated one name all hosts"
                    )
                if problem is not None:
                    raise (TaskFailedError(problem.problem, answered=False) if commit_sent else problem) from None
                time.sleep(PAUSE)

    def close(self) -> None:
        """Ends the connection. The next transaction makes another one."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    @contextlib.contextmanager
    def _connected(self, end: float) -> Iterator[psycopg.Connection[tuple[Any, ...]]]:
        """A connection, which is cut at `end` (monotonic seconds): a server that is stopped never answers."""
        if self._connection is None or self._connection.closed:
            self._connection = self._connect(end)
        with _cut_after(max(0.05, end - time.monotonic()), self._connection):
            yield self._connection

    def _connect(self, end: float) -> psycopg.Connection[tuple[Any, ...]]:
        import psycopg

        seconds = max(1.0, end - time.monotonic())
        connection = psycopg.connect(
            self._address,
            autocommit=True,
            connect_timeout=max(2, int(seconds)),  # libpq takes no less
            tcp_user_timeout=int(1000 * self._seconds),
            keepalives_idle=max(1, int(self._seconds)),
            target_session_attrs="read-write",
            application_name="ckpt-engine manager",
            prepare_threshold=None,  # a pooler between may give each transaction another connection
        )
        try:
            with _cut_after(seconds, connection):
                self._check(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _check(self, connection: psycopg.Connection[tuple[Any, ...]]) -> None:
        milliseconds = int(1000 * self._seconds)
        connection.execute(f"SET statement_timeout = {milliseconds}")
        connection.execute(f"SET idle_in_transaction_session_timeout = {milliseconds}")
        connection.execute(f"SET search_path = {SCHEMA}")
        connection.execute("SET default_transaction_isolation = 'read committed'")
        if connection.info.server_version < OLDEST_SERVER:
            raise precondition(
                f"the ledger {self.name} is in PostgreSQL {connection.info.server_version // 10000}: "
                f"{OLDEST_SERVER // 10000} or newer is needed"
            )
        for setting, bad in NOT_DURABLE.items():
            (value,) = cast("tuple[str]", connection.execute(f"SHOW {setting}").fetchone())
            if value == bad:
                raise precondition(
                    f"the ledger {self.name} has {setting}={value}: PostgreSQL would report commits that a power cut "
                    f"undoes, and two versions could get one number. Set {setting}=on for this database and role"
                )

    def _unusable(self, error: Exception) -> CkptEngineError:
        return precondition(
            f"the ledger {self.name} cannot be used: {self._words(error)}. Correct --ledger, or the database's rights"
        )

    def _words(self, error: Exception) -> str:
        """The error in one line, without what the address keeps secret."""
        line = " ".join(str(error).split()) or type(error).__name__
        for secret in secrets_of(self._address):
            line = line.replace(secret, "…")
        return line


class DatabaseStore:
    """The ledger's tables in a database, for the manager with the term. As `Store`."""

    def __init__(self, database: Database, terms: Terms, lost: Callable[[str], object], *, fresh: bool = False) -> None:
        """terms: that has taken the term. lost: called on the ledger's thread by each write that finds that it has
        ended, with the reason for people. fresh: the tables were just made."""
        self.name = database.name
        self.fresh = fresh
        self._database = database
        self._terms = terms
        self._holder = terms.holder
        self._lost = lost

    def read(self, statements: Callable[[Statements], T]) -> T:
        """As `Store.read`."""

        def run(connection: psycopg.Connection[tuple[Any, ...]]) -> T:
            connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
            return statements(_Translated(connection))

        return self._database.transaction(run)

    def write(self, statements: Callable[[Statements], T]) -> T:
        """As `Store.write`. Raises LostTermError if the term has ended or was taken over, or the database has lost
        writes of it."""
        count = self._terms.writes + 1
        ended = (
            f"this manager's term in the ledger {self.name} has ended: it writes nothing more, and another one may "
            "lead by now"
        )

        def run(connection: psycopg.Connection[tuple[Any, ...]]) -> T:
            row = connection.execute(
                f"UPDATE term SET writes = writes + 1 WHERE {_HOLDS} RETURNING writes", (self._holder,)
            ).fetchone()
            _check_term(row, count, self.name, ended)
            return statements(_Translated(connection))

        try:
            result = self._database.transaction(run)
        except LostTermError as error:
            self._lost(error.problem.message)
            raise
        self._terms.writes = count
        return result

    def close(self) -> None:
        """Ends the connection."""
        self._database.close()


class _Translated:
    """A transaction of psycopg's, with `?` for values as in SQLite. No statement has either sign in another sense."""

    def __init__(self, connection: psycopg.Connection[tuple[Any, ...]]) -> None:
        self._connection = connection

    def execute(self, statement: str, values: Sequence[object] = (), /) -> StatementResult:
        """Runs one statement."""
        return self._connection.execute(statement.replace("?", "%s").encode(), values)


class Terms:
    """The term's row, as one manager asks for it. Used on one thread."""

    def __init__(self, database: Database) -> None:
        self.holder = uuid.uuid4().hex
        """What the row names this manager by; a new one for each term, since a database that was rolled back may give a
        number twice."""
        self.writes = 0
        """At least so many writes of this term the database has confirmed."""
        self.name = database.name
        self._database = database

    def prepare(self, cluster: str) -> bool:
        """Makes the tables if they are not there, and migrates older ones. Returns whether it made them. cluster: as
        of `Ledger.open`.

        Raises FAILED_PRECONDITION for tables of a newer release, or of another cluster than the named one.
        """
        return self._database.transaction(lambda connection: self._prepare(connection, cluster))

    def _prepare(self, connection: psycopg.Connection[tuple[Any, ...]], cluster: str) -> bool:
        # Two managers may start at once. The lock ends with the transaction.
        connection.execute("SELECT pg_advisory_xact_lock(hashtext(%s))", (SCHEMA,))
        found = connection.execute("SELECT to_regclass(%s)", (f"{SCHEMA}.cluster",)).fetchone()
        if found is None or found[0] is None:
            schema = connection.execute("SELECT 1 FROM pg_namespace WHERE nspname = %s", (SCHEMA,)).fetchone()
            if schema is None:
                connection.execute(f"CREATE SCHEMA {SCHEMA}")
            connection.execute(_TABLES)
            connection.execute(
                "INSERT INTO cluster VALUES (%s, %s, 0, %s)", (cluster_id(cluster), time.time(), SCHEMA_VERSION)
            )
            return True
        ours, tables = cast("tuple[str, int]", connection.execute("SELECT id, tables FROM cluster").fetchone())
        if tables > SCHEMA_VERSION:
            raise precondition(
                f"the ledger {self.name} has tables of version {tables}, this software knows up to {SCHEMA_VERSION}: "
                "upgrade ckpt-engine"
            )
        if cluster and ours != cluster:
            raise precondition(
                f"the ledger {self.name} is that of cluster {ours}, not {cluster}: leave --cluster out, or name an "
                "empty database"
            )
        if tables < SCHEMA_VERSION:
            for older in range(tables, SCHEMA_VERSION):
                connection.execute(_MIGRATIONS[older])
            connection.execute("UPDATE cluster SET tables = %s", (SCHEMA_VERSION,))
        return False

    def take(self, leader: str, seconds: float, unrenewed: Lead | None = None) -> Lead | None:
        """Takes the term for `seconds`, if no manager has it. Returns the one that has it, or None: this manager does.
        leader: the address under which members reach this manager. unrenewed: what was there for a whole term: taken,
        whatever the database's clock says, if the row is still that."""
        holder_then, end_then = (None, None) if unrenewed is None else unrenewed.renewal

        def run(connection: psycopg.Connection[tuple[Any, ...]]) -> Lead | None:
            holder = uuid.uuid4().hex
            taken = connection.execute(
                "UPDATE term SET number = number + 1, holder = %s, leader = %s, seconds = %s, writes = 0, "
                "until = clock_timestamp() + make_interval(secs => %s) "
                "WHERE until <= clock_timestamp() OR (holder = %s AND until = %s)",
                (holder, leader, seconds, seconds, holder_then, end_then),
            )
            if taken.rowcount == 1:
                self.holder, self.writes = holder, 0
                return None
            row = connection.execute(
                "SELECT number, leader, extract(epoch FROM until - clock_timestamp()), seconds, holder, until FROM term"
            ).fetchone()
            assert row is not None
            return Lead(row[0], row[1], float(row[2]), row[3], row[4:])

        return self._database.transaction(run)

    def renew(self, seconds: float) -> None:
        """Has the term last for `seconds` from now on. Raises LostTermError if this manager has it no longer, or the
        database has lost writes of it."""
        count = self.writes

        def run(connection: psycopg.Connection[tuple[Any, ...]]) -> None:
            row = connection.execute(
                "UPDATE term SET seconds = %s, until = clock_timestamp() + make_interval(secs => %s) "
                f"WHERE {_HOLDS} RETURNING writes",
                (seconds, seconds, self.holder),
            ).fetchone()
            _check_term(row, count, self.name, f"the term in ledger={self.name} has ended, or was taken over")

        self._database.transaction(run)

    def release(self) -> None:
        """Ends the term now, if this manager has it, so that another one needs not wait for its end."""
        self._database.transaction(
            lambda connection: connection.execute(
                f"UPDATE term SET until = clock_timestamp() WHERE {_HOLDS}", (self.holder,)
            )
        )

    def close(self) -> None:
        """Ends the connection."""
        self._database.close()


def _check_term(row: tuple[Any, ...] | None, writes: int, ledger: str, ended: str) -> None:
    """Raises LostTermError if this manager's term has no row any more, which is said as `ended`, or if its row counts
    fewer writes than `writes`. row: its count of writes."""
    if row is None:
        raise LostTermError(precondition(ended).problem)
    if row[0] < writes:
        raise LostTermError(
            precondition(
                f"the ledger {ledger} was rolled back: a replica of the database, or a copy, took over that lacks at "
                f"least the last {writes - row[0]} writes of this manager. It gives its term up; the one that leads "
                "next reads the ledger again and goes on above what members have seen"
            ).problem
        )


def _may_pass(error: psycopg.Error) -> bool:
    """Whether a failure may be over in a moment, so that another attempt is made: the connection was lost, or the
    server starts, stops, became a replica or has no room."""
    import psycopg

    if isinstance(error, psycopg.errors.ReadOnlySqlTransaction):
        return True
    words = str(error)
    for_ever = ("authentication failed", "does not exist", "no pg_hba.conf", "no password", "not permitted to log in")
    return isinstance(error, psycopg.OperationalError) and not any(each in words for each in for_ever)


@contextlib.contextmanager
def _cut_after(seconds: float, connection: psycopg.Connection[tuple[Any, ...]]) -> Iterator[None]:
    """Ends a connection, from another thread, if what is done with it meanwhile takes longer."""

    def cut() -> None:
        with contextlib.suppress(Exception), socket.socket(fileno=os.dup(connection.fileno())) as line:
            line.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(seconds, cut)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
