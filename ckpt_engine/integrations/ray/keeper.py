"""Runs one command of a cluster in an actor of Ray, and starts it again when it ends. Decides when it is started again.
What the command is, and on which node it runs, the supervisor has decided."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import ray

from ckpt_engine.agent.process import EngineProcess, EngineProcessError, describe_status
from ckpt_engine.integrations.ray.plan import ClusterPlan, ProcessState, ProcessStatus

GRACE_SECONDS = 45.0  # between SIGTERM and SIGKILL of a process that is to leave; an agent says goodbye meanwhile
PAUSES_SECONDS = (0.5, 30.0)  # before a process that ended is started again: at first, and at most
USAGE_STATUS, EVICTED_STATUS = 2, 3  # exit statuses of our commands: options that cannot be; an evicted replica's
LINES_SHOWN = 20  # that a process printed last, in the reason of its end

logger = logging.getLogger("ckpt_engine.ray")


class ProcessKeeper:
    """An actor: runs one command, and starts it again when it ends, until it is to leave.

    The command's tree ends with this process, however that ends (`ckpt_engine/agent/launcher.py`).
    """

    def __init__(self, plan: ClusterPlan, first: ProcessStatus, ports: Mapping[str, int]) -> None:
        self._plan, self._ports = plan, ports
        self._status = replace(first, state="restarting", node=ray.get_runtime_context().get_node_id(), reason="")
        self._log = plan.directory / f"{first.name}.log"
        self._leave = asyncio.Event()
        self._process: EngineProcess | None = None
        self._keeping = asyncio.get_running_loop().create_task(self._keep())
        self._keeping.add_done_callback(_end_if_broken)

    def __repr__(self) -> str:
        """What Ray writes before each line that the command prints."""
        return f"ckpt-engine {self._status.name}"

    async def status(self) -> ProcessStatus:
        """How the process is now."""
        return self._status

    async def leave(self) -> None:
        """Ends the process: SIGTERM, and SIGKILL after a grace. Returns when its whole tree has gone."""
        self._leave.set()
        if self._process is not None:
            await self._process.stop()
        await self._keeping
        with contextlib.suppress(OSError):  # Ray has what it printed, too
            self._log.unlink()
            self._plan.directory.rmdir()

    async def _keep(self) -> None:
        command = self._plan.command(self._status, self._ports, ray.util.get_node_ip_address())
        first, most = PAUSES_SECONDS
        pause = first
        while not self._leave.is_set() and self._status.state not in ("refused", "evicted"):
            began = time.monotonic()
            await self._once(command)
            pause = first if time.monotonic() - began > most else min(2 * pause, most)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._leave.wait(), pause)

    async def _once(self, command: Sequence[str]) -> None:
        """The process from its start to its end, and what its end means."""
        process = EngineProcess(command, self._plan.environment, self._log, on_line=_print, grace_seconds=GRACE_SECONDS)
        self._process = process
        state: ProcessState = "restarting"
        try:
            await process.start()
            if self._leave.is_set():
                await process.stop()
            starts = self._status.starts + 1
            self._status = replace(self._status, state="running", pid=process.pid or 0, starts=starts)
            ended = await process.wait()
            if ended == USAGE_STATUS:
                state = "refused"
            elif ended == EVICTED_STATUS and self._status.kind == "replica":
                state = "evicted"
            reason = "\n".join([describe_status(ended), *process.last_lines(LINES_SHOWN)])
        except EngineProcessError as error:
            reason = str(error)
        self._status = replace(self._status, state=state, pid=0, reason=reason)


def _end_if_broken(keeping: asyncio.Task[None]) -> None:
    """A keeper that has a defect ends, and Ray starts it again: nothing else would notice that it keeps nothing."""
    if not keeping.cancelled() and (error := keeping.exception()) is not None:
        logger.error("a keeper ends with its process: %s", error, exc_info=error)
        os._exit(1)


def _print(line: str) -> None:
    """Into the actor's output, which Ray keeps and shows to the program."""
    print(line, file=sys.stderr, flush=True)
