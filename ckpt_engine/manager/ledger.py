"""What must survive a manager: the cluster's id, the spent epochs, what was about to happen and what happened.

An SQLite file (WAL, ``synchronous=FULL``, mode 0600) that one manager holds alone for its whole life. It stores
intents, reports, which version each replica should serve, which replicas operators hold, and staged deployments. What
replicas do serve is never stored: only the workers know that. All statements run on one thread of the ledger's own, in
the order of the calls, so the event loop never waits for a disk.

Its size is bounded: it keeps the newest ``KEPT_REPORTS`` reports with their intents. Of older ones it keeps the last
intent of each lineage and every commit that is still some replica's newest.

A lock can be lost (a network file system, a replaced file), so it is not the only guard. Each opening increments the
file's generation, and every write requires its own generation and the file that it opened. A manager that was overtaken
fails at its next write and begins nothing more.
"""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from ckpt_engine.core.problems import precondition
from ckpt_engine.core.version import Version
from ckpt_engine.machines.events import Found, OperatorHold
from ckpt_engine.machines.manager.versions import Commit, Commits
from ckpt_engine.manager.ledger_file import prepare, take_lock, unusable
from ckpt_engine.v1 import manager_pb2

LAST_NAMED = 4
"""Updates of a lineage that are named to a caller that asks for an unknown one."""

KEPT_REPORTS = 1000
"""A report of 64 replicas of 8 workers takes some 130 kB: the file stays below 130 MB even then."""

T = TypeVar("T")


@dataclass(frozen=True)
class Record:
    """One update of the history."""

    epoch: int
    identity: Version
    time: float  # Unix seconds
    report: manager_pb2.UpdateReport | None  # None: the manager ended between the intent and the report


def default_path() -> Path:
    """Where the ledger lies by default: below the XDG state directory of this user.

    Raises FAILED_PRECONDITION for a user without a home directory, as in containers.
    """
    try:
        state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    except RuntimeError as error:
        raise precondition(
            f"user {os.getuid()} has no home directory to keep the ledger in: give --ledger FILE"
        ) from error
    return Path(state) / "ckpt-engine" / "ledger.sqlite3"


