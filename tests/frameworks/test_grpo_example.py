"""The example that teaches a model by GRPO, from its beginning to its plot, with few steps."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

START = Path(__file__).parents[2] / "examples" / "grpo" / "start.py"
STEPS = 3


def test_the_example_runs_and_plots(tmp_path: Path) -> None:
    """Two replicas behind the gateway serve each step's version; reward, version and sync time of each are plotted."""
    command = [sys.executable, str(START), "--steps", str(STEPS), "--output", str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        printed, errors = process.communicate(timeout=600)
    except BaseException:
        process.terminate()  # it ends what it has started
        process.communicate(timeout=60)
        raise
    assert process.returncode == 0, f"{printed[-3000:]}\n{errors[-6000:]}"
    rows = json.loads((tmp_path / "outcome.json").read_text())["steps"]
    assert [row["version"] for row in rows] == list(range(STEPS))
    assert all(row["replicas"] == {"one": "new_serving", "two": "new_serving"} for row in rows)
    assert all(row["verified"] and row["sync_seconds"] > 0 for row in rows)
    assert all(0 < row["reward"] < 1 for row in rows), "a model that knows nothing yet is right now and then"
    assert len({row["root"] for row in rows}) == STEPS
    drawing = ElementTree.parse(tmp_path / "reward.svg").getroot()
    (line,) = (part for part in drawing if part.tag.endswith("polyline"))
    assert len(line.attrib["points"].split()) == STEPS
