"""Starts what a GRPO run needs on one machine, and the run: a manager, two replicas, a gateway, train.py; then plots.

In production each of these runs on its own host; the command lines are the same. CKPT_ENGINE_TRL_PYTHON names the
Python that has TRL, CKPT_ENGINE_OVERLAY a folder with ckpt-engine for it; `examples/grpo/run` sets both.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

HERE = Path(__file__).resolve().parent
START_SECONDS = 120.0
STOP_SECONDS = 30.0


class Service:
    """One process of ours, with its output in a file. As a context: ended at the end."""

    def __init__(self, log: Path, *arguments: str) -> None:
        self._log = log
        with log.open("wb") as output:
            command = [sys.executable, "-m", "ckpt_engine", *arguments]
            self._process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)

    def said(self, pattern: str) -> str:
        """What its output says first that fits the pattern, which has one group."""
        end = time.monotonic() + START_SECONDS
        while True:
            found = re.search(pattern, self._log.read_text(errors="replace"))
            if found:
                return found[1]
            if self._process.poll() is not None or time.monotonic() > end:
                raise SystemExit(f"it did not start; {self._log} ends with:\n{self._log.read_text()[-2000:]}")
            time.sleep(0.1)

    def __enter__(self) -> Service:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def trl(*command: str | Path) -> None:
    """Runs a program with TRL's Python. Raises SystemExit if it fails."""
    environment = {**os.environ, "PYTHONPATH": os.environ["CKPT_ENGINE_OVERLAY"], "OMP_NUM_THREADS": "1"}
    environment |= {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    status = subprocess.call([os.environ["CKPT_ENGINE_TRL_PYTHON"], *command], env=environment)
    if status:
        raise SystemExit(status)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--output", type=Path, default=HERE / "outcome", help="directory for the outcome and the logs")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the services end, too
    output: Path = options.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    ledger = output / "ledger.sqlite3"
    with ExitStack() as services:

        def service(name: str, *arguments: str) -> Service:
            return services.enter_context(Service(output / f"{name}.log", *arguments))

        serve = service("manager", "manager", "--listen", "127.0.0.1:0", "--http", "", "--ledger", str(ledger))
        manager = serve.said(r"manager started grpc=(\S+)")
        command = ["agent", "--manager", manager, "--engine", "reference", "--model", str(HERE / "model")]
        replicas = [service(name, *command, "--name", name, "--", "--dtype", "float32") for name in ("one", "two")]
        gateway = service("gateway", "gateway", "--manager", manager, "--listen", "127.0.0.1:0")
        url = "http://" + gateway.said(r"gateway listens on (\S+)")
        for replica in replicas:
            replica.said("(registered) with the manager")
        steps = ["--steps", str(options.steps), "--output", str(output)]
        trl(HERE / "train.py", "--manager", manager, "--gateway", url, "--replicas", "2", *steps)
    subprocess.check_call([sys.executable, HERE / "plot.py", output / "outcome.json", output / "reward.svg"])
    print(f"{output}/outcome.json, {output}/reward.svg")


if __name__ == "__main__":
    main()
