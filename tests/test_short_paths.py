"""Where tests write, and what stays of it."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.short_paths import KEPT, Base

ROOT = Path(__file__).parent.parent

SAMPLE = """
def test_one(tmp_path):
    (tmp_path / "written").write_text("by a test")
    print(f"here: {tmp_path}")
    assert SO

def test_other(tmp_path):
    print(f"here: {tmp_path}")
"""


LASTS = """
import sys, time
from pathlib import Path
from tests.short_paths import Base
base = Base(Path(sys.argv[1]))
print(base.path, flush=True)
time.sleep(600)
"""


def ended(folder: Path, age: int) -> Path:
    """The directory of a run that ended some seconds ago, with a test that failed."""
    base = Base(folder)
    base.tests.mkdir()
    base.failed = True
    base.close()
    os.utime(base.path, (2e9 - age,) * 2)
    return base.path


def test_of_runs_that_have_ended_the_newest_stay_and_one_that_goes_on_is_left_alone(tmp_path: Path) -> None:
    running = Base(tmp_path)
    os.utime(running.path, (0, 0))
    other = tmp_path / "ckpt-engine-0"
    other.mkdir()
    left = [ended(tmp_path, 100 - number) for number in range(KEPT + 2)]
    new = Base(tmp_path)
    assert set(tmp_path.iterdir()) == {running.path, other, new.path, *left[-KEPT:]}
    for base in (running, new):
        base.close()
    assert set(tmp_path.iterdir()) == {other, *left[-KEPT:]}


def test_a_run_that_was_killed_goes_on_no_more(tmp_path: Path) -> None:
    command = [sys.executable, "-c", LASTS, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        killed = Path(process.stdout.readline().strip())
        os.utime(killed, (0, 0))
        for _ in range(KEPT):
            ended(tmp_path, 0)
        assert killed.exists()
        process.send_signal(signal.SIGKILL)
        process.wait(60)
    Base(tmp_path).close()
    assert not killed.exists()


@pytest.mark.parametrize(
    ("so", "options"), [(True, []), (False, ["-n", "2"])], ids=["one process", "two, and a failure"]
)
def test_the_path_is_short_however_long_that_of_temporary_files_is(
    tmp_path: Path, so: bool, options: list[str]
) -> None:
    (tmp_path / "test_sample.py").write_text(SAMPLE.replace("SO", str(so)))
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-p", "tests.short_paths", "-rA", "-p", "no:cacheprovider", *options]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    environment |= {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    print(run.stdout, run.stderr)
    written = [Path(each) for each in re.findall("^here: (.*)", run.stdout, re.MULTILINE)]
    assert (run.returncode, len(written)) == (0 if so else 1, 2)
    (base,) = {path.parents[2 if options else 1] for path in written}
    assert re.fullmatch("/tmp/ck-.{8}", str(base))
    assert base.exists() != so
    if not so:
        assert [(path / "written").exists() for path in sorted(written)].count(True) == 1
        assert f"what the tests have written: {base / 't'}\n" in run.stdout
        shutil.rmtree(base)
