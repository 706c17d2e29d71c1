"""How long anything may take: one configuration for manager, agents, engines and trainers. All values are seconds.

The machines turn the protocol's part into timers, the shells bound their own waits by the rest; docs/configuration.md
lists them all, and a test holds that page and this class together. Members need not agree on the values: only
remaining durations travel, and the lease and heartbeat of a session are the manager's, told in its Welcome.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from ckpt_engine.core.problems import invalid

ENVIRONMENT = "CKPT_ENGINE_DEADLINES"
"""Settings for every process that starts with it, engines included: "lease=20 quiesce=90"."""

LONGEST_SECONDS = 1e6
"""The longest wait that can be asked for, 11 days: timers and gRPC count milliseconds in 32 bits."""

NOTICE_SECONDS = 3.0
"""After so long whatever waits says for what."""


def check_seconds(what: str, seconds: float) -> None:
    """Raises INVALID_ARGUMENT, naming `what`, for a time that nobody can wait: not above 0, too long, or no number."""
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        raise invalid(f"{what} is a number of seconds, not {seconds!r}")
    if not 0 < seconds <= LONGEST_SECONDS:
        raise invalid(f"{what} of {seconds} s cannot be waited for: give more than 0 and at most {LONGEST_SECONDS:.0f}")


def bounded(seconds: float) -> float:
    """What another process asks to wait, brought into the range that timers take; what is no number is no time."""
    return min(max(0.001, seconds), LONGEST_SECONDS) if seconds == seconds else 0.001


@dataclass(frozen=True)
class Deadlines:
    """Every wait. The protocol's, which the state machines keep:

    heartbeat: between two heartbeats of a session.
    lease: a session from which nothing was heard for so long is lost; several heartbeats.
    resend: a command without an answer is sent again after this; receivers take an equal fence as a repetition.
    reconnect_first, reconnect_most: wait before the first attempt to reach a lost manager; it doubles up to the most.
    words: between two looks of an agent at its workers' state words, while nothing is going on.
    blobs: fetching or storing blobs for one step.
    ledger: making an epoch, an intent or a report durable.
    gather: from the first rank's call of an update to the last one's.
    merge: merging the tables of all ranks into one manifest.
    prepare: recording the engine's loader, all workers; never more than half of an update if enough others are ready.
    plan: compiling transfer plans, and combining digests.
    seal: one rank's snapshot and digests.
    fill: relays' bringing a version, before anything is paused; never more than half of what an update has left.
    quiesce: pausing an engine.
    arm: what members of a collective that are ready, and paused, wait for the decision to begin.
    resume: resuming an engine; also what an install keeps back for it, and how long an engine that did not take its
        version is left alone before it is told again.
    stall: installs that have told nothing new for so long (and for `quiesce`, in which nothing is told) are asked to
        go back; `resume` later nothing waits for them any more, unless they read a trainer's live memory.
    report: what an update keeps back of its deadline for outcomes to travel and the report to be stored.
    update: a whole update, when the caller sets no timeout.
    catch_up: bringing one late replica to the latest version. What waits for it waits no longer than `resume` after it
        last told something new.
    catch_up_retry, catch_up_retry_most: before a failed catch-up is tried again; doubles with each attempt up to the
        most.
    sleep_wake: putting an engine to sleep or waking it, when the caller sets no timeout.
    forget: a member that lost its session and did not come back, until the manager forgets it; a replica only if no
        update reached it.

    The manager's process:

    hello: a new stream's first message.
    write: a peer's taking a message once the connection's buffers are full.
    last_tasks: storing what just ended, while the manager stops.
    ledger_busy: another process's hold on the ledger's file.
    start: a manager in a thread of its own (`running_manager`) to listen; a process that publishes a directory, too.

    A trainer's process:

    connect: reaching the manager, and its accepting what was published.
    settle: the other ranks' publications, when an update begins right after publishing.
    call_grace: beyond an update's own deadline, for its report to arrive.
    stop: the background thread's orderly end; also its storing of a table.
    status: one question about the manager's status.
    goodbye: a stream's end after the last message.

    An agent's process:

    engine_start: the launcher's first word. (Until the engine answers: `--startup-timeout`.)
    engine_grace: between SIGTERM and SIGKILL.
    engine_probe: all that is asked of an engine that has come up.
    engine_health: one answer of its health route.
    engine_watch: between two looks at whether it is still there.
    engine_unhealthy: without an answer for so long it counts as gone. Generous: installing may keep a server busy.
    engine_dead_worker: a server that has not noticed its dead worker in this time will not.
    engine_restart_first, engine_restart_most: wait before a restart; it doubles up to the most.
    engine_steady: an engine that served for so long has recovered: the next restart waits the first time again.
    unanswered: how long an engine may stay closed after a call without an answer; then one that is ours is ended.
        Workers that finish late open the gate by themselves within it; a hung one never does.
    worker_reply: the agent's own answer to a worker. It decides at once; this bounds what a fault of ours could cost.
    stop_idle: what a stopping agent gives an install under way in an engine that goes on without it.
    stop_tasks: what its last commands have begun, while it stops.

    A worker inside an engine:

    worker_ask: one question to the agent, repeated within it.
    worker_attempt: one attempt of it.
    """

    heartbeat: float = 1.0
    lease: float = 8.0
    resend: float = 2.0
    reconnect_first: float = 0.1
    reconnect_most: float = 2.0
    words: float = 0.5
    blobs: float = 60.0
    ledger: float = 20.0
    gather: float = 120.0
    merge: float = 120.0
    prepare: float = 300.0
    plan: float = 120.0
    seal: float = 300.0
    fill: float = 300.0
    quiesce: float = 60.0
    arm: float = 30.0
    resume: float = 15.0
    stall: float = 120.0
    report: float = 2.0
    update: float = 600.0
    catch_up: float = 300.0
    catch_up_retry: float = 5.0
    catch_up_retry_most: float = 300.0
    sleep_wake: float = 120.0
    forget: float = 300.0
    hello: float = 10.0
    write: float = 20.0
    last_tasks: float = 2.0
    ledger_busy: float = 5.0
    start: float = 60.0
    connect: float = 60.0
    settle: float = 3.0
    call_grace: float = 10.0
    stop: float = 15.0
    status: float = 5.0
    goodbye: float = 2.0
    engine_start: float = 30.0
    engine_grace: float = 10.0
    engine_probe: float = 30.0
    engine_health: float = 5.0
    engine_watch: float = 1.0
    engine_unhealthy: float = 60.0
    engine_dead_worker: float = 10.0
    engine_restart_first: float = 1.0
    engine_restart_most: float = 60.0
    engine_steady: float = 300.0
    unanswered: float = 30.0
    worker_reply: float = 60.0
    stop_idle: float = 60.0
    stop_tasks: float = 3.0
    worker_ask: float = 10.0
    worker_attempt: float = 2.0

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

        Raises ValueError, naming the setting: not NAME=SECONDS, a name that there is not, a value that cannot be.
        """
        known = {field.name for field in fields(self)}
        values = {}
        for setting in settings.replace(",", " ").split():
            name, separator, value = setting.partition("=")
            if not separator or name not in known:
                expected = f"one of {', '.join(sorted(known))}" if separator else "NAME=SECONDS"
                raise ValueError(f"{setting!r} sets no deadline: it must be {expected}")
            try:
                values[name] = float(value)
            except ValueError:
                raise ValueError(f"deadline {name} is a number of seconds, not {value!r}") from None
        return replace(self, **values)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Deadlines:
        """The defaults, changed by ENVIRONMENT. Raises ValueError that names the variable."""
        try:
            return cls().changed(environment.get(ENVIRONMENT, ""))
        except ValueError as error:
            raise ValueError(f"{ENVIRONMENT}: {error}") from None


CATCH_UP_ATTEMPTS = 3
"""How often a replica that serves is tried to be brought to the same version: each attempt may pause it."""
