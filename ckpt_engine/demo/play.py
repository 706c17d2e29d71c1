"""The demo's course: start everything, then train, update and recite until the text is known, and end everything."""

from __future__ import annotations

import asyncio
import math
import shutil
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from ckpt_engine.agent.ports import ReservedPort
from ckpt_engine.core.message_json import read_json
from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.demo.database import DatabaseError, demo_database
from ckpt_engine.demo.hosts import HostsError, hosts
from ckpt_engine.demo.recital import Recital, recite
from ckpt_engine.demo.sites import Wire
from ckpt_engine.demo.stage import DemoError, DemoSettings, Stage
from ckpt_engine.demo.task import milestones
from ckpt_engine.gate.directory import default_root
from ckpt_engine.report import UpdateReport
from ckpt_engine.v1 import manager_pb2

LINE_SECONDS = 120.0
"""The longest that the trainer may say nothing: an update, or a training step on a crowded machine."""


@dataclass(frozen=True)
class Act:
    """One update, and the replicas' answers after it."""

    report: UpdateReport  # the trainer's
    loss: float  # before the last optimizer step, nats a byte; NaN if there was none yet
    recitals: list[Recital]
    wire: Wire = field(default_factory=lambda: Wire({}))  # bytes through the hosts' interfaces meanwhile

    @property
    def verified(self) -> bool:
        """Whether the update was whole and verified, and each replica answered with its version."""
        served = all(recital.version == self.report.version for recital in self.recitals)
        return self.report.ok and self.report.verified and served

    @property
    def matches(self) -> bool:
        """Whether every replica recites the text."""
        return bool(self.recitals) and all(recital.matches for recital in self.recitals)


@dataclass
class Outcome:
    """The result of a demo."""

    settings: DemoSettings
    acts: list[Act] = field(default_factory=list)
    start_seconds: float = 0.0
    play_seconds: float = 0.0
    stop_seconds: float = 0.0
    problem: str = ""  # why it ended early; empty if it did not

    @property
    def ok(self) -> bool:
        """Whether all updates were made and verified, and the text is recited in the end."""
        complete = len(self.acts) == self.settings.updates
        return not self.problem and complete and self.verified and self.final_text_matches

    @property
    def verified(self) -> bool:
        """Whether every update that was made is verified."""
        return bool(self.acts) and all(act.verified for act in self.acts)

    @property
    def final_text_matches(self) -> bool:
        """Whether every replica recites the text after the last update."""
        return bool(self.acts) and self.acts[-1].matches

    def to_dict(self) -> dict[str, Any]:
        """The outcome as a dictionary for JSON."""
        replicas = [replica for act in self.acts for replica in act.report.replicas]
        return {
            "ok": self.ok,
            "updates": len(self.acts),
            "replicas": self.settings.replicas,
            "hosts": self.settings.hosts,
            "wire": [
                {name: {"sent": sent, "received": received} for name, (sent, received) in act.wire.counts.items()}
                for act in self.acts
            ],
            "verified": self.verified,
            "final_text_matches": self.final_text_matches,
            "problem": self.problem,
            "bytes": self.acts[-1].report.nbytes if self.acts else 0,
            "timings": {
                "start_seconds": round(self.start_seconds, 3),
                "play_seconds": round(self.play_seconds, 3),
                "stop_seconds": round(self.stop_seconds, 3),
                "update_seconds": [round(act.report.seconds, 4) for act in self.acts],
                "sync_seconds_worst": round(max((r.sync_seconds for r in replicas), default=0.0), 4),
                "pause_seconds_worst": round(max((r.pause_seconds for r in replicas), default=0.0), 4),
            },
        }


class Show(Protocol):
    """Shows the demo to a user."""

    def state(self, words: str) -> None:
        """Shows the current step, in place of the last one."""
        ...

    def started(self, stage: Stage, seconds: float) -> None: ...

    def act(self, act: Act) -> None: ...

    def leader_lost(self, address: str, phase: str, version: int) -> None:
        """Shows that the manager at an address was killed during an update, which brought a version under another
        one. phase: what it was doing."""
        ...

    def stay_open(self, stage: Stage) -> None:
        """Shows that everything keeps running, for a user of the page."""
        ...


