"""The scheduler: which requests take part in the next step, and when no step may be taken.

A step makes one token for each running request. Between two steps come pause, sleep, wake, prepare and install, all
under one lock, so none of them ever meets a step in flight. A step is taken only if the workers' state words are open
at that moment, and the version that these name is the tokens' version: labels cannot be wrong, since none are set.

Runs on the API process's event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from ckpt_engine.gate.page import Admission
from ckpt_engine.v1 import weights_pb2
from ckpt_engine_adapters.reference.generation import Generation
from ckpt_engine_adapters.reference.pool import WorkerPool

PAUSE_MODES = ("abort", "wait", "keep", "in_place")
WAKE_TAGS = ("weights", "kv_cache")
MAX_RUNNING = 8
"""The default of the command line."""
STEP_SECONDS = 300.0
_CLOSED_POLL_SECONDS = 0.02  # how soon held requests notice that the workers hold whole weights again


class ConflictError(Exception):
    """The engine's state does not allow the call; nothing was done. The message says what to do first."""


class ReferenceEngine:
    """State of one engine: its requests, whether it is paused, and which memory is given up.

    verdict: reads the workers' state words. on_fatal(message): called once if the engine cannot continue. most:
    requests that take part in one step; others wait.
    """

    def __init__(
        self,
        pool: WorkerPool,
        verdict: Callable[[], Admission],
        on_fatal: Callable[[str], None],
        most: int = MAX_RUNNING,
    ) -> None:
        self._pool = pool
        self._most = most
        self._verdict = verdict
        self._on_fatal = on_fatal
        self._running: list[Generation] = []
        self._waiting: list[Generation] = []
        self._forget: list[str] = []
        self._between_steps = asyncio.Lock()
        self._changed = asyncio.Event()
        self._draining = False
        self.paused: str | None = None
        self.asleep: set[str] = set()

    @property
    def counts(self) -> tuple[int, int]:
        """The numbers of running and of waiting requests."""
        return len(self._running), len(self._waiting)

    def identity(self) -> weights_pb2.Identity | None:
        """The version that all workers hold now; None unless they agree and are clean."""
        return self._verdict().identity

    def submit(self, generation: Generation) -> None:
        """Queues a request. It waits while the engine is paused, asleep, or its weights are not whole."""
        self._waiting.append(generation)
        self._changed.set()

    def cancel(self, generation: Generation) -> None:
        """Drops a request after its client has disconnected. Does nothing if it has ended."""
        generation.end("abort")
        self._remove_ended()

    async def run(self) -> None:
        """Takes steps until cancelled, or until it calls `on_fatal`."""
        while True:
            if not self._may_step():
                self._changed.clear()
                poll = bool(self._running or self._waiting) and self.paused is None and not self.asleep
                try:
                    async with asyncio.timeout(_CLOSED_POLL_SECONDS if poll else None):
                        await self._changed.wait()
                except TimeoutError:
                    continue
            else:
                async with self._between_steps:
                    if self._may_step():
                        try:
                            await self._step()
                        except Exception as error:
                            # After any error: requests must not wait for a loop that has ended.
                            self._on_fatal(f"a step failed: {type(error).__name__}: {error}")
                            return

    def _may_step(self) -> bool:
        # A busy pool may still be installing after its caller's deadline: a step queued after that would run on weights
        # that the verdict does not name yet.
        work = self._running or (self._waiting and not self._draining)
        ready = self.paused is None and not self.asleep and not self._pool.busy
        return bool(work) and ready and self._verdict().open

    async def _step(self) -> None:
        while self._waiting and len(self._running) < self._most and not self._draining:
            self._running.append(self._waiting.pop(0))
        identity = self._verdict().identity
        batch, forget, self._forget = list(self._running), self._forget, []
        items = [generation.item() for generation in batch]
        replies = await self._pool.call("step", STEP_SECONDS, items=items, forget=forget)
        for generation in batch:
            result = replies[0]["tokens"][generation.request]
            if generation.ended.is_set():
                continue  # cancelled during the step
            if result is None:
                generation.end("", "the weights of this version make logits that are not numbers")
            else:
                generation.append(result[0], result[1], identity)
        self._remove_ended()

    def _remove_ended(self) -> None:
        self._forget += [generation.request for generation in self._running if generation.ended.is_set()]
        self._running = [generation for generation in self._running if not generation.ended.is_set()]
        self._waiting = [generation for generation in self._waiting if not generation.ended.is_set()]
        self._changed.set()

    def _drop_caches(self, running: Iterable[Generation]) -> None:
        for generation in running:
            generation.fresh = True
            self._forget.append(generation.request)

    # -------------------------------------------------------------------------------------------- control

    async def pause(self, mode: str, seconds: float) -> None:
        """Stops stepping; returns when no step is in flight. Requests that have not begun keep waiting.

        abort: running requests end with the tokens that they have. wait: they finish first. keep: they are suspended,
        and recomputed from their first token after `resume`. in_place: they are suspended and keep their caches. A
        paused engine may be paused again, with another mode; suspended requests then do not finish first.

        Raises:
            ConflictError: mode "wait", and requests were still running after `seconds`; the engine is not paused.
            TimeoutError: a step was still in flight after `seconds`; the engine is paused as soon as it ends.
        """
        async with asyncio.timeout(seconds):
            if mode == "wait" and self.paused is None:
                await self._drain(seconds * 0.9)
            self.paused = mode
            async with self._between_steps:
                if mode == "abort":
                    for generation in self._running:
                        generation.end("abort")
                    self._remove_ended()
                elif mode == "keep":
                    self._drop_caches(self._running)

    async def _drain(self, seconds: float) -> None:
        self._draining = True
        try:
            async with asyncio.timeout(seconds):
                while self._running:
                    await asyncio.gather(*(generation.ended.wait() for generation in self._running))
                self.paused = "wait"  # before the loop can admit another one
        except TimeoutError:
            raise ConflictError(f"{len(self._running)} requests still run; the engine is not paused") from None
        finally:
            self._draining = False
            self._changed.set()

    def resume(self) -> None:
        """Takes steps again, unless asleep or the weights are not whole. A second call does nothing."""
        self.paused = None
        self._changed.set()

    async def sleep(self, level: int, seconds: float) -> None:
        """Gives memory up between two steps: caches, and with level 2 the weights. Requests are suspended until `wake`.

        Raises:
            TimeoutError: the workers were not done after `seconds`.
        """
        async with self._exclusive(seconds):
            self.asleep = set(WAKE_TAGS)
            self._drop_caches(self._running)
            await self._pool.call("sleep", seconds, level=level)

    async def discard(self, seconds: float) -> None:
        """Has every worker mark that it holds nothing; suspended requests then wait for other weights."""
        async with self._exclusive(seconds):
            await self._pool.call("discard", seconds)

    async def wake(self, tags: Collection[str], seconds: float) -> None:
        """Takes memory back. Discarded weights come back as NaN, with state words that say that there are none.

        tags: of WAKE_TAGS; empty: all.

        Raises:
            ConflictError: the caches would be awake and the weights not.
            TimeoutError: as `sleep` does.
        """
        async with self._exclusive(seconds):
            woken_tags = set(tags or WAKE_TAGS) & self.asleep
            if "weights" in self.asleep - woken_tags and woken_tags:
                raise ConflictError('weights are woken before kv_cache: POST /wake {"tags": ["weights"]} first')
            if "weights" in woken_tags:
                await self._pool.call("wake", seconds)
            self.asleep -= woken_tags
            self._changed.set()

    async def prepare(self, seconds: float) -> list[bool]:
        """Has every worker record its loader for the agent. Needs no pause."""
        async with self._exclusive(seconds):
            return [reply["done"] for reply in await self._pool.call("prepare", seconds)]

    async def install(self, epoch: int, seconds: float) -> list[bool]:
        """Has every worker fetch the agent's order for `epoch` and install it. Returns by rank whether it reports that
        it did.

        Raises:
            ConflictError: the engine is not paused, or its weights' memory is given up.
            TimeoutError: not all workers were done after `seconds`; their state words have the outcome.
        """
        async with self._exclusive(seconds):
            if self.paused is None:
                raise ConflictError("weights are installed into a paused engine only: POST /pause first")
            self._check_weights_awake()
            return [reply["done"] for reply in await self._pool.call("install", seconds, epoch=epoch)]

    async def score(self, tokens: Sequence[int], more: int, seconds: float) -> dict[str, Any]:
        """Log-probabilities of all tokens but the first, and a greedy continuation (see ReferenceModel.score), whatever
        the workers hold.

        Raises:
            ConflictError: the memory of the weights is given up.
            TimeoutError: the workers were not done after `seconds`.
        """
        async with self._exclusive(seconds):
            self._check_weights_awake()
            first, *_ = await self._pool.call("score", seconds, tokens=list(tokens), more=more)
            score: dict[str, Any] = first["score"]
            return score

    def _check_weights_awake(self) -> None:
        if "weights" in self.asleep:
            raise ConflictError('the memory of the weights is given up: POST /wake {"tags": ["weights"]} first')

    def confirm(self, lineage: str, version: int, root: str) -> None:
        """Checks a label against the version that the workers hold, which responses name anyway.

        Raises:
            ConflictError: they hold another version.
        """
        identity = self.identity()
        if identity is None or (identity.lineage, identity.version, identity.root.hex()) != (lineage, version, root):
            present = "nothing that they agree on"
            if identity is not None:
                present = f"version {identity.version} of {identity.lineage!r}"
            raise ConflictError(f"the workers do not hold version {version} of {lineage!r} but {present}")

    def info(self) -> dict[str, Any]:
        """The engine's state for GET /info."""
        running, waiting = self.counts
        return {"paused": self.paused, "asleep": sorted(self.asleep), "running": running, "waiting": waiting}

    @asynccontextmanager
    async def _exclusive(self, seconds: float) -> AsyncIterator[None]:
        async with asyncio.timeout(seconds), self._between_steps:
            yield
