"""Starts a relay beside an agent if the host has none, and ends it with the agent.

Of several agents on a host with this option, the first starts the relay; the others look every few seconds whether it
still runs. When it ends, with its agent or by itself, another agent starts an empty one.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Sequence

from ckpt_engine.core.deadlines import Deadlines
from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.host.modules import module_command, module_environment
from ckpt_engine.host.relay_directory import made_directory, relay_directory
from ckpt_engine.relay.alone import TakenError, alone

LOOK_SECONDS = 2.0
"""Time between two looks at whether the directory has a relay."""

MOST_SECONDS = 60.0
"""Longest wait before a relay that ended is started again; the wait doubles up to this."""


class OwnRelay:
    """The relay that an agent starts where the host has none (`agent --relay auto`).

    options: of `ckpt-engine relay`. say: gets one plain line an event.
    """

    def __init__(self, options: Sequence[str], deadlines: Deadlines, say: Callable[[str], None]) -> None:
        self._options = tuple(options)
        self._deadlines = deadlines
        self._say = say
        self._last_line = ""

    async def run(self) -> None:
        """Keeps a relay running on this host until cancelled; then the relay that it started ends, too. Raises nothing
        else."""
        wait = LOOK_SECONDS
        while True:
            why = self._why_not()
            if why:
                self._tell(why)
                wait = LOOK_SECONDS
            else:
                began = asyncio.get_running_loop().time()
                status = await self._one_relay()
                lived = asyncio.get_running_loop().time() - began
                wait = LOOK_SECONDS if lived > MOST_SECONDS else min(2 * wait, MOST_SECONDS)
                self._tell(f"the relay beside this agent ended with status {status}; another look in {wait:.0f} s")
            await asyncio.sleep(wait)

    def _why_not(self) -> str:
        """Why no relay is to be started now; empty: one is."""
        try:
            with alone(made_directory(shared=False)):
                return ""
        except TakenError:
            return f"this host has a relay already, at {relay_directory()}"
        except (CkptEngineError, OSError) as error:
            return f"no relay can run here: {error}"

    def _tell(self, line: str) -> None:
        if line != self._last_line:
            self._last_line = line
            self._say(line)

    async def _one_relay(self) -> int:
        command = module_command("ckpt_engine", "relay", "--until-stdin-ends", *self._options)
        try:
            process = await asyncio.create_subprocess_exec(
                *command, stdin=asyncio.subprocess.PIPE, env=module_environment(os.environ)
            )
        except OSError as error:
            self._tell(f"no relay can be started: {error}")
            return 1
        self._tell(f"started a relay for this host (process {process.pid})")
        try:
            return await process.wait()
        finally:
            await self._end(process)

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        """Ends the relay by closing its input; kills it if it does not end in time."""
        if process.returncode is not None:
            return
        assert process.stdin is not None
        process.stdin.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), self._deadlines.engine_grace)
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await asyncio.wait_for(process.wait(), self._deadlines.engine_grace)
