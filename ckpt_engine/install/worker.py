"""The object in an engine's hook: one worker, between the engine that calls it and the agent that gives the orders.

The engine calls `prepare()` and `install()`, through any hook that it offers, on the thread that owns the model.
`prepare()` is for work before a pause: recording a loader or making a plan ready. Each fetches its order from the
agent, carries it out, and reports. They never raise, since an exception in one worker would leave the engine's other
workers waiting for ever: problems are reported over the channel, and the state word has the outcome.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import torch

from ckpt_engine.core import scrub as scrubs
from ckpt_engine.core.deadlines import Deadlines
from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.core.stage_memory import ENVIRONMENT, NONE
from ckpt_engine.engine.target import LoadTarget
from ckpt_engine.gate.directory import EngineDirectory
from ckpt_engine.gate.page import EnginePage
from ckpt_engine.install.channel import WorkerChannel
from ckpt_engine.install.installer import Installer
from ckpt_engine.install.scrub import Scrub
from ckpt_engine.install.self_check import SelfCheck
from ckpt_engine.install.stage_memory import StageMemory
from ckpt_engine.transport.base import Transport
from ckpt_engine.transport.registry import all_transports
from ckpt_engine.v1 import manager_pb2, weights_pb2, worker_pb2

log = logging.getLogger(__name__)

PROGRESS_SECONDS = 0.2
"""Least time between two progress messages."""


class EngineWorker:
    """One worker of an engine. Used from one thread at a time."""

    def __init__(
        self,
        directory: EngineDirectory | Path,
        rank: int,
        world_size: int,
        target: LoadTarget,
        transports: Mapping[str, Transport] | None = None,
        deadlines: Deadlines | None = None,
        model: str = "",
        stage_memory: str | None = None,
        scrub_seconds: str | None = None,
    ) -> None:
        """Claims the worker's slot: from now on it holds no version, and the engine's gate is closed.

        rank: among all workers of the engine, 0 to world_size - 1. transports: default, all that work here.
        deadlines: default, from the environment. model: architecture, quantisation, layout, graphs and device; the
        result of a self-check is kept by it. stage_memory: as the agent's `--stage-memory`; default, from the
        environment. scrub_seconds: as the agent's `--scrub-seconds`; default, from the environment.

        Raises OSError, ValueError: the directory, the slot or that memory cannot be had, and the engine should not
        start.
        """
        directory = directory if isinstance(directory, EngineDirectory) else EngineDirectory(directory)
        self._deadlines = deadlines or Deadlines.from_environment(os.environ)
        self._page = EnginePage(directory.page)
        self.slot = self._page.claim(rank, world_size)
        self._channel = WorkerChannel(directory.endpoint, rank, self.slot.boot_id, self._deadlines.worker_attempt)
        self._scrub = Scrub(self.slot, _scrub_seconds(scrub_seconds), self._scrubbed, self._is_asleep)
        text = os.environ.get(ENVIRONMENT, NONE) if stage_memory is None else stage_memory
        self._installer = Installer(
            target,
            self.slot,
            all_transports() if transports is None else transports,
            _stage_memory(text, target),
            self._early,
            self._scrub,
        )
        self._check = SelfCheck(target, self._installer, self.slot, world_size)
        self._model = model
        self._last_progress = 0.0

    def prepare(self) -> bool:
        """Records the loader, makes a plan ready, or loads weights for a self-check, as the agent orders. Returns
        whether it could; the agent has the reason."""
        try:
            reply = self._ask(worker_pb2.WorkerRequest(want_prepare=worker_pb2.WantOrder()))
            if reply.HasField("ready"):
                ready = self._installer.ready(reply.ready)
                self._ask(worker_pb2.WorkerRequest(ready=ready))
                return not ready.HasField("problem")
            self._installer.stop_early()
            if reply.HasField("check"):
                checked = self._check.load(reply.check)
                self._ask(worker_pb2.WorkerRequest(checked=checked))
                return not checked.HasField("problem")
            if not reply.HasField("prepare"):
                return self._refused(reply)
            prepared = self._installer.prepare(reply.prepare)
            prepared.model = self._model
            self._ask(worker_pb2.WorkerRequest(prepared=prepared))
            return not prepared.HasField("problem")
        except Exception:
            log.exception("ckpt-engine: worker %d could not prepare", self.slot.rank)
            return False

    def install(self, epoch: int | None = None) -> bool:
        """Installs as the agent orders. Returns whether the worker is CLEAN afterwards; the agent has the reason.

        epoch: that the engine was called with, if any; an order of another one is not carried out.
        """
        try:
            reply = self._ask(worker_pb2.WorkerRequest(want_install=worker_pb2.WantOrder()))
            if not reply.HasField("install"):
                return self._refused(reply)
            order = reply.install
            if epoch is not None and epoch != order.fence.epoch:
                log.warning(
                    "ckpt-engine: nothing is installed: the engine asks for epoch %d, and the agent orders epoch %d",
                    epoch,
                    order.fence.epoch,
                )
                return False

            def on_progress(stage: manager_pb2.Stage, done: int, total: int) -> None:
                self._progress(order.fence, stage, done, total)

            installed = self._installer.install(order, on_progress)
            # In parallel with the engine's own answer: the agent waits for both, so no token is made before.
            report = worker_pb2.WorkerRequest(installed=installed)
            threading.Thread(target=self._report, args=(report,), name="ckpt-engine report", daemon=True).start()
            return not installed.report.HasField("problem")
        except Exception:
            log.exception("ckpt-engine: worker %d could not install", self.slot.rank)
            return False

    def discard(self) -> None:
        """Prepares for the engine's discarding of its weights (sleep level 2): the worker holds no version from now on,
        and all sources' memory is unmapped. Tensors that no update brings are digested, and compared at the next
        install.

        Never raises. May be called any number of times before the memory is discarded.
        """
        with self._scrub.halted():  # which may mark it DIRTY
            self.slot.none()
        try:
            self._installer.discarding()
        except Exception:
            log.exception("ckpt-engine: worker %d could not release the memory of its sources", self.slot.rank)

    def give_back(self) -> None:
        """Frees stage memory, before the engine gives up memory of its own at any level of sleep. The next plan that is
        made ready takes it again. Never raises. May be called any number of times."""
        try:
            self._installer.give_back()
        except Exception:
            log.exception("ckpt-engine: worker %d could not free its stage memory", self.slot.rank)

    def close(self) -> None:
        """Ends the worker: it holds no version any more."""
        with self._scrub.halted():  # which may mark it DIRTY
            self.slot.none()
        try:
            self._installer.close()
        finally:
            self._channel.close()
            self._page.close()

    def _ask(self, request: worker_pb2.WorkerRequest) -> worker_pb2.AgentReply:
        return self._channel.ask(request, self._deadlines.worker_ask)

    def _report(self, report: worker_pb2.WorkerRequest) -> None:
        """Sends a report until the agent has it. The engine thread's next request waits for that."""
        try:
            self._ask(report)
        except Exception:
            log.exception("ckpt-engine: the agent has not got the report of worker %d", self.slot.rank)

    def _early(self, news: worker_pb2.WorkerEarly) -> bool:
        """Tells the agent how far bringing into stage memory is; returns whether it waits for that."""
        return self._ask(worker_pb2.WorkerRequest(early=news)).HasField("acknowledged")

    def _scrubbed(self, news: manager_pb2.WorkerScrub) -> None:
        """Tells the agent how far the scrub is; this may be lost, and is told again. On the scrub's thread."""
        self._channel.tell(worker_pb2.WorkerRequest(scrub=news))

    def _is_asleep(self) -> bool:
        return bool(self._page.marked().sleeping)

    def _progress(self, fence: weights_pb2.Fence, stage: manager_pb2.Stage, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self._last_progress >= PROGRESS_SECONDS:
            self._last_progress = now
            progress = worker_pb2.WorkerProgress(fence=fence, stage=stage, bytes_done=done, bytes_total=total)
            self._channel.tell(worker_pb2.WorkerRequest(progress=progress))

    def _refused(self, reply: worker_pb2.AgentReply) -> bool:
        why = reply.refused.message if reply.HasField("refused") else "the agent gave no order"
        log.warning("ckpt-engine: worker %d does nothing: %s", self.slot.rank, why)
        return False


def _scrub_seconds(text: str | None) -> float:
    """The scrub's interval. Raises ValueError."""
    try:
        return scrubs.scrub_seconds(os.environ.get(scrubs.ENVIRONMENT, "") if text is None else text)
    except CkptEngineError as error:
        raise ValueError(error.problem.message) from error


def _stage_memory(text: str, target: LoadTarget) -> StageMemory:
    """Stage memory on the device of the model. Raises ValueError."""
    devices = {tensor.device for _, tensor in target.named_tensors()}
    device = next((device for device in devices if device.type == "cuda"), torch.device("cpu"))
    try:
        return StageMemory(text, device)
    except CkptEngineError as error:
        raise ValueError(error.problem.message) from error
