"""Carries out what the manager's machine asks for: ledger entries, and the heavy work on tables and plans.

Heavy work runs on one thread of its own, so sessions stay alive meanwhile, and its results are kept by the digests of
what went in, so an update that changes nothing compiles nothing.
"""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor

from ckpt_engine.core.machines import events
from ckpt_engine.core.machines.events import Done, Key
from ckpt_engine.core.problems import CkptEngineError, deadline, internal
from ckpt_engine.manager.compiler import Compiler
from ckpt_engine.manager.ledger import Ledger
from ckpt_engine.manager.metrics import Metrics
from ckpt_engine.v1 import manager_pb2

log = logging.getLogger("ckpt_engine.manager")


class Tasks:
    """Runs tasks of the manager's machine. Made and used on the manager's event loop thread."""

    def __init__(self, ledger: Ledger, compiler: Compiler, metrics: Metrics) -> None:
        self._ledger = ledger
        self._compiler = compiler
        self._metrics = metrics
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="compiler")

    async def run(self, key: Key, task: events.Task) -> Done:
        """Carries out one task and says how it ended, at the latest after ``task.seconds``. Raises nothing.

        Work that is still going on then is not stopped; its result is dropped.
        """
        work = asyncio.ensure_future(self._work(task))
        name = type(task).__name__
        try:
            done, _ = await asyncio.wait((work,), timeout=task.seconds)
        except asyncio.CancelledError:
            work.cancel()
            raise
        if not done:
            work.add_done_callback(_look_away)
            return Done(key, problem=deadline(f"{name} took longer than {task.seconds:g} s").problem, answered=False)
        try:
            return Done(key, result=work.result())
        except CkptEngineError as error:
            log.warning("task refused task=%s problem=%r", name, error.problem.message)
            return Done(key, problem=error.problem)
        except Exception as error:
            log.exception("task failed task=%s", name)
            return Done(key, problem=internal(f"{name} failed in the manager: {error!r}; its log says where").problem)

    def close(self) -> None:
        """Drops heavy work that has not begun; what runs ends by itself."""
        self._thread.shutdown(wait=False, cancel_futures=True)

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
            case events.RecordIntent(epoch, identity, _, selection, meant):
                await self._ledger.record_intent(epoch, identity, selection, meant)
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
                    if outcome.outcome != manager_pb2.NEW_SERVING:
                        name = manager_pb2.Outcome.Name(outcome.outcome).lower()
                        problem = outcome.problem.message
                        log.warning("replica not updated name=%s outcome=%s problem=%r", outcome.replica, name, problem)
                self._metrics.report(report)
                await self._ledger.record_outcome(report)
            case _:
                raise TypeError(f"the manager does not do {type(task).__name__}")
        return None


def _look_away(work: asyncio.Future[object]) -> None:
    """Takes note of a late failure, which nobody waits for any more."""
    if not work.cancelled() and (error := work.exception()) is not None:
        log.warning("task failed after its deadline error=%r", error)
