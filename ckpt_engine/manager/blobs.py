"""The content store: manifests, tables, needs and plans, held by their SHA-256.

It decides what stays in memory: pinned blobs stay; of the others the least recently used goes first. It does not know
what the bytes mean. Everything here runs on the manager's event loop thread, except ``get`` and ``has``, which any
thread may call.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterable, Iterator

from ckpt_engine.core.problems import CkptEngineError, data_loss, invalid, not_found
from ckpt_engine.v1 import manager_pb2, weights_pb2

MEBIBYTE = 1 << 20
CHUNK_BYTES = MEBIBYTE
"""The most data that one BlobChunk carries."""

MOST_OWNERS = 8
"""Owners that are named when the store is full."""


class ResourceExhaustedError(CkptEngineError):
    """A blob is larger than the store takes, or the store is full of blobs that are in use.

    gRPC: RESOURCE_EXHAUSTED. The wire's Problem has no such code, so it travels as FAILED_PRECONDITION there.
    """

    def __init__(self, message: str) -> None:
        super().__init__(weights_pb2.Problem(code=weights_pb2.Problem.CODE_FAILED_PRECONDITION, message=message))


def describe(digest: bytes) -> str:
    """A digest for people: the first twelve hexadecimal digits."""
    return digest.hex()[:12]


class BlobStore:
    """Blobs by digest, in memory, with a bound on each blob and on all of them together (bytes).

    Sizes announced by uploads count from their first chunk on, so many uploads at once stay within the bound too.
    """

    def __init__(self, max_blob_bytes: int = 256 * MEBIBYTE, max_total_bytes: int = 2048 * MEBIBYTE) -> None:
        self.max_blob_bytes = max_blob_bytes
        self.max_total_bytes = max_total_bytes
        self._lock = threading.Lock()
        self._blobs: OrderedDict[bytes, bytes] = OrderedDict()  # least recently used first
        self._pins: dict[str, frozenset[bytes]] = {}
        self._fleeting: set[bytes] = set()
        self._stored_bytes = 0
        self._reserved_bytes = 0

    @property
    def stored_bytes(self) -> int:
        """Bytes of all stored blobs, without uploads under way."""
        return self._stored_bytes

    def __len__(self) -> int:
        return len(self._blobs)

    def has(self, ref: manager_pb2.BlobRef) -> bool:
        """Whether the blob is stored. The query counts as a use, so a yes stays true for a while."""
        with self._lock:
            if ref.digest not in self._blobs:
                return False
            self._blobs.move_to_end(ref.digest)
            return len(self._blobs[ref.digest]) == ref.size

    def get(self, ref: manager_pb2.BlobRef) -> bytes:
        """The blob's bytes. Raises NOT_FOUND, naming the digest, if it is not stored; INVALID_ARGUMENT for another
        size."""
        with self._lock:
            data = self._blobs.get(ref.digest)
            if data is None:
                raise not_found(
                    f"no blob {describe(ref.digest)} of {ref.size} bytes is held: put it again, then repeat the call"
                )
            self._blobs.move_to_end(ref.digest)
        if len(data) != ref.size:
            raise invalid(f"blob {describe(ref.digest)} has {len(data)} bytes, the reference says {ref.size}")
        return data

    def put(self, data: bytes, digest: bytes | None = None, fleeting: bool = False) -> manager_pb2.BlobRef:
        """Stores bytes that this process made and returns their reference. digest: theirs, if it is at hand.

        fleeting: large, and new with every update, so it is dropped once no owner pins it any more.
        Raises ResourceExhaustedError when they are over a limit.
        """
        ref = manager_pb2.BlobRef(digest=digest or hashlib.sha256(data).digest(), size=len(data))
        self._reserve(ref.size)
        self._settle(ref, data)
        if fleeting:
            with self._lock:
                self._fleeting.add(ref.digest)
        return ref

    def upload(self, ref: manager_pb2.BlobRef) -> Upload:
        """Begins an upload of the announced blob.

        Raises INVALID_ARGUMENT for a malformed reference and ResourceExhaustedError when it is over a limit.
        """
        if len(ref.digest) != 32:
            raise invalid(f"a blob's digest has 32 bytes (SHA-256), not {len(ref.digest)}")
        self._reserve(ref.size)
        return Upload(self, ref)

    def pin(self, owner: str, refs: Iterable[manager_pb2.BlobRef]) -> None:
        """Pins these blobs, in place of those that the same owner pinned before."""
        digests = frozenset(ref.digest for ref in refs if ref.digest)
        with self._lock:
            before = self._pins.pop(owner, frozenset())
            if digests:
                self._pins[owner] = digests
            self._let_go(before)

    def unpin(self, owner: str) -> None:
        """Ends an owner's claims; unknown owners are fine."""
        with self._lock:
            self._let_go(self._pins.pop(owner, frozenset()))

    def _let_go(self, digests: frozenset[bytes]) -> None:
        """Drops the fleeting ones of these that no owner pins."""
        fleeting = self._fleeting & digests
        for digest in fleeting.difference(*self._pins.values()) if fleeting else ():
            self._drop(digest)

    def _drop(self, digest: bytes) -> None:
        self._stored_bytes -= len(self._blobs.pop(digest, b""))
        self._fleeting.discard(digest)

    def _reserve(self, size: int) -> None:
        if size > self.max_blob_bytes:
            raise ResourceExhaustedError(
                f"a blob of {size} bytes is over this manager's limit of {self.max_blob_bytes} bytes for one blob"
            )
        with self._lock:
            self._make_room(size)
            self._reserved_bytes += size

    def _make_room(self, size: int) -> None:
        excess = self._stored_bytes + self._reserved_bytes + size - self.max_total_bytes
        if excess <= 0:
            return
        pinned = frozenset().union(*self._pins.values()) if self._pins else frozenset()
        victims = []
        for digest, data in self._blobs.items():
            if excess <= 0:
                break
            if digest not in pinned:
                victims.append(digest)
                excess -= len(data)
        if excess > 0:
            raise ResourceExhaustedError(
                f"this manager's store is full: no room for {size} bytes, since of {self.max_total_bytes} "
                f"{self._reserved_bytes} are being uploaded and these are in use: {self._owners()}. Runs that are gone "
                "are forgotten after a while; `ckpt-engine lineage evict LINEAGE` lets go of one now"
            )
        for digest in victims:
            self._drop(digest)

    def _owners(self) -> str:
        """The owners and the bytes that each pins, the most first; a blob with several owners counts for each."""
        bytes_by_owner = {
            owner: sum(len(self._blobs[digest]) for digest in pins if digest in self._blobs)
            for owner, pins in self._pins.items()
        }
        most = sorted(bytes_by_owner, key=lambda owner: (-bytes_by_owner[owner], owner))
        shares = [f"{owner}: {bytes_by_owner[owner]} bytes" for owner in most[:MOST_OWNERS]]
        if len(most) > MOST_OWNERS:
            rest = most[MOST_OWNERS:]
            shares.append(f"{len(rest)} others: {sum(bytes_by_owner[owner] for owner in rest)} bytes")
        return "; ".join(shares) or "nothing"

    def _settle(self, ref: manager_pb2.BlobRef, data: bytes | None) -> None:
        """Turns a reservation into a stored blob, or releases it (``data`` is None)."""
        with self._lock:
            self._reserved_bytes -= ref.size
            if data is None:
                return
            if ref.digest in self._blobs:
                self._blobs.move_to_end(ref.digest)
            else:
                self._blobs[ref.digest] = data
                self._stored_bytes += len(data)


