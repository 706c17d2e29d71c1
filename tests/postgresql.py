"""A PostgreSQL server of the tests' own, on a port of loopback, with its data in a temporary directory.

Debian's server refuses to run as root, so it runs as `nobody` then.
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

import psycopg
import pytest

from tests.ports import free_port
from tests.waiting import PATIENCE, eventually

USER, PASSWORD = "ckpt", "pa:ss@wo/rd 9"
"""Signs that an address must escape."""

_INITIAL = ("--auth=scram-sha-256", "--no-sync", "--no-locale", "-E", "UTF8")


def program(name: str) -> str | None:
    """The path of one of the server's programs; None: it is not installed."""
    found = [*Path("/usr/lib/postgresql").glob(f"*/bin/{name}")]
    return str(max(found, key=lambda path: int(path.parts[4]))) if found else shutil.which(name)


class Server:
    """A running server. ``pid`` is its main process."""

    def __init__(self, folder: Path, primary: Server | None = None, network: str = "") -> None:
        """primary: that it is to follow, asynchronously, until it is promoted. network: of another host that reaches
        it, besides this one, as 198.18.0.0/15."""
        self.port = free_port()
        self._listen = "*" if network else "127.0.0.1"
        self._folder = folder
        self._as = {"user": "nobody", "group": pwd.getpwnam("nobody").pw_gid} if os.getuid() == 0 else {}
        if self._as:
            os.chown(folder, pwd.getpwnam("nobody").pw_uid, -1)
        if primary is None:
            secret = folder / "secret"
            secret.write_text(PASSWORD)
            secret.chmod(0o644)
            self._program("initdb", "-U", USER, f"--pwfile={secret}", *_INITIAL)
        else:
            self._program("pg_basebackup", "-d", primary.address(), "--write-recovery-conf", "--checkpoint=fast")
        if network:
            with (folder / "data" / "pg_hba.conf").open("a") as rules:
                rules.write(f"host all all {network} scram-sha-256\n")
        self.start()

    def start(self) -> None:
        """Starts it, also again, and returns once it answers."""
        settings = {
            "port": self.port,
            "listen_addresses": self._listen,
            "unix_socket_directories": self._folder,
            "shared_buffers": "16MB",
        }
        options = [f"--{key}={value}" for key, value in settings.items()]
        self._process = subprocess.Popen(
            [str(program("postgres")), "-D", self._folder / "data", *options],
            stderr=subprocess.DEVNULL,
            **self._as,  # type: ignore[call-overload]
        )
        self.pid = self._process.pid
        eventually("PostgreSQL answers", PATIENCE, self._answers)

    def stop(self, number: signal.Signals = signal.SIGINT) -> None:
        """Ends it, and returns when it has ended. number: SIGINT ends its connections in order, SIGQUIT at once."""
        self._process.send_signal(signal.SIGCONT)
        self._process.send_signal(number)
        self._process.wait(PATIENCE)

    def has_all_of(self, primary: Server) -> bool:
        """Whether it has received and replayed what is on the disk of the server that it follows."""
        ((written,),) = primary.run("SELECT pg_current_wal_flush_lsn()")
        ((has,),) = self.run(f"SELECT pg_last_wal_replay_lsn() >= '{written}'")
        return bool(has)

    def stop_following(self) -> None:
        """From now on it receives nothing more."""
        self.run("ALTER SYSTEM SET primary_conninfo = ''")
        self.run("SELECT pg_reload_conf()")
        receiving = "SELECT 1 FROM pg_stat_wal_receiver"
        eventually("PostgreSQL follows no more", PATIENCE, lambda: not self.run(receiving))

    def promote(self) -> None:
        """It takes over, with what it has received."""
        self._program("pg_ctl", "promote")

    def address(self, database: str = "postgres") -> str:
        """A database's address, with the password."""
        return f"postgresql://{USER}:{quote(PASSWORD, safe='')}@127.0.0.1:{self.port}/{database}"

    def new_database(self) -> str:
        """The address of a database that was empty a moment ago."""
        name = f"t{uuid.uuid4().hex[:12]}"
        self.run(f"CREATE DATABASE {name}")
        return self.address(name)

    def run(self, statement: str, database: str = "postgres") -> list[tuple[object, ...]]:
        """Runs one statement, and returns what it found."""
        with psycopg.connect(self.address(database), autocommit=True, connect_timeout=5) as connection:
            rows = connection.execute(statement.encode())
            return rows.fetchall() if rows.description else []

    def _program(self, name: str, *arguments: str) -> None:
        subprocess.run(
            [str(program(name)), "-D", self._folder / "data", *arguments],
            check=True,
            capture_output=True,
            timeout=PATIENCE,
            cwd="/",
            **self._as,  # type: ignore[call-overload]
        )

    def _answers(self) -> bool:
        try:
            return bool(self.run("SELECT 1"))
        except psycopg.OperationalError:
            assert self._process.poll() is None, "PostgreSQL has ended"
            return False


@contextmanager
def running(primary: Server | None = None, network: str = "") -> Iterator[Server]:
    """A server of its own, for a test that ends it. primary, network: as of `Server`. Skips the test where PostgreSQL
    is not installed."""
    if program("initdb") is None:
        pytest.skip("PostgreSQL's server is not installed here (Debian: postgresql)")
    folder = Path(tempfile.mkdtemp(prefix="ck-pg-", dir="/tmp"))
    try:
        folder.chmod(0o755)
        server = Server(folder, primary, network)
        try:
            yield server
        finally:
            server.stop(signal.SIGQUIT)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def postgresql() -> Iterator[Server]:
    """A server for tests that do not end it. Skips them where there is none."""
    with running() as server:
        yield server
