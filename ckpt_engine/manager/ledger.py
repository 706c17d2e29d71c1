"""What must survive a manager: the cluster's id, the spent epochs, what was about to happen and what happened.

It decides which statements make each of these durable, in tables in an SQLite file that one manager holds
(`ledger_file.py`), or in a PostgreSQL database that several share (`ledger_database.py`). It does not decide which
manager may write: the store does, in every transaction.

It stores intents, reports, which version each replica should serve, how these versions were sealed, which replicas
operators hold, and staged deployments. What replicas do serve is never stored: only the workers know that. All
statements run on one thread of the ledger's own, in the order of the calls, so the event loop never waits for a disk.

Its size is bounded: it keeps the newest ``KEPT_REPORTS`` reports with their intents. Of older ones it keeps the last
intent of each lineage and every commit that is still some replica's newest. Sealed records it keeps of the versions
that are to be served and of those before them, compressed, of at most ``MOST_RECORD_BYTES`` each.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
import zlib
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from ckpt_engine.core.problems import precondition
from ckpt_engine.core.version import Version
from ckpt_engine.machines.events import Found, OperatorHold
from ckpt_engine.machines.manager.versions import Commit, Commits
from ckpt_engine.manager.ledger_file import FileStore
from ckpt_engine.manager.ledger_store import Statements, Store
from ckpt_engine.v1 import manager_pb2

LAST_NAMED = 4
"""Updates of a lineage that are named to a caller that asks for an unknown one."""

OF_HIGHEST = (
    "SELECT intents.epoch FROM intents JOIN highest "
    "ON highest.lineage = intents.lineage AND highest.version = intents.version"
)
"""The epochs of each lineage's highest version. A deployment has its number from the first of its target's."""

KEPT_REPORTS = 1000
"""A report of 64 replicas of 8 workers takes some 130 kB: the file stays below 130 MB even then."""

MOST_RECORD_BYTES = 16 << 20
"""Of a compressed record. That of 8 billion parameters in 400 tensors has 7 to 150 kB, by how finely they are cut; of
235 billion in 36,000 tensors 0.5 to 12 MB (a quarter to a half of what they are uncompressed)."""

log = logging.getLogger("ckpt_engine.manager")

T = TypeVar("T")


@dataclass(frozen=True)
class SealEntry:
    """How a version was sealed."""

    fill: int  # epoch of the fill fence under which its ranks sealed it; 0: unknown
    record: bytes | None  # a serialised SealedRecord; None: there is none, or it is too large to be stored


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
    tables cannot be read or written. When a method returns, its effect is on the disk.
    """

    def __init__(self, store: Store, thread: ThreadPoolExecutor, kept_reports: int = KEPT_REPORTS) -> None:
        """Made on the ledger's thread. kept_reports: see the module."""
        self.name = store.name
        self.fresh = store.fresh
        self.written: Callable[[int], object] = lambda epoch: None
        """Called on the loop with the epoch of each stored report."""
        self._kept_reports = kept_reports
        self._store = store
        self._thread = thread
        self.cluster: str
        self.epoch: int
        self.cluster, self.epoch = store.read(lambda run: run.execute("SELECT id, epoch FROM cluster").fetchone())
        self._highest_spent = self.epoch

    @classmethod
    async def open(
        cls,
        path: Path | None = None,
        busy_seconds: float = 5.0,
        cluster: str = "",
        kept_reports: int = KEPT_REPORTS,
    ) -> Ledger:
        """Opens the ledger in a file, creating it if needed, and locks it until ``close``. path: its file, in a
        directory that exists; None: the `default_path`, with its directory created.

        busy_seconds: how long another process, such as a backup, may hold the file at each step. cluster: the id of a
        new ledger, in place of one that was lost; empty: a random one. kept_reports: see the module.

        Raises FAILED_PRECONDITION if another manager holds it, if it is not a ledger, if it belongs to a newer release
        or to another cluster than the named one, if its directory does not exist, or if it cannot be written.
        """
        where = path or default_path()
        return await cls.of(lambda: FileStore(where, busy_seconds, cluster, is_explicit=path is not None), kept_reports)

    @classmethod
    async def of(cls, make: Callable[[], Store], kept_reports: int = KEPT_REPORTS) -> Ledger:
        """Opens the ledger in a store. make: makes the store on the ledger's thread, and may raise CkptEngineError."""
        thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ledger")

        def opened() -> Ledger:
            store = make()
            try:
                return cls(store, thread, kept_reports)
            except BaseException:
                store.close()
                raise

        try:
            return await asyncio.get_running_loop().run_in_executor(thread, opened)
        except BaseException:
            thread.shutdown(wait=False)
            raise

    async def spend_epoch(self, epoch: int) -> None:
        """Ensures that no manager on this ledger ever uses an epoch up to this one again."""
        await self._write(epoch, lambda run: None)

    async def record_intent(
        self,
        epoch: int,
        identity: Version,
        selection: Sequence[str] = (),
        deployment: manager_pb2.Deployment | None = None,
        seal: SealEntry | None = None,
        keeps: Sequence[Version] = (),
    ) -> None:
        """Stores what is about to be installed, and spends its epoch. All but epoch and identity: see
        events.RecordIntent.

        Also raises FAILED_PRECONDITION, storing nothing, if the lineage has used the number for another root.
        """

        def statements(run: Statements) -> None:
            self._take_number(run, identity)
            run.execute(
                "INSERT INTO intents (epoch, lineage, version, root, time, selection, late) "
                "VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT (epoch) DO UPDATE SET lineage = excluded.lineage, "
                "version = excluded.version, root = excluded.root, time = excluded.time, "
                "selection = excluded.selection, late = excluded.late",
                (
                    *(epoch, identity.lineage, identity.number, identity.root),
                    *(time.time(), json.dumps(selection), int(not selection)),
                ),
            )
            for replica in selection:
                run.execute(
                    "INSERT INTO meant (replica, epoch, lineage) VALUES (?, ?, ?) "
                    "ON CONFLICT (replica) DO UPDATE SET epoch = excluded.epoch, lineage = excluded.lineage",
                    (replica, epoch, identity.lineage),
                )
            if deployment is not None:
                _store(run, deployment)
            if seal is not None:
                _store_seal(run, identity, seal.fill, record, keeps)

        record = None
        if seal is not None and seal.record is not None:
            record = await asyncio.get_running_loop().run_in_executor(self._thread, _compressed, identity, seal.record)
        await self._write(epoch, statements)

    async def record_deployment(self, row: manager_pb2.Deployment) -> None:
        """Stores the row of a deployment, in place of the one that it had."""

        await self._write(0, lambda run: _store(run, row))

    async def record_outcome(self, report: manager_pb2.UpdateReport) -> None:
        """Stores a report under its fence's epoch; a later report of the same epoch replaces it."""
        epoch, data = report.fence.epoch, report.SerializeToString(deterministic=True)

        def statements(run: Statements) -> None:
            run.execute(
                "INSERT INTO outcomes (epoch, report, time) VALUES (?, ?, ?) "
                "ON CONFLICT (epoch) DO UPDATE SET report = excluded.report, time = excluded.time",
                (epoch, data, time.time()),
            )
            self._forget_old(run)

        await self._write(epoch, statements)
        self.written(epoch)

    async def record_hold(self, replica: str, reason: str) -> OperatorHold:
        """Stores that an operator holds a replica. A replica that is already held keeps its time and gets this
        reason."""

        def statements(run: Statements) -> OperatorHold:
            run.execute(
                "INSERT INTO holds (replica, since, reason) VALUES (?, ?, ?) "
                "ON CONFLICT (replica) DO UPDATE SET reason = excluded.reason",
                (replica, time.time(), reason),
            )
            return OperatorHold(
                *run.execute("SELECT since, reason FROM holds WHERE replica = ?", (replica,)).fetchone()
            )

        return await self._write(0, statements)

    async def record_release(self, replica: str) -> None:
        """Stores that no operator holds a replica any more."""
        await self._write(0, lambda run: run.execute("DELETE FROM holds WHERE replica = ?", (replica,)))

    async def record_forgotten(self, lineage: str, epoch: int) -> None:
        """Stores that intents of a lineage up to this epoch no longer say what replicas should serve. Their numbers
        stay taken, and their reports are kept like others."""

        def statements(run: Statements) -> None:
            run.execute("DELETE FROM meant WHERE lineage = ? AND epoch <= ?", (lineage, epoch))
            run.execute(
                "DELETE FROM seals WHERE lineage = ? AND version NOT IN "
                "(SELECT version FROM intents WHERE lineage = ? AND epoch > ?)",
                (lineage, lineage, epoch),
            )

        await self._write(0, statements)

    async def seals(self, identities: Sequence[Version]) -> dict[Version, SealEntry]:
        """How these versions were sealed, of those of which that is stored."""

        def statements(run: Statements) -> dict[Version, SealEntry]:
            find = "SELECT fill, record FROM seals WHERE lineage = ? AND version = ? AND root = ?"
            keys = ((each.lineage, each.number, each.root) for each in identities)
            found = zip(identities, (run.execute(find, key).fetchone() for key in keys), strict=True)
            return {each: SealEntry(row[0], _decompressed(each, row[1])) for each, row in found if row is not None}

        return await self._read(statements)

    async def holds(self) -> dict[str, OperatorHold]:
        """The replicas that operators hold, by name."""
        rows = await self._read(lambda run: run.execute("SELECT replica, since, reason FROM holds").fetchall())
        return {replica: OperatorHold(since, reason) for replica, since, reason in rows}

    async def commits(self) -> Commits:
        """The commits that are some replica's newest, the last one of each lineage, and deployments: undecided ones,
        and those of each lineage's highest version."""

        def statements(run: Statements) -> Commits:
            rows = run.execute(
                "SELECT epoch, lineage, version, root, selection FROM intents "
                "WHERE epoch IN (SELECT epoch FROM meant) "
                "OR epoch IN (SELECT coalesce(max(CASE WHEN late = 0 THEN epoch END), max(epoch)) "
                "FROM intents GROUP BY lineage) ORDER BY epoch"
            ).fetchall()
            found = {row[0]: Commit(row[0], Version(*row[1:4])) for row in rows}
            last = {commit.identity.lineage: commit for commit in found.values()}
            selections = {row[1]: json.loads(row[4]) for row in rows}
            desired = {}
            for replica, epoch, lineage in run.execute("SELECT replica, epoch, lineage FROM meant").fetchall():
                if epoch in found:
                    desired[replica] = found[epoch]
                elif replica in selections.get(lineage, ()):  # in a ledger from before all commits were kept
                    desired[replica] = last[lineage]
            (until,) = run.execute("SELECT coalesce(max(epoch), 0) FROM intents").fetchone()
            stored = run.execute(
                f"SELECT deployment FROM deployments WHERE undecided <> 0 OR number IN ({OF_HIGHEST}) ORDER BY number"
            ).fetchall()
            deployments = tuple(manager_pb2.Deployment.FromString(bytes(row)) for (row,) in stored)
            return Commits(until, tuple(last.values()), desired, deployments)

        return await self._read(statements)

    async def highest(self) -> list[Version]:
        """The version with the highest number of each lineage."""
        rows = await self._read(
            lambda run: run.execute("SELECT lineage, version, root FROM highest ORDER BY lineage").fetchall()
        )
        return [Version(lineage, number, root) for lineage, number, root in rows]

    async def identities(self) -> list[Version]:
        """Every version with a stored intent, the one that was installed longest ago first."""
        rows = await self._read(
            lambda run: run.execute(
                "SELECT lineage, version, root FROM intents GROUP BY lineage, version, root ORDER BY max(epoch)"
            ).fetchall()
        )
        return [Version(lineage, number, root) for lineage, number, root in rows]

    async def last_update(self, lineage: str, version: int) -> Found:
        """How the last update to a version ended, and the versions of the lineage's last updates. Late replicas'
        catch-ups do not count."""

        def statements(run: Statements) -> tuple[tuple[int, bytes | None] | None, list[tuple[int]]]:
            found = run.execute(
                "SELECT i.epoch, o.report FROM intents i LEFT JOIN outcomes o ON o.epoch = i.epoch "
                "WHERE i.late = 0 AND i.lineage = ? AND i.version = ? ORDER BY i.epoch DESC LIMIT 1",
                (lineage, version),
            ).fetchone()
            last = run.execute(
                "SELECT version FROM intents WHERE late = 0 AND lineage = ? "
                "GROUP BY version ORDER BY max(epoch) DESC LIMIT ?",
                (lineage, LAST_NAMED),
            ).fetchall()
            return found, last

        found, last = await self._read(statements)
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
        """Finishes pending calls, and closes and unlocks the tables."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self._store.close)
        self._thread.shutdown(wait=False)

    def _take_number(self, run: Statements, identity: Version) -> None:
        """Stores the highest number of the lineage, which outlives its intents. Raises FAILED_PRECONDITION if the
        number is known with another root."""
        key = (identity.lineage, identity.number)
        other = run.execute(
            "SELECT root FROM (SELECT lineage, version, root FROM intents "
            "UNION SELECT lineage, version, root FROM highest) AS known "
            "WHERE lineage = ? AND version = ? AND root != ?",
            (*key, identity.root),
        ).fetchone()
        if other is not None:
            raise precondition(
                f"version {identity.number} of lineage {identity.lineage!r} has the root {other[0].hex()[:12]} in the "
                f"ledger {self.name}, and not {identity.root.hex()[:12]}: take a higher version"
            )
        run.execute(
            "INSERT INTO highest (lineage, version, root) VALUES (?, ?, ?) ON CONFLICT (lineage) DO UPDATE "
            "SET version = excluded.version, root = excluded.root WHERE excluded.version > highest.version",
            (*key, identity.root),
        )

    def _forget_old(self, run: Statements) -> None:
        """Deletes the oldest reports beyond the limit, and their intents, except the last intent of a lineage, commits
        that are some replica's newest, and deployments of the lineage's highest version."""
        oldest = run.execute(
            "SELECT epoch FROM outcomes ORDER BY epoch DESC LIMIT 1 OFFSET ?", (self._kept_reports,)
        ).fetchone()
        if oldest is not None:
            run.execute("DELETE FROM outcomes WHERE epoch <= ?", oldest)
            run.execute(
                f"DELETE FROM deployments WHERE number <= ? AND undecided = 0 AND number NOT IN ({OF_HIGHEST})", oldest
            )
            run.execute(
                "DELETE FROM intents WHERE epoch <= ? "
                "AND epoch NOT IN (SELECT max(epoch) FROM intents GROUP BY lineage, late) "
                "AND epoch NOT IN (SELECT epoch FROM meant) AND epoch NOT IN (SELECT number FROM deployments)",
                oldest,
            )

    async def _records(self, where: str, value: int, limit: int, without: Collection[int] = ()) -> list[Record]:
        left_out = ", ".join("?" * len(without)) or "NULL"
        rows = await self._read(
            lambda run: run.execute(
                "SELECT i.epoch, i.lineage, i.version, i.root, i.time, "
                f"CASE WHEN i.epoch IN ({left_out}) THEN NULL ELSE o.report END "
                f"FROM intents i LEFT JOIN outcomes o ON o.epoch = i.epoch {where} ORDER BY i.epoch DESC LIMIT ?",
                (*without, value, limit),
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

    async def _read(self, statements: Callable[[Statements], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._store.read, statements)

    async def _write(self, epoch: int, statements: Callable[[Statements], T]) -> T:
        """Runs statements, and spends epochs up to this one, in one transaction. Raises FAILED_PRECONDITION, changing
        nothing, if the tables have lost an epoch that this ledger has spent: a former state of them was put back, or a
        replica of the database took over that had not received all of it."""

        def all_of_it(run: Statements) -> T:
            (stored,) = run.execute("SELECT epoch FROM cluster").fetchone()
            if stored < self._highest_spent:
                raise precondition(
                    f"the ledger {self.name} was rolled back while this manager ran: it had spent epoch "
                    f"{self._highest_spent} and knows of {stored} only. Restart the manager, which goes on above what "
                    "members have seen"
                )
            if stored < epoch:
                run.execute("UPDATE cluster SET epoch = ?", (epoch,))
            return statements(run)

        def written() -> T:
            result = self._store.write(all_of_it)
            self._highest_spent = max(self._highest_spent, epoch)
            return result

        return await asyncio.get_running_loop().run_in_executor(self._thread, written)


def _store(run: Statements, row: manager_pb2.Deployment) -> None:
    undecided = int(row.state == manager_pb2.Deployment.STATE_UNDECIDED)
    run.execute(
        "INSERT INTO deployments (number, undecided, deployment) VALUES (?, ?, ?) "
        "ON CONFLICT (number) DO UPDATE SET undecided = excluded.undecided, deployment = excluded.deployment",
        (row.number, undecided, row.SerializeToString(deterministic=True)),
    )


def _compressed(identity: Version, record: bytes) -> bytes | None:
    """A record as it is stored; None: it is too large."""
    data = zlib.compress(record, 1)
    if len(data) <= MOST_RECORD_BYTES:
        return data
    log.warning(
        "the sealed record of %s has %d bytes, compressed, and the ledger takes %d: a manager that is started again "
        "gets it from relays, or has ranks digest all of that version to bring it to a replica that is late",
        *(identity, len(data), MOST_RECORD_BYTES),
    )
    return None


def _decompressed(identity: Version, data: bytes | None) -> bytes | None:
    try:
        return None if data is None else zlib.decompress(data)
    except zlib.error as error:
        log.warning("the ledger's sealed record of %s is damaged, and not used: %s", identity, error)
        return None


def _store_seal(run: Statements, identity: Version, fill: int, record: bytes | None, keeps: Sequence[Version]) -> None:
    """Stores how a version was sealed, and deletes what is stored of versions that are not to be kept. A version that
    was not sealed now (fill: 0) stays as it is stored."""
    update = "UPDATE SET root = excluded.root, fill = excluded.fill, record = excluded.record"
    run.execute(
        "INSERT INTO seals (lineage, version, root, fill, record) VALUES (?, ?, ?, ?, ?) "
        f"ON CONFLICT (lineage, version) DO {update if fill else 'NOTHING'}",
        (identity.lineage, identity.number, identity.root, fill, record),
    )
    names = {(each.lineage, each.number) for each in keeps}
    for lineage, version in run.execute("SELECT lineage, version FROM seals").fetchall():
        if (lineage, version) not in names:
            run.execute("DELETE FROM seals WHERE lineage = ? AND version = ?", (lineage, version))
