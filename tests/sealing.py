"""What sealing comes to, in messages and numbers instead of the blobs that the manager makes."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from ckpt_engine.core.manifest import RootHasher
from ckpt_engine.core.plan import Plans
from ckpt_engine.core.sealed import Sealed, expected_blob
from ckpt_engine.core.sealed_record import RecordWriter
from ckpt_engine.v1.weights_pb2 import Digests, Manifest, SealedRecord


def expected_digests(plans: Plans, key: Hashable, sealed: Sealed) -> Digests:
    """What a worker must find in each of its needs once it has read them, in their order."""
    return Digests.FromString(expected_blob(plans, key, sealed))


def record_of(sealed: Sealed) -> SealedRecord:
    """What an update's sources sealed."""
    return SealedRecord.FromString(RecordWriter(sealed.cells).write(sealed)[0])


def root(manifest: Manifest, tensor_digests: Sequence[int]) -> bytes:
    """The root of a content with one 64-bit digest a tensor, in the manifest's order."""
    return RootHasher(manifest).root(b"".join(each.to_bytes(8, "little") for each in tensor_digests))
