"""A PostgreSQL server of the demo's own, for the ledger that its managers share.

Decides where the server's programs are found, as which user it runs, and with which options: its data is in a directory
that goes with it, and it listens on loopback. `stage.py` starts and ends its process.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ckpt_engine.extras import require

USER = "demo"

STEP_SECONDS = 60.0

_INITIAL = ("--auth=scram-sha-256", "--no-locale", "-E", "UTF8")

ORDINARY = "nobody"
"""The user that the server runs as where the demo runs as root, as which PostgreSQL refuses to run."""


class DatabaseError(Exception):
    """PostgreSQL cannot be had here; the message says what is missing, for a person."""


@dataclass(frozen=True)
class DemoDatabase:
    """A server whose data is made; it does not run yet."""

    command: Sequence[str]  # that runs it
    address: str  # of its database, for `--ledger`

    def wait(self) -> None:
        """Waits until it answers. Raises DatabaseError."""
        import psycopg

        end = time.monotonic() + STEP_SECONDS
        while True:
            try:
                psycopg.connect(self.address, connect_timeout=5).close()
            except psycopg.OperationalError as error:
                if time.monotonic() > end:
                    raise DatabaseError(f"PostgreSQL does not answer: {error}") from error
                time.sleep(0.1)
            else:
                return


@contextmanager
def demo_database(port: int) -> Iterator[DemoDatabase]:
    """A server on this port of loopback, whose data goes with the block. Raises DatabaseError if PostgreSQL's server is
    not installed, CkptEngineError if psycopg is not."""
    require("postgresql", "psycopg", what="--standby")
    initdb, postgres = _program("initdb"), _program("postgres")
    if initdb is None or postgres is None:
        raise DatabaseError("--standby needs PostgreSQL's server (Debian and Ubuntu: apt install postgresql)")
    is_root = os.geteuid() == 0
    person = ("setpriv", f"--reuid={ORDINARY}", "--regid=nogroup", "--clear-groups") if is_root else ()
    folder = Path(tempfile.mkdtemp(prefix="ckpt-engine-demo-db-", dir="/tmp" if is_root else None))
    try:
        if is_root:
            shutil.chown(folder, ORDINARY)
        password = secrets.token_hex(16)
        secret = folder / "password"
        secret.write_text(password)
        if is_root:
            shutil.chown(secret, ORDINARY)
        data = folder / "data"
        options = ("-D", str(data), "-U", USER, f"--pwfile={secret}", *_INITIAL)
        done = subprocess.run(
            [*person, initdb, *options], capture_output=True, text=True, timeout=STEP_SECONDS, check=False
        )
        if done.returncode:
            raise DatabaseError(f"PostgreSQL cannot make its data in {folder}: {done.stderr.strip()}")
        settings = ("-p", str(port), "-h", "127.0.0.1", "-k", str(folder))
        yield DemoDatabase(
            (*person, postgres, "-D", str(data), *settings), f"postgresql://{USER}:{password}@127.0.0.1:{port}/postgres"
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _program(name: str) -> str | None:
    """The path of a program of the newest server, which Debian keeps out of PATH; None: it is not installed."""
    found = [*Path("/usr/lib/postgresql").glob(f"*/bin/{name}")]
    return str(max(found, key=lambda path: float(path.parts[4]))) if found else shutil.which(name)
