"""All members of a collective as processes of this host, and what they have told."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.collective.collective_case import make_case

ROOT = Path(__file__).parents[2]
LIMIT = 150.0
RUN_SECONDS = 60.0
"""What a run may take: more than silence, so that who is silent is named."""


class Processes:
    """All members of a case as processes. module: what each runs."""

    module = "tests.collective.collective_member"

    def __init__(
        self, name: str, updates: int, faults: dict[int, str], device: str = "cpu", silence: float = 8.0
    ) -> None:
        self.case = make_case(name)
        numbers = range(len(self.case.members))
        self.processes: list[subprocess.Popen[str]] = []
        try:
            for number in numbers:
                asked = [name, number, updates, faults.get(number, "-"), RUN_SECONDS, *self.further(silence, device)]
                self.processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", self.module, *map(str, asked)],
                        cwd=ROOT,
                        env={**os.environ, "OMP_NUM_THREADS": "1"},
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        text=True,
                    )
                )
            lead, *others = self.processes
            assert lead.stdout is not None
            address = json.loads(lead.stdout.readline())["address"]
            for each in others:
                assert each.stdin is not None
                each.stdin.write(json.dumps(address) + "\n")
                each.stdin.flush()
        except BaseException:
            self.close()
            raise

    def further(self, silence: float, device: str) -> list[object]:
        """The module's last arguments."""
        return [silence, device]

    def said(self, but: Sequence[int] = ()) -> dict[int, list[dict[str, Any]]]:
        """What each has printed when it has ended. but: those that are not waited for."""
        found = {}
        for number, process in reversed(list(enumerate(self.processes))):
            if number not in but:
                told, _ = process.communicate("\n", timeout=LIMIT)  # the lead's last, whose meeting it is
                found[number] = [json.loads(line) for line in told.splitlines()]
        return found

    def close(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
            process.wait(LIMIT)
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    stream.close()


@contextmanager
def processes(*given: Any) -> Iterator[Processes]:
    made = Processes(*given)
    try:
        yield made
    finally:
        made.close()
