"""A process of a test, driven by one JSON line at a time: a question in, an answer out. It ends when its input does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self


class LineProcess:
    """Starts `python -m module arguments`; `ask` is answered within the test's own timeout.

    before: of the command, as `unshare`. environment: added to ours.
    """

    def __init__(self, module: str, *arguments: str, before: Sequence[str] = (), **environment: str) -> None:
        self.process = subprocess.Popen(
            [*before, sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[1],
            env={**os.environ, **environment},
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def send(self, **question: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        """Raises EOFError if the process has ended."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise EOFError(f"{self.process.args} has ended")
        return json.loads(line)

    def ask(self, **question: Any) -> Any:
        self.send(**question)
        return self.answer()

    def kill(self) -> None:
        """Safe to call twice."""
        self.process.kill()
        self.process.wait(timeout=30)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()
