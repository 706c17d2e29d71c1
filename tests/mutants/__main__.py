"""Makes mistakes in the code that the promises rest on, and says which of them its tests do not notice.

`python -m tests.mutants --seed 1 --count 100`: draws so many lines (`draw.py`), makes one mistake in each in a copy of
the tree, and runs the tests that are there for that file (`SELECTIONS`) until one fails. Prints the mistakes that none
noticed, as differences; ends with 1 if there are some. Those in `equivalent.toml` change nothing that anybody could
see, each with the reason; they are not run. A hundred take about an hour.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.draw import Mutation, draw

ROOT = Path(__file__).resolve().parents[2]
EQUIVALENT = Path(__file__).with_name("equivalent.toml")
STORIES = "tests/simulation/test_simulation.py"


def _about_machines() -> str:
    """Tests that drive the machines alone, the quickest first; with them a tenth of the simulation's stories."""
    core = sorted(ROOT.glob("tests/machines/test_*.py"))
    rules = [path for path in sorted(ROOT.glob("tests/simulation/test_*_rules.py")) if "_design_" not in path.name]
    # Those that take a rule out and look for a seed that notices come last.
    rules.sort(key=lambda path: "must_be_noticed" in path.read_text())
    files = [str(path.relative_to(ROOT)) for path in (*core, *rules)]
    return " ".join([*files, f"{STORIES}::test_promises_hold_whatever_happens[0]", "--timeout=60"])


def _about_relays_in_updates() -> str:
    """Tests of the manager's side of relays: its machine alone, then stories of the simulation."""
    names = ("relay_hosts", "relay_stories", "relay_failures", "held_stories", "fan_out_stories", "busy_rules")
    stories = " ".join(f"tests/simulation/test_{name}.py" for name in names)
    return f"tests/machines/test_relay_placing.py tests/core/test_placements.py {stories} --timeout=60"


def _gate(*names: str) -> str:
    return " ".join(f"tests/gate/test_{name}.py" for name in names)


def _relay(*names: str) -> str:
    return " ".join(f"tests/relay/test_{name}.py" for name in names)


def _gateway(*names: str) -> str:
    return " ".join(f"tests/gateway/test_{name}.py" for name in names)


SELECTIONS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("ckpt_engine/gate/gate.py", (_gate("gate", "waiting", "routes"), "tests/gate")),
    ("ckpt_engine/gate/routes.py", (_gate("routes"), "tests/gate")),
    ("ckpt_engine/gate/holding.py", (_gate("holding", "waiting"), "tests/gate")),
    ("ckpt_engine/gate/waiting.py", (_gate("waiting"), "tests/gate")),
    ("ckpt_engine/gate/reader.py", (_gate("state_page", "gate"), "tests/gate")),
    ("ckpt_engine/gate/page.py", (_gate("page_layout", "state_page"), "tests/gate", "tests/install")),
    ("ckpt_engine/install/installer.py", ("tests/install",)),
    ("ckpt_engine/install/ready.py", ("tests/install",)),
    ("ckpt_engine/install/changes.py", (_relay("changed_install"),)),
    ("ckpt_engine/delta/table.py", ("tests/delta/test_table.py", _relay("changed_install"))),
    ("ckpt_engine/core/plan.py", ("tests/core", "tests/manager/test_compiler.py", "tests/install")),
    ("ckpt_engine/core/publication.py", ("tests/core", "tests/manager/test_compiler.py")),
    ("ckpt_engine/core/sealed_record.py", ("tests/core",)),
    ("ckpt_engine/digest/host.py", ("tests/digest",)),
    ("ckpt_engine/digest/host_jobs.py", ("tests/digest",)),
    ("ckpt_engine/digest/finite.py", ("tests/digest/test_finite.py", "tests/digest")),
    (
        "ckpt_engine/source/",
        ("tests/source", "tests/trainer/test_trainer_updates.py tests/trainer/test_whose_memory.py"),
    ),
    ("ckpt_engine/relay/asking.py", ("tests/relay/test_asking.py", "tests/network/test_tcp.py", "tests/relay")),
    ("ckpt_engine/relay/", (_relay("filling", "relay_work", "sources", "door", "relay_settings"), "tests/relay")),
    ("ckpt_engine/gateway/", (_gateway("stitching", "json_numbers", "fleet", "journeys", "gateway"), "tests/gateway")),
    *(
        (f"ckpt_engine/machines/manager/{name}.py", (_about_relays_in_updates(), _about_machines(), STORIES))
        for name in ("placing", "update_relays", "plan_pipeline", "claims")
    ),
    ("ckpt_engine/machines/", (_about_machines(), STORIES, "tests/manager", "tests/agent")),
)
"""Which files (all below a folder), and which tests are to notice: arguments of pytest, quick ones first.

A mistake that one run of it notices does not get to the next."""

NOT_MISTAKEN = frozenset({"__init__.py", "events.py", "tasks.py"})
"""Declarations only."""

