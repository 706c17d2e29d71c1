"""The agent's blob cache, and the lines that it prints."""

from __future__ import annotations

import asyncio

import pytest

from ckpt_engine.agent.blobs import BlobCache
from ckpt_engine.agent.narration import received_line, seconds, sent_line
from ckpt_engine.channel import blob_ref
from ckpt_engine.core.manifest import DIGEST_FORMAT
from ckpt_engine.v1 import manager_pb2, weights_pb2


class Store:
    """Blobs by digest, each fetched after a moment."""

    def __init__(self, *blobs: bytes) -> None:
        self._blobs = {blob_ref(data).digest: data for data in blobs}
        self.fetched: list[bytes] = []

    async def fetch(self, ref: manager_pb2.BlobRef) -> bytes:
        self.fetched.append(ref.digest)
        await asyncio.sleep(0.01)
        return self._blobs[ref.digest]


async def test_a_blob_is_fetched_once() -> None:
    store = Store(b"plan")
    cache = BlobCache(store.fetch)
    ref = blob_ref(b"plan")
    assert await asyncio.gather(*(cache.get(ref) for _ in range(3))) == [b"plan"] * 3
    assert await cache.get(ref) == b"plan"
    assert len(store.fetched) == 1


async def test_one_that_gives_up_does_not_take_it_from_the_others() -> None:
    store = Store(b"plan")
    cache = BlobCache(store.fetch)
    hasty = asyncio.ensure_future(cache.get(blob_ref(b"plan")))
    patient = asyncio.ensure_future(cache.get(blob_ref(b"plan")))
    await asyncio.sleep(0)
    hasty.cancel()
    assert await patient == b"plan"


async def test_what_was_used_least_recently_goes_first() -> None:
    blobs = [bytes([i]) * 10 for i in range(3)]
    store = Store(*blobs)
    cache = BlobCache(store.fetch, limit_bytes=25)
    for data in (blobs[0], blobs[1], blobs[0], blobs[2]):
        await cache.get(blob_ref(data))
    assert cache.bytes == 20
    await cache.get(blob_ref(blobs[0]))
    assert len(store.fetched) == 3
    await cache.get(blob_ref(blobs[1]))
    assert len(store.fetched) == 4


async def test_a_failure_is_not_kept() -> None:
    store = Store()
    cache = BlobCache(store.fetch)
    for _ in range(2):
        with pytest.raises(KeyError):
            await cache.get(blob_ref(b"missing"))
    assert len(store.fetched) == 2
    assert cache.bytes == 0


async def test_a_blob_larger_than_the_cache_is_handed_on() -> None:
    cache = BlobCache(Store(b"x" * 100).fetch, limit_bytes=10)
    assert await cache.get(blob_ref(b"x" * 100)) == b"x" * 100
    assert cache.bytes == 0


def test_lines_for_people() -> None:
    fence = weights_pb2.Fence(cluster="0123456789", epoch=7)
    outcome = manager_pb2.ReplicaOutcome(
        fence=fence,
        outcome=manager_pb2.OUTCOME_NEW_SERVING,
        after=weights_pb2.Identity(version=3),
        bytes=16_400_000_000,
        pause_seconds=0.0314,
        sync_seconds=1.5,
    )
    said = sent_line(outcome)
    assert said == "update of epoch 7: new weights, serving (version 3), 16.4 GB, pause 31.4 ms, sync 1.50 s"
    closed = manager_pb2.ReplicaOutcome(
        fence=fence, outcome=manager_pb2.OUTCOME_QUARANTINED, problem=weights_pb2.Problem(message="worker 1 is dead")
    )
    assert sent_line(closed) == "update of epoch 7: QUARANTINED, 0 B, pause 0.0 ms, sync 0.0 ms, worker 1 is dead"
    prepared = manager_pb2.Prepared(fence=fence, workers=[manager_pb2.PreparedWorker()])
    assert sent_line(prepared) == "prepared, 1 worker"
    welcome = manager_pb2.Welcome(digest_format=DIGEST_FORMAT, fence=fence)
    assert received_line(welcome) == "registered with the manager of cluster 01234567"
    assert received_line(manager_pb2.Heartbeat()) == sent_line(manager_pb2.ReplicaHeartbeat()) == ""


def test_durations() -> None:
    assert [seconds(s) for s in (0.0005, 0.999, 61.0)] == ["0.5 ms", "999.0 ms", "61.00 s"]
