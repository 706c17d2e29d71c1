"""Plays one cell of the faults between hosts."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from contextlib import ExitStack

from tests.faults.cells import OLD, VICTIM
from tests.faults.conductor import REACH_SECONDS, TIMEOUT_SECONDS, Result, go_on, played
from tests.faults.far_cells import CABLE, STAGES, UPSTREAM, FarCell
from tests.faults.far_world import DOWN, UP, FarWorld

LONG_TIMEOUT_SECONDS = 50.0
"""Of updates in which a relay waits for another one as long as it ever does."""
MOMENT_SECONDS = 2.0
STOPS = {"stop": 3.0, "stop60": 60.0}


def play_far(world: FarWorld, cell: FarCell) -> Result:
    """As `conductor.play`. What is said of a replica that keeps what it serves must name relay and address or host."""
    timeout = LONG_TIMEOUT_SECONDS if cell.fault in ("stop60", "away") else TIMEOUT_SECONDS

    def suffer(result: Result) -> None:
        with ExitStack() as undo:
            _inject(world, cell, undo, timeout)
            answer = world.answer(timeout)
            result.report = "died" if answer is None else str(answer.get("error") or answer)
            if answer is not None and "error" not in answer:
                result.wrong += [f"{each!r} does not say enough" for each in _said(answer) if not _tells(each)]

    return played(world, cell, suffer, world.supervise)


def _said(answer: dict[str, object]) -> list[str]:
    """Why replicas are left with what they serve."""
    replicas = answer["replicas"]
    assert isinstance(replicas, dict)
    return [words for outcome, words in replicas.values() if outcome == OLD]


def _tells(words: str) -> bool:
    return f"relay {UP}" in words or f"relay {DOWN}" in words


def _inject(world: FarWorld, cell: FarCell, undo: ExitStack, timeout: float) -> None:
    """From now until `undo` ends the victim suffers, beginning at the cell's stage; an update has been asked for."""
    stage = STAGES[cell.stage]
    if stage.holder is None:
        _suffer(world, cell, undo)
        world.ask(timeout)
        return
    with world.far_listener.holding(stage.point) as held:
        world.ask(timeout)
        assert held.wait(REACH_SECONDS), f"nobody reached {stage.point}"
        _suffer(world, cell, undo)


def _suffer(world: FarWorld, cell: FarCell, undo: ExitStack) -> None:
    if cell.victim == UPSTREAM:
        _upstream(world, cell, undo)
        return
    begin, end = (world.host.cut, world.host.mend) if cell.victim == CABLE else (world.host.lose, world.host.find)
    match cell.fault:
        case "reset":
            world.link.cut()
        case "slow":
            world.link.pause = 0.5
            undo.callback(setattr, world.link, "pause", 0.0)
        case _:
            begin()
            undo.callback(end)
            if cell.fault == "cut":
                _later(MOMENT_SECONDS, end, undo)


def _later(seconds: float, action: Callable[[], object], undo: ExitStack) -> None:
    """`action` is called after so long, whatever this thread does then; `undo` waits for that."""
    timer = threading.Timer(seconds, action)
    timer.start()
    undo.callback(timer.join)


def _upstream(world: FarWorld, cell: FarCell, undo: ExitStack) -> None:
    pid = world.pid_of(UP, VICTIM)
    if cell.fault in STOPS:
        os.kill(pid, signal.SIGSTOP)
        _later(STOPS[cell.fault], lambda: go_on(pid), undo)
        return
    world.kill(UP, VICTIM)
    if cell.fault == "restart":
        # The next one holds nothing when it comes, but an update that goes on may have it filled at once.
        world.until("the relay is known to be gone", REACH_SECONDS, lambda: UP not in world.relays())
        world.restart_up()
        world.until("the next relay is there", REACH_SECONDS, lambda: UP in world.relays())
