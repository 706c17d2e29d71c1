"""Kills a server exactly at a stage of an update, while somebody keeps asking it."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psutil

from ckpt_engine import Trainer
from tests.cluster import Replica
from tests.conformance.engines import Answer, Engine
from tests.conformance.server import Server
from tests.conformance.weights import of_either_version

REACH_SECONDS = 120.0
UPDATE_SECONDS = 120.0
PROMPT = [3, 5, 7]
FEW = 6


@dataclass(frozen=True)
class Crash:
    """part: what is killed, the API server or the worker. point: where whoever reaches it stands then; see
    ckpt_engine/trace.py. holder: who that is; empty: nothing goes on."""

    stage: str
    part: str
    point: str = ""
    holder: str = ""


CRASHES = (
    Crash("quiesce", "server", "agent.does.PauseEngine.begin", "agent"),
    Crash("transfer", "server", "worker.install.transfer", "worker"),
    Crash("install", "worker", "worker.install.install", "worker"),
    Crash("verify", "server", "worker.install.verify", "worker"),
    Crash("commit", "server", "worker.install.commit", "worker"),
    Crash("resume", "server", "agent.does.ResumeEngine.begin", "agent"),
    Crash("idle", "server"),
)


class Watcher(threading.Thread):
    """Asks all the time, and keeps each answer that is of no version that was published."""

    def __init__(self, engine: Engine, replica: Replica, models: Sequence[Any]) -> None:
        super().__init__(daemon=True)
        self._engine, self._replica, self._models = engine, replica, models
        self._ended = threading.Event()
        self.violations: list[Answer] = []
        self.start()

    def __enter__(self) -> Watcher:
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self.join(180)
        assert not self.is_alive(), "a request did not come back"

    def run(self) -> None:
        while not self._ended.wait(0.1):
            answer = self._engine.complete(self._replica, PROMPT, FEW)
            if answer.status == 200 and answer.tokens and not of_either_version(self._models, PROMPT, answer.tokens):
                self.violations.append(answer)


class Updating(threading.Thread):
    """One call of update_weights, on a thread of its own."""

    def __init__(self, trainer: Trainer, version: int) -> None:
        super().__init__(daemon=True)
        self._trainer, self._version = trainer, version
        self._report: Any = None
        self._error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            self._report = self._trainer.update_weights(version=self._version, timeout=UPDATE_SECONDS)
        except Exception as error:  # raised by report()
            self._error = error

    def report(self) -> Any:
        self.join(UPDATE_SECONDS + 30)
        assert not self.is_alive(), "an update did not end"
        if self._error is not None:
            raise self._error
        return self._report


def victim_of(server: Server, crash: Crash) -> psutil.Process:
    replica = server.replica
    return replica.workers()[0] if crash.part == "worker" else server.engine.server(replica)


def update_and_kill(server: Server, trainer: Trainer, version: int, crash: Crash) -> Any:
    """The report of an update during which the server is killed at the stage."""
    replica, victim = server.replica, victim_of(server, crash)
    holder = {"agent": replica.process.pid, "worker": replica.workers()[0].pid}[crash.holder]
    with server.listener.holding(crash.point, lambda pid: pid == holder) as held:
        updating = Updating(trainer, version)
        assert held.wait(REACH_SECONDS), f"nobody reached {crash.point}\n{replica.tail()}"
        kill(victim)
    return updating.report()


def kill(process: psutil.Process) -> None:
    """kill -9, and waits until it has gone."""
    with contextlib.suppress(psutil.NoSuchProcess):
        os.kill(process.pid, signal.SIGKILL)
        process.wait(60)
