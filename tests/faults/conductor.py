"""Plays one cell of the matrix in a world, and judges by what can be seen from outside."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from ckpt_engine.v1 import manager_pb2
from tests.faults.cells import ALL_STAGES, BYSTANDER, NEW, OLD, QUARANTINED, RELAY, VICTIM, Cell
from tests.faults.listener import Held
from tests.faults.proxy import Proxy
from tests.faults.world import HEAL_SECONDS, LEASE, World

REACH_SECONDS = SETTLE_SECONDS = HEAL_SECONDS  # an engine starts meanwhile
TIMEOUT_SECONDS = 20.0
SHORT_TIMEOUT_SECONDS = 8.0
"""Of updates whose engine stands still until their end."""
FIRST = ("register", "publish", "hello")
"""Stages that come before an update is asked for."""
FINER = 2
"""Workers of a replica that joins: their pieces are finer than those that the version was sealed in."""


@dataclass
class Result:
    """What came of a cell: each replica's end state as its own requests and its manager show it, and what is wrong."""

    cell: Cell
    ends: dict[str, str] = field(default_factory=dict)
    report: str = ""
    seconds: float = 0.0
    led_after: float = 0.0  # seconds from the fault until another manager led, where the one that leads suffers
    wrong: list[str] = field(default_factory=list)


def play(world: World, cell: Cell) -> Result:
    """Brings the world into order, lets the fault happen, looks, and makes the next update. Raises nothing."""
    world.by_relay = cell.victim == RELAY
    workers = world.replicas[VICTIM].workers
    timeout = SHORT_TIMEOUT_SECONDS if _until_end(cell) else TIMEOUT_SECONDS

    def suffer(result: Result) -> None:
        with ExitStack() as undo:
            _inject(world, cell, undo, timeout)
            answer = world.answer(timeout) if cell.stage != "join" else {"replicas": "joined"}
            result.report = "died" if answer is None else str(answer.get("error") or answer.get("replicas"))

    def mend() -> None:
        if cell.stage == "join":
            world.restart_agent(VICTIM, workers=workers)

    return played(world, cell, suffer, mend)


def played(world: World, cell: Cell, suffer: Callable[[Result], None], mend: Callable[[], None]) -> Result:
    """A cell between two updates that must reach everybody. suffer: makes an update, with the fault. Raises nothing."""
    result = Result(cell)
    started = time.monotonic()
    try:
        if wrong := world.update_all():
            result.wrong.append(f"before the fault: {wrong}")
        before = world.version
        suffer(result)
        _judge(world, cell, result, before)
        mend()
        if wrong := world.update_all():
            result.wrong.append(f"after the fault: {wrong}")
    except Exception as error:
        result.wrong.append(f"{type(error).__name__}: {error}")
    result.wrong += world.take_violations()
    result.seconds = time.monotonic() - started
    return result


def _until_end(cell: Cell) -> bool:
    return cell.fault == "stop" and cell.victim in ("api", "worker")


def _inject(world: World, cell: Cell, undo: ExitStack, timeout: float) -> None:
    """From now until `undo` ends the victim suffers, beginning at the cell's stage; an update has been asked for."""
    if cell.fault in ("delay", "duplicate"):
        undo.enter_context(_tampering(world, cell))  # the member is on the tamperer before the stage comes
    stage = ALL_STAGES[cell.stage]
    if stage.holder is None:
        _suffer(world, cell, undo)
        if not world.trainer.alive or not world.manager.alive:
            world.heal()
        world.ask(timeout)
        return
    with reaching(world, cell, timeout):
        _suffer(world, cell, undo)
    if cell.stage == "join":
        return  # the version that is there is the one that it joins
    if cell.stage in FIRST:
        if not world.trainer.alive or not world.manager.alive:
            world.heal()
        world.trainer.ready()
        world.ask(timeout)