class Upload:
    """One blob on its way in. Its bytes are hashed as they come, and stored only if they have the announced digest."""

    def __init__(self, store: BlobStore, ref: manager_pb2.BlobRef) -> None:
        self._store = store
        self._ref = ref
        self._hash = hashlib.sha256()
        self._parts: list[bytes] = []
        self._size = 0
        self._open = True

    def write(self, data: bytes) -> None:
        """Takes the next part. Raises INVALID_ARGUMENT if it is too large, or exceeds the announced size."""
        if len(data) > CHUNK_BYTES:
            raise invalid(f"a chunk carries at most {CHUNK_BYTES} bytes, not {len(data)}")
        self._size += len(data)
        if self._size > self._ref.size:
            raise invalid(f"blob {describe(self._ref.digest)} was announced with {self._ref.size} bytes, more came")
        self._hash.update(data)
        self._parts.append(data)

    def finish(self) -> manager_pb2.BlobRef:
        """Stores the blob. Raises DATA_LOSS, storing nothing, unless its bytes hash to the announced digest."""
        if self._size != self._ref.size:
            raise data_loss(
                f"blob {describe(self._ref.digest)} was announced with {self._ref.size} bytes, {self._size} came"
            )
        if self._hash.digest() != self._ref.digest:
            raise data_loss(
                f"blob {describe(self._ref.digest)} arrived with other bytes (they hash to "
                f"{describe(self._hash.digest())}); nothing was stored, put it again"
            )
        self._open = False
        self._store._settle(self._ref, b"".join(self._parts))
        return self._ref

    def abandon(self) -> None:
        """Releases the reserved room; does nothing after ``finish``."""
        if self._open:
            self._open = False
            self._store._settle(self._ref, None)


async def receive(store: BlobStore, chunks: AsyncIterator[manager_pb2.BlobChunk]) -> manager_pb2.BlobRef:
    """Reads one blob from a PutBlob stream into the store; the first chunk names it.

    Raises what ``upload``, ``write`` and ``finish`` raise, and INVALID_ARGUMENT for a stream without a reference.
    """
    upload: Upload | None = None
    try:
        async for chunk in chunks:
            if upload is None:
                if not chunk.HasField("ref"):
                    raise invalid("the first chunk of a blob must carry its reference (digest and size)")
                if store.has(chunk.ref):
                    return chunk.ref
                upload = store.upload(chunk.ref)
            upload.write(chunk.data)
        if upload is None:
            raise invalid("the stream ended before its first chunk")
        return upload.finish()
    finally:
        if upload is not None:
            upload.abandon()


def chunks_of(ref: manager_pb2.BlobRef, data: bytes) -> Iterator[manager_pb2.BlobChunk]:
    """A blob as the chunks of a GetBlob or PutBlob stream; an empty blob is one chunk without data."""
    for offset in range(0, max(len(data), 1), CHUNK_BYTES):
        part = data[offset : offset + CHUNK_BYTES]
        yield manager_pb2.BlobChunk(ref=ref, data=part) if offset == 0 else manager_pb2.BlobChunk(data=part)
