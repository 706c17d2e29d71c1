"""What starting an engine takes, whole or one node's part of it."""

from __future__ import annotations

import os
from pathlib import Path

from ckpt_engine.agent.process import EngineProcess, LineSink, torchrun_variables
from ckpt_engine.core.deadlines import Deadlines
from ckpt_engine.engine.adapter import LaunchPlan
from ckpt_engine.words.directory import ENVIRONMENT, EngineDirectory
from ckpt_engine.words.state import EnginePage


def new_page(directory: EngineDirectory, before: EnginePage | None) -> EnginePage:
    """A new file, so that nothing which outlived the last engine can write into this one's words. before: closed."""
    if before is not None:
        before.close()
    directory.page.unlink(missing_ok=True)
    return EnginePage(directory.page)


def engine_process(
    plan: LaunchPlan,
    sleeps: bool,
    directory: EngineDirectory,
    log: Path,
    deadlines: Deadlines,
    on_output: LineSink | None,
) -> EngineProcess:
    """A process, not started yet, whose workers find `directory`. sleeps: the engine is to give memory up."""
    return EngineProcess(
        plan.command(sleeps),
        {**plan.env, ENVIRONMENT: str(directory.path)},
        log,
        on_line=on_output,
        grace_seconds=deadlines.engine_grace,
        start_seconds=deadlines.engine_start,
        without=torchrun_variables(os.environ),
    )
