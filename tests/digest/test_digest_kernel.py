"""The GPU's digest against the CPU's: tables on a CPU, the kernel in Triton's interpreter, where there is a Triton."""

from __future__ import annotations

import importlib.util
import logging
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.digest import cuda as digest_cuda
from ckpt_engine.digest import cuda_tiles as digest_tiles
from ckpt_engine.digest import factors
from ckpt_engine.digest import prepared as prepared_digests
from ckpt_engine.digest.boxes import SEED, digest_box, digest_boxes
from ckpt_engine.digest.cuda_tiles import NotTileableError, Strided, Tiles, TileTable
from ckpt_engine.digest.prepared import prepare_digests
from tests.digest.test_digest import random_tensor, views

MASK = (1 << 64) - 1


def walked(memory: torch.Tensor, tiles: Tiles, origin: int) -> int:
    """What the kernel does with a table, in plain integers. memory: the storage's units, from `origin` on."""
    units = memory.tolist()
    total = 0
    for lanes, table in tiles.flat.items():
        for first, step, outer, inner, rows, columns, scale, place in table.tolist():
            assert place == 0
            for number in range(rows * step if rows > 1 else columns):
                mixed = factors.mix(inner + number // lanes * factors.INDEX_STEP & MASK)
                total += units[first + number] * mixed * int(tiles.factors[outer + number % lanes]) * scale
    for first, step, outer, inner, rows, columns, scale, place in np.concatenate([tiles.aligned, tiles.unaligned]):
        assert place == 0
        for row in range(int(rows)):
            for column in range(int(columns)):
                lane = units[int(np.int64(first)) + row * int(np.int64(step)) + column]
                factor = int(tiles.factors[int(outer) + row]) * int(tiles.factors[int(inner) + column])
                total += lane * factor * int(scale)
    return total & MASK


@pytest.mark.parametrize("longest", [digest_tiles._COLUMN_WORDS, 4], ids=["", "flat"])
@settings(deadline=None, max_examples=60)
@given(drawn=views())
def test_tiles_cover_each_element_once_with_its_factor(
    drawn: tuple[torch.Tensor, tuple[int, ...]], longest: int
) -> None:
    view, start = drawn
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(digest_tiles, "_COLUMN_WORDS", longest)  # longer rows are flat
        patch.setattr(digest_tiles, "BLOCK_BYTES", 32)
        check_tiles(view, start)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(41,), (2100,), (3, 700)])
def test_flat_tiles_go_on_where_the_one_before_ended(
    shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digest_tiles, "_COLUMN_WORDS", 4)
    monkeypatch.setattr(digest_tiles, "BLOCK_BYTES", 16)
    check_tiles(random_tensor(shape, dtype), (7,) * len(shape))


