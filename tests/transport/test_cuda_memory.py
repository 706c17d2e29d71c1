"""What can be known of CUDA IPC without a GPU: which allocations are offered, and what is said where there is none."""

from __future__ import annotations

import bisect

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.cuda.driver import Allocation, CudaDriverError, Driver, driver, library_problem
from ckpt_engine.transport.cuda_ipc.memory import LEGACY, NOT_SHAREABLE, PIECES, Imported, Kind, run_at, runs_of
from ckpt_engine.transport.cuda_ipc.probe import probe
from ckpt_engine.transport.cuda_ipc.reader import CudaIpcTransport
from ckpt_engine.v1.weights_pb2 import CudaIpcLocator, Problem, Region

Allocations = list[tuple[Allocation, Kind]]


@st.composite
def allocations(draw: st.DrawFn) -> Allocations:
    """Of a driver: some end to end, some apart, each shareable in its own way."""
    found, at = [], draw(st.integers(1, 9)) * 64
    for _ in range(draw(st.integers(1, 12))):
        size = draw(st.integers(1, 5)) * 64
        found.append((Allocation(at, size), draw(st.sampled_from([LEGACY, PIECES, PIECES, NOT_SHAREABLE]))))
        at += size + draw(st.sampled_from([0, 0, 64]))
    return found


def spans_in(known: Allocations, draw: st.DataObject) -> list[tuple[int, int]]:
    """Tensors: within one allocation, or across pieces that lie end to end."""
    spans = []
    for _ in range(draw.draw(st.integers(1, 10))):
        first = last = draw.draw(st.integers(0, len(known) - 1))
        while (
            last + 1 < len(known)
            and known[last][1] == known[last + 1][1] == PIECES
            and known[last][0].pointer + known[last][0].size == known[last + 1][0].pointer
            and draw.draw(st.booleans())
        ):
            last += 1
        low, high = known[first][0], known[last][0]
        start = draw.draw(st.integers(low.pointer, low.pointer + low.size - 1))
        spans.append((start, draw.draw(st.integers(max(start, high.pointer) + 1, high.pointer + high.size))))
    return spans


@given(allocations(), st.data())
def test_every_allocation_is_offered_once_and_only_if_a_tensor_lies_in_it(
    known: Allocations, data: st.DataObject
) -> None:
    spans = spans_in(known, data)
    starts = [allocation.pointer for allocation, _ in known]

    def look(pointer: int) -> tuple[Allocation, Kind]:
        return known[bisect.bisect_right(starts, pointer) - 1]

    runs = runs_of(spans, look)
    offered = [part for run in runs for part in run.parts]
    touched = {
        allocation
        for allocation, _ in known
        for start, stop in spans
        if start < allocation.pointer + allocation.size and allocation.pointer < stop
    }
    assert len(offered) == len(set(offered))
    assert set(offered) == touched
    kinds = dict(known)
    for run in runs:
        assert all(kinds[part] == run.kind for part in run.parts)
        assert len(run.parts) == 1 or run.kind == PIECES
        assert run.size == sum(part.size for part in run.parts)
    for start, stop in spans:
        found = run_at(runs, start, stop)
        assert found is not None
        assert runs[found].pointer <= start < stop <= runs[found].stop
    last = runs[-1].stop
    assert run_at(runs, last - 1, last + 1) is None
    assert run_at(runs, runs[0].pointer - 1, runs[0].pointer) is None


def test_a_tensor_across_pieces_makes_them_one_region() -> None:
    pieces = [(Allocation(at, 100), PIECES) for at in (0, 100, 200, 300)]
    runs = runs_of([(250, 260), (20, 180)], lambda pointer: pieces[pointer // 100])
    assert [(run.pointer, run.size, len(run.parts)) for run in runs] == [(0, 300, 3)]
    apart = [(allocation, LEGACY) for allocation, _ in pieces]
    runs = runs_of([(250, 260), (120, 180)], lambda pointer: apart[pointer // 100])
    assert [(run.pointer, run.size) for run in runs] == [(100, 100), (200, 100)]


def test_a_driver_that_contradicts_itself_is_refused() -> None:
    with pytest.raises(CkptEngineError, match="does not"):
        runs_of([(100, 200)], lambda _: (Allocation(300, 50), LEGACY))


@pytest.mark.parametrize(
    ("region", "words"),
    [
        (Region(id=3, transport="shared_memory", size=64), "region 3 for shared_memory"),
        (Region(id=3, transport="cuda_ipc", size=64), "not GPU memory of 64 bytes"),
        (Region(id=3, transport="cuda_ipc"), "of 0 bytes"),
    ],
)
def test_a_region_that_is_no_gpu_memory_is_refused(region: Region, words: str) -> None:
    with pytest.raises(CkptEngineError, match=words) as refused:
        Imported(Driver(None), 0, region)
    assert refused.value.problem.code == Problem.CODE_INVALID_ARGUMENT


def test_sizes_of_parts_must_add_up_to_the_region() -> None:
    locator = CudaIpcLocator(kind=PIECES, parts=[CudaIpcLocator.Part(size=32), CudaIpcLocator.Part(size=16)])
    region = Region(id=3, transport="cuda_ipc", size=64, locator=locator.SerializeToString())
    with pytest.raises(CkptEngineError, match="of 64 bytes"):
        Imported(Driver(None), 0, region)


@pytest.mark.skipif(not library_problem(), reason="there is an NVIDIA driver here")
def test_a_missing_driver_is_a_reason() -> None:
    assert "no NVIDIA driver can be used" in library_problem()
    with pytest.raises(CudaDriverError, match="no NVIDIA driver"):
        driver()
    assert "no NVIDIA driver" in probe(Region(id=1, transport="cuda_ipc", size=64))
    found = CudaIpcTransport().availability()
    assert not found.ok
    assert "without CUDA" in found.reason or "no NVIDIA driver" in found.reason


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_worker_without_a_gpu_says_so() -> None:
    with pytest.raises(CkptEngineError, match="uses no GPU") as refused:
        CudaIpcTransport().open([Region(id=1, transport="cuda_ipc", size=64)])
    assert refused.value.problem.code == Problem.CODE_UNAVAILABLE
