"""Digests against the formula of digest/factors.py, written once more in plain Python integers."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from math import prod
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckpt_engine.core.dtypes import ITEMSIZES
from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.digest import host as digest_host
from ckpt_engine.digest import host_jobs as digest_host_jobs
from ckpt_engine.digest.boxes import SEED, digest_box, digest_boxes
from ckpt_engine.digest.factors import widened
from ckpt_engine.digest.host import HostDigests
from ckpt_engine.digest.numba_cache import may_cache
from ckpt_engine.torch_dtypes import halves, torch_dtype

MASK = (1 << 64) - 1
FIXED = 6739952492997205342


def mixed(axis: int, index: int, seed: int = SEED) -> int:
    x = (seed + axis * 0xD1B54A32D192ED03 + (index + 1) * 0x9E3779B97F4A7C15) & MASK
    x ^= x >> 30
    x = x * 0xBF58476D1CE4E5B9 & MASK
    x ^= x >> 27
    x = x * 0x94D049BB133111EB & MASK
    return x ^ (x >> 31)


def factor(axis: int, index: int, seed: int = SEED) -> int:
    return mixed(axis, index, seed) | 1


def of_zeros(dtype: torch.dtype, shape: tuple[int, ...], start: tuple[int, ...], seed: int = SEED) -> int:
    name = str(dtype).removeprefix("torch.")
    value = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little") | 1
    for axis, (first, length) in enumerate(zip(start, shape, strict=True), 1):
        value *= mixed(-axis, first + length, seed) - mixed(-axis, first, seed)
    return value & MASK


def by_the_formula(view: torch.Tensor, start: tuple[int, ...], seed: int = SEED) -> int:
    return (of_zeros(view.dtype, tuple(view.shape), start, seed) + of_lanes(view, start, seed)) & MASK


def of_lanes(view: torch.Tensor, start: tuple[int, ...], seed: int = SEED) -> int:
    size = view.itemsize
    flat = view.clone(memory_format=torch.contiguous_format).reshape(-1)
    raw = bytes(flat.view(torch.uint8).tolist()) if flat.numel() else b""
    lanes = [factor(0, lane, seed) for lane in range(max(size // 2, 1))]
    axes = [
        [factor(axis + 1, first + index, seed) for index in range(length)]
        for axis, (first, length) in enumerate(zip(start, view.shape, strict=True))
    ]
    total = 0
    for number, factors in enumerate(product(*axes)):
        element = raw[number * size : (number + 1) * size]
        values = [int.from_bytes(element[at : at + 2], "little") for at in range(0, size, 2)]
        total += prod(factors) * sum(value * lane for value, lane in zip(values, lanes, strict=True))
    return total & MASK


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    raw = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).reshape(shape)


@st.composite
def views(draw: st.DrawFn) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Views with any strides: every second element, a part of a larger tensor, axes in any order."""
    rank = draw(st.integers(0, 4))
    shape = tuple(draw(st.sampled_from([0, 1, 2, 3, 7, 12] if rank > 2 else [0, 1, 5, 40])) for _ in range(rank))
    dtype = torch_dtype(draw(st.sampled_from(sorted(ITEMSIZES))))
    view = random_tensor(tuple(2 * length for length in shape), dtype, draw(st.integers(0, 1 << 30)))
    for axis, length in enumerate(shape):
        if draw(st.booleans()):
            view = view[(slice(None),) * axis + (slice(None, None, 2),)]
        else:
            view = view.narrow(axis, draw(st.integers(0, length)), length)
    view = view.permute(draw(st.permutations(range(rank))))
    return view, tuple(draw(st.integers(0, 1 << 40)) for _ in range(rank))


@settings(deadline=None)
@given(views())
def test_it_is_the_formula_for_any_dtype_shape_and_strides(drawn: tuple[torch.Tensor, tuple[int, ...]]) -> None:
    view, start = drawn
    assert digest_box(view, start) == by_the_formula(view, start)


LARGE = {
    "matrix": ((40, 300), torch.float32, (0, 1), (2, 3)),
    "wide enough to be cut into column blocks": ((13, 9000), torch.bfloat16, (0, 1), (0, 5)),
    "few wide rows, not worth a matrix product": ((3, 9000), torch.bfloat16, (0, 1), (0, 5)),
    "one wide row": ((20_001,), torch.uint8, (0,), (9,)),
    "tall and narrow": ((9000, 3), torch.bfloat16, (0, 1), (1, 0)),
    "transposed": ((150, 130), torch.bfloat16, (1, 0), (4, 4)),
    "experts, permuted": ((6, 30, 70), torch.bfloat16, (1, 0, 2), (3, 2, 1)),
    "single bytes": ((90, 200), torch.float8_e4m3fn, (0, 1), (0, 0)),
    "eight bytes": ((30, 100), torch.float64, (0, 1), (0, 0)),
    "axes of length one": ((1, 90, 1, 110), torch.bfloat16, (0, 1, 2, 3), (5, 6, 7, 8)),
}


