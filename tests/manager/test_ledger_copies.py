"""A copy of a ledger that a manager writes to meanwhile is of one moment, and is a ledger (docs/clusters.md)."""

from __future__ import annotations

import asyncio
import sqlite3
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from itertools import count
from pathlib import Path

from ckpt_engine.core.version import Version
from ckpt_engine.manager.ledger import Ledger
from ckpt_engine.manager.term import Term
from tests.postgresql import Server, program
from tests.waiting import PATIENCE


@asynccontextmanager
async def writing(ledger: Ledger) -> AsyncIterator[None]:
    """Version after version is committed, each with its epoch in one transaction."""
    written = asyncio.Event()

    async def write() -> None:
        for number in count(1):
            await ledger.record_intent(number, Version("run", number, bytes(32)), [""])
            if number == 20:
                written.set()

    task = asyncio.create_task(write())
    await asyncio.wait_for(written.wait(), PATIENCE)
    yield
    assert not task.done(), "nothing was blocked or refused"
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def check(copy: Ledger, original: Ledger) -> None:
    (highest,) = await copy.highest()
    (newest, *_) = await copy.history()
    assert highest == newest.identity
    assert copy.epoch == newest.epoch >= 20
    assert copy.cluster == original.cluster
    await copy.record_intent(copy.epoch + 1, Version("run", copy.epoch + 1, bytes(32)), [""])


async def test_a_file_that_is_copied_by_sqlites_backup(tmp_path: Path) -> None:
    """What the shell's `.backup` calls."""
    original = await Ledger.open(tmp_path / "ledger.sqlite3")

    def copy() -> None:
        with closing(sqlite3.connect(tmp_path / "ledger.sqlite3")) as here:
            with closing(sqlite3.connect(tmp_path / "copy.sqlite3")) as there:
                here.backup(there)

    async with writing(original):
        await asyncio.to_thread(copy)
    copied = await Ledger.open(tmp_path / "copy.sqlite3")
    await check(copied, original)
    for each in (original, copied):
        await each.close()


async def test_a_database_that_is_copied_by_pg_dump(postgresql: Server, tmp_path: Path) -> None:
    address, other = postgresql.new_database(), postgresql.new_database()
    dump = tmp_path / "ledger.sql"
    terms = Term(address, 5.0, 5.0), Term(other, 5.0, 5.0)
    await terms[0].prepare("")
    assert await terms[0].take("a:1") is None
    original = await terms[0].ledger()
    async with writing(original):
        await asyncio.to_thread(run, "pg_dump", "--schema=ckpt_engine", f"--file={dump}", address)
    run("psql", "--quiet", "--set=ON_ERROR_STOP=1", f"--file={dump}", other)
    await terms[1].prepare("")
    end = asyncio.get_running_loop().time() + PATIENCE
    while (lead := await terms[1].take("b:1")) is not None:
        assert lead.leader == "a:1", "the copy has the term of the manager that led, which ends"
        assert asyncio.get_running_loop().time() < end
        await asyncio.sleep(terms[1].pause)
    copied = await terms[1].ledger()
    await check(copied, original)
    for each in (original, copied):
        await each.close()
    for term in terms:
        await term.close()


def run(name: str, *arguments: str) -> None:
    done = subprocess.run([str(program(name)), *arguments], capture_output=True, timeout=PATIENCE, text=True)
    assert done.returncode == 0, done.stderr
