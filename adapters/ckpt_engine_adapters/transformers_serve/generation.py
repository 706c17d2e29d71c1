"""transformers' continuous batching with a gate point: between two steps of its loop, for as long as we want.

It decides what becomes of requests in each pause mode. It does not decide when to pause, and touches no weights. It
stands in the place of transformers' own `CBGenerateManager`, and everything else of that is as it was: the first
request fixes how all are sampled.

Everything but `init_cb` and `generate_non_streaming`, which transformers calls on its event loop, runs on one thread:
transformers counts pauses by thread.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal, TypeAlias

from fastapi import HTTPException
from transformers import ContinuousBatchingConfig
from transformers.cli.serving.utils import CBGenerateManager
from transformers.generation.continuous_batching.requests import RequestStatus

from ckpt_engine_adapters.transformers_serve.versions import TokenVersions

Mode: TypeAlias = Literal["keep", "abort", "wait", "in_place"]

ABORTED = "the request was ended early, since this replica takes new weights"
"""Goes into an event of a stream without being escaped, so it has no quotation marks."""

_LOOK_AGAIN_SECONDS = 0.005


class PausableGeneration(CBGenerateManager):
    """The continuous batching of one model. Blocks of caches are not shared between requests: those of a request that
    ended before an update would answer one that comes after it."""

    _cb: Any  # transformers' ContinuousBatchingManager; None before the first request

    def __init__(self, versions: TokenVersions, config: Any = None) -> None:
        """config: transformers' ContinuousBatchingConfig; changed."""
        config = config or ContinuousBatchingConfig()
        config.allow_block_sharing = False
        super().__init__(cb_config=config)
        self._versions = versions
        self._lock = threading.Lock()  # between starting the loop, on the event loop, and pausing it
        self._paused = False
        self._parked: AbstractContextManager[None] | None = None  # transformers' own pause, while the loop stands still

    @property
    def paused(self) -> bool:
        """Whether no step is computed, and none will be until `resume`."""
        return self._paused

    def init_cb(self, model: Any, gen_config: Any) -> None:
        """Makes transformers' manager for the first request; its loop starts at once, or when `resume` is called."""
        with self._lock:
            if self._cb is None:
                self._cb = model.init_continuous_batching(
                    generation_config=gen_config, continuous_batching_config=self._cb_config
                )
                self._count_what_ends(self._cb.output_router)
                if not self._paused:
                    self._cb.start()

    async def generate_non_streaming(self, *arguments: Any, **named: Any) -> Any:
        """Generates a whole answer. Raises HTTPException (503) if a pause ended it early: transformers has no form for
        a part of an answer."""
        try:
            return await super().generate_non_streaming(*arguments, **named)
        except RuntimeError as error:
            if ABORTED in str(error):
                raise HTTPException(503, f"{ABORTED}; ask again") from None
            raise

    def pause(self, mode: Mode, seconds: float) -> None:
        """Waits until the step that runs has ended, lets none begin, and does with running requests what `mode` says.
        May be repeated.

        Raises TimeoutError if running requests do not end within `seconds` (mode "wait"), RuntimeError if the loop has
        died. It stays paused all the same.
        """
        end = time.monotonic() + seconds
        with self._lock:
            self._paused = True
            running = self._cb is not None and self._cb.is_running()
        if not running:
            return
        self._park()
        match mode:
            case "keep":
                self._recompute()
            case "abort":
                self._abort()
            case "wait":
                self._drain(end)
            case "in_place":
                pass

    def resume(self) -> None:
        """Lets the loop run again, with what the worker holds now. May be repeated."""
        if self._parked is not None:
            self._count_what_runs()
        self._versions.renew()
        with self._lock:
            self._paused = False
            if self._cb is not None and self._cb._generation_thread is None:
                self._cb.start()  # the first request came during the pause
        if self._parked is not None:
            self._processor.input_queue = self._cb.input_queue
            self._unpark()

    @contextmanager
    def between_steps(self) -> Iterator[None]:
        """A pause in place, if there is none, for what has to use the model."""
        if self._paused:
            yield
            return
        self.pause("in_place", 0.0)
        try:
            yield
        finally:
            self.resume()

    @property
    def _processor(self) -> Any:
        """transformers' batch processor; there once the loop has stood still."""
        return self._cb.batch_processor

    def _park(self) -> None:
        if self._parked is None:
            parked = self._cb.pause()
            parked.__enter__()
            self._parked = parked

    def _unpark(self) -> None:
        parked, self._parked = self._parked, None
        if parked is not None:
            parked.__exit__(None, None, None)

    def _recompute(self) -> None:
        """Makes each running request one that has not begun, with what it has generated as a part of its prompt; as
        transformers does with requests for which there is no cache left."""
        scheduler = self._processor.scheduler
        waiting = list(scheduler.waiting_requests_order)
        scheduler.waiting_requests_order.clear()
        for state in list(scheduler.active_requests.values()):
            again = state.create_equivalent_initial_request()
            self._leave_out(state)
            scheduler.finish_request(state.request_id)
            scheduler.add_waiting_request(again)
        scheduler.waiting_requests_order.extend(waiting)

    def _abort(self) -> None:
        scheduler = self._processor.scheduler
        states = [*scheduler.active_requests.values(), *scheduler.waiting_requests.values()]
        self._processor.fail_all_requests(RuntimeError(ABORTED))
        for state in states:
            self._leave_out(state)

    @staticmethod
    def _leave_out(state: Any) -> None:
        """Has the loop drop a token of this request that is computed already, and on its way from the device."""
        state._status = RequestStatus.FINISHED

    def _drain(self, end: float) -> None:
        """Lets the requests that the loop has go on until they have ended; those that come wait in their queue."""
        self._processor.input_queue = queue.Queue()
        # What the loop took from the queue just before it stood still is among its requests only after its next step.
        self._step()
        while self._processor.has_pending_requests():
            if time.monotonic() > end:
                raise TimeoutError("requests are still running: they have not ended within the time that a pause has")
            time.sleep(_LOOK_AGAIN_SECONDS)
            self._step()

    def _count_what_ends(self, router: Any) -> None:
        """Has each request that ends counted on the loop's thread, so under the version that made its last token."""
        deliver, deliver_batch = router.deliver, router.deliver_batch

        def counted(output: Any) -> None:
            if output.is_finished():
                self._versions.count(output.request_id, len(output.generated_tokens))

        def deliver_counted(output: Any) -> None:
            counted(output)
            deliver(output)

        def deliver_batch_counted(outputs: Any) -> None:
            for output in outputs:
                counted(output)
            deliver_batch(outputs)

        router.deliver, router.deliver_batch = deliver_counted, deliver_batch_counted

    def _count_what_runs(self) -> None:
        """Counts the tokens of the version before. Where a further one may be on its way from the device
        (asynchronous batching), answers say nothing of versions."""
        scheduler = self._processor.scheduler
        for state in (*scheduler.active_requests.values(), *scheduler.waiting_requests.values()):
            if self._processor.use_async_batching:
                self._versions.close(state.request_id)
            else:
                self._versions.count(state.request_id, len(state.to_generation_output().generated_tokens))

    def _step(self) -> None:
        self._unpark()
        self._park()
