"""The processes that suffer: a manager, agents with their engines, a trainer, a relay. Each can be made anew."""

from __future__ import annotations

import ctypes
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil

_DIE_WITH_US = partial(ctypes.CDLL(None).prctl, 1, signal.SIGKILL)  # PR_SET_PDEATHSIG: also if the harness is killed


class Member:
    """One process of ours. Its output is appended to `log`. before: of its command, as `nsenter`: it ends with that."""

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        environment: Mapping[str, str],
        before: Sequence[str] = (),
        **pipes: Any,
    ) -> None:
        self.log = log
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                [*before, sys.executable, *command],
                **{"stdout": output, "stderr": output, **pipes},
                env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
                preexec_fn=_DIE_WITH_US,
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def end(self, number: int = signal.SIGKILL, seconds: float = 60.0) -> None:
        """Ends the process, wherever it stands. Its engine, if it has one, goes with it."""
        if self.alive:
            self.process.send_signal(signal.SIGCONT)
            self.process.send_signal(number)
            try:
                self.process.wait(seconds)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(seconds)

    def tail(self, lines: int = 40) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


def start_manager(path: Path, port: int, environment: Mapping[str, str], ledger: Path, cluster: str = "") -> Member:
    """`ckpt-engine manager` on this port; its log goes to `path`."""
    command = ["-m", "ckpt_engine", "manager", "--listen", f"127.0.0.1:{port}", "--http", "127.0.0.1:0"]
    command += ["--ledger", str(ledger), "--cluster", cluster]
    return Member(command, path / "manager.log", environment)


def start_agent(
    path: Path, name: str, manager: str, model: Path, port: int, workers: int, environment: Mapping[str, str]
) -> Member:
    """`ckpt-engine agent` that launches a reference engine on this port."""
    command = ["-m", "ckpt_engine", "agent", "--manager", manager, "--engine", "reference", "--model", str(model)]
    command += ["--name", name, "--port", str(port), "--engine-output"]
    return Member([*command, "--", "--tensor-parallel", str(workers)], path / f"{name}.log", environment)


def start_attached_agent(
    path: Path, name: str, manager: str, port: int, environment: Mapping[str, str], *options: str
) -> Member:
    """`ckpt-engine agent` beside an engine that runs on this port."""
    command = ["-m", "ckpt_engine", "agent", "--manager", manager, "--engine", "reference"]
    command += ["--url", f"http://127.0.0.1:{port}", "--name", name, *options]
    return Member(command, path / f"{name}.log", environment)


def start_engine(path: Path, name: str, model: Path, port: int, workers: int, environment: Mapping[str, str]) -> Member:
    """A reference engine that nobody of ours has launched."""
    command = ["-m", "ckpt_engine_adapters.reference.server", "--model", str(model), "--port", str(port)]
    return Member([*command, "--tensor-parallel", str(workers)], path / f"{name}-engine.log", environment)


def start_relay(path: Path, manager: str, environment: Mapping[str, str]) -> Member:
    """`ckpt-engine relay` for everybody here; small, and of little patience with readers that keep a slot."""
    command = ["-m", "ckpt_engine", "relay", "--manager", manager, "--name", "relay", "--memory", "16MiB"]
    return Member([*command, "--slot-grace", "3"], path / "relay.log", environment)


class TrainerMember(Member):
    """One run of trainer_process.py."""

    def __init__(
        self, path: Path, manager: str, lineage: str, weights: Path, environment: Mapping[str, str], *options: str
    ) -> None:
        script = Path(__file__).with_name("trainer_process.py")
        super().__init__(
            [str(script), manager, lineage, str(weights), *options],
            path / "trainer.log",
            environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.lineage = lineage
        self._is_ready = False
        self._answers: queue.Queue[dict[str, Any] | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def ready(self, seconds: float = 120.0) -> None:
        """Waits until it has offered its weights."""
        if not self._is_ready:
            answer = self._answers.get(timeout=seconds)
            assert answer == {"published": True}, f"the trainer did not start: {answer}\n{self.tail()}"
            self._is_ready = True

    def ask(self, version: int, seed: int, timeout: float, prefetch: str = "auto", until: str = "installed") -> None:
        """Begins an update; a trainer that is dead does not begin one."""
        assert self.process.stdin is not None
        try:
            told = {"version": version, "seed": seed, "timeout": timeout, "prefetch": prefetch, "until": until}
            line = json.dumps(told)
            self.process.stdin.write(line.encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            self._answers.put(None)

    def answer(self, seconds: float) -> dict[str, Any] | None:
        """What it said last, or None if it died first. Raises queue.Empty if neither happens in time."""
        return self._answers.get(timeout=seconds)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._answers.put(json.loads(line))
        self._answers.put(None)


def engine_processes(starter: Member) -> list[psutil.Process]:
    """What an agent's launcher has started and runs, or an engine by itself: API server first, then workers by rank."""
    try:
        process = psutil.Process(starter.pid)
        descendants = [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []
    found: list[tuple[int, int, psutil.Process]] = []
    for process in descendants:
        try:
            command = process.cmdline()
        except psutil.NoSuchProcess:
            continue
        if "ckpt_engine_adapters.reference.worker_process" in command:
            found.append((1, int(command[command.index("--rank") + 1]), process))
        elif "ckpt_engine_adapters.reference.server" in command and "launcher.py" not in " ".join(command):
            found.append((0, 0, process))
    return [process for _, _, process in sorted(found, key=lambda each: each[:2])]
