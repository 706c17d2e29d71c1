"""Digests of a source that has no process of its own: one of its readers works them out.

A directory of safetensors files stays as it is after the process that published it has gone. A replica that joins
later can install from it, once somebody has said anew what its bytes hash to: the agent of that replica. The pieces
are read where they lie, through the transport that the readers use as well.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping

import torch

from ckpt_engine.core.digest import digest_boxes
from ckpt_engine.core.dtypes import itemsize
from ckpt_engine.core.problems import deadline, invalid, unavailable
from ckpt_engine.transport.base import OpenedRegions, Transport
from ckpt_engine.v1 import weights_pb2

ATOMS_AT_ONCE = 64
"""Digested together; between such groups the deadline is looked at."""


def digest_for_readers(
    table_bytes: bytes, atoms_bytes: bytes, transports: Mapping[str, Transport], seconds: float
) -> weights_pb2.Digests:
    """The digests of `atoms_bytes` (Atoms) over the regions of `table_bytes` (SourceTable), in the order of the atoms.

    Blocks for as long as reading takes: runs on a thread. Raises CkptEngineError: the atoms belong to another table or
    leave their shard, a region cannot be opened here or has changed since it was published, or `seconds` have passed.
    """
    until = time.monotonic() + seconds
    table = weights_pb2.SourceTable.FromString(table_bytes)
    atoms = weights_pb2.Atoms.FromString(atoms_bytes)
    if atoms.table_digest != hashlib.sha256(table_bytes).digest():
        raise invalid("the atoms to digest were made for another table than the one that came with them")
    regions = {region.id: region for region in table.regions}
    opened: dict[str, OpenedRegions] = {}
    digests = weights_pb2.Digests()
    try:
        for name in {region.transport for region in table.regions}:
            if name not in transports:
                raise unavailable(
                    f"transport {name!r} of the source does not work on this host; see `ckpt-engine doctor`"
                )
            opened[name] = transports[name].open([region for region in table.regions if region.transport == name])
            opened[name].check()
        for first in range(0, len(atoms.atoms), ATOMS_AT_ONCE):
            if time.monotonic() > until:
                raise deadline(f"digested {first} of {len(atoms.atoms)} atoms in {seconds:g} s")
            group = atoms.atoms[first : first + ATOMS_AT_ONCE]
            digests.values.extend(digest_boxes([_view(table, regions, opened, atom) for atom in group]))
        for regions_of_transport in opened.values():
            regions_of_transport.check()  # a file that was replaced meanwhile: what we digested is not what is there
    finally:
        for regions_of_transport in opened.values():
            regions_of_transport.close()
    return digests


def _view(
    table: weights_pb2.SourceTable,
    regions: Mapping[int, weights_pb2.Region],
    opened: Mapping[str, OpenedRegions],
    atom: weights_pb2.Atom,
) -> tuple[torch.Tensor, list[int]]:
    """The atom's elements, and the global coordinates of the first of them."""
    if atom.shard >= len(table.shards):
        raise invalid(f"an atom names shard {atom.shard}, but the source has {len(table.shards)}")
    shard = table.shards[atom.shard]
    spec = table.tensors[shard.tensor]
    inside = all(
        low <= start <= stop <= high
        for low, start, stop, high in zip(shard.start, atom.start, atom.stop, shard.stop, strict=True)
    )
    if not inside:
        raise invalid(f"an atom leaves its shard of tensor {spec.name}", tensors=[spec.name])
    elements = sum((at - low) * step for at, low, step in zip(atom.start, shard.start, shard.stride, strict=True))
    region = regions[shard.region]
    shape = [stop - start for start, stop in zip(atom.start, atom.stop, strict=True)]
    offset = shard.offset + elements * itemsize(spec.dtype)
    view = opened[region.transport].view(region, offset, shape, list(shard.stride), spec.dtype)
    return view, list(atom.start)
