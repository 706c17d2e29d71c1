"""The control plane's benchmark (test_control_plane.py) in this tree and in another one, in turns:
`python -m benchmarks.control_plane_before BEFORE [RESULT.json]`, with BEFORE a checkout of another commit.

Each tree runs its own benchmark with its own code, in this interpreter's environment; the one that goes first changes
from turn to turn. It measures, and decides nothing. `chrt -f 20` before the command (root) puts all that is measured
before other work of the machine. TURNS in the environment: 5 unless given.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.against_before import BEFORE, NOW, Trees

TURNS = int(os.environ.get("TURNS", "5"))


def one_turn(trees: Trees, name: str, folder: Path) -> dict[int, dict[str, Any]]:
    """What the benchmark of a tree finds, by the number of replicas. Raises RuntimeError, with its output, if it
    fails."""
    tree, result = trees.paths[name], folder / "result.json"
    command = [sys.executable, "-m", "pytest", "benchmarks/test_control_plane.py", "--benchmark-only", "-q"]
    ended = subprocess.run(
        [*command, f"--benchmark-json={result}", "--timeout=900"],
        cwd=tree,
        env={**os.environ, **trees.environment(name)},
        capture_output=True,
        text=True,
        timeout=1000,
    )
    if ended.returncode:
        raise RuntimeError(f"{tree}: {ended.stdout[-4000:]}{ended.stderr[-2000:]}")
    found = json.loads(result.read_text())["benchmarks"]
    return {each["extra_info"]["replicas"]: each["extra_info"] for each in found}


def commit(tree: Path) -> str:
    """The commit that a tree has checked out."""
    command = ["git", "-C", str(tree), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip()


def spread(values: list[float]) -> dict[str, float]:
    """Median, least and most."""
    return {"median": round(median(values), 3), "least": round(min(values), 3), "most": round(max(values), 3)}


def main() -> None:
    """Measures both trees; prints a line for each number of replicas, and writes the result."""
    trees = Trees(Path(sys.argv[1]))
    load = os.getloadavg()[0]
    turns: defaultdict[int, dict[str, list[dict[str, Any]]]] = defaultdict(lambda: {NOW: [], BEFORE: []})
    for turn in range(TURNS):
        for name in trees.in_turns(turn):
            with tempfile.TemporaryDirectory() as folder:
                for replicas, found in one_turn(trees, name, Path(folder)).items():
                    turns[replicas][name].append(found)
    result: dict[str, Any] = {
        "turns": TURNS,
        "commits": {name: commit(tree) for name, tree in trees.paths.items()},
        "python": platform.python_version(),
        "machine": platform.platform(),
        "processors": os.cpu_count(),
        "load_before": round(load, 1),
        "replicas": {},
    }
    for replicas, found in sorted(turns.items()):
        times = {name: [each["p50_milliseconds"] for each in found[name]] for name in trees.paths}
        messages = {name: spread([each["messages"] for each in found[name]]) for name in trees.paths}
        ratio = spread([now / before for now, before in zip(times[NOW], times[BEFORE], strict=True)])
        milliseconds = {name: spread(times[name]) for name in trees.paths}
        result["replicas"][replicas] = {"milliseconds": milliseconds, "ratio": ratio, "messages": messages}
        print(
            f"{replicas} replicas: now {milliseconds[NOW]}, before {milliseconds[BEFORE]}, ratio {ratio}, "
            f"messages {messages[NOW]['median']:g} and {messages[BEFORE]['median']:g}",
            flush=True,
        )
    if len(sys.argv) > 2:
        Path(sys.argv[2]).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
