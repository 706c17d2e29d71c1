"""The ledger's tables in an SQLite file (WAL, ``synchronous=FULL``, mode 0600), which one manager holds alone.

Decides which process holds the file, and which schema it has: `FileStore` takes its lock and migrates older schemas. It
does not decide what is stored.

A lock can be lost (a network file system, a replaced file), so it is not the only guard. Each opening increments the
file's generation, and every write requires its own generation and the file that it opened. A manager that was overtaken
fails at its next write and begins nothing more.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from ckpt_engine.core.problems import CkptEngineError, precondition
from ckpt_engine.host.owned import unwritable
from ckpt_engine.manager.ledger_store import Statements

SCHEMA_VERSION = 9
APPLICATION_ID = 0x636B7074  # "ckpt", so that `file` and we recognise it

T = TypeVar("T")

_MEANT = "CREATE TABLE meant (replica TEXT PRIMARY KEY, epoch INTEGER NOT NULL, lineage TEXT NOT NULL) STRICT;"
_HIGHEST = "CREATE TABLE highest (lineage TEXT PRIMARY KEY, version INTEGER NOT NULL, root BLOB NOT NULL) STRICT;"
_HOLDS = "CREATE TABLE holds (replica TEXT PRIMARY KEY, since REAL NOT NULL, reason TEXT NOT NULL) STRICT;"
_DEPLOYMENTS = (
    "CREATE TABLE deployments "
    "(number INTEGER PRIMARY KEY, undecided INTEGER NOT NULL, deployment BLOB NOT NULL) STRICT;"
)
_SEALS = (
    "CREATE TABLE seals (lineage TEXT NOT NULL, version INTEGER NOT NULL, root BLOB NOT NULL, fill INTEGER NOT NULL, "
    "record BLOB, PRIMARY KEY (lineage, version)) STRICT;"
)
_SCHEMA = f"""
CREATE TABLE cluster (
    id TEXT NOT NULL, made REAL NOT NULL, epoch INTEGER NOT NULL, generation INTEGER NOT NULL DEFAULT 0
) STRICT;
CREATE TABLE intents (
    epoch INTEGER PRIMARY KEY, lineage TEXT NOT NULL, version INTEGER NOT NULL, root BLOB NOT NULL, time REAL NOT NULL,
    selection TEXT NOT NULL DEFAULT '[]', late INTEGER NOT NULL DEFAULT 0
) STRICT;
CREATE TABLE outcomes (epoch INTEGER PRIMARY KEY, report BLOB NOT NULL, time REAL NOT NULL) STRICT;
{_MEANT}
{_HIGHEST}
{_HOLDS}
{_DEPLOYMENTS}
{_SEALS}
"""

_MIGRATIONS = {
    1: "ALTER TABLE cluster ADD COLUMN generation INTEGER NOT NULL DEFAULT 0;",
    2: "ALTER TABLE intents ADD COLUMN selection TEXT NOT NULL DEFAULT '[]';",
    3: _MEANT
    + "INSERT INTO meant SELECT name.value, max(epoch), lineage FROM intents, "
    + """json_each(CASE selection WHEN '[]' THEN '[""]' ELSE selection END) AS name GROUP BY name.value;""",
    4: _HIGHEST + "INSERT INTO highest SELECT lineage, max(version), root FROM intents GROUP BY lineage;",
    5: "ALTER TABLE intents ADD COLUMN late INTEGER NOT NULL DEFAULT 0;",
    6: _HOLDS,
    7: _DEPLOYMENTS,
    8: _SEALS,
}
"""The script from each schema to the next one."""


class FileStore:
    """The open file. Made and used on one thread, since a connection belongs to the thread that made it."""

    def __init__(self, path: Path, busy_seconds: float, cluster: str, *, is_explicit: bool) -> None:
        """As `Ledger.open`. is_explicit: the user has named the path, so its directory must exist."""
        path = path.expanduser().resolve()  # two names of one ledger must meet at one lock
        self.name = str(path)
        self._path = path
        try:
            if is_explicit:
                _check_parent(path)
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = take_lock(path)
        except OSError as error:
            raise unusable(path, error) from error
        try:
            os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
            os.chmod(path, 0o600)
            self.connection = sqlite3.connect(path, timeout=busy_seconds)
            try:
                self.fresh = prepare(path, self.connection, cluster)
                (self._generation,) = self.connection.execute("SELECT generation FROM cluster").fetchone()
                self._file = _file_at(path)
            except BaseException:
                self.connection.close()
                raise
        except (OSError, sqlite3.Error) as error:
            os.close(self._lock)
            raise unusable(path, error) from error
        except BaseException:
            os.close(self._lock)
            raise

    def read(self, statements: Callable[[Statements], T]) -> T:
        """As `Store.read`."""
        try:
            return statements(self.connection)
        except sqlite3.Error as error:
            raise unusable(self._path, error) from error

    def write(self, statements: Callable[[Statements], T]) -> T:
        """As `Store.write`."""
        try:
            with self.connection:
                self._check_holder()
                return statements(self.connection)
        except sqlite3.Error as error:
            raise unusable(self._path, error) from error

    def close(self) -> None:
        """Closes the file and unlocks it."""
        self.connection.close()
        os.close(self._lock)

    def _check_holder(self) -> None:
        """Takes the file for writing. Raises FAILED_PRECONDITION if this manager was overtaken."""
        if _file_at(self._path) != self._file:
            raise precondition(
                f"the ledger {self._path} was removed or another file was put in its place while this manager ran: "
                "restart the manager"
            )
        held = self.connection.execute(
            "UPDATE cluster SET generation = generation WHERE generation = ?", (self._generation,)
        )
        if held.rowcount != 1:
            raise precondition(f"another manager has taken the ledger {self._path} over: stop one of the two")


def take_lock(path: Path) -> int:
    """Locks a file beside the ledger: SQLite drops its own locks when any other descriptor of the file is closed."""
    lock = os.open(path.with_name(path.name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.pread(lock, 32, 0).decode("ascii", "replace").strip() or "unknown"
        os.close(lock)
        raise precondition(
            f"ledger {path} is in use by pid {holder}: stop that manager, or give this one another --ledger"
        ) from error
    os.ftruncate(lock, 0)
    os.pwrite(lock, str(os.getpid()).encode("ascii"), 0)
    return lock


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


def prepare(path: Path, connection: sqlite3.Connection, cluster: str) -> bool:
    """Brings the file to this schema, and starts a new generation, so that no earlier opening can write any more.
    Returns whether it is a new ledger."""
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    fresh = bool(tables == 0 and version == 0)
    if not fresh and application != APPLICATION_ID:
        raise precondition(f"{path} is an SQLite file of another program, not a ledger: pass another --ledger")
    if version > SCHEMA_VERSION:
        raise precondition(
            f"the ledger {path} has schema {version}, this software knows up to {SCHEMA_VERSION}: upgrade ckpt-engine"
        )
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    if not fresh and cluster:
        (ours,) = connection.execute("SELECT id FROM cluster").fetchone()
        if ours != cluster:
            raise precondition(
                f"the ledger {path} is that of cluster {ours}, not {cluster}: leave --cluster out, or name a file that "
                "does not exist yet"
            )
    if fresh:
        # One transaction, so that a crash here leaves an empty file and not half a schema.
        connection.executescript(
            f"BEGIN IMMEDIATE; {_SCHEMA} PRAGMA application_id = {APPLICATION_ID}; "
            f"PRAGMA user_version = {SCHEMA_VERSION}; "
            f"INSERT INTO cluster (id, made, epoch) VALUES ('{cluster_id(cluster)}', {time.time()}, 0); COMMIT;"
        )
    elif version < SCHEMA_VERSION:
        steps = " ".join(_MIGRATIONS[older] for older in range(version, SCHEMA_VERSION))
        connection.executescript(f"BEGIN IMMEDIATE; {steps} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;")
    with connection:  # fails now, and not in the middle of an update, when the disk is full or read-only
        connection.execute("UPDATE cluster SET generation = generation + 1")
    return fresh


def cluster_id(cluster: str) -> str:
    """Checks the id of a new cluster; empty: makes one. It goes into the schema's script, so it must be a UUID."""
    try:
        return str(uuid.UUID(cluster)) if cluster else str(uuid.uuid4())
    except ValueError:
        raise precondition(f"--cluster {cluster!r} is not a cluster's id, which is a UUID") from None


def unusable(path: Path, error: Exception) -> CkptEngineError:
    """The error for a file that cannot be used, with what to do."""
    if path.is_dir():
        return precondition(f"the ledger {path} is a directory: name a file in it with --ledger")
    advice = unwritable(path.parent, error) or "Free or repair its disk"
    return precondition(f"the ledger {path} cannot be used: {error}. {advice}, or pass another --ledger")
