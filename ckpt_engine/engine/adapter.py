"""What an agent asks of any inference engine: the interface of an adapter.

An adapter drives one running engine over its own HTTP API on loopback, and knows how to start one. It moves no weights
and decides nothing about versions: `prepare` and `install` only make the engine call our code inside its workers, and
the workers report the outcome over the ZeroMQ channel. So a successful `install()` does not prove that weights are in
place, and a failed one does not prove that they are not.

The driver is a module with what `AdapterModule` lists, found by its engine's entry point (kinds.py). It is imported
only when its kind is used, so that an engine that is not installed costs nothing and breaks nothing.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, cast

from ckpt_engine.core.check_verdict import Score
from ckpt_engine.engine.command import command_options, value
from ckpt_engine.engine.kinds import UnknownAdapterError, engine_kind
from ckpt_engine.gate.directory import TOKEN_HEADER
from ckpt_engine.v1 import manager_pb2, weights_pb2


@dataclass(frozen=True)
class Capabilities:
    """What an engine can do, as far as its adapter can use it. Constant for an engine version.

    docs/engines/README.md shows it, and the conformance suite (tests/conformance) checks it: what is declared must
    work, and what is not must be refused by name.
    """

    pause_modes: frozenset[manager_pb2.PauseMode]  # that `pause` accepts; others are refused before any pause
    default_pause_mode: manager_pb2.PauseMode  # the meaning of PAUSE_MODE_UNSPECIFIED
    sleep_levels: frozenset[int] = frozenset()  # that `sleep` accepts; empty: the engine cannot sleep
    wake_tags: frozenset[str] = frozenset()  # that `wake` accepts; empty: it only wakes as a whole
    layouts: tuple[str, ...] = ()  # of workers, for people: ("TP", "PP", "DP")
    versions: tuple[str, ...] = ()  # that tests have run, for people; `availability` and `probe` judge others
    notes: tuple[str, ...] = ()  # what a person should know, a sentence each
    cannot: tuple[str, ...] = ()  # what the engine cannot do, or has not been tested to do, a sentence each


@dataclass(frozen=True)
class EngineInfo:
    """A running engine's answer about itself."""

    version: str
    world_size: int  # workers (TP x PP x EP x DP) that hold weights and will ask for orders
    supported: bool  # whether this adapter can drive this server
    reason: str = ""  # why not, and what to do
    paused: bool | None = None  # an agent that takes over an engine starts from this; None: it does not say
    asleep: bool | None = None  # likewise
    untested: str = ""  # says that no test has run this version; empty: tests have
    sleep_levels: frozenset[int] | None = None  # of this server; None: those of its capabilities
    # Modes of its capabilities that this server cannot be paused in, each with the reason and what to do.
    refused_modes: Mapping[manager_pb2.PauseMode, str] = field(default_factory=dict)


OLD_GATE = "its gate is of an older ckpt-engine and salts no requests; restart the server with this one"
"""Why a server cannot be updated in place whose gate says nothing of it."""


@dataclass(frozen=True)
class LaunchPlan:
    """How to start an engine."""

    argv: tuple[str, ...]  # the whole command; `argv[0]` is an executable
    url: str  # base URL at which the engine will answer, without a trailing slash
    workers: int  # by the launch arguments
    # In addition to the agent's environment, which the engine inherits. Without CKPT_ENGINE_DIRECTORY: the agent sets
    # it.
    env: Mapping[str, str] = field(default_factory=dict)
    # Option without which this engine's sleep would free no memory; added for replicas that are to sleep. Empty: none
    # is needed, or this host has no memory that sleep could free.
    sleep_argument: str = ""

    def command(self, sleeps: bool) -> tuple[str, ...]:
        """The whole command. sleeps: with the option that the engine needs to give memory up."""
        if sleeps and self.sleep_argument and self.sleep_argument not in self.argv:
            return (*self.argv, self.sleep_argument)
        return self.argv

    @property
    def listens_at(self) -> str:
        """The host at which the engine will listen, by its `--host`, which every known engine has. Empty: its
        default."""
        return value(command_options(self.argv), "--host")


