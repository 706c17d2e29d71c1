"""`python -m tests.faults.endurance`: many updates of many replicas, processes are killed at random, nothing grows.

Who is killed when follows from --seed: some process at some stage (a trace point) of one update in ten. What died is
started again as a supervisor would, and nobody waits for it: the next update goes to whoever is there, and the manager
brings late replicas up by itself, since the trainer's snapshot stays sealed. With --relay there is a relay, which is a
victim as well, and half of the updates, two and two, return when they are held: the next one is called at once, while
replicas install. Those wait for a relay that is just starting again, since without one they are refused.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.faults.cells import ALL_STAGES, RELAY, WRITING
from tests.faults.matrix import make_models
from tests.faults.world import World

DEADLINES = (
    "lease=6 resend=1 reconnect_most=1 quiesce=10 resume=6 unanswered=5 engine_restart_first=0.1 engine_restart_most=1 "
    "engine_watch=0.5 engine_dead_worker=5 engine_grace=2 worker_ask=5 connect=20 catch_up_retry=1"
)
KILL_CHANCE = 0.1
VICTIMS = ("worker", "worker", "worker", "api", "api", "agent", "agent", "trainer", "trainer", "manager")
RELAY_VICTIMS = (*VICTIMS, *(RELAY,) * 5)
MOMENTS = ("plan", "quiesce", *WRITING, "resume", "idle")
RELAY_MOMENTS = (*MOMENTS, "count", "fill", "filled")
TIMEOUT_SECONDS = 60.0

MORE_DESCRIPTORS = 8
"""A reconnecting member has an old and a new connection for a moment, and pools of HTTP connections vary."""
MORE_THREADS = 4
"""gRPC's pool of threads grows and shrinks as it likes."""
MORE_BYTES = 16 << 20
"""Of a process's own memory, from the first checkpoint on: allocators' rounding and late imports."""
MORE_MEMORY_FILES = 4
"""A dead trainer's memory lives until each of its readers has read from the next one."""
LEDGER_BYTES = 16 << 20
"""Of file and log together. The ledger keeps a bounded number of reports (manager/ledger.py)."""


@dataclass(frozen=True)
class Holdings:
    """The most that one process of a role holds. resident: bytes that it shares with nobody."""

    descriptors: int
    threads: int
    resident: int

    def exceeds(self, before: Holdings) -> bool:
        return (
            self.descriptors > before.descriptors + MORE_DESCRIPTORS
            or self.threads > before.threads + MORE_THREADS
            or self.resident > before.resident + MORE_BYTES
        )


@dataclass
class Checkpoint:
    """Everything at one moment, after so many updates. memory_files: of ours, held by any process here. sockets: in the
    relay's directory, those of dead ones included."""

    updates: int
    roles: dict[str, Holdings]
    memory_files: int
    memory_bytes: int
    ledger_bytes: int
    sockets: int = 0


@dataclass
class Story:
    """What happened. kills: victim to how often. ends: how updates ended for their caller. refusals: what those
    that were refused were told."""

    kills: dict[str, int] = field(default_factory=dict)
    ends: dict[str, int] = field(default_factory=dict)
    refusals: dict[str, int] = field(default_factory=dict)
    checkpoints: list[Checkpoint] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    seconds: float = 0.0


def endure(world: World, updates: int, seed: int, every: int, say: Callable[[str], None] = print) -> Story:
    """Makes `updates` updates with random kills, and takes stock every `every` ones and at the end."""
    story, chance = Story(), random.Random(seed)
    started = time.monotonic()
    world.heal()
    for number in range(1, updates + 1):
        world.supervise()
        end = one_update(world, chance, story, held=world.relay is not None and number % 4 < 2)
        story.ends[end] = story.ends.get(end, 0) + 1
        if number % every == 0 or number == updates:
            if wrong := world.update_all(TIMEOUT_SECONDS):
                story.wrong.append(f"after {number} updates: {wrong}")
            story.wrong += world.take_violations()
            story.checkpoints.append(take_stock(world, number))
            say(f"{time.strftime('%H:%M:%S')} {describe(story)}")
    story.wrong += judge(story.checkpoints)
    story.seconds = time.monotonic() - started
    return story


def one_update(world: World, chance: random.Random, story: Story, held: bool = False) -> str:
    """How it ended: ok, partly (some replicas failed or were away), held (its installs may go on), refused, or died
    (the trainer was killed)."""
    kill = chance.random() < KILL_CHANCE
    victims, moments = (VICTIMS, MOMENTS) if world.relay is None else (RELAY_VICTIMS, RELAY_MOMENTS)
    victim, stage = chance.choice(victims), ALL_STAGES[chance.choice(moments)]
    until = "held" if held else "installed"
    if held:
        world.until("the relay is there", 60.0, world.has_relay)
    name = chance.choice(sorted(world.replicas))
    if kill and stage.holder is not None:
        with world.listener.holding(stage.point) as reached:
            world.ask(TIMEOUT_SECONDS, until)
            reached.wait(5)  # not reached if nobody who is there comes by; then the kill comes at some other moment
            strike(world, victim, name, story)
    else:
        if kill:
            strike(world, victim, name, story)
            world.supervise()
        world.ask(TIMEOUT_SECONDS, until)
    answer = world.answer(TIMEOUT_SECONDS)
    if answer is None:
        return "died"
    if "error" in answer:
        story.refusals[answer["error"]] = story.refusals.get(answer["error"], 0) + 1
        return "refused"
    if answer["held"]:
        return "held"
    whole = answer["ok"] and len(answer["replicas"]) == len(world.replicas)
    return "ok" if whole else "partly"


