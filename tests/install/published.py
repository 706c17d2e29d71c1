"""What the sources of a checkpoint publish, and what they answer when it is sealed."""

from __future__ import annotations

from torch import Tensor

from ckpt_engine.core.boxes import Box
from ckpt_engine.core.offers import region_offered
from ckpt_engine.core.plan import Plans
from ckpt_engine.digest.boxes import digest_boxes
from ckpt_engine.host.facts import this_host
from ckpt_engine.torch_dtypes import dtype_name
from ckpt_engine.v1.weights_pb2 import Digests, SourceTable
from tests.install.install_world import Checkpoint, slices


def tables(checkpoint: Checkpoint, name: str = "rank") -> list[SourceTable]:
    """Of its two sources. name: of both; those called "rank" are a trainer's ranks."""
    found = []
    for source, arena in enumerate(checkpoint.arenas):
        mine = [(number, shard) for number, shard in enumerate(checkpoint.shards) if shard[2] == source]
        names = sorted({checkpoint.manifest.tensors[shard[0]].name for _, shard in mine})
        table = SourceTable(host=this_host(), id=f"{name} {source}", regions=[region_offered([arena.region(0)])])
        if name == "rank":
            table.rank = source
        for each in names:
            weight = checkpoint.weights[each]
            table.tensors.add(name=each, dtype=dtype_name(weight.dtype), shape=weight.shape)
        for number, (index, box, _, offset) in mine:
            table.shards.add(
                tensor=names.index(checkpoint.manifest.tensors[index].name),
                start=box.start,
                stop=box.stop,
                region=0,
                offset=offset,
                stride=checkpoint.shard(number).stride(),
                stored_dtype=dtype_name(checkpoint.stored(index)) if checkpoint.widened else "",
            )
        found.append(table)
    return found


def sealed(plans: Plans, weights: dict[str, Tensor]) -> dict[int, Digests]:
    """What each source answers to its atoms if it holds `weights`."""
    found = {}
    for source, atoms in plans.atoms.items():
        table = plans.publication.tables[source]
        views = []
        for atom in atoms.atoms:
            box = Box(tuple(atom.start), tuple(atom.stop))
            views.append((weights[table.tensors[table.shards[atom.shard].tensor].name][slices(box)], box.start))
        found[source] = Digests(values=digest_boxes(views))
    return found
