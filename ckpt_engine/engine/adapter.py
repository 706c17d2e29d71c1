"""What an agent asks of an inference engine, whatever engine it is.

An adapter drives one running engine over its own HTTP API on loopback, and knows how to start one. It moves no
weights and decides nothing about versions: `prepare` and `install` only make the engine call into our code inside its
workers, and what became of that arrives from the workers over the ZeroMQ channel. So a successful `install()` is no
proof that weights are in place, and a failed one is no proof that they are not.

The driver is a module that offers what `AdapterModule` lists, found by its engine's entry point (kinds.py). It is
imported only when its kind is asked for, so that an engine which is not installed costs nothing and breaks nothing.
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
from ckpt_engine.v1 import manager_pb2, weights_pb2
from ckpt_engine.words.directory import TOKEN_HEADER


@dataclass(frozen=True)
class Capabilities:
    """What an engine can do, as far as its adapter can use it. Constant for an engine version.

    It is what docs/engines/README.md shows and what the conformance suite (tests/conformance) holds the engine to: what
    is declared must work, and what is not must be refused by name.

    pause_modes: modes that `pause` accepts; asking for another one is refused before anything is paused.
    default_pause_mode: what PAUSE_MODE_UNSPECIFIED means for this engine.
    sleep_levels: levels that `sleep` accepts; empty: the engine cannot sleep.
    wake_tags: tags that `wake` accepts; empty: it only wakes as a whole.
    layouts: how workers may be laid out, for people: ("TP", "PP", "DP").
    versions: of the engine that tests have run, for people; what others become is `AdapterModule.availability`'s and
        `probe`'s to say.
    notes: one sentence each about what a person should know.
    cannot: one sentence each about what this engine cannot do, or what nobody has seen it do.
    """

    pause_modes: frozenset[manager_pb2.PauseMode]
    default_pause_mode: manager_pb2.PauseMode
    sleep_levels: frozenset[int] = frozenset()
    wake_tags: frozenset[str] = frozenset()
    layouts: tuple[str, ...] = ()
    versions: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    cannot: tuple[str, ...] = ()


@dataclass(frozen=True)
class EngineInfo:
    """What a running engine says about itself, found by asking it.

    world_size: number of workers (TP x PP x EP x DP) that hold weights and will ask for orders.
    supported: whether this adapter can drive this very server; `reason` says why not, and what to do.
    paused, asleep: as the engine says; an agent that takes over an engine starts from these. None: it does not say.
    untested: says that no test has run this version; empty: tests have. sleep_levels: that this very server has; None:
    those of its capabilities.
    """

    version: str
    world_size: int
    supported: bool
    reason: str = ""
    paused: bool | None = None
    asleep: bool | None = None
    untested: str = ""
    sleep_levels: frozenset[int] | None = None


@dataclass(frozen=True)
class LaunchPlan:
    """How to start an engine.

    argv: the whole command; `argv[0]` is an executable.
    env: added to the agent's own environment (which the engine inherits); must not contain CKPT_ENGINE_DIRECTORY,
        which the agent sets.
    url: base URL that the engine will answer at, without a trailing slash.
    workers: how many workers the launch arguments ask for.
    sleep_argument: an option without which this engine would sleep and give no memory up; added for replicas that are
        to sleep, unless it is there. Empty: none is needed, or there is no memory here that could be given up.
    """

    argv: tuple[str, ...]
    url: str
    workers: int
    env: Mapping[str, str] = field(default_factory=dict)
    sleep_argument: str = ""

    def command(self, sleeps: bool) -> tuple[str, ...]:
        """`argv`, with the option that lets an engine sleep. sleeps: whether this engine is to sleep."""
        if sleeps and self.sleep_argument and self.sleep_argument not in self.argv:
            return (*self.argv, self.sleep_argument)
        return self.argv

    @property
    def listens_at(self) -> str:
        """The host that the engine is told to listen at: every engine that we know has `--host`. Empty: its default."""
        return value(command_options(self.argv), "--host")


@dataclass(frozen=True)
class AdapterSettings:
    """What an adapter is told about the engine that it drives."""

    url: str  # base URL, without a trailing slash
    directory: Path  # the engine's runtime directory (see words/directory.py)
    token: str  # sent with every call (`headers`); without it the gate refuses control routes. Secret

    @property
    def headers(self) -> dict[str, str]:
        """Headers of every call to the engine."""
        return {TOKEN_HEADER: self.token}


@dataclass(frozen=True)
class AdapterAvailability:
    """Whether engines of a kind can be started on this host."""

    ok: bool
    version: str  # of the installed engine; empty: none is installed
    reason: str  # why not, or what was found


class EngineCallError(Exception):
    """An engine did not do what it was asked.

    answered: True: the engine said no, so it did nothing, or what it did is over. False: nobody knows what it does
        (no answer, connection lost, timeout); the caller must read the workers' state back before it goes on.
    status: of HTTP, of an engine that answered over it with an error; else 0.
    """

    def __init__(self, message: str, *, answered: bool, status: int = 0) -> None:
        super().__init__(message)
        self.answered, self.status = answered, status


class EngineAdapter(Protocol):
    """Drives one running engine. Runs in the agent, on its event loop; must never block it.

    Every call but `close` takes `seconds`, the time left for it, and raises `EngineCallError` when the engine does not
    do it within that time. Calls are made one at a time, except `healthy`, which may run beside any other. Each call
    may be repeated (an agent restarts; a deadline passes): pausing a paused engine, or resuming one that runs, is no
    error.
    """

    @property
    def kind(self) -> str: ...

    @property
    def capabilities(self) -> Capabilities: ...

    async def probe(self, seconds: float) -> EngineInfo:
        """Asks the engine what it is. Called once it is healthy, before anything else."""
        ...

    async def healthy(self, seconds: float) -> bool:
        """Whether the engine answers its health route. Never raises; False after `seconds`."""
        ...

    async def prepare(self, seconds: float) -> None:
        """Makes every worker call `EngineWorker.prepare()`, for a new manifest or a new plan. Needs no pause; returns
        when all of them have returned."""
        ...

    async def score(self, tokens: Sequence[int], more: int, seconds: float) -> Score:
        """The engine's log-probabilities of `tokens` and of `more` tokens that it generates greedily after them.

        Works while the gate is closed to all other requests. Raises KeyError, TypeError, ValueError or IndexError if
        the engine's answer has an unknown form."""
        ...

    async def pause(self, mode: manager_pb2.PauseMode, seconds: float) -> None:
        """Returns when no worker computes any more and none will until `resume`."""
        ...

    async def install(self, epoch: int, seconds: float) -> None:
        """Makes every worker call `EngineWorker.install()`; the engine is paused.

        Returns when all of them have returned, and whatever the engine must do after an update (caches, graphs) is
        done, also when a worker reported a failure: the engine's own begin and finish calls are always paired.
        """
        ...

    async def resume(self, seconds: float) -> None:
        """Returns when the engine produces tokens again."""
        ...

    async def discard(self, seconds: float) -> None:
        """Makes every worker call `EngineWorker.discard()`; the engine may compute meanwhile. Before `sleep(2)`.

        Returns when all of them have returned.
        """
        ...

    async def sleep(self, level: int, seconds: float) -> None:
        """Gives up memory; requests that run are ended. Level 1 keeps the weights on the host; level 2 discards them.

        At level 2 each worker must itself call `EngineWorker.discard()` again before the weights go, since calls may
        come in any order."""
        ...

    async def wake(self, tags: Sequence[str], seconds: float) -> None:
        """Takes memory back; tags "weights" and "kv_cache", none: all. Waking what is awake is no error.

        An engine may compute again once all is awake.
        """
        ...

    async def stamp(self, identity: weights_pb2.Identity, seconds: float) -> None:
        """Tells the engine the version that was verified, for its own responses. A no-op where it keeps none."""
        ...

    async def close(self) -> None:
        """Closes connections; the engine is not touched."""
        ...