def strike(world: World, victim: str, name: str, story: Story) -> None:
    with contextlib.suppress(IndexError, psutil.NoSuchProcess):  # its engine is just being started: nobody to kill
        world.kill(victim, name)
        story.kills[victim] = story.kills.get(victim, 0) + 1


def take_stock(world: World, updates: int) -> Checkpoint:
    members: dict[str, list[int]] = {"manager": [world.manager.pid], "trainer": [world.trainer.pid]}
    for name, rollout in world.replicas.items():
        api, *workers = world.engine(name)
        agent = "agent with torch" if has_torch(rollout.agent.pid) else "agent"
        members.setdefault(agent, []).append(rollout.agent.pid)
        members.setdefault("API server", []).append(api.pid)
        members.setdefault("worker", []).extend(worker.pid for worker in workers)
    if world.relay is not None:
        members["relay"] = [world.relay.pid]
    files = memory_files([pid for pids in members.values() for pid in pids])
    ledger = sum(path.stat().st_size for path in world.path.glob("ledger.sqlite*"))
    roles = {role: most(pids) for role, pids in members.items()}
    sockets = len(list(world.relay_directory.iterdir()))
    return Checkpoint(updates, roles, len(files), sum(files.values()), ledger, sockets)


def has_torch(pid: int) -> bool:
    """An agent imports it, which takes some 130 MB, when another replica reads from its engine for the first time."""
    return "libtorch_cpu" in Path(f"/proc/{pid}/maps").read_text()


def most(pids: list[int]) -> Holdings:
    found = []
    for pid in pids:
        process = psutil.Process(pid)
        memory = process.memory_info()
        found.append((process.num_fds(), process.num_threads(), memory.rss - memory.shared))
    return Holdings(*(max(column) for column in zip(*found, strict=True)))


def memory_files(pids: list[int]) -> Mapping[int, int]:
    """Inode to bytes of each anonymous memory file of ours that one of these processes has open or maps."""
    found: dict[int, int] = {}
    for pid in pids:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            if "/memfd:ckpt-engine" in line:
                inode = int(line.split()[4])
                low, high = (int(end, 16) for end in line.split()[0].split("-"))
                found[inode] = max(found.get(inode, 0), high - low)
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if "/memfd:ckpt-engine" in str(descriptor.readlink()):
                    facts = descriptor.stat()
                    found[facts.st_ino] = max(found.get(facts.st_ino, 0), facts.st_size)
    return found


def judge(checkpoints: list[Checkpoint]) -> list[str]:
    """What grew between the first checkpoint, or the first that knows the role, and the last."""
    first, last = checkpoints[0], checkpoints[-1]
    before = {role: held for point in reversed(checkpoints) for role, held in point.roles.items()}
    wrong = [
        f"one {role} grew from {before[role]} to {held}"
        for role, held in last.roles.items()
        if held.exceeds(before[role])
    ]
    if last.memory_files > first.memory_files + MORE_MEMORY_FILES:
        wrong.append(f"shared memory grew from {first.memory_files} files to {last.memory_files}")
    if last.sockets > 1:
        wrong.append(f"the relay's directory has {last.sockets} files, and one relay")
    if last.ledger_bytes > LEDGER_BYTES:
        wrong.append(f"the ledger has {last.ledger_bytes} bytes")
    return wrong


def describe(story: Story) -> str:
    last = story.checkpoints[-1]
    roles = ", ".join(
        f"{role} {held.descriptors} fds {held.threads} threads {held.resident / 1e6:.1f} MB"
        for role, held in last.roles.items()
    )
    memory = f"{last.memory_files} memory files of {last.memory_bytes / 1e6:.2f} MB"
    return (
        f"{last.updates} updates {story.ends} kills {story.kills}: {roles}, {memory}, ledger {last.ledger_bytes} bytes"
    )


def table(story: Story) -> str:
    """The checkpoints as a table in Markdown."""
    roles = list(dict.fromkeys(role for point in story.checkpoints for role in point.roles))
    lines = [f"| updates | {' | '.join(roles)} | shared memory | ledger |", "|---" * (len(roles) + 3) + "|"]
    for point in story.checkpoints:
        held = [
            f"{each.descriptors} / {each.threads} / {each.resident / 1e6:.1f}" if each else ""
            for each in map(point.roles.get, roles)
        ]
        memory = f"{point.memory_files} files, {point.memory_bytes / 1e6:.2f} MB"
        lines.append(f"| {point.updates} | {' | '.join(held)} | {memory} | {point.ledger_bytes / 1e6:.2f} MB |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.endurance", description=__doc__)
    parser.add_argument("--updates", type=int, default=500)
    parser.add_argument("--replicas", type=int, default=10)
    parser.add_argument("--relay", action="store_true", help="with a relay; half of the updates until they are held")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--every", type=int, default=50)
    options = parser.parse_args()
    path = Path(tempfile.mkdtemp(prefix="endurance-"))
    model, weights, expected = make_models(path)
    names = {f"replica-{number}": 1 for number in range(options.replicas)}
    with World(
        path,
        model,
        weights,
        expected,
        names,
        snapshot=True,
        deadlines=DEADLINES,
        probe_pause=1.0,
        relayed=options.relay,
    ) as world:
        story = endure(world, options.updates, options.seed, options.every, lambda line: print(line, flush=True))
    print(f"{options.updates} updates in {story.seconds:.0f} s, kills {story.kills}, ends {story.ends}; logs in {path}")
    print(table(story))
    for told, times in story.refusals.items():
        print(f"refused {times} times: {told}")
    for wrong in story.wrong:
        print(f"WRONG {wrong}")
    os._exit(1 if story.wrong else 0)


if __name__ == "__main__":
    main()