class Ledger:
    """An open ledger. ``cluster`` and ``epoch`` are as they were when it was opened.

    Every method may be awaited from any event loop. Each raises FAILED_PRECONDITION, with the system's error, when the
    file cannot be read or written. When a method returns, its effect is on the disk.
    """

    def __init__(
        self,
        path: Path,
        connection: sqlite3.Connection,
        lock: int,
        thread: ThreadPoolExecutor,
        kept_reports: int,
        fresh: bool,
    ) -> None:
        """fresh: the file was just created."""
        self.path = path
        self.fresh = fresh
        self._kept_reports = kept_reports
        self._file = _file_at(path)
        self._connection = connection
        self._lock = lock
        self.written: Callable[[int], object] = lambda epoch: None
        """Called on the loop with the epoch of each stored report."""
        self._thread = thread
        self.cluster: str
        self.epoch: int
        self._generation: int
        facts = connection.execute("SELECT id, epoch, generation FROM cluster").fetchone()
        self.cluster, self.epoch, self._generation = facts

    @classmethod
    async def open(
        cls,
        path: Path | None = None,
        busy_seconds: float = 5.0,
        cluster: str = "",
        kept_reports: int = KEPT_REPORTS,
    ) -> Ledger:
        """Opens the ledger, creating it if needed, and locks it until ``close``. path: its file, in a directory that
        exists; None: the `default_path`, with its directory created.

        busy_seconds: how long another process, such as a backup, may hold the file at each step. cluster: the id of a
        new ledger, in place of one that was lost; empty: a random one. kept_reports: see the module.

        Raises FAILED_PRECONDITION if another manager holds it, if it is not a ledger, if it belongs to a newer release
        or to another cluster than the named one, if its directory does not exist, or if it cannot be written.
        """
        where = path or default_path()
        thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ledger")
        try:
            return await asyncio.get_running_loop().run_in_executor(
                thread, _open, where, thread, busy_seconds, cluster, kept_reports, path is not None
            )
        except BaseException:
            thread.shutdown(wait=False)
            raise

    async def spend_epoch(self, epoch: int) -> None:
        """Ensures that no manager on this ledger ever uses an epoch up to this one again."""

        def statements() -> None:
            with self._connection:
                self._spend(epoch)

        await self._run(statements)

    async def record_intent(
        self,
        epoch: int,
        identity: Version,
        selection: Sequence[str] = (),
        deployment: manager_pb2.Deployment | None = None,
    ) -> None:
        """Stores what is about to be installed, and spends its epoch. selection, deployment: see events.RecordIntent.

        Also raises FAILED_PRECONDITION, storing nothing, if the lineage has used the number for another root.
        """

        def statements() -> None:
            with self._connection:
                self._spend(epoch)
                self._take_number(identity)
                self._connection.execute(
                    "INSERT OR REPLACE INTO intents VALUES (?, ?, ?, ?, ?, ?, ?)",
                    (
                        *(epoch, identity.lineage, identity.number, identity.root),
                        *(time.time(), json.dumps(selection), not selection),
                    ),
                )
                self._connection.executemany(
                    "INSERT OR REPLACE INTO meant VALUES (?, ?, ?)",
                    [(replica, epoch, identity.lineage) for replica in selection],
                )
                if deployment is not None:
                    self._store(deployment)

        await self._run(statements)

    async def record_deployment(self, row: manager_pb2.Deployment) -> None:
        """Stores the row of a deployment, in place of the one that it had."""

        def statements() -> None:
            with self._connection:
                self._spend(0)
                self._store(row)

        await self._run(statements)

    def _store(self, row: manager_pb2.Deployment) -> None:
        undecided = row.state == manager_pb2.Deployment.STATE_UNDECIDED
        values = row.number, undecided, row.SerializeToString(deterministic=True)
        self._connection.execute("INSERT OR REPLACE INTO deployments VALUES (?, ?, ?)", values)

    async def record_outcome(self, report: manager_pb2.UpdateReport) -> None:
        """Stores a report under its fence's epoch; a later report of the same epoch replaces it."""
        epoch, data = report.fence.epoch, report.SerializeToString(deterministic=True)

        def statements() -> None:
            with self._connection:
                self._spend(epoch)
                self._connection.execute("INSERT OR REPLACE INTO outcomes VALUES (?, ?, ?)", (epoch, data, time.time()))
                self._forget_old()

        await self._run(statements)
        self.written(epoch)

    async def record_hold(self, replica: str, reason: str) -> OperatorHold:
        """Stores that an operator holds a replica. A replica that is already held keeps its time and gets this
        reason."""

        def statements() -> OperatorHold:
            with self._connection:
                self._spend(0)
                self._connection.execute(
                    "INSERT INTO holds VALUES (?, ?, ?) ON CONFLICT (replica) DO UPDATE SET reason = excluded.reason",
                    (replica, time.time(), reason),
                )
                row = self._connection.execute("SELECT since, reason FROM holds WHERE replica = ?", (replica,))
                return OperatorHold(*row.fetchone())

        return await self._run(statements)

    async def record_release(self, replica: str) -> None:
        """Stores that no operator holds a replica any more."""

        def statements() -> None:
            with self._connection:
                self._spend(0)
                self._connection.execute("DELETE FROM holds WHERE replica = ?", (replica,))

        await self._run(statements)

    async def record_forgotten(self, lineage: str, epoch: int) -> None:
        """Stores that intents of a lineage up to this epoch no longer say what replicas should serve. Their numbers
        stay taken, and their reports are kept like others."""

        def statements() -> None:
            with self._connection:
                self._spend(0)
                self._connection.execute("DELETE FROM meant WHERE lineage = ? AND epoch <= ?", (lineage, epoch))

        await self._run(statements)

    async def holds(self) -> dict[str, OperatorHold]:
        """The replicas that operators hold, by name."""
        rows = await self._run(lambda: self._connection.execute("SELECT replica, since, reason FROM holds").fetchall())
        return {replica: OperatorHold(since, reason) for replica, since, reason in rows}

    async def commits(self) -> Commits:
        """The commits that are some replica's newest, the last one of each lineage, and undecided deployments."""

        def statements() -> Commits:
            rows = self._connection.execute(
                "SELECT epoch, lineage, version, root, selection FROM intents "
                "WHERE epoch IN (SELECT epoch FROM meant) "
                "OR epoch IN (SELECT coalesce(max(CASE WHEN late THEN NULL ELSE epoch END), max(epoch)) "
                "FROM intents GROUP BY lineage) ORDER BY epoch"
            ).fetchall()
            found = {row[0]: Commit(row[0], Version(*row[1:4])) for row in rows}
            last = {commit.identity.lineage: commit for commit in found.values()}
            selections = {row[1]: json.loads(row[4]) for row in rows}
            desired = {}
            for replica, epoch, lineage in self._connection.execute("SELECT replica, epoch, lineage FROM meant"):
                if epoch in found:
                    desired[replica] = found[epoch]
                elif replica in selections.get(lineage, ()):  # in a ledger from before all commits were kept
                    desired[replica] = last[lineage]
            (until,) = self._connection.execute("SELECT coalesce(max(epoch), 0) FROM intents").fetchone()
            stored = self._connection.execute("SELECT row FROM deployments WHERE undecided ORDER BY number").fetchall()
            deployments = tuple(manager_pb2.Deployment.FromString(row) for (row,) in stored)
            return Commits(until, tuple(last.values()), desired, deployments)

        return await self._run(statements)

    async def highest(self) -> list[Version]:
        """The version with the highest number of each lineage."""
        rows = await self._run(
            lambda: self._connection.execute("SELECT lineage, version, root FROM highest ORDER BY lineage").fetchall()
        )
        return [Version(lineage, number, root) for lineage, number, root in rows]

    async def identities(self) -> list[Version]:
        """Every version with a stored intent, the one that was installed longest ago first."""
        rows = await self._run(
            lambda: self._connection.execute(
                "SELECT lineage, version, root FROM intents GROUP BY lineage, version, root ORDER BY max(epoch)"
            ).fetchall()
        )
        return [Version(lineage, number, root) for lineage, number, root in rows]

    async def last_update(self, lineage: str, version: int) -> Found:
        """How the last update to a version ended, and the versions of the lineage's last updates. Late replicas'
        catch-ups do not count."""

        def statements() -> tuple[tuple[int, bytes | None] | None, list[tuple[int]]]:
            found = self._connection.execute(
                "SELECT i.epoch, o.report FROM intents i LEFT JOIN outcomes o ON o.epoch = i.epoch "
                "WHERE NOT i.late AND i.lineage = ? AND i.version = ? ORDER BY i.epoch DESC LIMIT 1",
                (lineage, version),
            ).fetchone()
            last = self._connection.execute(
                "SELECT version FROM intents WHERE NOT late AND lineage = ? "
                "GROUP BY version ORDER BY max(epoch) DESC LIMIT ?",
                (lineage, LAST_NAMED),
            ).fetchall()
            return found, last

        found, last = await self._run(statements)
        epoch, report = (None, None) if found is None else found
        last_report = None if report is None else manager_pb2.UpdateReport.FromString(report)
        return Found(epoch, last_report, tuple(number for (number,) in last))

    async def history(self, before: int | None = None, limit: int = 50, without: Collection[int] = ()) -> list[Record]:
        """Updates, newest first. before: the lowest epoch of the page before this one. without: epochs to return
        without their report, which is not even read."""
        last = before if before is not None else (1 << 63) - 1
        return await self._records("WHERE i.epoch < ?", last, limit, without)

    async def record(self, epoch: int) -> Record | None:
        """One update of the history, or None."""
        records = await self._records("WHERE i.epoch = ?", epoch, 1)
        return records[0] if records else None

    async def close(self) -> None:
        """Finishes pending calls, closes the file and unlocks it."""

        def statements() -> None:
            self._connection.close()
            os.close(self._lock)

        await self._run(statements)
        self._thread.shutdown(wait=False)

    def _spend(self, epoch: int) -> None:
        """Spends epochs up to this one. Runs on the ledger's thread, first in every writing transaction. Raises
        FAILED_PRECONDITION if this manager was overtaken."""
        if _file_at(self.path) != self._file:
            raise precondition(
                f"the ledger {self.path} was removed or another file was put in its place while this manager ran: "
                "restart the manager"
            )
        written = self._connection.execute(
            "UPDATE cluster SET epoch = max(epoch, ?) WHERE generation = ?", (epoch, self._generation)
        )
        if written.rowcount != 1:
            raise precondition(f"another manager has taken the ledger {self.path} over: stop one of the two")

    def _take_number(self, identity: Version) -> None:
        """Stores the highest number of the lineage, which outlives its intents. Raises FAILED_PRECONDITION if the
        number is known with another root."""
        key = (identity.lineage, identity.number)
        other = self._connection.execute(
            "SELECT root FROM (SELECT lineage, version, root FROM intents UNION SELECT * FROM highest) "
            "WHERE lineage = ? AND version = ? AND root != ?",
            (*key, identity.root),
        ).fetchone()
        if other is not None:
            raise precondition(
                f"version {identity.number} of lineage {identity.lineage!r} has the root {other[0].hex()[:12]} in the "
                f"ledger {self.path}, and not {identity.root.hex()[:12]}: take a higher version"
            )
        self._connection.execute(
            "INSERT INTO highest VALUES (?, ?, ?) ON CONFLICT (lineage) DO UPDATE "
            "SET version = excluded.version, root = excluded.root WHERE excluded.version > version",
            (*key, identity.root),
        )

    def _forget_old(self) -> None:
        """Deletes the oldest reports beyond the limit, and their intents, except the last intent of a lineage and
        commits that are some replica's newest."""
        oldest = self._connection.execute(
            "SELECT epoch FROM outcomes ORDER BY epoch DESC LIMIT 1 OFFSET ?", (self._kept_reports,)
        ).fetchone()
        if oldest is not None:
            self._connection.execute("DELETE FROM outcomes WHERE epoch <= ?", oldest)
            self._connection.execute("DELETE FROM deployments WHERE number <= ? AND NOT undecided", oldest)
            self._connection.execute(
                "DELETE FROM intents WHERE epoch <= ? "
                "AND epoch NOT IN (SELECT max(epoch) FROM intents GROUP BY lineage, late) "
                "AND epoch NOT IN (SELECT epoch FROM meant)",
                oldest,
            )

    async def _records(self, where: str, value: int, limit: int, without: Collection[int] = ()) -> list[Record]:
        left_out = json.dumps(list(without))
        rows = await self._run(
            lambda: self._connection.execute(
                "SELECT i.epoch, i.lineage, i.version, i.root, i.time, "
                "CASE WHEN i.epoch IN (SELECT value FROM json_each(?)) THEN NULL ELSE o.report END "
                f"FROM intents i LEFT JOIN outcomes o ON o.epoch = i.epoch {where} ORDER BY i.epoch DESC LIMIT ?",
                (left_out, value, limit),
            ).fetchall()
        )
        return [
            Record(
                epoch,
                Version(lineage, number, root),
                moment,
                None if report is None else manager_pb2.UpdateReport.FromString(report),
            )
            for epoch, lineage, number, root, moment, report in rows
        ]

    async def _run(self, statements: Callable[[], T]) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, statements)
        except sqlite3.Error as error:
            raise unusable(self.path, error) from error


