"""The copy kernel, in Triton's interpreter: any pairs, merged and sorted into tables, arrive as torch would copy them,
and nothing around them changes. The same runs on a GPU in tests/gpu/test_device_copy.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckpt_engine.copy import copy_kernel, staging
from ckpt_engine.copy.device_work import DeviceWork
from tests.copy.test_copying import layouts, view

pytestmark = pytest.mark.skipif(bool(copy_kernel.problem()), reason=copy_kernel.problem())
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(copy_kernel, "_LANES", 64)
    monkeypatch.setattr(copy_kernel, "PROGRAM_BYTES", 2048)
    copy_kernel._kernel.cache_clear()
    yield
    copy_kernel._kernel.cache_clear()


def finish(work: DeviceWork) -> None:
    for segment in work.segments:
        segment.queue(0)


@given(st.lists(layouts(), min_size=1, max_size=4))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_it_is_what_copy_makes_of_it(drawn: list[tuple]) -> None:
    pairs, raws = [], []
    for dtype, shape, sides in drawn:
        raw, destination = view(dtype, shape, sides[0])
        _, source = view(dtype, shape, sides[1])
        expected_raw = raw.clone()
        expected = expected_raw.view(dtype).as_strided(destination.shape, destination.stride(), sides[0][2])
        expected.copy_(source)
        pairs.append((destination, source))
        raws.append((raw, expected_raw))
    work = DeviceWork(pairs, CPU)
    assert work.bytes == sum(destination.nbytes for destination, _ in pairs)
    finish(work)
    for raw, expected in raws:
        assert torch.equal(raw, expected)


@pytest.mark.parametrize("shape", [(3,), (4096,), (130, 68), (7, 33)])
@pytest.mark.parametrize(
    ("source_dtype", "dtype"),
    [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float32, torch.float16)],
)
def test_casts(shape: tuple[int, ...], source_dtype: torch.dtype, dtype: torch.dtype) -> None:
    # The interpreter truncates where a GPU rounds, so nothing is left to round.
    source = torch.randn(*shape[:-1], shape[-1] + 4).to(torch.bfloat16).to(source_dtype)[..., : shape[-1]]
    around = torch.full((*shape[:-1], shape[-1] + 8), 7, dtype=dtype)
    finish(DeviceWork([(around[..., : shape[-1]], source)], CPU))
    assert torch.equal(around[..., : shape[-1]], source.to(dtype))
    assert bool((around[..., shape[-1] :] == 7).all())


def test_hundreds_of_tensors_are_one_launch() -> None:
    sources = [torch.randn(64) for _ in range(300)]
    destinations = [torch.empty(64) for _ in range(300)]
    work = DeviceWork(zip(destinations, sources, strict=True), CPU)
    assert work.launches <= 2  # by alignment: torch's memory on a CPU has 64 bytes
    finish(work)
    assert all(map(torch.equal, destinations, sources))


def test_warming_up_writes_nothing() -> None:
    copy_kernel.warm_up(CPU, {torch.bfloat16, torch.uint8})  # its blocks lie at address 0


def test_a_program_copies_no_more_than_its_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_kernel, "PROGRAM_BYTES", 256)
    source = torch.randn(50, 40)
    destination = torch.full((50, 24), 7.0)
    work = DeviceWork([(destination, source[:, 8:32])], CPU)
    finish(work)
    assert torch.equal(destination, source[:, 8:32])


def test_staged_batches_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "SLOT_BYTES", 4096)
    staging._rings.clear()
    pairs = [
        (torch.full((90, 50), 7.0), torch.randn(90, 50)),
        (torch.full((3,), 7.0), torch.randn(3).to(torch.bfloat16)),
        (torch.full((40, 300), 7.0)[:, 10:], torch.randn(300, 290 + 10)[:40, :290]),
        *((torch.empty(128), torch.randn(128)) for _ in range(200)),
    ]
    feed = staging.StagedFeed(pairs, CPU)
    assert feed.bytes == sum(destination.nbytes for destination, _ in pairs)
    for _ in range(2):
        flight = SlowStream()
        feed.run(flight)
        flight.finish()
        assert all(torch.equal(destination, source.to(destination.dtype)) for destination, source in pairs)
        for _, source in pairs:
            source.normal_()


class SlowStream:
    """Stands in for a GPU's stream, where there is none: one segment arrives with each poll."""

    def __init__(self) -> None:
        self._waiting: list = []
        self._done = 0

    def queue(self, segment) -> int:  # type: ignore[no-untyped-def]
        self._waiting.append(segment)
        return self._done + len(self._waiting)

    def arrived(self) -> int:
        if self._waiting:
            self._waiting.pop(0).queue(0)
            self._done += 1
        return self._done

    def pause(self) -> None:
        pass

    def finish(self) -> None:
        while self._waiting:
            self.arrived()