async def play(settings: DemoSettings, show: Show) -> Outcome:
    """Runs the demo. When it returns, or is cancelled, none of its processes runs. No file remains, but for the logs of
    a demo that failed, which its problem names."""
    outcome = Outcome(settings)
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="ckpt-engine-demo-"))
        try:
            found = stack.enter_context(hosts(settings.hosts)) if settings.hosts > 1 else []
            if found:
                stack.enter_context(found[0].on_network())
            database = None
            if settings.standby:
                port = ReservedPort(default_root())
                database = stack.enter_context(demo_database(port.number))
            stage = Stage(settings, Path(directory), found, database)
        except (HostsError, DatabaseError) as error:
            outcome.problem = str(error)
            return outcome
        except CkptEngineError as error:
            outcome.problem = error.problem.message
            return outcome
        try:
            await _play(stage, settings, show, outcome)
            if settings.page:
                await _keep(stage, show)
        except (DemoError, HostsError) as error:
            outcome.problem = str(error)
        finally:
            stop_start = time.monotonic()
            show.state("stopping")
            await stage.stop()
            outcome.stop_seconds = time.monotonic() - stop_start
        if outcome.problem and (log_directory := _keep_logs(Path(directory))):
            outcome.problem = f"{outcome.problem.replace(directory, log_directory)}\nThe logs are in {log_directory}"
    return outcome


def _keep_logs(directory: Path) -> str:
    """Copies the logs into a new directory, since this one is removed. Empty: there are none."""
    logs = [*directory.glob("*.log"), *directory.glob("**/logs/*.log")]
    if not logs:
        return ""
    copy = tempfile.mkdtemp(prefix="ckpt-engine-demo-logs-")
    for log in logs:
        shutil.copy2(log, copy)
    return copy


async def _play(stage: Stage, settings: DemoSettings, show: Show, outcome: Outcome) -> None:
    start = time.monotonic()
    await stage.start(show.state)
    outcome.start_seconds = time.monotonic() - start
    show.started(stage, outcome.start_seconds)
    start = time.monotonic()
    loss, losing = math.nan, None
    while len(outcome.acts) < settings.updates:
        former_wire = Wire.now(stage.sites)
        loses = settings.standby and len(outcome.acts) == settings.updates // 2
        if not loses:
            stage.give_turn()
        while "report" not in (line := await stage.line(LINE_SECONDS)):
            if "problem" in line:
                raise DemoError(f"the update was not made: {line['problem']}")
            loss = line["loss"]
            show.state(f"training: step {line['step']}, loss {loss:.3f}")
            if loses and line["step"] == milestones(settings.updates)[len(outcome.acts)]:
                losing = asyncio.ensure_future(stage.lose_leader())
                await asyncio.sleep(0)  # it stops an agent, before the ranks call
                stage.give_turn()
        message = manager_pb2.UpdateReport()
        read_json(line["report"].encode(), message)
        report = UpdateReport(message)
        if losing is not None:
            if not losing.done():
                losing.cancel()
                raise DemoError("the update was not seen to install, so no manager was killed")
            show.leader_lost(*await losing, report.version)
            losing = None
        if not report.ok:
            raise DemoError(f"the update is not whole:\n{line['table']}")
        wire = Wire.now(stage.sites).since(former_wire)
        show.state(f"asking {settings.replicas} replicas to go on from the opening words")
        act = Act(report, loss, await recite(settings.engine, stage.gateway, list(stage.replicas)), wire)
        outcome.acts.append(act)
        show.act(act)
        outcome.play_seconds = time.monotonic() - start
    if not settings.page:
        stage.give_turn()


async def _keep(stage: Stage, show: Show) -> None:
    """Waits until this task is cancelled, which ends the demo. Processes may have ended by then: the page has buttons
    that end replicas."""
    show.stay_open(stage)
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        task = asyncio.current_task()
        assert task is not None
        task.uncancel()