COPIED = ("ckpt_engine", "adapters", "tests", "docs", "examples", "proto", "benchmarks", "README.md", "pyproject.toml")
PYTEST = ("-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "not (slow or engine or gpu)", "--timeout=120")


@dataclass(frozen=True)
class Verdict:
    """noticed_by: the tests that failed, or what else went wrong; empty: nobody noticed."""

    mutation: Mutation
    noticed_by: str
    seconds: float


def selection(file: str) -> tuple[str, ...]:
    """The tests that must notice a mistake in it."""
    return next(tests for prefix, tests in SELECTIONS if file.startswith(prefix))


def sources(*parts: str) -> dict[str, str]:
    """Every file in which mistakes are made, if its name contains one of `parts`, or there are none."""
    found = [ROOT / prefix for prefix, _ in SELECTIONS]
    files = [each for path in found for each in (sorted(path.rglob("*.py")) if path.is_dir() else [path])]
    names = {str(path.relative_to(ROOT)): path for path in files if path.name not in NOT_MISTAKEN}
    return {name: path.read_text() for name, path in names.items() if not parts or any(part in name for part in parts)}


def equivalents() -> dict[tuple[str, str, str, str], str]:
    """Why, by `Mutation.key`."""
    listed = tomllib.loads(EQUIVALENT.read_text()).get("equivalent", [])
    return {(each["file"], each["line"], each["old"], each["new"]): each["why"] for each in listed}


class Tree:
    """A copy of the tree in which one mistake at a time is made and tested."""

    def __init__(self, path: Path, seconds: float) -> None:
        self._path, self._seconds = path, seconds
        self._sound: set[str] = set()
        for name in COPIED:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, path / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / name, path / name)
        found = self._run("-c", "import ckpt_engine; print(ckpt_engine.__file__)")[1].strip()
        if not found.startswith(str(path)):
            raise SystemExit(f"tests would run {found}, and not the copy in {path}")

    def judge(self, mutation: Mutation, runs: int) -> Verdict:
        """With this mistake in it, and only this one; by so many runs of its selection at most."""
        began = time.monotonic()
        for tests in selection(mutation.file)[:runs]:
            self._must_pass(tests)
            file = self._path / mutation.file
            source = file.read_text()
            try:
                file.write_text(mutation.apply(source))
                failed = self._failing(tests)
            finally:
                file.write_text(source)
            if failed:
                return Verdict(mutation, failed, time.monotonic() - began)
        return Verdict(mutation, "", time.monotonic() - began)

    def _must_pass(self, tests: str) -> None:
        """Without a mistake; once. Twice if need be: on a busy machine one that looks at the clock may fail."""
        if tests not in self._sound and self._failing(tests) and (wrong := self._failing(tests)):
            raise SystemExit(f"without any mistake: {wrong}")
        self._sound.add(tests)

    def _failing(self, tests: str) -> str:
        """What fails or hangs; empty: nothing does."""
        status, output = self._run(*PYTEST, *tests.split())
        if not status:
            return ""
        lines = [line for line in output.splitlines() if line.startswith(("FAILED tests", "ERROR tests", "ERROR it"))]
        return lines[0] if lines else f"{tests}: status {status}"

    def _run(self, *arguments: str) -> tuple[int, str]:
        path = os.pathsep.join((str(self._path), str(self._path / "adapters")))
        # Compiled files are known by size and second: another mistake of the same length would not be seen.
        environment = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=self._path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=self._seconds)
        except subprocess.TimeoutExpired:
            return -1, f"ERROR it was not over after {self._seconds:g} s"
        finally:
            # Also what the tests have left behind.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return process.returncode, output


@contextlib.contextmanager
def trees(count: int, seconds: float) -> Iterator[list[Tree]]:
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        paths = [Path(folder) / str(number) for number in range(count)]
        for path in paths:
            path.mkdir()
        yield [Tree(path, seconds) for path in paths]


def judge_all(drawn: Mapping[int, Mutation], jobs: int, runs: int, seconds: float) -> list[Verdict]:
    """Each tree in a thread of its own; the tests are processes. drawn: by number, which is printed."""
    waiting: queue.SimpleQueue[tuple[int, Mutation]] = queue.SimpleQueue()
    for each in drawn.items():
        waiting.put(each)
    verdicts: list[Verdict] = []

    def work(tree: Tree) -> None:
        while True:
            try:
                number, mutation = waiting.get_nowait()
            except queue.Empty:
                return
            verdict = tree.judge(mutation, runs)
            verdicts.append(verdict)
            said = verdict.noticed_by or "NOBODY NOTICED"
            print(f"{number}: {verdict.seconds:.0f} s {mutation.file}:{mutation.line} {said}"[:240])

    with trees(jobs, seconds) as made:
        with ThreadPoolExecutor(jobs) as threads:
            for done in [threads.submit(work, tree) for tree in made]:
                done.result()
    return verdicts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=100, help="mistakes, each in another line")
    parser.add_argument("--file", nargs="*", default=[], help="only files whose name contains one of these")
    parser.add_argument("--only", type=int, nargs="*", default=[], help="of the mistakes drawn only these, by number")
    parser.add_argument("--runs", type=int, default=9, help="of each selection only so many; 1: the quick tests alone")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=400, help="for one selection of tests; longer is a failure")
    parser.add_argument("--show", action="store_true", help="print the mistakes and make none")
    options = parser.parse_args()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    found, known = sources(*options.file), equivalents()
    drawn = draw(found, options.seed, options.count)
    todo = {
        number: mutation
        for number, mutation in enumerate(drawn, 1)
        if mutation.key not in known and (not options.only or number in options.only)
    }
    listed = sum(mutation.key in known for mutation in drawn)
    print(f"{len(drawn)} mistakes in {len(found)} files, {listed} of them listed as equivalent")
    if options.show:
        for number, mutation in todo.items():
            print(f"{number}:", mutation.difference(found[mutation.file]))
        return 0
    verdicts = judge_all(todo, options.jobs, options.runs, options.seconds)
    survivors = [each.mutation for each in verdicts if not each.noticed_by]
    for mutation in survivors:
        print(mutation.difference(found[mutation.file]))
    print(f"{len(todo)} mistakes were made with seed {options.seed}, {len(survivors)} of them nobody noticed")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
