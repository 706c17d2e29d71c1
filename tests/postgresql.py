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

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self._folder = folder
        self._initdb, self._postgres = program("initdb"), program("postgres")
        self._as = {"user": "nobody", "group": pwd.getpwnam("nobody").pw_gid} if os.getuid() == 0 else {}
        if self._as:
            os.chown(folder, pwd.getpwnam("nobody").pw_uid, -1)
        secret = folder / "secret"
        secret.write_text(PASSWORD)
        secret.chmod(0o644)
        subprocess.run(
            [str(self._initdb), "-D", folder / "data", "-U", USER, f"--pwfile={secret}", *_INITIAL],
            check=True,
            capture_output=True,
            timeout=PATIENCE,
            **self._as,  # type: ignore[call-overload]
        )
        self.start()

    def start(self) -> None:
        """Starts it, also again, and returns once it answers."""
        settings = {
            "port": self.port,
            "listen_addresses": "127.0.0.1",
            "unix_socket_directories": self._folder,
            "shared_buffers": "16MB",
        }
        options = [f"--{key}={value}" for key, value in settings.items()]
        self._process = subprocess.Popen(
            [str(self._postgres), "-D", self._folder / "data", *options],
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

    def _answers(self) -> bool:
        try:
            return bool(self.run("SELECT 1"))
        except psycopg.OperationalError:
            assert self._process.poll() is None, "PostgreSQL has ended"
            return False


@contextmanager
def running() -> Iterator[Server]:
    """A server of its own, for a test that ends it. Skips the test where PostgreSQL is not installed."""
    if program("initdb") is None:
        pytest.skip("PostgreSQL's server is not installed here (Debian: postgresql)")
    folder = Path(tempfile.mkdtemp(prefix="ck-pg-", dir="/tmp"))
    try:
        folder.chmod(0o755)
        server = Server(folder)
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
