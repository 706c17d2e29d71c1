"""How long anything may take: one configuration for manager, agents and trainers. All values are seconds.

The machines turn these into timers; nothing else in the package waits without one of them. Members need not agree on
the values: only remaining durations travel, and the lease and heartbeat of a session are the manager's, told in its
Welcome.
"""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Deadlines:
    """Every wait of the protocol.

    heartbeat: between two heartbeats of a session.
    lease: a session from which nothing was heard for so long is lost; several heartbeats.
    resend: a command without an answer is sent again after this; receivers take an equal fence as a repetition.
    reconnect_first, reconnect_most: wait before the first attempt to reach a lost manager; it doubles up to the most.
    words: between two looks of an agent at its workers' state words, while nothing is going on.
    blobs: fetching or storing blobs for one step.
    ledger: making an epoch, an intent or a report durable.
    gather: from the first rank's call of an update to the last one's.
    merge: merging the tables of all ranks into one manifest.
    prepare: recording the engine's loader, all workers.
    plan: compiling transfer plans, and combining digests.
    seal: one rank's snapshot and digests.
    quiesce: pausing an engine.
    resume: resuming an engine; also what an install keeps back for it.
    report: what an update keeps back of its deadline for outcomes to travel and the report to be stored.
    update: a whole update, when the caller sets no timeout.
    catch_up: bringing one late replica to the latest version.
    catch_up_retry: before a failed catch-up is tried again; doubles with each attempt.
    sleep_wake: putting an engine to sleep or waking it, when the caller sets no timeout.
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
    quiesce: float = 60.0
    resume: float = 15.0
    report: float = 2.0
    update: float = 600.0
    catch_up: float = 300.0
    catch_up_retry: float = 5.0
    sleep_wake: float = 120.0

    def __post_init__(self) -> None:
        """Raises ValueError for values that are not positive or cannot work together."""
        for field in fields(self):
            if not getattr(self, field.name) > 0:
                raise ValueError(f"deadline {field.name} must be positive, not {getattr(self, field.name)}")
        if self.lease < 2 * self.heartbeat:
            raise ValueError(
                f"a lease of {self.lease} s ends before a second heartbeat (every {self.heartbeat} s) can arrive"
            )
        if self.report >= self.update:
            raise ValueError(f"an update of {self.update} s cannot keep {self.report} s back for its report")


CATCH_UP_ATTEMPTS = 3
"""How often bringing the same workers to the same version is tried before the next update is awaited."""
