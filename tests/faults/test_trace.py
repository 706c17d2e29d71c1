"""The named points: off by default, told to a listener if there is one, and never in the way when it has gone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from ckpt_engine.trace import ENVIRONMENT, trace
from tests.faults.listener import Listener

PROGRAM = """
from ckpt_engine.trace import span, trace
with span("here.does", "Work"):
    trace("here", "inside")
print("done")
"""


def start(path: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, ENVIRONMENT: str(path)}
    return subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True, env=environment)


def test_it_is_off_unless_somebody_asked_for_it(tmp_path: Path) -> None:
    with Listener(tmp_path / "trace.sock") as listener:
        trace("here", "inside")
        assert not listener.seen


def test_a_process_stands_at_the_point_until_it_is_let_go(tmp_path: Path) -> None:
    with Listener(tmp_path / "trace.sock") as listener:
        with listener.holding("here.inside") as held:
            process = start(listener.path)
            assert held.wait(60)
            assert held.pid == process.pid
            assert set(listener.seen) == {"here.does.Work.begin", "here.inside"}
            assert process.poll() is None
        assert process.communicate(timeout=120)[0] == "done\n"
        assert listener.seen["here.does.Work.end"] == 1


def test_a_listener_that_is_not_there_or_goes_away_holds_nobody(tmp_path: Path) -> None:
    assert start(tmp_path / "nothing.sock").communicate(timeout=120)[0] == "done\n"
    with Listener(tmp_path / "trace.sock") as listener, listener.holding("here.does.Work.begin") as held:
        process = start(listener.path)
        assert held.wait(60)
    assert process.communicate(timeout=120)[0] == "done\n"