@pytest.fixture(params=["compiled", "numpy"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each way of computing a digest, with blocks so small that there are several."""
    if request.param == "numpy":
        monkeypatch.setattr(digest_host, "_kernel", lambda: None)
        monkeypatch.setattr(digest_host, "_NUMPY_LANES", 1000)
    else:
        assert digest_host._kernel() is not None, "Numba is not installed"
        monkeypatch.setattr(digest_host_jobs, "_JOB_BYTES", 32 << 10)
        monkeypatch.setattr(digest_host_jobs, "COLUMNS", 1500)
        monkeypatch.setattr(digest_host_jobs, "jobs_of", digest_host_jobs.jobs_of.__wrapped__)  # nothing that was kept
    return str(request.param)


@pytest.mark.parametrize("case", LARGE)
def test_each_way_of_computing_it_is_the_formula(case: str, way: str) -> None:
    shape, dtype, order, start = LARGE[case]
    view = random_tensor(shape, dtype).permute(order)
    assert digest_box(view, start) == by_the_formula(view, start)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(drawn=views())
def test_each_way_takes_any_dtype_shape_and_strides(drawn: tuple[torch.Tensor, tuple[int, ...]], way: str) -> None:
    view, start = drawn
    assert digest_box(view, start) == by_the_formula(view, start)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_addresses_need_not_be_aligned(dtype: torch.dtype, way: str) -> None:
    """A safetensors file may put a tensor anywhere."""
    memory = bytearray(1 + 3 * 700 * dtype.itemsize)
    view = torch.frombuffer(memory, dtype=dtype, offset=1, count=3 * 700).view(3, 700)
    there = random_tensor((3, 700), dtype)
    memory[1:] = there.view(torch.uint8).numpy().tobytes()
    assert view.data_ptr() % 2
    assert digest_box(view[:, 3:], (1, 3)) == digest_box(there[:, 3:], (1, 3)) == by_the_formula(there[:, 3:], (1, 3))


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(drawn=views(), data=st.data())
def test_one_pass_copies_and_digests(
    drawn: tuple[torch.Tensor, tuple[int, ...]], data: st.DataObject, way: str
) -> None:
    source, start = drawn
    order = data.draw(st.permutations(range(source.dim())))
    room = random_tensor(tuple(source.shape[axis] + 3 for axis in order), source.dtype, 5)
    inside = room[tuple(slice(2, 2 + source.shape[axis]) for axis in order)]
    destination = inside.permute([order.index(axis) for axis in range(source.dim())])
    expected = room.clone()
    expected[tuple(slice(2, 2 + source.shape[axis]) for axis in order)] = source.permute(order)
    assert HostDigests([(destination, start)], sources=[source]).run() == [by_the_formula(source, start)]
    assert bits(room) == bits(expected)


def bits(tensor: torch.Tensor) -> list[int]:
    found: list[int] = tensor.reshape(-1).view(torch.uint8).tolist() if tensor.numel() else []
    return found


def test_one_pass_over_many_rows_and_over_tensors_that_lie_otherwise(way: str) -> None:
    sources = [random_tensor((300, 5000), torch.bfloat16), random_tensor((300, 70), torch.float32).t()]
    sources += [random_tensor((7,), torch.uint8), random_tensor((40, 2, 30), torch.float16)[:, 1]]
    there = [torch.zeros(tensor.shape, dtype=tensor.dtype) for tensor in sources]
    starts = [(1,) * tensor.dim() for tensor in sources]
    copies = HostDigests(list(zip(there, starts, strict=True)), sources=sources)
    assert copies.run() == digest_boxes(list(zip(sources, starts, strict=True)))
    assert [bits(tensor) for tensor in there] == [bits(tensor.contiguous()) for tensor in sources]


def test_what_cannot_be_copied_in_one_pass_is_refused() -> None:
    box, good, other = (torch.zeros(4), (0,)), torch.ones(4), torch.ones(4, dtype=torch.bfloat16)
    for bad, source in ((box, other), ((torch.zeros(5), (0,)), good)):
        with pytest.raises(CkptEngineError, match="both must have one shape and dtype"):
            HostDigests([box, bad], sources=[good, source])
    with pytest.raises(CkptEngineError, match="give one entry an axis"):
        HostDigests([(torch.zeros(4), (0, 0))], sources=[good])
    with pytest.raises(CkptEngineError, match="not strided memory of this host"):
        HostDigests([box], sources=[torch.ones(4, device="meta")])
    with pytest.raises(ValueError, match="longer"):
        HostDigests([box, box], sources=[good])


def test_freed_memory_is_refused_and_memory_that_moved_is_found() -> None:
    tensor = random_tensor((64, 64), torch.bfloat16)
    digests = HostDigests([(tensor, (0, 0))])
    tensor.untyped_storage().resize_(1 << 22)  # moves
    tensor.copy_(random_tensor((64, 64), torch.bfloat16, 1))
    assert digests.run() == digest_boxes([(tensor, (0, 0))])
    tensor.untyped_storage().resize_(0)
    with pytest.raises(CkptEngineError, match="was freed"):
        digests.run()


def test_extreme_bytes_do_not_overflow() -> None:
    for byte in (0x00, 0x7F, 0x80, 0xFF):
        view = torch.full((20, 16384), byte, dtype=torch.uint8)
        rows = sum(factor(1, row) for row in range(20))
        columns = sum(factor(2, column) for column in range(16384))
        sums = byte * factor(0, 0) * rows * columns
        assert digest_box(view, (0, 0)) == (of_zeros(view.dtype, (20, 16384), (0, 0)) + sums) & MASK


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_digests_of_disjoint_boxes_add_up(data: st.DataObject) -> None:
    tensor = random_tensor((60, 90), torch.bfloat16, data.draw(st.integers(0, 99)))
    row, column = data.draw(st.integers(0, 60)), data.draw(st.integers(0, 90))
    parts = digest_boxes(
        [
            (tensor[:row, :column], (0, 0)),
            (tensor[:row, column:], (0, column)),
            (tensor[row:, :column], (row, 0)),
            (tensor[row:, column:], (row, column)),
        ]
    )
    assert sum(parts) & MASK == digest_box(tensor, (0, 0))


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_shares_of_threads_add_up_to_the_same(two_threads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest_host, "_SHARE_BYTES", 10 << 10)
    monkeypatch.setattr(digest_host_jobs, "_JOB_BYTES", 10 << 10)
    monkeypatch.setattr(digest_host_jobs, "jobs_of", digest_host_jobs.jobs_of.__wrapped__)
    pools: list[int] = []
    pool = digest_host._pool
    monkeypatch.setattr(digest_host, "_pool", lambda *key: pools.append(key[1]) or pool(*key))
    shapes = [(700, 300), (3,), (0, 4), (), (9000,), (3, 40_000), (20, 30, 40), (1, 50_000), *[(64,)] * 50]
    boxes = [(random_tensor(shape, torch.bfloat16), tuple(range(len(shape)))) for shape in shapes]
    found = digest_boxes(boxes)
    assert pools == [2]
    torch.set_num_threads(1)
    assert found == digest_boxes(boxes) == [digest_box(view, start) for view, start in boxes]
    assert pools == [2]


def in_a_child(*, missing: str = "", **environment: str) -> str:
    """What another process logs when it digests, where `missing` cannot be imported."""
    script = (
        "import logging, sys, threading, torch\n"
        "logging.basicConfig(level=logging.WARNING, stream=sys.stdout, format='%(message)s')\n"
        f"if {missing!r}: sys.modules[{missing!r}] = None\n"
        "from ckpt_engine.digest.boxes import digest_box\n"
        "view = torch.arange(24, dtype=torch.int16).reshape(4, 6)\n"
        "print([digest_box(view, (1, 2)) for _ in range(2)])\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(sys.path)} | environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    return ran.stdout


def test_without_numba_numpy_digests_and_the_log_says_so_once() -> None:
    lines = in_a_child(missing="numba").splitlines()
    assert lines[1:] == [str([FIXED, FIXED])]
    assert "numpy" in lines[0]
    assert "import of numba halted" in lines[0]


@pytest.mark.slow
def test_processes_that_compile_at_once_share_what_was_kept(tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        assert set(pool.map(lambda _: in_a_child(NUMBA_CACHE_DIR=str(tmp_path)), range(2))) == {f"{[FIXED, FIXED]}\n"}
    kept = list(tmp_path.rglob("*.nb?"))
    assert kept
    for path in kept:
        path.write_bytes(b"cut short")
    assert in_a_child(NUMBA_CACHE_DIR=str(tmp_path)) == f"{[FIXED, FIXED]}\n"


@pytest.mark.parametrize("home", ["open to all", "absent", "mine"])
def test_compiled_code_is_kept_only_where_nobody_else_writes(
    home: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everywhere, so a read-only package is a fake
    tmp_path.chmod(0o777 if home == "open to all" else 0o700)
    monkeypatch.setenv("HOME", str(tmp_path / "absent" if home == "absent" else tmp_path))
    assert may_cache(Path(digest_host.__file__).parent) is (home == "mine")
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    assert may_cache(Path(digest_host.__file__).parent)


def test_memory_layout_does_not_matter() -> None:
    tensor = random_tensor((64, 96), torch.bfloat16)
    there = torch.empty((96, 64), dtype=torch.bfloat16).t().copy_(tensor)
    assert there.stride() != tensor.stride()
    assert digest_box(there, (0, 0)) == digest_box(tensor, (0, 0))
    expanded = random_tensor((1, 96), torch.bfloat16).expand(64, 96)
    assert digest_box(expanded, (0, 0)) == digest_box(expanded.contiguous(), (0, 0))


def flipped(tensor: torch.Tensor, *places: tuple[int, int], bit: int) -> torch.Tensor:
    changed = tensor.clone()
    bits = changed.view(torch.int16)
    for place in places:
        bits[place] ^= -(1 << 15) if bit == 15 else 1 << bit
    return changed


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 63), st.integers(0, 63), st.integers(0, 15))
def test_one_flipped_bit_is_seen(row: int, column: int, bit: int) -> None:
    tensor = random_tensor((64, 64), torch.bfloat16)
    assert digest_box(flipped(tensor, (row, column), bit=bit), (0, 0)) != digest_box(tensor, (0, 0))


def test_two_flipped_sign_bits_do_not_cancel() -> None:
    tensor = random_tensor((64, 64), torch.bfloat16)
    clean = digest_box(tensor, (0, 0))
    for other in ((0, 1), (1, 0), (1, 1), (63, 63)):
        assert digest_box(flipped(tensor, (0, 0), other, bit=15), (0, 0)) != clean


def test_swapped_rows_columns_elements_and_lanes_are_seen() -> None:
    tensor = random_tensor((64, 64), torch.bfloat16)
    wide = tensor.view(torch.float32)
    lanes = tensor.view(64, 32, 2).flip(2).reshape(64, 64).view(torch.float32)
    clean = digest_box(tensor, (0, 0))
    for other in (tensor.flip(0), tensor.flip(1), tensor.roll(1, 0), tensor.t()):
        assert digest_box(other, (0, 0)) != clean
    assert digest_box(lanes, (0, 0)) != digest_box(wide, (0, 0))


def test_a_stale_slice_is_seen_and_so_is_one_at_a_wrong_place() -> None:
    old, new = random_tensor((64, 64), torch.bfloat16, 1), random_tensor((64, 64), torch.bfloat16, 2)
    mixed = new.clone()
    mixed[17, 5:9] = old[17, 5:9]
    assert digest_box(mixed, (0, 0)) != digest_box(new, (0, 0))
    assert digest_box(new[:8], (0, 0)) != digest_box(new[:8], (8, 0))


SMALL = torch.arange(6, dtype=torch.int16).reshape(2, 3)
VECTORS = [
    (SMALL, (4, 0), 0xAF9FC13508CFB181),
    (torch.tensor([1.0, -2.5]), (0,), 0xBEB689E699177E5D),
    (torch.zeros(2, 3, dtype=torch.bfloat16), (0, 0), 0x9D03F44FC6F60AF0),
    (torch.zeros(2, 3, dtype=torch.float16), (0, 0), 0x9550D33F193144F0),
    (torch.zeros(3, 2, dtype=torch.bfloat16), (0, 0), 0x2D5D5E4F5AF4C1F0),
    (torch.zeros(2, 3, dtype=torch.bfloat16), (1, 0), 0xDF9A3115F145DBA0),
    (torch.zeros((), dtype=torch.float32), (), 0x19C2777B727D936B),
    (torch.zeros(0, 3), (0, 0), 0),
]
"""Of docs/protocol.md."""


def test_the_vectors_of_the_protocol(way: str) -> None:
    assert [digest_box(view, start) for view, start, _ in VECTORS] == [value for _, _, value in VECTORS]


def test_zeros_of_another_number_shape_place_or_dtype_have_another_digest(way: str) -> None:
    """Otherwise zeros that were never read, or read as another tensor, would be what was sealed."""
    found: set[int] = set()
    for name in ITEMSIZES:
        for shape in [(), (1,), (2,), (6,), (2, 3), (3, 2), (1, 6), (2, 3, 1), (1 << 17,)]:
            zeros = torch.zeros(shape, dtype=torch_dtype(name))
            found |= {digest_box(zeros, (first,) * len(shape)) for first in (0, 1, 1 << 40)}
        assert digest_box(torch.zeros(0, 3, dtype=torch_dtype(name)), (5, 1)) == 0, "there is nothing in it"
    assert 0 not in found
    assert len(found) == len(ITEMSIZES) * (1 + 8 * 3)


@settings(deadline=None, max_examples=40)
@given(drawn=views(), data=st.data())
def test_a_difference_is_that_of_the_lanes_alone(
    drawn: tuple[torch.Tensor, tuple[int, ...]], data: st.DataObject
) -> None:
    """What a change adds to a digest follows from what changed: the sum of (new - old) times the factors."""
    old, start = drawn
    new = random_tensor(tuple(old.shape), old.dtype, data.draw(st.integers(0, 1 << 30)))
    change = of_lanes(new, start) - of_lanes(old, start) & MASK
    assert (digest_box(new, start) - digest_box(old, start)) & MASK == change


@settings(deadline=None, max_examples=60)
@given(drawn=views(), data=st.data())
def test_a_box_is_the_sum_of_any_boxes_that_tile_it(
    drawn: tuple[torch.Tensor, tuple[int, ...]], data: st.DataObject
) -> None:
    view, start = drawn
    parts = [(view if data.draw(st.booleans()) else torch.zeros_like(view), start)]
    whole = parts[0]
    for _ in range(4):
        part, at = parts.pop(data.draw(st.integers(0, len(parts) - 1)))
        if not part.dim():
            parts.append((part, at))
            continue
        axis = data.draw(st.integers(0, part.dim() - 1))
        cut = data.draw(st.integers(0, part.shape[axis]))
        moved = (*at[:axis], at[axis] + cut, *at[axis + 1 :])
        parts += [(part.narrow(axis, 0, cut), at), (part.narrow(axis, cut, part.shape[axis] - cut), moved)]
    assert sum(digest_boxes(parts)) & MASK == digest_box(*whole)


def test_the_constants_are_fixed() -> None:
    """A digest written down: a change of the formula breaks every version that is deployed beside this one."""
    view = torch.arange(24, dtype=torch.int16).reshape(4, 6)
    assert digest_box(view, (1, 2)) == by_the_formula(view, (1, 2)) == FIXED
    assert digest_box(view, (1, 2), seed=1) != FIXED


def test_what_cannot_be_digested_is_refused() -> None:
    with pytest.raises(CkptEngineError, match="one entry an axis"):
        digest_box(torch.zeros(3, 3), (0,))
    with pytest.raises(CkptEngineError, match="complex128"):
        digest_box(torch.zeros(3, dtype=torch.complex128), (0,))


class Marked(torch.nn.Parameter):
    """A parameter as engines have them: a class of its own."""


def test_gradients_and_parameter_classes_are_no_matter() -> None:
    plain = torch.ones(200, 100)
    for parameter in (torch.nn.Parameter(plain), Marked(plain)):
        assert digest_box(parameter, (0, 0)) == digest_box(plain, (0, 0))


@pytest.mark.parametrize("shape", [(3, 8), (4, 3, 8), (3, 4, 8)])
def test_rows_that_lie_on_one_another_are_digested_as_often(shape: tuple[int, ...]) -> None:
    """A row that was expanded: its neighbours have a step of 0."""
    row = random_tensor((1,) * (len(shape) - 1) + (8,), torch.bfloat16, 5)
    view = row.expand(shape)
    assert digest_box(view, (0,) * len(shape)) == digest_box(view.contiguous(), (0,) * len(shape))


@given(st.lists(st.integers(0, 9), max_size=3), st.integers(0, 1 << 30))
@settings(deadline=None)
def test_widened_values_digest_to_what_follows_from_their_digest(shape: list[int], seed: int) -> None:
    narrow = random_tensor(tuple(shape), torch.bfloat16, seed)
    wide = torch.zeros((*shape, 2), dtype=torch.bfloat16)
    wide[..., 1] = narrow
    start = tuple(range(len(shape)))
    kept = wide.view(torch.float32)[..., 0]
    assert digest_box(kept, start) == widened(digest_box(narrow, start), start, tuple(shape))
    if narrow.numel():
        lower, upper = halves(kept)
        assert torch.equal(upper.view(torch.int16), narrow.view(torch.int16))
        assert not lower.view(torch.int16).any()
        lower.view(torch.int16)[(0,) * len(shape)] = 1
        assert digest_box(kept, start) != widened(digest_box(narrow, start), start, tuple(shape))
