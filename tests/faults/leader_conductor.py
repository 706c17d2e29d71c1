"""Plays one cell in which the manager that leads is lost, and another one takes the update over."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

from tests.faults.cells import STAGES, Cell
from tests.faults.conductor import FIRST, REACH_SECONDS, Result, go_on, played, reaching
from tests.faults.leader_world import LeaderWorld
from tests.faults.proxy import Proxy

TIMEOUT_SECONDS = 90.0
LOOK_SECONDS = 0.1


def play_leader(world: LeaderWorld, cell: Cell) -> Result:
    """As `conductor.play`. The same call must end, as the version that it was made for, although its manager was lost;
    and the former leader, once it is back, stands by."""

    def suffer(result: Result) -> None:
        with ExitStack() as undo:
            lost = _inject(world, cell, undo, result)
            answer = world.answer(TIMEOUT_SECONDS)
            result.report = "died" if answer is None else str(answer.get("error") or answer.get("replicas"))
            if answer is None or not answer.get("ok"):
                result.wrong.append(f"the call did not end as promised: {answer}")
        if not result.led_after:
            result.wrong.append(f"no other manager led within {REACH_SECONDS:g} s")
        if cell.fault != "kill":
            world.until("the former leader stands by", REACH_SECONDS, lambda: world.stands_by(lost))

    return played(world, cell, suffer, world.supervise)


def _inject(world: LeaderWorld, cell: Cell, undo: ExitStack, result: Result) -> int:
    """The manager that leads suffers from the cell's stage on, until the other one leads; an update has been asked for.
    Returns which manager it was."""
    if STAGES[cell.stage].holder is None:
        lost = world.leader()
        _suffer(world, cell, lost, undo, result)
        world.ask(TIMEOUT_SECONDS)
        return lost
    with reaching(world, cell, TIMEOUT_SECONDS) as held:
        pids = [each.pid for each in world.managers]
        lost = pids.index(held.pid) if held.pid in pids else world.leader()  # one that is held answers no probe
        _suffer(world, cell, lost, undo, result)
    if cell.stage in FIRST:
        world.trainer.ready()
        world.ask(TIMEOUT_SECONDS)
    return lost


def _suffer(world: LeaderWorld, cell: Cell, lost: int, undo: ExitStack, result: Result) -> None:
    begun = time.monotonic()
    mend = _begin(world, cell, lost)
    undo.callback(mend)

    def watch() -> None:
        while time.monotonic() < begun + REACH_SECONDS:
            if world.leads(1 - lost):
                result.led_after = time.monotonic() - begun
                break
            time.sleep(LOOK_SECONDS)
        mend()

    watching = threading.Thread(target=watch, daemon=True)
    watching.start()
    undo.callback(watching.join)


def _begin(world: LeaderWorld, cell: Cell, lost: int) -> Callable[[], object]:
    """Begins the fault. Returns what ends it."""
    match cell.fault:
        case "kill":
            world.managers[lost].end()
            return lambda: None
        case "stop":
            pid = world.managers[lost].pid
            os.kill(pid, signal.SIGSTOP)
            return partial(go_on, pid)
        case _:
            members = world.members_of(lost) if cell.fault != "database" else []
            cut = [*members, *([world.databases[lost]] if cell.fault != "members" else [])]
            for proxy in cut:
                proxy.cut(reachable=False)
            return partial(_restore, cut)


def _restore(proxies: list[Proxy]) -> None:
    for proxy in proxies:
        proxy.restore()
