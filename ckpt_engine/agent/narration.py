"""The lines that an agent prints for people, one for each event. Pure."""

from __future__ import annotations

from google.protobuf.message import Message

from ckpt_engine.core.sizes import human_bytes
from ckpt_engine.machines.events import SessionEnded
from ckpt_engine.v1 import manager_pb2

_OUTCOMES = {
    manager_pb2.OUTCOME_NEW_SERVING: "new weights, serving",
    manager_pb2.OUTCOME_OLD_SERVING: "old weights, serving",
    manager_pb2.OUTCOME_QUARANTINED: "QUARANTINED",
}


def received_line(body: Message) -> str:
    """The line for a message from the manager; empty: none."""
    match body:
        case manager_pb2.Welcome():
            return f"registered with the manager of cluster {body.fence.cluster[:8]}"
        case manager_pb2.SleepWake():
            tags = f" ({', '.join(body.tags)})" if body.tags else ""
            return f"order {body.fence.epoch}: " + (
                f"wake up{tags}" if body.wake else f"sleep at level {body.level or 1}"
            )
        case manager_pb2.Abandon():
            return f"update of epoch {body.fence.epoch}: abandoned by the manager: {body.reason}"
        case _:
            return ""


def not_brought_line(body: manager_pb2.NotBrought) -> str:
    """The line that says what a late replica waits for."""
    return f"waits for version {body.identity.version} of {body.identity.lineage}: {body.reason}"


def lost_session_line(manager: str, end: SessionEnded) -> str:
    """The line that says why there is no session, and what the agent does about it."""
    if end.patience:
        patience = f"waiting up to {end.patience:.0f} s, in case that is an agent that has died"
        return f"refused by the manager at {manager}: {end.problem.message}; {patience}"
    return f"no session with the manager at {manager}: {end.problem.message}; trying again until it is there"


def sent_line(body: Message) -> str:
    """The line for a message to the manager; empty: none."""
    match body:
        case manager_pb2.Prepared():
            if body.HasField("problem"):
                return f"cannot be prepared: {body.problem.message}"
            return f"prepared, {_count(len(body.workers), 'worker')}"
        case manager_pb2.ReplicaOutcome():
            return _outcome(body)
        case manager_pb2.SleepWakeDone():
            if body.HasField("problem"):
                return f"order {body.fence.epoch}: sleep or wake failed: {body.problem.message}"
            return f"order {body.fence.epoch}: done"
        case _:
            return ""


def _outcome(outcome: manager_pb2.ReplicaOutcome) -> str:
    parts = [f"update of epoch {outcome.fence.epoch}: {_OUTCOMES.get(outcome.outcome, 'unknown')}"]
    if outcome.outcome == manager_pb2.OUTCOME_NEW_SERVING:
        parts[0] += f" (version {outcome.after.version})"
    parts.append(human_bytes(outcome.bytes))
    parts.append(f"pause {seconds(outcome.pause_seconds)}")
    parts.append(f"sync {seconds(outcome.sync_seconds)}")
    if outcome.HasField("problem"):
        parts.append(outcome.problem.message)
    if outcome.label_problem:
        parts.append(outcome.label_problem)
    return ", ".join(parts)


def seconds(duration: float) -> str:
    """A duration in seconds, for people."""
    return f"{duration * 1000:.1f} ms" if duration < 1 else f"{duration:.2f} s"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
