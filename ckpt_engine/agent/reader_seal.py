"""Computes the digests of a source without a process, on one of its readers.

A directory of safetensors files outlives the process that published it. A replica that joins later can install from it
once its bytes are digested again, which its agent does. The pieces are read in place, over the readers' transport.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch

from ckpt_engine.core.offers import by_transport
from ckpt_engine.core.problems import deadline, invalid, precondition, unavailable
from ckpt_engine.source.digests import digest_atoms
from ckpt_engine.transport.base import OpenedRegions, Transport, Viewable
from ckpt_engine.v1 import weights_pb2

ATOMS_AT_ONCE = 1024
"""Atoms that are digested together; the deadline is checked between such groups."""


def digest_for_readers(
    table_bytes: bytes, atoms_bytes: bytes, transports: Mapping[str, Transport], seconds: float
) -> weights_pb2.Digests:
    """Digests `atoms_bytes` (Atoms) over the regions of `table_bytes` (SourceTable), in the order of the atoms.

    Blocks while it reads, so run it on a thread. Raises CkptEngineError: the source does not stay sealed, the atoms
    belong to another table or leave their shard, a region cannot be opened here or has changed since it was published,
    or `seconds` have passed.
    """
    until = time.monotonic() + seconds
    table = weights_pb2.SourceTable.FromString(table_bytes)
    atoms = weights_pb2.Atoms.FromString(atoms_bytes)
    if not table.stays_sealed:
        raise precondition(f"source {table.description!r} does not stay sealed; only its own process can seal it")
    opened: dict[str, OpenedRegions] = {}
    digests = weights_pb2.Digests()
    try:
        regions = {offer.id: _usable(offer, transports) for offer in table.regions}
        for name in sorted({region.transport for region in regions.values()}):
            opened[name] = transports[name].open([each for each in regions.values() if each.transport == name])
            opened[name].check()
        shards = _shards(table, regions, opened)
        for first in range(0, len(atoms.atoms), ATOMS_AT_ONCE):
            if time.monotonic() > until:
                raise deadline(f"digested {first} of {len(atoms.atoms)} atoms in {seconds:g} s")
            group = atoms.atoms[first : first + ATOMS_AT_ONCE]
            part = weights_pb2.Atoms(table_digest=atoms.table_digest, atoms=group)
            digests.values.extend(digest_atoms(table, shards, part))
        for each in opened.values():
            each.check()  # a file that was replaced meanwhile was not digested
    finally:
        for each in opened.values():
            each.close()
    return digests


def _usable(region: weights_pb2.OfferedRegion, transports: Mapping[str, Transport]) -> weights_pb2.Region:
    """The first offer of a region that this process can map."""
    ways = by_transport(region)
    for name, way in ways.items():
        if name in transports:
            return way
    raise unavailable(
        f"the source needs transport {' or '.join(map(repr, ways))}, which is off here; see `ckpt-engine doctor`"
    )


def _shards(
    table: weights_pb2.SourceTable,
    regions: Mapping[int, weights_pb2.Region],
    opened: Mapping[str, OpenedRegions],
) -> list[torch.Tensor]:
    """The memory of each shard, as a tensor of the shard's shape. Nothing is read."""
    shards = []
    for shard in table.shards:
        spec = table.tensors[shard.tensor]
        region = regions.get(shard.region)
        if region is None:
            raise invalid(
                f"a shard lies in region {shard.region}, which the source does not offer", tensors=[spec.name]
            )
        shape = [stop - start for start, stop in zip(shard.start, shard.stop, strict=True)]
        ways = opened[region.transport]
        assert isinstance(ways, Viewable), region.transport  # `_usable` takes no others
        view = ways.view(region, shard.offset, shape, list(shard.stride), spec.dtype)
        shards.append(view)
    return shards
