"""Prepares the start of an engine, or of one node's part of it: its page and its process."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from ckpt_engine.agent.process import EngineProcess, LineSink, torchrun_variables
from ckpt_engine.core import scrub
from ckpt_engine.core import stage_memory as stage
from ckpt_engine.core.deadlines import Deadlines
from ckpt_engine.engine.adapter import LaunchPlan
from ckpt_engine.gate.directory import ENVIRONMENT, EngineDirectory
from ckpt_engine.gate.page import EnginePage
from ckpt_engine.gate.shelf import ENVIRONMENT as ADAPTERS_VARIABLE

NO_ADAPTERS: Mapping[str, int] = MappingProxyType({})


def new_page(directory: EngineDirectory, before: EnginePage | None) -> EnginePage:
    """Makes a new page file, so that no process of the last engine can write into this one's words. Closes `before`."""
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
    stage_memory: str = "",
    scrub_seconds: str = "",
    adapters: Mapping[str, int] = NO_ADAPTERS,
) -> EngineProcess:
    """An engine process, not started yet; its workers find `directory`, and their stage memory, by its environment.
    sleeps: launch it so that it can give memory up. stage_memory, scrub_seconds: empty: what the agent's environment
    says. adapters: how many versions it keeps of each."""
    own = {stage.ENVIRONMENT: stage_memory, scrub.ENVIRONMENT: scrub_seconds}
    own[ADAPTERS_VARIABLE] = ",".join(f"{name}={versions}" for name, versions in adapters.items())
    return EngineProcess(
        plan.command(sleeps),
        {**plan.env, ENVIRONMENT: str(directory.path), **{name: value for name, value in own.items() if value}},
        log,
        on_line=on_output,
        grace_seconds=deadlines.engine_grace,
        start_seconds=deadlines.engine_start,
        without=torchrun_variables(os.environ),
    )
