"""Which events are heartbeats that tell nothing.

Nearly all events of a large cluster are. Whatever looks at all replicas, to begin something or to show it, must not do
so for each heartbeat of each replica.
"""

from __future__ import annotations

from ckpt_engine.machines.events import ManagerEvent, Message
from ckpt_engine.machines.manager.members import Members, Replica
from ckpt_engine.v1 import manager_pb2


def tells_nothing(event: ManagerEvent, members: Members) -> bool:
    """Whether an event is a heartbeat that says what its member said before. To be asked before it is taken."""
    if not isinstance(event, Message):
        return False
    if not isinstance(event.body, manager_pb2.ReplicaHeartbeat):
        return isinstance(event.body, manager_pb2.Heartbeat)
    replica = members.by_peer.get(event.peer)
    return isinstance(replica, Replica) and _told(replica) == _told(event.body)


def take_beat(replica: Replica, beat: manager_pb2.ReplicaHeartbeat) -> None:
    """Notes what a replica says of itself."""
    replica.take_workers(beat.workers)
    replica.serving, replica.asleep = beat.serving, beat.asleep
    replica.closed_reason, replica.label_problem = beat.closed_reason, beat.label_problem
    replica.engine_check = beat.engine_check


def _told(said: Replica | manager_pb2.ReplicaHeartbeat) -> tuple[object, ...]:
    words = said.closed_reason, said.label_problem, said.engine_check
    return said.serving, said.asleep, *words, tuple(said.workers)