def _file_at(path: Path) -> tuple[int, int] | None:
    """The device and inode of a file; None: it does not exist."""
    try:
        facts = os.stat(path)
    except OSError:
        return None
    return facts.st_dev, facts.st_ino


def _check_parent(path: Path) -> None:
    """Raises FAILED_PRECONDITION unless the directory exists. A missing one is more often a typing mistake than the
    place for a new ledger, which would leave the existing ledger behind, with the cluster and all numbers."""
    if not path.parent.is_dir():
        raise precondition(
            f"the ledger {path} cannot be made: there is no directory {path.parent}. Correct --ledger, or make the "
            "directory if this is the first start"
        )


def _open(
    path: Path, thread: ThreadPoolExecutor, busy_seconds: float, cluster: str, kept_reports: int, is_explicit: bool
) -> Ledger:
    """Opens the file. Runs on the ledger's thread, since a connection belongs to the thread that made it."""
    path = path.expanduser().resolve()  # two names of one ledger must meet at one lock
    try:
        if is_explicit:
            _check_parent(path)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = take_lock(path)
    except OSError as error:
        raise unusable(path, error) from error
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        os.chmod(path, 0o600)
        connection = sqlite3.connect(path, timeout=busy_seconds)
        try:
            fresh = prepare(path, connection, cluster)
            return Ledger(path, connection, lock, thread, kept_reports, fresh)
        except BaseException:
            connection.close()
            raise
    except (OSError, sqlite3.Error) as error:
        os.close(lock)
        raise unusable(path, error) from error
    except BaseException:
        os.close(lock)
        raise
