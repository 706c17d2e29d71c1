"""Carries out the agent machine's tasks: blobs, engine calls, state words, digests of a directory.

Each task ends with exactly one Done, at the latest when its seconds have passed. Everything runs on the agent's loop,
except digests, which have a thread.
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from ckpt_engine.agent import checks
from ckpt_engine.agent.blobs import BlobCache
from ckpt_engine.agent.engine import EngineHost
from ckpt_engine.channel import ManagerStub, get_blob, put_blob
from ckpt_engine.core.manifest import canonical
from ckpt_engine.core.problems import internal, unavailable
from ckpt_engine.engine.adapter import EngineAdapter, EngineCallError
from ckpt_engine.gate.counts import total_counts
from ckpt_engine.gate.page import EngineMark, EnginePage, HoldLimits, RequestHold, verdict
from ckpt_engine.machines import events
from ckpt_engine.shell.tasks import TaskFailedError, carry_out, words
from ckpt_engine.v1 import manager_pb2, weights_pb2

if TYPE_CHECKING:
    from ckpt_engine.transport.base import Transport


class TaskRunner:
    """Runs tasks on the agent's loop. host: has the engine, page and adapter that the tasks use."""

    def __init__(
        self,
        stub: ManagerStub,
        host: EngineHost,
        blob_seconds: float,
        hold_limits: HoldLimits,
    ) -> None:
        """blob_seconds: for the fetch of one blob, which several tasks may share; each waits only for its own time."""
        self._hold_limits = hold_limits
        self._stub = stub
        self._host = host
        self._transports: dict[str, Transport] | None = None
        self._blobs = BlobCache(lambda ref: get_blob(stub, ref, blob_seconds))
        self._digester = ThreadPoolExecutor(max_workers=1, thread_name_prefix="digest")

    def close(self) -> None:
        """Closes without waiting for a running digest; its thread ends at its own deadline."""
        self._digester.shutdown(wait=False, cancel_futures=True)

    async def run(self, key: events.Key, task: events.Task) -> events.Done:
        """Carries `task` out. Raises nothing but cancellation."""
        return await carry_out("agent", key, task, self._carry_out)

    async def _carry_out(self, task: events.Task) -> object:
        try:
            return await self._work(task)
        except EngineCallError as error:
            make_error = internal if error.answered else unavailable
            raise TaskFailedError(make_error(f"{words(task)}: {error}").problem, error.answered) from error

    async def _work(self, task: events.Task) -> object:
        match task:
            case events.PutBlobs():
                return tuple([await self._put(data, task.seconds) for data in task.blobs])
            case events.FetchBlobs():
                return tuple(await asyncio.gather(*(self._blobs.get(ref) for ref in task.refs)))
            case events.ReadWords():
                if task.current:
                    await self._host.look(task.seconds / 2)
                return self._state_words()
            case events.MarkEngine():
                self._page().mark(EngineMark(task.own_weights, task.sleeping))
                return None
            case events.HoldRequests():
                hold = (
                    RequestHold(task.epoch, time.monotonic() + task.hold_seconds, task.closed)
                    if task.epoch
                    else RequestHold()
                )
                self._page().hold(hold, self._hold_limits)
                return None
            case events.SealDirectory():
                return await self._seal(task)
            case (
                events.PrepareEngine()
                | events.ScoreEngine()
                | events.PauseEngine()
                | events.InstallEngine()
                | events.StampEngine()
                | events.ResumeEngine()
                | events.DiscardEngine()
                | events.SleepEngine()
                | events.WakeEngine()
            ):
                adapter = self._host.adapter
                if adapter is None:
                    raise EngineCallError("the engine is not there", answered=True)
                result = await _call_engine(adapter, task)
                if isinstance(task, events.PauseEngine):
                    mode = task.mode or adapter.capabilities.default_pause_mode
                    if adapter.keeps_caches(mode):
                        self._page().keep_caches()  # not earlier: what is cached until the pause is of the old weights
                return result
            case events.FindCheck():
                return await asyncio.to_thread(checks.has_passed, task.key)
            case events.KeepCheck():
                return await asyncio.to_thread(checks.keep, task.key)
            case _:
                raise internal(f"an agent carries out no {words(task)}")

    async def _put(self, data: bytes, seconds: float) -> manager_pb2.BlobRef:
        ref = await put_blob(self._stub, data, seconds)
        self._blobs.keep(ref, data)
        return ref

    def _state_words(self) -> events.Words:
        page = self._host.page
        words = page.read() if page is not None else []
        admission = verdict(words, page is not None and page.marked().own_weights)
        statuses = tuple(self._host.status(word) for word in words)
        guesses = None if self._host.adapter is None else self._host.adapter.guesses
        counts = None if page is None else total_counts(page.path.parent)
        requests = (None, None) if counts is None else (counts.answered, counts.failed)
        return events.Words(statuses, admission.open, admission.reason, admission.identity, guesses, *requests)

    def _page(self) -> EnginePage:
        if self._host.page is None:
            raise EngineCallError("the engine has no page", answered=True)
        return self._host.page

    async def _seal(self, task: events.SealDirectory) -> events.SealResult:
        started = time.monotonic()
        table, atoms = await asyncio.gather(self._blobs.get(task.table), self._blobs.get(task.atoms))
        remaining = task.seconds - (time.monotonic() - started)
        began = time.monotonic()
        loop = asyncio.get_running_loop()
        digests: weights_pb2.Digests = await loop.run_in_executor(
            self._digester, self._digest_for_readers, table, atoms, remaining
        )
        digest_seconds = time.monotonic() - began
        ref = await self._put(canonical(digests), task.seconds)
        return events.SealResult(ref, 0.0, digest_seconds)

    def _digest_for_readers(self, table: bytes, atoms: bytes, seconds: float) -> weights_pb2.Digests:
        """Digests, on the digester's thread. Imports torch here, so that only agents that digest load it."""
        from ckpt_engine.agent.reader_seal import digest_for_readers
        from ckpt_engine.transport.registry import all_transports

        until = time.monotonic() + seconds
        if self._transports is None:
            self._transports = all_transports()
        return digest_for_readers(table, atoms, self._transports, until - time.monotonic())


async def _call_engine(adapter: EngineAdapter, task: events.EngineTask) -> object:
    match task:
        case events.ScoreEngine():
            try:
                score = await adapter.score(task.tokens, task.more, task.seconds, task.cached)
                await adapter.count_guesses(task.seconds)  # of a draft, which have come with the continuation
                return score
            except (KeyError, TypeError, ValueError, IndexError) as error:
                text = f"its log-probabilities have no form that is known: {type(error).__name__}: {error}"
                raise EngineCallError(text, answered=True) from error
        case events.PrepareEngine():
            await adapter.prepare(task.seconds)
        case events.PauseEngine():
            await adapter.pause(task.mode, task.seconds)
        case events.InstallEngine():
            await adapter.install(task.epoch, task.seconds)
        case events.StampEngine():
            await adapter.stamp(task.identity, task.seconds)
        case events.ResumeEngine():
            await adapter.resume(task.seconds)
        case events.DiscardEngine():
            await adapter.discard(task.seconds)
        case events.SleepEngine():
            await adapter.sleep(task.level, task.seconds)
        case events.WakeEngine():
            await adapter.wake(task.tags, task.seconds)
    return None