@dataclass(frozen=True)
class AdapterSettings:
    """The engine that an adapter is to drive."""

    url: str  # base URL, without a trailing slash
    directory: Path  # the engine's runtime directory (see gate/directory.py)
    token: str  # secret; sent with every call (`headers`), or the gate refuses control routes

    @property
    def headers(self) -> dict[str, str]:
        """Headers of every call to the engine."""
        return {TOKEN_HEADER: self.token}


@dataclass(frozen=True)
class AdapterAvailability:
    """Whether engines of a kind can be started on this host."""

    ok: bool
    version: str  # of the installed engine; empty: none is installed
    reason: str


class EngineCallError(Exception):
    """A call to an engine failed.

    answered: True: the engine refused, so it did nothing, or what it did has ended. False: it is unknown what it does
        (no answer, connection lost, timeout); the caller must read the workers' state before it continues.
    status: the HTTP status of an error answer; else 0.
    """

    def __init__(self, message: str, *, answered: bool, status: int = 0) -> None:
        super().__init__(message)
        self.answered, self.status = answered, status


class EngineAdapter(Protocol):
    """Drives one running engine. Runs in the agent, on its event loop; must never block it.

    Every call but `close` takes `seconds`, the time that it may take, and raises `EngineCallError` if the engine does
    not do it within that time. Calls are made one at a time, except `healthy` and `count_guesses`. Each call may
    be repeated (an agent restarts; a deadline passes): pausing a paused engine, or resuming a running one, succeeds.
    """

    @property
    def kind(self) -> str: ...

    @property
    def capabilities(self) -> Capabilities: ...

    async def probe(self, seconds: float) -> EngineInfo:
        """Asks the engine for its version and layout. Called once it is healthy, before any other call."""
        ...

    async def healthy(self, seconds: float) -> bool:
        """Whether the engine answers its health route. Never raises; False after `seconds`."""
        ...

    @property
    def guesses(self) -> manager_pb2.Guesses | None:
        """What the engine's draft model has guessed since the engine's start, by the last `count_guesses`; None: it has
        no draft, or does not count."""
        ...

    async def count_guesses(self, seconds: float) -> None:
        """Reads the engine's counts for `guesses`. Never raises; may run at any time."""
        ...

    async def prepare(self, seconds: float) -> None:
        """Makes every worker call `EngineWorker.prepare()`, for a new manifest or a new plan, and returns when all have
        returned. Needs no pause."""
        ...

    async def score(self, tokens: Sequence[int], more: int, seconds: float, cached: bool = False) -> Score:
        """Has the engine score `tokens` and continue them greedily with `more` tokens. The gate may be closed to
        others.

        cached: only continue them, over what the engine has cached of such beginnings, as for any request. Else nothing
        that is cached is used: the request has a salt of its own. A log-probability that is not a number is NaN.

        Also raises KeyError, TypeError, ValueError or IndexError for an answer of an unknown form.
        """
        ...

    async def pause(self, mode: manager_pb2.PauseMode, seconds: float) -> None:
        """Pauses the engine; returns when no worker computes any more, and none will until `resume`."""
        ...

    def keeps_caches(self, mode: manager_pb2.PauseMode) -> bool:
        """Whether caches of the old weights are still there after a pause in this mode and an install. From such a
        pause on requests have another salt (gate/salt.py), so that none finds them."""
        ...

    async def install(self, epoch: int, seconds: float) -> None:
        """Makes every worker call `EngineWorker.install()`; the engine is paused.

        Returns when all of them have returned and the engine's own work after an update (caches, graphs) is done. The
        engine's own begin and finish calls are always paired, also if a worker reported a failure.
        """
        ...

    async def resume(self, seconds: float) -> None:
        """Resumes the engine; returns when it produces tokens again."""
        ...

    async def discard(self, seconds: float) -> None:
        """Makes every worker call `EngineWorker.discard()`; the engine may compute meanwhile. Before `sleep(2)`.

        Returns when all of them have returned.
        """
        ...

    async def sleep(self, level: int, seconds: float) -> None:
        """Has the engine give up memory; running requests end. Level 1 keeps weights on the host, level 2 discards
        them: then each worker must itself call `EngineWorker.discard()` before the weights go, in any order of
        calls."""
        ...

    async def wake(self, tags: Sequence[str], seconds: float) -> None:
        """Has the engine take memory back; tags "weights" and "kv_cache", none: all. To wake awake memory succeeds.

        An engine may compute again once all is awake.
        """
        ...

    async def stamp(self, identity: weights_pb2.Identity, seconds: float) -> None:
        """Gives the engine the verified version, for its own responses. A no-op if it names no version."""
        ...

    async def close(self) -> None:
        """Closes connections; the engine is not touched."""
        ...


