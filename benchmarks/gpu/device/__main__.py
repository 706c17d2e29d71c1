"""Runs a list of steps.py, one after the other, each under its own limit, also after a failure; packs what they wrote.

    python -m benchmarks.gpu.device NAME... --out DIRECTORY [--seconds 540] [--cpu]
    python -m benchmarks.gpu.device --list

DIRECTORY gets one file, `results.tar.xz`, with a log of each step, what it wrote, `machine.json` and `steps.json`. It
is written anew after each step, so that a run that is cut off leaves the steps before. --seconds: of all steps; one
that is expected to take longer than what is left is left out. Prints a line for each step. Exits with 1 if one failed.

A step that is not over at its limit gets SIGINT, so that pytest can end what it has started, and then SIGKILL. Whatever
is left that was started by it is killed, too, so that the next step finds the GPU's memory free.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import secrets
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks.gpu.device.steps import STEPS, Step

ROOT = Path(__file__).resolve().parents[3]
MARK = "CKPT_ENGINE_DEVICE_STEP"
"""In the environment of all that a step starts."""

GRACE_SECONDS = 20.0
LOG_BYTES = 2 << 20
"""What is kept of a log: its end."""

SERVER_LOG_BYTES = 256 << 10
"""The same of each server that a step has started."""

ARCHIVE = "results.tar.xz"


def gpus() -> int:
    """Asked of the driver's tool: this process uses no GPU."""
    return len(said("nvidia-smi", "--query-gpu=name", "--format=csv,noheader").splitlines())


def said(*command: str) -> str:
    """What a short command prints; empty if there is none of that name, or it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def machine() -> dict[str, Any]:
    """What results depend on."""
    query = "name,driver_version,memory.total,memory.used,clocks.sm,clocks.mem"
    return {
        "gpus": said("nvidia-smi", f"--query-gpu={query}", "--format=csv").splitlines(),
        "links": said("nvidia-smi", "topo", "-m").splitlines(),
        "processors": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "disk_free_bytes": shutil.disk_usage(tempfile.gettempdir()).free,
        "python": platform.python_version(),
        "system": platform.platform(),
        "packages": said(sys.executable, "-m", "pip", "list", "--format=freeze").splitlines(),
    }


def missing(step: Step, there: int, cpu: bool) -> str:
    """Why a step cannot run here; empty if it can."""
    if cpu:
        return ""
    if step.gpus > there:
        return f"needs {step.gpus} GPUs, this host shows {there}"
    variable = f"CKPT_ENGINE_{step.engine.upper()}_PYTHON"
    if step.engine and not os.environ.get(variable):
        return f"{variable} is not set"
    return ""


def end(process: subprocess.Popen[bytes], mark: str) -> None:
    """The step and all that it has started."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(GRACE_SECONDS)
    left = [each for each in psutil.process_iter() if marked(each, mark)]
    for each in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()
    psutil.wait_procs(left, GRACE_SECONDS)


def marked(process: psutil.Process, mark: str) -> bool:
    """Whether a step with this mark has started it."""
    try:
        return bool(process.environ().get(MARK) == mark)
    except psutil.Error:
        return False


def run(step: Step, results: Path, cpu: bool, limit: float) -> dict[str, Any]:
    """One step, in a temporary directory of its own. What it ended with, and its seconds."""
    out = results / step.name
    out.mkdir(parents=True)
    words = [word.replace("{out}", str(out)) for word in (step.cpu if cpu and step.cpu else step.command)]
    # Names of sockets lie below it and must be short.
    temporary = tempfile.mkdtemp(prefix="d", dir="/tmp")
    mark = secrets.token_hex(8)
    environment = {**os.environ, "TMPDIR": temporary, "PYTHONUNBUFFERED": "1", MARK: mark}
    # A program that uses NVLink multicast can put a shared host's GPUs out of service.
    environment["NCCL_NVLS_ENABLE"] = "0"
    log = out / "log.txt"
    began = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, *words],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        try:
            status = process.wait(limit)
            ended = "ok" if status == 0 else f"failed ({status})"
        except subprocess.TimeoutExpired:
            ended = f"not over in {limit:.0f} s"
        finally:
            end(process, mark)
            keep_logs(Path(temporary), out / "servers")
            shutil.rmtree(temporary, ignore_errors=True)
    shorten(log)
    return {"ended": ended, "seconds": time.monotonic() - began, "command": words}


