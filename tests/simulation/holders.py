"""The simulated shell of a holder: the third kind of member, which keeps copies of versions that were sealed."""

from __future__ import annotations

import json
from typing import Any

from ckpt_engine.core.offers import holder_id
from ckpt_engine.core.problems import invalid
from ckpt_engine.machines import events
from ckpt_engine.machines.holder.machine import HolderMachine
from ckpt_engine.v1 import manager_pb2, weights_pb2
from tests.simulation.hosts import HOST
from tests.simulation.members import Cluster, MemberShell
from tests.simulation.weights import SLICES, HeldSource, ref_of
from tests.simulation.world import Steps

KIND = "holder"


class HolderShell(MemberShell):
    """One holder. It copies a version by what the ledger says of it, and holds the last one that it has copied.

    lies: it holds other weights, and a record that fits them, under the name of the version.
    """

    envelopes = (manager_pb2.HolderMessage, manager_pb2.HolderCommand)

    def __init__(self, cluster: Cluster, name: str, lies: bool = False) -> None:
        session = f"{name}-{cluster.world.random.getrandbits(32):08x}"
        super().__init__(cluster, name, HolderMachine(KIND, name, session, HOST, cluster.deadlines))
        self.lies = lies
        self.held: HeldSource | None = None
        self.problems: list[weights_pb2.Problem] = []
        self.asked = 0  # how often it was to digest something
        self.feed(events.Start())

    def hold(self, identity: weights_pb2.Identity) -> None:
        """It has a copy of this version now, and of no other."""
        truth = self.cluster.truth
        content = ["forged"] * SLICES if self.lies else truth.content[identity.root]
        memory = dict(enumerate(content))
        number = self.world.random.getrandbits(32)
        model = truth.models[identity.lineage]
        self.held = HeldSource(
            identity.lineage, 0, 1, "held", model, number, memory, memory, source=holder_id(KIND, self.name)
        )
        table = self.held.table()
        truth.sources[ref_of(table).digest] = self.held
        record = json.dumps({str(index): tag for index, tag in memory.items()}, sort_keys=True).encode()
        self.feed(events.HoldVersions((events.OfferedVersion(table, record, identity),)))

    def crash(self) -> None:
        """Its memory is gone with it."""
        super().crash()
        if self.held is not None:
            self.held.alive = False

    def own(self, command: Any) -> None:
        """Remembers what it was told of what it holds."""
        match command:
            case events.PublicationDecided(_, problem):
                self.problems += [] if problem is None else [problem]
            case events.Released():
                return
            case _:
                raise AssertionError(command)

    def start_task(self, key: events.Key, task: Any) -> None:
        """The holder's tasks."""
        match task:
            case events.PutBlobs(blobs):
                self.run_task(key, task.seconds, self.put(blobs))
            case events.SealSource():
                self.asked += 1
                self.run_task(key, task.seconds, self._seal(task))

    def _seal(self, task: events.SealSource) -> Steps:
        yield self.world.between(0.001, 0.02)
        if not task.keep or self.held is None:
            raise invalid("a holder seals nothing anew")
        return (yield from self.put_digests(self.held, task.atoms))