@contextmanager
def reaching(world: World, cell: Cell, timeout: float) -> Iterator[Held]:
    """Makes the stage come, and holds the process that reaches it."""
    stage = ALL_STAGES[cell.stage]
    if cell.stage == "publish":
        with world.listener.holding(stage.point) as held:
            world.restart_trainer(wait=False)
            assert held.wait(REACH_SECONDS), f"nobody reached {stage.point}"
            yield held
        return
    if cell.stage == "setup":
        world.restart_trainer()  # no communicator of the one before is kept
    pids = {world.pid_of(str(stage.holder), VICTIM)}
    with world.listener.holding(stage.point, pids.__contains__) as held:
        if cell.stage in ("register", "hello"):
            world.restart_manager()
        elif cell.stage == "join":
            world.restart_agent(VICTIM, workers=FINER)
        else:
            world.ask(timeout)
        assert held.wait(REACH_SECONDS), f"nobody reached {stage.point}"
        yield held


def _suffer(world: World, cell: Cell, undo: ExitStack) -> None:
    match cell.fault:
        case "kill":
            world.kill(cell.victim, VICTIM)
        case "stop":
            pid = world.pid_of(cell.victim, VICTIM)
            os.kill(pid, signal.SIGSTOP)
            undo.callback(go_on, pid)
            if not _until_end(cell):
                _later(world, lambda: go_on(pid))
        case "cut" | "partition":
            for proxy in _proxies(world, cell.victim):
                proxy.cut(reachable=cell.fault == "cut")
            if cell.fault == "partition":
                _later(world, lambda: [proxy.restore() for proxy in _proxies(world, cell.victim)])


def _later(world: World, action: Callable[[], object]) -> None:
    """Calls `action` once the lease is over, on the world's loop, whatever this thread does."""
    world.loop.loop.call_soon_threadsafe(lambda: world.loop.loop.call_later(1.5 * LEASE, action))


def go_on(pid: int) -> None:
    """A stopped process does, if it is there yet."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def _proxies(world: World, victim: str) -> list[Proxy]:
    agents = [rollout.proxy for rollout in world.replicas.values()]
    relays = [] if world.relay_proxy is None else [world.relay_proxy]
    if victim == RELAY:
        return relays
    if victim == "manager":
        return [world.trainer_proxy, *relays, *agents]
    return [world.trainer_proxy] if victim == "trainer" else [world.replicas[VICTIM].proxy]


@contextmanager
def _tampering(world: World, cell: Cell) -> Iterator[None]:
    (proxy,) = _proxies(world, cell.victim)
    tamperer = world.tampered(proxy)
    try:
        proxy.cut()
        tamperer.delay = 1.0 if cell.fault == "delay" else 0.0
        tamperer.duplicate = cell.fault == "duplicate"
        world.heal()
        yield
        assert tamperer.tampered, "no message came by the tamperer"
    finally:
        world.untampered(proxy, tamperer)


def _judge(world: World, cell: Cell, result: Result, before: int) -> None:
    """Waits until each replica is in an end state, and compares it with what the promises allow."""
    if not world.manager.alive:
        world.restart_manager()
    if not world.replicas[VICTIM].agent.alive:
        world.restart_agent(VICTIM)
    for name, allowed in zip((VICTIM, BYSTANDER), cell.allowed(), strict=True):
        ended = world.until(
            f"{name} is in an end state", SETTLE_SECONDS, lambda name=name: end_of(world, cell, name, before)
        )
        result.ends[name] = ended
        if ended not in allowed:
            result.wrong.append(f"{name} is {ended}, allowed: {', '.join(sorted(allowed))}; {world.describe()}")


def end_of(world: World, cell: Cell, name: str, before: int) -> str:
    """new_serving and old_serving if its own answers say so, quarantined if it is closed with a reason; else ''."""
    status = world.status()
    found = next((each for each in status.replicas if each.name == name), None) if status is not None else None
    if status is None or status.phase != "idle" or found is None or not found.connected:
        return ""
    if found.serving:
        version = found.identity.version
        if not world.replicas[name].prober.answered(version, time.monotonic(), 30):
            return ""
        if version == world.version:
            return NEW
        if version == before:
            return OLD
        return f"serving version {version}"
    if cell.stage == "join" and name == VICTIM and world.relay is not None and world.relay.alive:
        return ""  # its engine is new and closed, and a relay holds the version, which may be on its way back
    return QUARANTINED if found.closed_reason and _is_closed(found) else ""


def _is_closed(status: manager_pb2.ReplicaStatus) -> bool:
    """Not just on its way: its engine has gone or is new, or its workers are not whole."""
    return status.closed_reason not in ("paused", "asleep", "its agent has just connected")
