"""Many updates of two hosts while the network between them is cut at random: nothing torn, nothing grows.

What is cut, when and for how long follows from a seed; updates do not wait for it. The way between the relays is slow,
so that cuts meet it in use: every connection on it is reset, what is sent on it is lost for a moment, the far host's
cable is pulled for a moment, or for longer than a lease.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tests.faults.cells import VICTIM
from tests.faults.endurance import Checkpoint, Story, describe, judge, memory_files, most
from tests.faults.far_world import FarWorld, started_by
from tests.faults.world import LEASE

TIMEOUT_SECONDS = 20.0
SLOW_SECONDS = 0.05
"""For 64 KiB between the relays: a version takes four times that, or longer."""
BETWEEN_SECONDS = (0.1, 2.0)
MOMENT_SECONDS = (0.1, 1.5)
LONG = 0.05
"""How often the cable is away for longer than a lease."""


@contextmanager
def cutting(world: FarWorld, seed: int, cuts: Counter[str]) -> Iterator[None]:
    """From now on the network is cut at random; it is whole when the block has ended. cuts: how often, by kind."""
    chance, over = random.Random(seed), threading.Event()

    def away(begin: Callable[[], None], end: Callable[[], None], seconds: float) -> None:
        begin()
        over.wait(seconds)
        end()

    def run() -> None:
        while not over.wait(chance.uniform(*BETWEEN_SECONDS)):
            kind = "long" if chance.random() < LONG else chance.choice(("reset", "lost", "cable"))
            cuts[kind] += 1
            seconds = chance.uniform(*MOMENT_SECONDS)
            if kind == "reset":
                world.link.cut()
            elif kind == "lost":
                away(world.host.lose, world.host.find, seconds)
            else:
                away(world.host.cut, world.host.mend, 1.5 * LEASE if kind == "long" else seconds)

    cutter = threading.Thread(target=run, daemon=True)
    cutter.start()
    try:
        yield
    finally:
        over.set()
        cutter.join(60)
        assert not cutter.is_alive()


def endure_cuts(world: FarWorld, updates: int, seed: int, every: int, say: Callable[[str], None] = print) -> Story:
    """Makes `updates` updates. After every `every` ones the network is whole, the next update must reach everybody, and
    stock is taken. The story's kills are cuts."""
    story, cuts = Story(), Counter[str]()
    started = time.monotonic()
    world.heal()
    world.link.pause = SLOW_SECONDS
    for first in range(0, updates, every):
        with cutting(world, seed + first, cuts):
            for _ in range(first, min(first + every, updates)):
                end = _one_update(world, story)
                story.ends[end] = story.ends.get(end, 0) + 1
        done = min(first + every, updates)
        if wrong := world.update_all(TIMEOUT_SECONDS):
            story.wrong.append(f"after {done} updates: {wrong}")
        story.wrong += world.take_violations()
        story.kills = dict(cuts)
        story.checkpoints.append(_stock(world, done))
        say(f"{time.strftime('%H:%M:%S')} {describe(story)}")
    story.wrong += judge(story.checkpoints)
    story.seconds = time.monotonic() - started
    return story


def _one_update(world: FarWorld, story: Story) -> str:
    """How it ended: ok, partly (the far replica keeps what it serves, or was not reached) or refused."""
    world.ask(TIMEOUT_SECONDS)
    answer = world.answer(TIMEOUT_SECONDS)
    if answer is None:
        story.wrong.append("the trainer has died")
        return "died"
    if "error" in answer:
        story.refusals[answer["error"]] = story.refusals.get(answer["error"], 0) + 1
        return "refused"
    return "ok" if answer["ok"] else "partly"


def _stock(world: FarWorld, updates: int) -> Checkpoint:
    assert world.relay is not None
    rollout = world.replicas[VICTIM]
    api, *workers = world.engine(VICTIM)
    members = {
        "manager": [world.manager.pid],
        "trainer": [world.trainer.pid],
        "relay": [world.relay.pid],
        "far relay": [started_by(world.down)],
        "agent": [started_by(rollout.agent)],
        "API server": [api.pid],
        "worker": [worker.pid for worker in workers],
    }
    files = memory_files([pid for pids in members.values() for pid in pids])
    ledger = sum(path.stat().st_size for path in world.path.glob("ledger.sqlite*"))
    sockets = max(len(list(folder.iterdir())) for folder in world.relay_folders)
    roles = {role: most(pids) for role, pids in members.items()}
    return Checkpoint(updates, roles, len(files), sum(files.values()), ledger, sockets)
