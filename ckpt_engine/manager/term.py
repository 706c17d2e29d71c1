"""The term of a manager that shares its ledger: it asks for it, renews it, and knows by its own clock when it ends.

Decides when a manager may lead. What the term protects, and by which clock, is `ledger_database.py`'s.

A manager counts its term from before it asked for it, by a clock that goes on while its machine is suspended. So it
stops leading before another one can begin, however long an answer of the database took; and a process that was stopped
and goes on finds its term ended before it does anything else. A manager that stands by counts the other's term from
after it was told of it, and may take one that was not renewed in all of that, whatever the database's clock says.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.manager.ledger import KEPT_REPORTS, Ledger
from ckpt_engine.manager.ledger_database import Database, DatabaseStore, Lead, LostTermError, Terms

RENEWALS = 3
"""Attempts to renew a term while it lasts; also how often a manager that stands by looks, in that time."""

log = logging.getLogger("ckpt_engine.manager")

T = TypeVar("T")


def _now() -> float:
    """Seconds of a clock that no one sets, and that goes on while the machine is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Term:
    """One manager's asking for the term, and its having it. Made and used on one event loop.

    ``lost`` is set once a term that this manager had has ended without `release`.
    """

    def __init__(self, address: str, seconds: float, answer_seconds: float) -> None:
        """address: of the database. seconds: how long a term lasts without a renewal. answer_seconds: how long the
        database may take for one transaction. Raises as `Database`."""
        self.lost = asyncio.Event()
        self._address = address
        self._seconds = seconds
        self._answer_seconds = answer_seconds
        self._terms = Terms(Database(address, min(answer_seconds, seconds)))
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="term")
        self._end = 0.0  # by `_now`
        self._given_up = False  # the database's row may still have the term
        self._renewal_at = 0.0  # by `_now`: when this manager first heard of the renewal that `lead` has
        self.lead: Lead | None = None
        """The manager that led when this one asked last."""
        self._fresh = False
        self._keeping: asyncio.Task[None] | None = None
        self.name = self._terms.name
        """The ledger, for people."""

    @property
    def pause(self) -> float:
        """Seconds between two attempts."""
        return self._seconds / RENEWALS / 2

    async def prepare(self, cluster: str) -> None:
        """Makes the ledger's tables if they are not there, and migrates older ones. Raises as `Terms.prepare`."""
        self._fresh = await self._run(lambda: self._terms.prepare(cluster))

    async def take(self, leader: str) -> Lead | None:
        """Takes the term, and renews it from then on, if no manager has it. Returns the one that has it, or None:
        this manager leads. leader: the address under which members reach it. Raises as `Database.transaction`."""
        start, last = _now(), self.lead
        unrenewed = last if last is not None and 0 < last.length <= start - self._renewal_at else None
        lead = await self._run(lambda: self._terms.take(leader, self._seconds, unrenewed))
        if lead is not None and (last is None or lead.renewal != last.renewal):
            self._renewal_at = _now()
        self.lead = lead
        if lead is None:
            if unrenewed is not None and unrenewed.seconds > 0:
                log.warning(
                    "the term of %s was not renewed for %g s and is over, although the clock of ledger=%s gave it %.0f "
                    "s more: was that clock set back?",
                    unrenewed.leader,
                    unrenewed.length,
                    self.name,
                    unrenewed.seconds,
                )
            self._end = start + self._seconds
            self.lost.clear()
            self._keeping = asyncio.create_task(self._keep(), name="term")
        return lead

    @property
    def held(self) -> bool:
        """Whether this manager leads, at this moment."""
        return _now() < self._end

    async def ledger(self, kept_reports: int = KEPT_REPORTS) -> Ledger:
        """The ledger, for writing as long as the term lasts. Its owner closes it. kept_reports: see `ledger.py`."""
        loop, fresh, self._fresh = asyncio.get_running_loop(), self._fresh, False

        def lost(reason: str) -> None:
            loop.call_soon_threadsafe(self._give_up, reason)

        return await Ledger.of(
            lambda: DatabaseStore(Database(self._address, self._answer_seconds), self._terms, lost, fresh=fresh),
            kept_reports,
        )

    async def release(self) -> None:
        """Gives the term back, so that another manager can lead at once."""
        await self._stop_keeping()
        if self.held or self._given_up:
            self._end, self._given_up = 0.0, False
            try:
                await self._run(self._terms.release)
            except CkptEngineError as error:
                log.warning("the term ends by itself in at most %g s: %s", self._seconds, error.problem.message)

    async def close(self) -> None:
        """Ends the connection."""
        await self._stop_keeping()
        await self._run(self._terms.close)
        self._thread.shutdown(wait=False)

    async def _stop_keeping(self) -> None:
        if self._keeping is not None:
            self._keeping.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._keeping
            self._keeping = None

    async def _keep(self) -> None:
        """Renews the term until it is lost, or that fails in an unforeseen way."""
        try:
            await self._renew()
            if not self._given_up:
                log.warning("the term has ended: it was not renewed for %g s ledger=%s", self._seconds, self.name)
        except LostTermError as error:
            self._give_up(error.problem.message)
        except Exception:
            log.exception("the term is given up")
        self._lose()

    def _give_up(self, reason: str) -> None:
        if not self._given_up:
            log.warning("%s", reason)
        self._given_up = True
        self._lose()

    def _lose(self) -> None:
        self._end = 0.0
        self.lost.set()

    async def _renew(self) -> None:
        renewing: asyncio.Future[None] | None = None
        start = self._end - self._seconds  # before it was asked for, which may have taken most of the term
        due = start + self._seconds / RENEWALS
        while self.held:
            if renewing is None and _now() >= due:
                start = _now()
                renewing = asyncio.ensure_future(self._run(lambda: self._terms.renew(self._seconds)))
                renewing.add_done_callback(lambda done: done.cancelled() or done.exception())  # it may be given up
            wake = self._end if renewing is not None else min(due, self._end)
            pause = asyncio.ensure_future(asyncio.sleep(max(0.0, wake - _now()) + 0.001))
            await asyncio.wait([each for each in (renewing, pause) if each], return_when=asyncio.FIRST_COMPLETED)
            pause.cancel()
            if renewing is not None and renewing.done():
                due = start + self._seconds / RENEWALS
                try:
                    await renewing
                    if self.held:
                        self._end = start + self._seconds
                except LostTermError:
                    raise
                except CkptEngineError as error:
                    log.warning("the term was not renewed: %s", error.problem.message)
                renewing = None

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)
