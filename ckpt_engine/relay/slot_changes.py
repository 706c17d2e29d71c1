"""What differs between the two versions that a relay holds, for workers of its host that hold one of them.

It decides whether there is such a table, and lays it into memory that nobody can change any more; `delta/table.py` says
what is in it. It does not decide whether a worker installs by it: a worker proves what comes of it, as of all it reads.
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from ckpt_engine.core.manifest import canonical
from ckpt_engine.core.relay_layout import SlotLayout
from ckpt_engine.core.sizes import in_words
from ckpt_engine.delta.table import AtomPair, Part, bytes_of, compare
from ckpt_engine.host.room import memory_room
from ckpt_engine.relay.cell_memory import bits_of
from ckpt_engine.relay.fill import Memory
from ckpt_engine.torch_dtypes import torch_dtype
from ckpt_engine.v1.weights_pb2 import Identity

log = logging.getLogger("ckpt_engine.relay")

_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_MOST_ELEMENTS = 1 << 32  # of an atom: places have 32 bits


class ComparedVersion(NamedTuple):
    """A version in a slot, all of it."""

    identity: Identity
    layout: SlotLayout
    memory: Memory  # of the slot


def changes_of(
    one: ComparedVersion, other: ComparedVersion, slot_bytes: int, carry_on: Callable[[], None]
) -> int | str:
    """Compares the versions in slots 0 and 1. Returns the descriptor of a sealed memory file with the table, or why
    there is none. carry_on: called from time to time; what it raises ends the comparison."""
    manifests = [canonical(each.layout.recorded.record.manifest) for each in (one, other)]
    if manifests[0] != manifests[1] or one.layout.atoms != other.layout.atoms:
        return "its two versions are laid out differently"
    specs = one.layout.recorded.record.manifest.tensors
    pairs = []
    for atom in one.layout.atoms:
        if atom.box.volume >= _MOST_ELEMENTS:
            return f"tensor {specs[atom.tensor].name} has too many elements in one piece"
        if not atom.box.volume:
            continue
        dtype = torch_dtype(specs[atom.tensor].dtype)
        bits = [bits_of(each.memory(atom.offset, atom.box.shape, dtype)) for each in (one, other)]
        pairs.append(AtomPair(atom.offset, *bits))
    began = time.monotonic()
    roots = one.identity.root, other.identity.root
    table = compare(roots, slot_bytes, pairs, torch.get_num_threads(), memory_room(), carry_on)
    if isinstance(table, str):
        return table
    size = sum(len(bytes_of(part)) for part in table)
    descriptor = _sealed(table)
    log.info(
        "workers can be brought from version %d to %d, and back, by %s of changes, found in %.2f s",
        min(one.identity.version, other.identity.version),
        max(one.identity.version, other.identity.version),
        in_words(size),
        time.monotonic() - began,
    )
    return descriptor


def _sealed(parts: Sequence[Part]) -> int:
    """The descriptor of a memory file with these bytes, which no process can change. Raises OSError."""
    descriptor = os.memfd_create("ckpt-engine changes", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with os.fdopen(os.dup(descriptor), "wb", buffering=1 << 20) as file:
            for part in parts:
                file.write(bytes_of(part))
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
