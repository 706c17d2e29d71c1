"""The matrix: which process suffers which fault at which stage, and what the promises allow to come of it.

A stage is a named trace point (ckpt_engine/trace.py). The process that reaches it is held there while the victim, which
may be itself or another one, suffers the fault; then it goes on. So every cell happens at exactly its stage.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

NEW, OLD, QUARANTINED = "new_serving", "old_serving", "quarantined"
VICTIM, BYSTANDER = "one", "two"
"""Replicas: faults hit the engine or the agent of the first one only."""


@dataclass(frozen=True)
class Stage:
    """point: where it is. holder: who reaches it, of trainer, manager, agent, worker, relay; None: nothing goes on."""

    name: str
    point: str
    holder: str | None


STAGES = {
    stage.name: stage
    for stage in (
        Stage("register", "agent.sends.ReplicaHello", "agent"),
        Stage("publish", "trainer.sends.Publish", "trainer"),
        Stage("plan", "manager.does.CompilePlans.begin", "manager"),
        Stage("quiesce", "agent.does.PauseEngine.begin", "agent"),
        Stage("transfer", "worker.install.transfer", "worker"),
        Stage("install", "worker.install.install", "worker"),
        Stage("verify", "worker.install.verify", "worker"),
        Stage("commit", "worker.install.commit", "worker"),
        Stage("resume", "agent.does.ResumeEngine.begin", "agent"),
        Stage("idle", "", None),
    )
}
RELAY_STAGES = {
    stage.name: stage
    for stage in (
        Stage("hello", "relay.sends.HolderHello", "relay"),
        Stage("count", "relay.does.CountSlot.begin", "relay"),
        Stage("fill", "relay.does.FillSlot.begin", "relay"),
        Stage("filled", "relay.sends.RelayFilled", "relay"),
        Stage("quiesce", "agent.does.PauseEngine.begin", "agent"),
        Stage("transfer", "worker.install.transfer", "worker"),
        Stage("join", "relay.does.SealSource.begin", "relay"),
        Stage("idle", "", None),
    )
}
"""Where a relay suffers. join: a replica has come whose workers need finer pieces of the version that is held, and the
relay is to digest them."""
COLLECTIVE_STAGES = {
    stage.name: stage
    for stage in (
        Stage("setup", "worker.ready.join.begin", "worker"),
        Stage("arming", "worker.install.vote", "worker"),
    )
}
"""Where a member of a collective suffers, beside quiesce and transfer. setup: it is about to join a communicator that
is made anew. arming: its engine is paused, and it is about to vote."""
EARLY_STAGES = {
    stage.name: stage
    for stage in (
        Stage("bring", "worker.early.copy", "worker"),
        Stage("brought", "worker.early.verified", "worker"),
    )
}
"""Where workers with stage memory suffer, before the pause. bring: the first bytes are about to come. brought: all of
them are there, verified, and the agent does not know it yet."""
WRITING = ("transfer", "install", "verify", "commit")
BEFORE = ("register", "publish", "plan", "idle")
ALL_STAGES = {**STAGES, **RELAY_STAGES, **COLLECTIVE_STAGES, **EARLY_STAGES}

FAULTS = {
    "kill": "SIGKILL",
    "stop": "SIGSTOP past the lease (workers and API servers: past the update's deadline), then SIGCONT",
    "cut": "every connection of it to the manager is reset; reachable again at once",
    "partition": "the same, and it cannot connect until the lease is over",
    "delay": "each message of its session waits a second, both ways",
    "duplicate": "each message of its session comes twice, and again behind the next one, both ways",
}
VICTIMS = {
    "kill": ("trainer", "manager", "agent", "api", "worker"),
    "stop": ("trainer", "manager", "agent", "api", "worker"),
    "cut": ("trainer", "manager", "agent"),
    "partition": ("trainer", "manager", "agent"),
    "delay": ("trainer", "agent"),
    "duplicate": ("trainer", "agent"),
}
RELAY = "relay"
"""A victim in worlds that have one; it can suffer every fault."""
LEADER = "leader"
"""A victim in worlds with two managers on one database: the one that leads. It suffers until the other one leads."""
LEADER_FAULTS = {
    "kill": "SIGKILL",
    "stop": "SIGSTOP, then SIGCONT",
    "members": "cut off from all members: connections are reset, and none can be made",
    "database": "cut off from the database in the same way",
    "both": "cut off from members and database",
}
LEFT_OUT = {
    ("cut", "worker"): "a worker's connections are Unix sockets of one host, whose other end is the agent or the API "
    "server: they break when one of the two dies, which are the kill and stop cells of those",
    ("cut", "api"): "an API server has no connection to the manager; its agent's is HTTP on loopback, a connection for "
    "a call: it breaks when one of the two dies",
    ("delay", "manager"): "the manager's messages are those of the other two: both ways are delayed there",
    ("delay", "worker"): "no messages to the manager; repeated and late messages of the channel between worker and "
    "agent are in tests/agent/test_channel.py and tests/install/test_worker_channel.py",
}
"""Fault (with its like: cut with partition, delay with duplicate) and victim to why there is no cell."""


@dataclass(frozen=True)
class Cell:
    victim: str
    fault: str
    stage: str

    def __str__(self) -> str:
        return f"{self.victim}-{self.fault}-{self.stage}"

    def allowed(self) -> tuple[frozenset[str], frozenset[str]]:
        """What may become of the victim's replica and of the other one. Seen after the update, before the next one."""
        return frozenset(self._of_victim()), frozenset(self._of_bystander())

    def _of_victim(self) -> Iterator[str]:
        if self.victim == LEADER:
            yield NEW  # the call goes on under the next one
            return
        if self.victim == RELAY:
            yield NEW  # what it cannot bring is read from the trainer, and what is mapped stays readable
            if self.stage == "join" and self.fault == "kill":
                yield QUARANTINED  # what it held has gone with it, and nobody else has it
            elif self.stage == "quiesce":
                yield OLD  # the plan reads from it, and it is gone before anything was changed
            return
        harmless = self.fault in ("delay", "duplicate") or (
            self.fault != "kill" and self.victim in ("trainer", "manager")
        )
        beside = self.victim in ("trainer", "manager")
        if self.fault == "stop" and self.victim in ("api", "worker"):
            # It stands still until the update's end, so the engine may not answer any more, not even to resume.
            yield from (NEW, QUARANTINED)
            if self.stage in BEFORE or self.stage == "quiesce":
                yield OLD
        elif self.fault == "kill" and not beside:
            # The engine has gone with its weights. It comes back with none, or an update found it already back.
            yield QUARANTINED
            if self.stage in BEFORE:
                yield NEW
        elif self.stage in BEFORE or self.stage == "quiesce":
            # Refused, gone back, or done all the same.
            yield from (OLD, NEW)
            if not beside and not harmless and self.stage == "quiesce":
                yield QUARANTINED  # an engine that does not resume in time
        elif self.victim == "manager" or harmless:
            yield NEW  # an install needs nobody but the memory that it reads
        elif self.victim == "trainer":
            yield from (NEW, QUARANTINED)  # memory of the dead is read if it was open already
        else:
            yield from (NEW, QUARANTINED)

    def _of_bystander(self) -> Iterator[str]:
        yield NEW
        if self.victim == LEADER:
            return
        if self.victim == RELAY:
            if self.stage in ("quiesce", "transfer", "install", "verify", "commit", "resume"):
                yield OLD  # the other one is there, and this one may not have come so far
            return
        if self.stage in BEFORE or self.stage == "quiesce" or self.victim in ("trainer", "manager"):
            yield OLD  # never reached by its install, or the update was refused
        if self.victim == "trainer" and self.fault == "kill" and self.stage not in BEFORE:
            yield QUARANTINED  # it may stand at its first byte itself when the memory that it reads goes


def all_cells() -> list[Cell]:
    without = [Cell(victim, fault, stage) for fault in FAULTS for victim in VICTIMS[fault] for stage in STAGES]
    relays = [Cell(RELAY, fault, stage) for stage in RELAY_STAGES for fault in FAULTS]
    return without + relays + [Cell(LEADER, fault, stage) for fault in LEADER_FAULTS for stage in STAGES]
