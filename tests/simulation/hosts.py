"""Where everybody is, and which memory is reached from there: by the facts and the rules that the real ones go by."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.core.topology import Choice, choose_transport
from ckpt_engine.core.transports import is_collective
from ckpt_engine.v1 import weights_pb2

NETWORK = "tcp"
MEMORY, FILES, RELAY = "shared_memory", "file", "relay_memory"

WORKERS_READ = (MEMORY, RELAY, FILES)
"""Transports of engines' workers: no network."""

IN_COLLECTIVES = (*WORKERS_READ, "nccl")
"""Those of workers that can take part in a collective."""

COLLECTIVE = "nccl"


def host_of(name: str) -> weights_pb2.Host:
    """A host, or a container that shares nothing with others."""
    return weights_pb2.Host(
        boot_id=f"boot {name}", pid_namespace="namespace", name=name, relay_directory="relays", address=name
    )


HOST = weights_pb2.Host(boot_id="host", pid_namespace="namespace", name="simulated", relay_directory="relays")
"""Where everybody is, in stories of one host."""


def locator_of(table: bytes) -> bytes:
    """What a worker tells of the memory of a table, by its digest, that it could not open."""
    return hashlib.sha256(table).digest()


def ways(
    source: weights_pb2.Host, offered: Sequence[str], reader: weights_pb2.Host, reads: Sequence[str]
) -> list[Choice]:
    """All ways on which a reader by itself reaches memory that is offered, the nearest first."""
    found = []
    for transport in [each for each in offered if not is_collective(each)]:
        try:
            found.append(choose_transport(source, transport, reader, reads))
        except CkptEngineError:
            continue
    return sorted(found, key=lambda choice: choice.distance)
