"""How a relay reads a source: only what certainly lies in this host's memory is digested while it is copied."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from ckpt_engine.core.boxes import Box
from ckpt_engine.core.reach import by_process
from ckpt_engine.core.transports import (
    GPU_MEMORY,
    HOST_MEMORY,
    TransportKind,
    memory_of,
    register_transport,
    unregister_transport,
)
from ckpt_engine.host.facts import this_host
from ckpt_engine.relay.sources import Sources
from ckpt_engine.transport.base import OpenedRegions
from ckpt_engine.transport.shared_memory.memory import SharedMemoryTransport
from ckpt_engine.v1.weights_pb2 import Region
from tests.install.install_models import TensorParallel
from tests.install.install_world import Checkpoint
from tests.relay.relay_world import seal, tables


class Renamed(SharedMemoryTransport):
    """Shared memory under another name."""

    name = "lent"

    def open(self, regions: Sequence[Region]) -> OpenedRegions:
        return super().open(
            [Region(id=r.id, size=r.size, transport="shared_memory", locator=r.locator) for r in regions]
        )


@pytest.mark.parametrize(
    ("lends", "plain"), [({HOST_MEMORY}, True), ({GPU_MEMORY}, False), ({GPU_MEMORY, HOST_MEMORY}, False)]
)
def test_a_transport_says_where_its_memory_is(lends: set[str], plain: bool) -> None:
    checkpoint = Checkpoint(TensorParallel(0, 1).checkpoint())
    recorded, offered = seal(checkpoint, []), tables(checkpoint)
    for table in offered:
        for region in table.regions:
            for offer in region.offers:
                offer.transport = "lent"
    assert memory_of("lent") == frozenset()
    register_transport(TransportKind("lent", by_process, Renamed, lends=frozenset(lends)))
    try:
        sources = Sources(recorded, offered, {"lent": Renamed()}, this_host())
        shape = tuple(recorded.record.manifest.tensors[0].shape)
        found = [reading for _, near in sources.holders(0, Box((0,) * len(shape), shape)) for reading in near]
        assert not sources.faults
        assert found
        assert {reading.is_plain for reading in found} == {plain}
        sources.close()
    finally:
        unregister_transport("lent")