def check_tiles(view: torch.Tensor, start: tuple[int, ...]) -> None:
    unit = min(view.itemsize, 2)
    storage = torch.tensor([], dtype=view.dtype).set_(view.untyped_storage())
    raw = storage.view(torch.uint8).numpy()[: storage.nbytes // unit * unit]
    units = torch.from_numpy(raw.view(np.uint16 if unit == 2 else np.uint8).astype(np.int64))
    table = TileTable(SEED, unit, storage.data_ptr())
    try:
        table.add(Strided(view.data_ptr(), tuple(view.shape), view.stride(), start, view.itemsize // unit), 0)
    except NotTileableError:
        assert view.numel()
        assert min(step for step, length in zip(view.stride(), view.shape, strict=True) if length > 1) != 1
        return
    zeros = factors.digest_of_zeros(str(view.dtype).removeprefix("torch."), start, tuple(view.shape))
    assert (zeros + walked(units, table.tiles(), storage.data_ptr())) & MASK == digest_box(view, start)


@pytest.mark.parametrize(
    ("shape", "stride", "aligned", "tiles"),
    [
        ((512, 4096), (4096, 1), True, 512 // 8 * 4),
        ((512, 2048), (4096, 1), True, 512 // 8 * 2),  # a column slice
        ((512, 4096), (4100, 1), False, 512 // 8 * 4),
        ((1 << 31,), (1,), None, 1 << 14),  # flat
        ((32, 128), (128, 1), True, 4),  # small rows that touch are one long row
        ((4, 512, 1024), (1 << 20, 1024, 1), True, 4 * 512 // 8),  # rows that are not evenly spaced
        ((1 << 20, 1024), (1024, 1), True, (1 << 20) // 128),  # large ones have long tiles
    ],
)
def test_rows_are_long_and_loads_wide(
    shape: tuple[int, ...], stride: tuple[int, ...], aligned: bool | None, tiles: int
) -> None:
    table = TileTable(SEED, 2, 0)
    table.add(Strided(1 << 20, shape, stride, (0,) * len(shape), 1), 0)
    found = table.tiles()
    counts = (len(found.aligned), len(found.unaligned), sum(map(len, found.flat.values())))
    assert counts == {True: (tiles, 0, 0), False: (0, tiles, 0), None: (0, 0, tiles)}[aligned]
    moved = TileTable(SEED, 2, 0)
    moved.add(Strided((1 << 20) + 2, shape, stride, (0,) * len(shape), 1), 0)
    assert not len(moved.tiles().aligned)


def test_equal_boxes_share_their_factors() -> None:
    table = TileTable(SEED, 2, 0)
    for place in range(100):
        table.add(Strided(place << 24, (768, 2048), (2048, 1), (0, 0), 1), place)
    assert table.tiles().factors.size == 1 + 768 + 2048


def test_casts_round_like_torch_on_the_host() -> None:
    boxes = [(torch.randn(200, 90), (3, 4)), (torch.arange(6), (0,)), (torch.randn(5, dtype=torch.float64), (1,))]
    served = [torch.bfloat16, None, torch.float16]
    expected = [
        digest_box(view if to is None else view.to(to), at) for (view, at), to in zip(boxes, served, strict=True)
    ]
    assert digest_boxes(boxes, served=served) == expected
    prepared = prepare_digests(boxes, served=served)
    assert prepared.run() == expected == prepared.run()
    assert prepared.launches == 0
    boxes[0][0][7, 7] += 1.0
    assert prepared.run()[0] != expected[0]
    with pytest.raises(CkptEngineError, match="2 dtypes for 3 boxes"):
        prepare_digests(boxes, served=[None, None])
    with pytest.raises(CkptEngineError, match="complex128"):
        prepare_digests(boxes, served=[torch.complex128, None, None])


def test_without_triton_the_reason_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(digest_cuda, "missing", lambda: "no Triton here")
    box = (torch.zeros(3), (0,), torch.float32)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert prepared_digests._on_gpu(torch.device("cuda", 5), [box], SEED) is None
    assert [record.message.count("no Triton here") for record in caplog.records] == [1]


INTERPRETED = """
import sys, torch
from ckpt_engine.digest.boxes import SEED, digest_boxes
from ckpt_engine.digest.cuda import CudaDigests
from tests.digest.test_digest import random_tensor
from ckpt_engine.core.dtypes import ITEMSIZES
from ckpt_engine.torch_dtypes import torch_dtype

boxes = []
for number, name in enumerate(sorted(ITEMSIZES)):
    dtype = torch_dtype(name)
    boxes += [
        (random_tensor((13, 70), dtype, number), (3, 1 << 40)),
        (random_tensor((9, 2112), dtype, number)[1:, 16:], (0, 0)),
        (random_tensor((40, 24), dtype, number)[:, 1:].t(), (5, 6)),
        (random_tensor((4, 3, 6, 10), dtype, number)[:, :, ::2, 3:], (0, 1, 2, 3)),
        (random_tensor((6, 10), dtype, number)[:, ::2], (0, 9)),
        (random_tensor((), dtype, number), ()),
        (random_tensor((0, 3), dtype, number), (2, 2)),
    ]
digests = CudaDigests([(view, start, view.dtype) for view, start in boxes], SEED)
assert digests.run() == digest_boxes(boxes) == digests.run()
assert digests.launches == 4, digests.launches
from ckpt_engine.digest import cuda_tiles
usual, cuda_tiles._COLUMN_WORDS = cuda_tiles._COLUMN_WORDS, 4  # so that rows are flat
long = [box for box in boxes if box[0].dim() == 2] + [(random_tensor((7001,), torch.float64), (5,))]
flat = CudaDigests([(view, start, view.dtype) for view, start in long], SEED)
assert flat.launches >= 4, flat.launches  # flat: bytes; elements of 1, 2, 4 lanes
assert flat.run() == digest_boxes(long)
cuda_tiles._COLUMN_WORDS = usual
for view, _ in boxes:  # one bit of each
    if view.numel() and view.dtype != torch.bool:
        last = view[(-1,) * view.dim()]
        last.copy_((last.clone().view(-1).view(torch.uint8) ^ 1).view(view.dtype)[0])
changed = digests.run()
assert changed == digest_boxes(boxes)

single = torch.randn(24, 700) * 1000
single[0, :6] = torch.tensor([float("inf"), -float("inf"), 3e38, 1e-42, 1.00390625, -0.0])
views = (single, single[1:, 1:], single.double())
casts = [(view, (3, 4), to) for to in (torch.bfloat16, torch.float16) for view in views]
found = CudaDigests(casts, SEED).run()
assert found == digest_boxes([(view.to(to), start) for view, start, to in casts])
print("equal")
"""


FINITE = """
import torch
from ckpt_engine.core.dtypes import ITEMSIZES
from ckpt_engine.digest import cuda_tiles
from ckpt_engine.digest.boxes import SEED, digest_boxes
from ckpt_engine.digest.cuda import CudaDigests
from ckpt_engine.torch_dtypes import torch_dtype
from tests.digest.test_digest import random_tensor
from tests.digest.test_finite import is_finite

views = []
for number, name in enumerate(sorted(ITEMSIZES)):
    dtype = torch_dtype(name)
    finite = random_tensor((11, 80), dtype, number)
    if dtype.is_complex or dtype.is_floating_point:
        finite = torch.where(is_finite(finite), torch.view_as_real(finite)[..., 0] if dtype.is_complex else
                             finite.to(torch.float64), 1.0).to(dtype)
    views += [finite, finite[:, 1:]]
    for row, column in ((0, 0), (10, 71), (7, 31)):
        each = finite.clone()
        if name != "bool":  # the highest bits of one element, and what else it needs to be NaN or infinite
            last = (column + 1) * dtype.itemsize
            each.view(torch.uint8)[row, last - min(dtype.itemsize, 2) : last] = 0x80 if "fnuz" in name else 0xFF
        apart = torch.zeros(11, 96, dtype=dtype)[:, :80]  # rows that do not touch, in units of 16 bytes
        views += [each, each[:, :72], apart.copy_(each)]
boxes = [(view, (0, 0)) for view in views]
expected = [bool((~is_finite(view)).any()) for view in views]
assert sum(expected) == 9 * 10, sum(expected)
for longest in (cuda_tiles._COLUMN_WORDS, 4):  # the second time rows are flat
    cuda_tiles._COLUMN_WORDS = longest
    found = CudaDigests([(view, (0, 0), view.dtype) for view in views], SEED, finite=True)
    assert found.run() == digest_boxes(boxes)
    wrong = [str(view.dtype) for view, one, other in zip(views, expected, found.not_finite) if one != other]
    assert not wrong, wrong
before = [view.clone() for view in views]
for view in views:
    view.zero_()
found.run()
assert not any(found.not_finite), "marks are cleared at each run"

single = torch.randn(12, 300) * 1000
for served, largest in ((torch.bfloat16, 3.389e38), (torch.float16, 65519.0)):
    for value, answer in ((largest, False), (largest * 1.003, True), (float("nan"), True), (float("-inf"), True)):
        cast = single.clone()
        cast[10, 200] = value
        found = CudaDigests([(cast, (0, 0), served), (cast[:10], (0, 0), served)], SEED, finite=True)
        found.run()
        assert found.not_finite == [answer, False], (served, value, found.not_finite)
print("equal")
"""


@pytest.mark.parametrize("script", [INTERPRETED, FINITE], ids=["digests", "finite"])
def test_the_kernel_agrees_in_the_interpreter(script: str, tmp_path: Path) -> None:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed here")
    path = tmp_path / "interpreted.py"
    path.write_text(script)
    ran = subprocess.run(
        [sys.executable, str(path)],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    if "only 0-dimensional arrays" in ran.stderr:
        pytest.skip("this Triton's interpreter does not work with this NumPy (2.4 or newer)")
    assert ran.stdout.splitlines()[-1:] == ["equal"], ran.stderr


def test_one_flipped_bit_changes_the_digest_of_its_box_alone() -> None:
    boxes = [(random_tensor((40, 90), torch.bfloat16, number), (0, 0)) for number in range(3)]
    prepared = prepare_digests(boxes)
    before = prepared.run()
    boxes[1][0].view(torch.int16)[39, 89] ^= 1
    after = prepared.run()
    assert [one != other for one, other in zip(before, after, strict=True)] == [False, True, False]
