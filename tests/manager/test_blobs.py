"""The content store: bytes are what their digest says, and memory stays bounded."""

import hashlib
import os
from collections.abc import AsyncIterator

import pytest

from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.manager.blobs import CHUNK_BYTES, BlobStore, ResourceExhaustedError, chunks_of, receive
from ckpt_engine.v1 import manager_pb2, weights_pb2


def ref_of(data: bytes) -> manager_pb2.BlobRef:
    return manager_pb2.BlobRef(digest=hashlib.sha256(data).digest(), size=len(data))


async def stream(*chunks: manager_pb2.BlobChunk) -> AsyncIterator[manager_pb2.BlobChunk]:
    for chunk in chunks:
        yield chunk


@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES + 7])
async def test_a_blob_comes_back_as_it_went_in(size: int) -> None:
    store, data = BlobStore(), os.urandom(size)
    ref = await receive(store, stream(*chunks_of(ref_of(data), data)))
    assert ref == ref_of(data)
    assert store.get(ref) == data
    assert b"".join(chunk.data for chunk in chunks_of(ref, data)) == data
    assert all(len(chunk.data) <= CHUNK_BYTES for chunk in chunks_of(ref, data))


async def test_other_bytes_than_announced_are_refused_and_leave_nothing() -> None:
    data = os.urandom(CHUNK_BYTES + 5)
    store = BlobStore(max_total_bytes=len(data))
    wrong = bytes([data[0] ^ 1]) + data[1:]
    with pytest.raises(CkptEngineError) as caught:
        await receive(store, stream(*chunks_of(ref_of(data), wrong)))
    assert caught.value.problem.code == weights_pb2.Problem.CODE_DATA_LOSS
    assert not store.has(ref_of(data))
    assert len(store) == 0
    assert store.stored_bytes == 0
    assert store.put(data) == ref_of(data), "the room that was reserved is free again"


@pytest.mark.parametrize("change", [-1, 1])
async def test_more_or_fewer_bytes_than_announced_are_refused(change: int) -> None:
    store, data = BlobStore(), b"x" * 100
    ref = ref_of(data)
    with pytest.raises(CkptEngineError):
        await receive(store, stream(manager_pb2.BlobChunk(ref=ref, data=b"x" * (100 + change))))
    assert not store.has(ref)


async def test_a_stream_without_a_reference_is_refused() -> None:
    with pytest.raises(CkptEngineError, match="reference"):
        await receive(BlobStore(), stream(manager_pb2.BlobChunk(data=b"x")))
    with pytest.raises(CkptEngineError, match="first chunk"):
        await receive(BlobStore(), stream())


async def test_an_oversized_chunk_is_refused() -> None:
    data = bytes(CHUNK_BYTES + 1)
    with pytest.raises(CkptEngineError, match="at most"):
        await receive(BlobStore(), stream(manager_pb2.BlobChunk(ref=ref_of(data), data=data)))


def test_a_blob_over_the_limit_is_refused_before_its_bytes_come() -> None:
    store = BlobStore(max_blob_bytes=100)
    with pytest.raises(ResourceExhaustedError, match="101 bytes"):
        store.upload(manager_pb2.BlobRef(digest=bytes(32), size=101))


def test_the_least_recently_used_blobs_make_room() -> None:
    store = BlobStore(max_total_bytes=30)
    first, second, third = (store.put(bytes([number]) * 10) for number in range(3))
    assert store.get(first) == bytes(10)  # now the second is the least recently used
    fourth = store.put(b"4" * 10)
    assert [store.has(ref) for ref in (first, second, third, fourth)] == [True, False, True, True]
    assert store.stored_bytes == 30


def test_pinned_blobs_stay_whatever_comes() -> None:
    store = BlobStore(max_total_bytes=30)
    kept = store.put(b"k" * 20)
    store.pin("publication", [kept])
    for number in range(5):
        store.put(bytes([number]) * 10)
    assert store.has(kept)
    with pytest.raises(ResourceExhaustedError, match="in use"):
        store.put(b"n" * 20)
    store.pin("plan", [kept])
    store.unpin("publication")
    with pytest.raises(ResourceExhaustedError):
        store.put(b"n" * 20)
    store.unpin("plan")
    assert store.has(store.put(b"n" * 20))
    assert not store.has(kept)


def test_a_full_store_says_of_what_it_is_full() -> None:
    store = BlobStore(max_total_bytes=1000)
    for number in range(12):
        store.pin(f"lineage 'run-{number}'", [store.put(bytes([number]) * (70 + number))])
    with pytest.raises(CkptEngineError) as caught:
        store.put(bytes(200))
    said = caught.value.problem.message
    assert "store is full: no room for 200 bytes" in said
    assert "in use: lineage 'run-11': 81 bytes; lineage 'run-10': 80 bytes" in said
    assert "; 4 others: 286 bytes" in said
    assert "ckpt-engine lineage evict" in said


def test_uploads_under_way_count_and_give_their_room_back() -> None:
    store = BlobStore(max_total_bytes=30)
    upload = store.upload(ref_of(b"u" * 20))
    with pytest.raises(ResourceExhaustedError):
        store.put(b"v" * 20)
    upload.abandon()
    upload.abandon()
    assert store.has(store.put(b"v" * 20))


def test_the_same_bytes_twice_are_held_once() -> None:
    store = BlobStore()
    assert store.put(b"same") == store.put(b"same")
    assert store.stored_bytes == 4


def test_an_unknown_blob_is_not_found() -> None:
    with pytest.raises(CkptEngineError) as caught:
        BlobStore().get(manager_pb2.BlobRef(digest=bytes(32), size=1))
    assert caught.value.problem.code == weights_pb2.Problem.CODE_NOT_FOUND
