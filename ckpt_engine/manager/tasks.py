"""Carries out the tasks of the manager's machine: ledger entries, and the heavy work on tables and plans.

Heavy work runs on one thread of its own, so sessions stay alive meanwhile. Its results are cached by the digests of its
input, so an update that changes nothing compiles nothing.
"""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

from ckpt_engine.core.enums import enum_word
from ckpt_engine.core.scrub import difference_words
from ckpt_engine.machines import events
from ckpt_engine.machines.events import Done, Key
from ckpt_engine.machines.manager.versions import Commits
from ckpt_engine.manager.compiler import Compiler
from ckpt_engine.manager.ledger import Ledger, SealEntry
from ckpt_engine.manager.metrics import ManagerMetrics
from ckpt_engine.shell.tasks import carry_out
from ckpt_engine.v1 import manager_pb2

log = logging.getLogger("ckpt_engine.manager")


class Tasks:
    """Runs tasks of the manager's machine. Made and used on the manager's event loop thread."""

    def __init__(self, ledger: Ledger, compiler: Compiler, metrics: ManagerMetrics) -> None:
        self._ledger = ledger
        self._compiler = compiler
        self._metrics = metrics
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="compiler")

    async def run(self, key: Key, task: events.Task) -> Done:
        """Carries out one task and returns how it ended, at the latest after ``task.seconds``. Raises nothing."""
        done = await carry_out("manager", key, task, self._work)
        if done.problem is not None:
            log.warning("task failed task=%s problem=%r", type(task).__name__, done.problem.message)
        return done

    def close(self) -> None:
        """Drops heavy work that has not begun; running work ends by itself."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def commits(self) -> Commits:
        """The ledger's commits with the sealed records of their versions, of which those count that hash to the root.
        Raises as `Ledger.commits`."""
        commits = await self._ledger.commits()
        entries = await self._ledger.seals(commits.identities)
        take = partial(self._compiler.take_seals, entries)
        return replace(commits, seals=await asyncio.get_running_loop().run_in_executor(self._thread, take))

    async def _work(self, task: events.Task) -> object:
        loop = asyncio.get_running_loop()
        match task:
            case events.MergeTables():
                return await loop.run_in_executor(self._thread, self._compiler.merge, task)
            case events.JoinSources():
                return await loop.run_in_executor(self._thread, self._compiler.join, task)
            case events.CompilePlans():
                return await loop.run_in_executor(self._thread, self._compiler.compile, task)
            case events.CombineSeals():
                return await loop.run_in_executor(self._thread, self._compiler.combine, task)
            case events.SpendEpoch(epoch):
                await self._ledger.spend_epoch(epoch)
            case events.RecordIntent(epoch, identity, _, selection, deployment, seal, keeps):
                entry = None if seal is None else SealEntry(seal.fill, self._compiler.stored(seal.record))
                await self._ledger.record_intent(epoch, identity, selection, deployment, entry, keeps)
            case events.RecordDeployment(row):
                await self._ledger.record_deployment(row)
            case events.ReadCommits():
                return await self.commits()
            case events.RecordHold(replica, reason):
                return await self._ledger.record_hold(replica, reason)
            case events.RecordRelease(replica):
                await self._ledger.record_release(replica)
            case events.RecordForgotten(lineage, epoch):
                log.info("lineage forgotten lineage=%r", lineage)
                await self._ledger.record_forgotten(lineage, epoch)
            case events.FindReport(lineage, version):
                return await self._ledger.last_update(lineage, version)
            case events.RecordOutcome(report):
                log.info(
                    "update ended epoch=%d lineage=%r version=%d ok=%s replicas=%d bytes=%d seconds=%.3f",
                    report.fence.epoch,
                    report.identity.lineage,
                    report.identity.version,
                    report.ok,
                    len(report.replicas),
                    report.bytes,
                    report.seconds,
                )
                for outcome in report.replicas:
                    for found in outcome.differences:
                        log.warning("brought again name=%s since %s", outcome.replica, difference_words(found))
                    if outcome.outcome != manager_pb2.OUTCOME_NEW_SERVING:
                        name = enum_word(manager_pb2.Outcome, outcome.outcome)
                        problem = outcome.problem.message
                        log.warning("replica not updated name=%s outcome=%s problem=%r", outcome.replica, name, problem)
                self._metrics.report(report)
                # It is written even after the deadline: the update happened.
                await asyncio.shield(self._ledger.record_outcome(report))
            case events.CorrectOutcome(report, replica):
                (became,) = (each.outcome for each in report.replicas if each.replica == replica)
                log.info(
                    "report corrected epoch=%d lineage=%r version=%d replica=%s outcome=%s ok=%s",
                    report.fence.epoch,
                    report.identity.lineage,
                    report.identity.version,
                    replica,
                    enum_word(manager_pb2.Outcome, became),
                    report.ok,
                )
                await asyncio.shield(self._ledger.record_outcome(report))
            case _:
                raise TypeError(f"the manager does not do {type(task).__name__}")
        return None
