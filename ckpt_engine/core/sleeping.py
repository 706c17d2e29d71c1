"""Which memory of an engine is released, and the steps that release it or take it back. Pure.

An engine sleeps at level 1 (its weights wait on the host) or 2 (they are discarded), and is woken by tags, weights
before kv_cache. This module decides what is allowed in which deployment mode, and in which order. The agent's machine
takes the steps one by one, and writes each state into the engine's page, where the gate reads it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from ckpt_engine.core.problems import invalid, precondition
from ckpt_engine.v1 import manager_pb2

WEIGHTS = "weights"
KV_CACHE = "kv_cache"
TAGS = (WEIGHTS, KV_CACHE)
"""All tags, in the order in which they are woken."""

DISCARDS = 2
"""The level at which weights are thrown away."""


@dataclass(frozen=True)
class Sleeping:
    """How deeply an engine sleeps."""

    level: int = 0  # of the sleep; 0: awake
    tags: frozenset[str] = frozenset()  # the memory that is, or may be, released now
    rousing: bool = False  # the rest is woken once the workers hold whole weights; survives the agent

    def __bool__(self) -> bool:
        """Whether any memory is released."""
        return bool(self.tags)

    @property
    def resting(self) -> bool:
        """Whether it must stay as it is: only an update that was called for may wake it."""
        return bool(self.tags) and not (self.rousing and WEIGHTS not in self.tags)

    def describe(self) -> str:
        """The sleep in words for people."""
        if not self.tags:
            return "awake"
        what = "its weights are discarded" if self.level >= DISCARDS else "its weights are kept on the host"
        if WEIGHTS not in self.tags:
            return f"asleep (level {self.level}): kv_cache is not woken yet"
        return f"asleep (level {self.level}): {what}"

    def without(self, tags: Collection[str]) -> Sleeping:
        """The sleep that remains after these tags were woken."""
        remaining = self.tags.difference(tags)
        return replace(self, tags=remaining) if remaining else AWAKE


AWAKE = Sleeping()


class SleepStep(Enum):
    """What an agent does with its engine; a list of steps is taken in its order."""

    CLOSE = "mark it asleep, so that the gate closes"
    DISCARD = "let every worker say that it holds nothing, and check that all do"
    ABORT = "pause, ending the requests that are inside"
    SLEEP = "release memory"
    WAKE_WEIGHTS = "take the memory of the weights back"
    PAUSE = "pause, so that nothing computes"
    INSTALL = "let the workers install, and judge by their state words"
    WAKE_KV_CACHE = "take the memory of the caches back, empty"
    RESUME = "compute again"


def update_steps(mode: manager_pb2.Mode, sleeping: Sleeping) -> tuple[SleepStep, ...]:
    """The steps of an update in an engine, which is awake and computes at the end.

    Raises FAILED_PRECONDITION if it must not be touched: it has weights of its own, or it sleeps and no update may wake
    it.
    """
    if mode == manager_pb2.MODE_COLOCATED:
        raise precondition("the replica is colocated: it sleeps and wakes, but no update touches its own weights")
    if not sleeping:
        return (SleepStep.PAUSE, SleepStep.INSTALL, SleepStep.RESUME)
    if WEIGHTS not in sleeping.tags:
        return (SleepStep.PAUSE, SleepStep.INSTALL, SleepStep.WAKE_KV_CACHE, SleepStep.RESUME)
    if mode != manager_pb2.MODE_HYBRID:
        raise precondition(
            f"the replica is {sleeping.describe()}; wake it first, or register it with `--mode hybrid`, which lets "
            "updates wake it"
        )
    wake_cache = (SleepStep.WAKE_KV_CACHE,) if KV_CACHE in sleeping.tags else ()
    return (SleepStep.WAKE_WEIGHTS, SleepStep.PAUSE, SleepStep.INSTALL, *wake_cache, SleepStep.RESUME)


def sleep_steps(
    mode: manager_pb2.Mode, sleeping: Sleeping, level: int, levels: Collection[int], whole: bool = True
) -> tuple[tuple[SleepStep, ...], Sleeping]:
    """The steps that put an engine to sleep, and how deeply it sleeps then. levels: those that the engine supports.

    The gate closes first, and no worker calls weights clean that are about to be discarded. A half-awake engine is
    fully woken first, since engines cannot release memory twice. Its requests are ended before that, and torn weights
    discarded, since awake it could compute. whole: as for `wake_steps`.

    Raises INVALID_ARGUMENT for a level that the engine or the mode does not have, FAILED_PRECONDITION if it sleeps at
    another level.
    """
    level = level or 1
    if level not in levels:
        if not levels:
            raise invalid(
                f"this engine cannot sleep at level {level}, nor at another one, as it was started: `ckpt-engine "
                "engines` says whether its kind can, and what that needs"
            )
        level_names = ", ".join(map(str, sorted(levels)))
        raise invalid(f"this engine cannot sleep at level {level} (it knows: {level_names})")
    if mode == manager_pb2.MODE_COLOCATED and level >= DISCARDS:
        raise invalid(f"sleep level {level} discards the weights, and no update brings a colocated replica's own back")
    after = Sleeping(level, frozenset(TAGS))
    if set(sleeping.tags) == set(TAGS):
        if sleeping.level != level:
            raise precondition(f"it is {sleeping.describe()}; wake it before putting it to sleep at level {level}")
        return (), sleeping
    steps = [SleepStep.CLOSE]
    if level >= DISCARDS or (sleeping and not whole):
        steps.append(SleepStep.DISCARD)
    if sleeping:
        steps += [SleepStep.ABORT, SleepStep.WAKE_KV_CACHE if KV_CACHE in sleeping.tags else SleepStep.WAKE_WEIGHTS]
    return (*steps, SleepStep.SLEEP), after


def wake_steps(sleeping: Sleeping, tags: Sequence[str], whole: bool) -> tuple[tuple[SleepStep, ...], Sleeping]:
    """The steps that wake an engine, and its sleep then. tags: none: all. whole: its workers hold whole weights.

    While weights are torn or discarded, the caches wait for whole ones: with its caches an engine computes.

    Raises INVALID_ARGUMENT for an unknown tag, FAILED_PRECONDITION for a wrong order.
    """
    for tag in tags:
        if tag not in TAGS:
            raise invalid(f"there is no memory tag {tag!r} (known: {', '.join(TAGS)})")
    targets = frozenset(tags or TAGS) & sleeping.tags
    if KV_CACHE in targets and WEIGHTS in sleeping.tags - targets:
        raise precondition("weights are woken before kv_cache: wake weights, or both")
    rousing = sleeping.rousing
    if KV_CACHE in targets and not whole:
        if tuple(tags) == (KV_CACHE,):
            raise precondition("it holds no whole weights: the next update installs new ones and then wakes kv_cache")
        targets, rousing = targets - {KV_CACHE}, True
    steps = [SleepStep.WAKE_WEIGHTS] if WEIGHTS in targets else []
    if KV_CACHE in targets:
        steps.append(SleepStep.WAKE_KV_CACHE)
    after = replace(sleeping, rousing=rousing).without(targets)
    return tuple(steps), after