OFFERED = ("CAPABILITIES", "create_adapter", "launch_plan", "refused_command", "availability")
"""What the module of an adapter has: see AdapterModule."""


class AdapterModule(Protocol):
    """What the module of an adapter offers at its top level. Importing it must not import the engine."""

    CAPABILITIES: Capabilities
    """The same as `create_adapter(...).capabilities`, without an adapter."""

    def create_adapter(self, settings: AdapterSettings) -> EngineAdapter:
        """A driver for the engine at `settings.url`. No I/O."""
        ...

    def launch_plan(self, arguments: Sequence[str], port: int, model: str) -> LaunchPlan:
        """How to start an engine on 127.0.0.1:`port`.

        arguments: what the user wrote after `--`; passed through untouched. model: directory or name, empty: the
        arguments name it. Raises ValueError, in words for the user, if the arguments contradict what is needed.
        """
        ...

    def refused_command(self, command: Sequence[str]) -> str:
        """Why the engine that `command` would start can never be driven; empty: no reason is known. Does not start it;
        may take a tenth of a second."""
        ...

    def availability(self) -> AdapterAvailability:
        """Whether the engine is installed here, in a version that this adapter drives. For `ckpt-engine doctor`."""
        ...


def load_adapter(kind: str) -> AdapterModule:
    """The module that drives engines of `kind`. Raises UnknownAdapterError as `engine_kind` does, and if the module
    cannot be imported or lacks what an adapter offers."""
    known = engine_kind(kind)
    try:
        module = importlib.import_module(known.driver)
    except Exception as error:
        raise UnknownAdapterError(
            f"the adapter for engine kind {known.name!r} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    if lacking := [each for each in OFFERED if not hasattr(module, each)]:
        raise UnknownAdapterError(
            f"the adapter for engine kind {known.name!r} ({known.driver}) lacks {', '.join(lacking)}"
        )
    return cast(AdapterModule, module)