OFFERED = ("CAPABILITIES", "create_adapter", "launch_plan", "refused_command", "availability")
"""Names that an adapter's module must have: see AdapterModule."""


class AdapterModule(Protocol):
    """What the module of an adapter offers at its top level. Importing it must not import the engine."""

    CAPABILITIES: Capabilities
    """The same as `create_adapter(...).capabilities`, without an adapter."""

    def create_adapter(self, settings: AdapterSettings) -> EngineAdapter:
        """Makes a driver for the engine at `settings.url`. No I/O."""
        ...

    def launch_plan(self, arguments: Sequence[str], port: int, model: str) -> LaunchPlan:
        """Plans the start of an engine on 127.0.0.1:`port`.

        arguments: the user's, after `--`; passed on unchanged. model: directory or name; empty: the arguments name it.
        Raises ValueError with a message for the user if the arguments cannot be used.
        """
        ...

    def refused_command(self, command: Sequence[str]) -> str:
        """Why the engine that `command` starts cannot be driven in any case; empty: it may be. Starts nothing of the
        engine; may take a tenth of a second."""
        ...

    def availability(self) -> AdapterAvailability:
        """Whether the engine is installed here, in a version that this adapter drives. For `ckpt-engine doctor`."""
        ...


def load_adapter(kind: str) -> AdapterModule:
    """Imports the module that drives engines of `kind`. Raises UnknownAdapterError for an unknown kind, and if the
    module cannot be imported or lacks a name of OFFERED."""
    entry = engine_kind(kind)
    try:
        module = importlib.import_module(entry.driver)
    except Exception as error:
        raise UnknownAdapterError(
            f"the adapter for engine kind {entry.name!r} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    if missing := [each for each in OFFERED if not hasattr(module, each)]:
        raise UnknownAdapterError(
            f"the adapter for engine kind {entry.name!r} ({entry.driver}) lacks {', '.join(missing)}"
        )
    return cast(AdapterModule, module)


class ShelfModule(Protocol):
    """What the module of an engine with adapters (LoRA) offers beside AdapterModule: each adapter of an engine has a
    shelf (gate/shelf.py), which an agent drives as if it were an engine."""

    def create_shelf_adapter(self, settings: AdapterSettings, adapter: str) -> EngineAdapter:
        """Makes a driver for the shelf of `adapter` in the engine at `settings.url`. No I/O."""
        ...

    def refuse_adapters(self, command: Sequence[str], versions: Mapping[str, int]) -> None:
        """Raises ValueError, with a message for the user, unless the engine that `command` starts can serve these
        adapters. versions: how many versions it keeps of each."""
        ...


def load_shelf_module(kind: str) -> ShelfModule:
    """The module that drives the shelves of engines of `kind`. Raises ValueError if such engines have none."""
    module = load_adapter(kind)
    if not hasattr(module, "create_shelf_adapter"):
        raise ValueError(f"--adapter: {engine_kind(kind).title} serves no adapters; publish the merged model")
    return cast(ShelfModule, module)
