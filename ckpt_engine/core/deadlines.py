"""How long anything may take: one configuration for manager, agents, engines and trainers. All values are seconds.

The machines turn the protocol's part into timers, and the shells bound their own waits by the rest.
docs/configuration.md lists all of them, and a test compares that page with this class. Members need not agree on the
values: only remaining durations travel, and a session's lease and heartbeat are the manager's, sent in its Welcome.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from ckpt_engine.core.problems import invalid

ENVIRONMENT = "CKPT_ENGINE_DEADLINES"
"""Settings for every process that starts with it, engines included: "lease=20 quiesce=90"."""

LONGEST_SECONDS = 1e6
"""The longest wait, 11 days: timers and gRPC count milliseconds in 32 bits."""

NOTICE_SECONDS = 3.0
"""Seconds after which a wait is reported, with what it is for."""


def check_seconds(what: str, seconds: float) -> None:
    """Raises INVALID_ARGUMENT, naming `what`, unless it is a number above 0 and at most LONGEST_SECONDS."""
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        raise invalid(f"{what} is a number of seconds, not {seconds!r}")
    if not 0 < seconds <= LONGEST_SECONDS:
        raise invalid(f"{what} of {seconds} s cannot be waited for: give more than 0 and at most {LONGEST_SECONDS:.0f}")


def bounded(seconds: float) -> float:
    """Clamps the wait that another process asks for to the range that timers take. NaN becomes 1 ms."""
    return min(max(0.001, seconds), LONGEST_SECONDS) if seconds == seconds else 0.001


@dataclass(frozen=True)
class Deadlines:
    """Every wait, in seconds."""

    # -- the protocol's, which the state machines keep
    heartbeat: float = 1.0  # between two heartbeats of a session
    lease: float = 8.0  # a silent session is lost after this; several heartbeats
    # A command without an answer is sent again after this; receivers take an equal fence as a repetition.
    resend: float = 2.0
    reconnect_first: float = 0.1  # before the first attempt to reach a lost manager
    reconnect_most: float = 2.0  # the wait doubles up to this
    words: float = 0.5  # between two looks of an agent at its workers' state words, while idle
    blobs: float = 60.0  # fetching or storing blobs for one step
    ledger: float = 20.0  # making an epoch, an intent or a report durable
    gather: float = 120.0  # from the first rank's call of an update to the last one's
    merge: float = 120.0  # merging the tables of all ranks into one manifest
    # Recording the engine's loader, all workers; at most half of an update if enough others are ready.
    prepare: float = 300.0
    plan: float = 120.0  # compiling transfer plans, and combining digests
    seal: float = 300.0  # one rank's snapshot and digests
    fill: float = 300.0  # filling relays, before anything is paused; at most half of what an update has left
    quiesce: float = 60.0  # pausing an engine
    arm: float = 30.0  # ready and paused members of a collective wait this long for the decision to begin
    # Resuming an engine, for which an install reserves this. Also before an engine that did not take its version is
    # commanded again.
    resume: float = 15.0
    # Installs without progress for this plus `quiesce`, which reports none, are asked to go back. `resume` later
    # nothing waits for them any more, unless a worker may still read a trainer's live memory.
    stall: float = 120.0
    report: float = 2.0  # an update reserves this for outcomes to travel and the report to be stored
    update: float = 600.0  # a whole update, when the caller sets no timeout
    # Bringing one late replica to the latest version. What waits for it waits no longer than `resume` after its last
    # progress.
    catch_up: float = 300.0
    catch_up_retry: float = 5.0  # before a failed catch-up is tried again
    catch_up_retry_most: float = 300.0  # the wait doubles up to this
    sleep_wake: float = 120.0  # putting an engine to sleep or waking it, when the caller sets no timeout
    forget: float = 300.0  # a member without a session is forgotten after this; a replica only if no update reached it

    # -- the manager's process
    hello: float = 10.0  # a new stream's first message
    write: float = 20.0  # a peer's taking a message once the connection's buffers are full
    last_tasks: float = 2.0  # storing what just ended, while the manager stops
    # Another process's hold on the ledger's file, or one transaction of a ledger in a database, which may be away.
    ledger_busy: float = 5.0
    # A manager that shares its ledger leads for so long after it has renewed its term last; then another one may.
    term: float = 6.0
    start: float = 60.0  # starting a `running_manager`, or a process that publishes a directory

    # -- a trainer's process
    connect: float = 60.0  # reaching the manager, and its accepting what was published
    settle: float = 3.0  # the other ranks' publications, when an update begins right after publishing
    call_grace: float = 10.0  # for the report to arrive, beyond an update's own deadline
    stop: float = 15.0  # the background thread's orderly end; also its storing of a table
    status: float = 5.0  # one question about the manager's status
    goodbye: float = 2.0  # a stream's end after the last message

    # -- an agent's process
    engine_start: float = 30.0  # the launcher's first word; until the engine answers: `--startup-timeout`
    engine_grace: float = 10.0  # between SIGTERM and SIGKILL
    engine_probe: float = 30.0  # all that is asked of an engine that has come up
    engine_health: float = 5.0  # one answer of its health route
    engine_watch: float = 1.0  # between two checks that it is still running
    # A silent engine is gone after this; generous, since installing may keep a server busy.
    engine_unhealthy: float = 60.0
    engine_dead_worker: float = 10.0  # a server that has not noticed its dead worker by then never will
    engine_restart_first: float = 1.0  # before a restart
    engine_restart_most: float = 60.0  # the wait doubles up to this
    # An engine that served this long has recovered: the next restart waits the first time again.
    engine_steady: float = 300.0
    # How long an engine may stay closed after a call without an answer; then one that is ours is ended. Workers
    # that finish late open the gate by themselves within it; a hung one never does.
    unanswered: float = 30.0
    worker_reply: float = 60.0  # the agent's answer to a worker; immediate, so this bounds what a fault of ours costs
    stop_idle: float = 60.0  # a stopping agent gives this to an install in an engine that goes on without it
    stop_tasks: float = 3.0  # tasks of its last commands, while it stops

    # -- a worker inside an engine
    worker_ask: float = 10.0  # one question to the agent, repeated within it
    worker_attempt: float = 2.0  # one attempt of it

    def __post_init__(self) -> None:
        """Raises ValueError for values that are not positive or cannot work together."""
        for field in fields(self):
            if not 0 < getattr(self, field.name) <= LONGEST_SECONDS:
                raise ValueError(
                    f"deadline {field.name} must be positive and at most {LONGEST_SECONDS:.0f} s, "
                    f"not {getattr(self, field.name)}"
                )
        if self.lease < 2 * self.heartbeat:
            raise ValueError(
                f"a lease of {self.lease} s ends before a second heartbeat (every {self.heartbeat} s) can arrive"
            )
        if self.report >= self.update:
            raise ValueError(f"an update of {self.update} s cannot keep {self.report} s back for its report")

    def changed(self, settings: str) -> Deadlines:
        """These deadlines with settings such as "lease=20 quiesce=90" (seconds; blanks or commas between them).

        Raises ValueError, naming the setting, unless it is NAME=SECONDS with a name and a value that exist.
        """
        names = {field.name for field in fields(self)}
        values = {}
        for setting in settings.replace(",", " ").split():
            name, separator, value = setting.partition("=")
            if not separator or name not in names:
                expected = f"one of {', '.join(sorted(names))}" if separator else "NAME=SECONDS"
                raise ValueError(f"{setting!r} sets no deadline: it must be {expected}")
            try:
                values[name] = float(value)
            except ValueError:
                raise ValueError(f"deadline {name} is a number of seconds, not {value!r}") from None
        return replace(self, **values)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Deadlines:
        """The defaults, changed by ENVIRONMENT. Raises ValueError, naming the variable."""
        try:
            return cls().changed(environment.get(ENVIRONMENT, ""))
        except ValueError as error:
            raise ValueError(f"{ENVIRONMENT}: {error}") from None


CATCH_UP_ATTEMPTS = 3
"""Attempts to bring a serving replica to one version; few, since each may pause it."""