def keep_logs(below: Path, out: Path) -> None:
    """What servers printed, under one name each: `servers/graphs-graphs.log`."""
    for log in below.rglob("*.log"):
        if log.is_file() and log.stat().st_size:
            out.mkdir(exist_ok=True)
            kept = out / "-".join(log.relative_to(below).parts[-3:])
            shutil.copyfile(log, kept)
            shorten(kept, SERVER_LOG_BYTES)


def shorten(log: Path, most: int = LOG_BYTES) -> None:
    """Keeps its end."""
    if (size := log.stat().st_size) > most:
        with log.open("rb") as file:
            file.seek(size - most)
            kept = file.read()
        log.write_bytes(b"(what came before is left out)\n" + kept)


def last_words(log: Path) -> str:
    """The last line that is a result, or the last line."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    results = [line for line in lines if line.startswith("RESULT")]
    return (results or lines or [""])[-1][:160]


def pack(results: Path, archive: Path) -> None:
    """All of it; the file is whole at any time."""
    part = archive.with_name(f".{archive.name}")
    with tarfile.open(part, "w:xz") as file:
        file.add(results, "results")
    part.replace(archive)


def run_all(steps: Sequence[Step], out: Path, seconds: float, cpu: bool) -> bool:
    """Whether all that ran were well."""
    out.mkdir(parents=True, exist_ok=True)
    end_at = time.monotonic() + seconds
    there = 0 if cpu else gpus()
    told: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="results") as directory:
        results = Path(directory)
        (results / "machine.json").write_text(json.dumps(machine(), indent=1) + "\n")
        for step in steps:
            left = end_at - time.monotonic()
            why = missing(step, there, cpu)
            if not why and not cpu and left < step.seconds:
                why = f"is expected to take {step.seconds} s, {max(left, 0.0):.0f} s are left"
            if not why and left <= 0:
                why = "no time is left"
            if why:
                found: dict[str, Any] = {"ended": "left out", "why": why, "seconds": 0.0}
            else:
                try:
                    found = run(step, results, cpu, min(step.limit, left))
                    why = last_words(results / step.name / "log.txt")
                except Exception as error:  # the other steps are worth their time all the same
                    found = {"ended": "failed", "why": repr(error), "seconds": 0.0}
                    why = repr(error)
            told.append({"step": step.name, "expected_seconds": step.seconds, **found})
            (results / "steps.json").write_text(json.dumps(told, indent=1) + "\n")
            pack(results, out / ARCHIVE)
            print(f"{step.name:<13} {found['ended']:<16} {found['seconds']:6.0f} s  {why}", flush=True)
    ran = [each["ended"] for each in told if each["ended"] != "left out"]
    print(f"{ran.count('ok')} of {len(ran)} well, {len(told) - len(ran)} left out; {out / ARCHIVE}", flush=True)
    return ran.count("ok") == len(ran)


def table(steps: Sequence[Step]) -> str:
    """For people: a line a step."""
    lines = [f"{'name':<13} {'seconds':>8} {'limit':>6} {'GPUs':>5} {'engine':<7} what"]
    for step in steps:
        seconds = f"{'~' if step.guessed else ''}{step.seconds}"
        lines.append(f"{step.name:<13} {seconds:>8} {step.limit:>6} {step.gpus:>5} {step.engine or '-':<7} {step.what}")
    return "\n".join(lines)


def main() -> int:
    known = {step.name: step for step in STEPS}
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(known)}; none: all, in this order")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")), help="default: $OUT, or here")
    parser.add_argument("--seconds", type=float, default=540.0, help="of all steps together")
    parser.add_argument("--cpu", action="store_true", help="small models without GPUs: a rehearsal")
    parser.add_argument("--list", action="store_true", help="only print what there is")
    options = parser.parse_args()
    if unknown := [name for name in options.names if name not in known]:
        parser.error(f"there is no step {', '.join(unknown)}; there are {', '.join(known)}")
    if options.list:
        print(table(STEPS))
        return 0
    steps = [known[name] for name in options.names] or list(STEPS)
    return 0 if run_all(steps, options.out, options.seconds, options.cpu) else 1


if __name__ == "__main__":
    sys.exit(main())
