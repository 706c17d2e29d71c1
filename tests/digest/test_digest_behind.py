"""Digests behind a copy within one GPU: each tile waits for what is written over it, and one that waits in vain is told
and digested again. Copy and digest are two launches of two kernels, run here in Triton's interpreter, one after the
other; on a GPU, at once, in tests/gpu/test_digest_behind_cuda.py."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.digest.cuda import BEHIND, PROGRAMS_BEHIND, programs_behind

SCRIPT = """
import logging, random, torch
from ckpt_engine.copy import copy_kernel
from ckpt_engine.copy.device_work import DeviceWork
from ckpt_engine.digest import cuda as digest_cuda
from ckpt_engine.digest import cuda_tiles
from ckpt_engine.digest.boxes import SEED, digest_boxes
from ckpt_engine.digest.prepared import PreparedDigests
from tests.digest.test_digest import random_tensor

CPU = torch.device("cpu")
copy_kernel._LANES, copy_kernel.PROGRAM_BYTES, copy_kernel.PIECE_PROGRAMS = 64, 2048, 3
digest_cuda._PATIENCE = 5
told = []
class Told(logging.Handler):
    def emit(self, record):
        told.append(record.getMessage())
logging.getLogger("ckpt_engine.digest.cuda").addHandler(Told())

def prepared(pairs, starts):
    work = DeviceWork(pairs, CPU)
    pieces = work.pieces()
    digests = digest_cuda.CudaDigests([(view, start, view.dtype) for (view, _), start in zip(pairs, starts)], SEED)
    follows = digests.follow(pieces.first, pieces.end, pieces.arrived, pieces.programs, 3)
    return work, pieces, digests, follows

def copied(work, but=()):
    for number, segment in enumerate(work.segments):
        if number not in but:
            segment.queue(0)

def sources(number):
    return [
        random_tensor((33, 512), torch.bfloat16, number),
        random_tensor((40, 300), torch.bfloat16, number + 1),
        random_tensor((7, 64), torch.float32, number + 2),
        random_tensor((640,), torch.bfloat16, number + 3),
    ]

# Into parts of larger tensors, rows apart, a row of which is not aligned; with a cast; and new values each time.
for dtype in (torch.bfloat16, torch.float32):
    wide = torch.zeros(40, 700, dtype=torch.bfloat16)
    targets = [torch.zeros(33, 512, dtype=torch.bfloat16), wide[:, 5:305], torch.zeros(7, 64)]
    targets.append(torch.zeros(640, dtype=dtype))
    starts = [(0, 7), (1 << 33, 0), (0, 0), (4,)]
    live = sources(0)
    work, pieces, digests, follows = prepared(list(zip(targets, live)), starts)
    assert follows
    for number in (0, 10, 20):
        for source, value in zip(live, sources(number)):
            source.copy_(value)
        pieces.arrived.zero_()
        copied(work)
        assert (pieces.arrived.numpy() == pieces.programs).all(), (pieces.arrived, pieces.programs)
        digests.begin(None)
        assert digests.run() == digest_boxes(list(zip(targets, starts)))
        for target, source in zip(targets[: 3 if dtype == torch.float32 else 4], live):
            torch.testing.assert_close(target, source.to(target.dtype), rtol=0, atol=0, equal_nan=True)
    assert not told
    # As they lie: a bit that is wrong in memory is seen, whoever wrote it.
    before = digests.run()
    pieces.arrived.zero_()
    copied(work)
    targets[0].view(torch.int16)[32, 511] ^= 1
    digests.begin(None)
    changed = [one != other for one, other in zip(before, digests.run())]
    assert changed == [True, False, False, False], changed
    # What has not arrived is waited for, in vain: all is digested again.
    pieces.arrived.zero_()
    copied(work)
    pieces.arrived[0] -= 1
    digests.begin(None)
    targets[0].zero_()  # what was digested too early is of no matter
    assert digests.run() == digest_boxes(list(zip(targets, starts)))
    assert len(told) == 1, told
    # Begun, and the copy came to nothing: the next digest is an ordinary one.
    pieces.arrived.zero_()
    digests.begin(None)
    digests.forsake()
    assert digests.run() == digest_boxes(list(zip(targets, starts)))
    assert len(told) == 1, told
    told.clear()

# Each tile waits for every piece that writes to it.
random.seed(1)
for _ in range(20):
    rows, columns = random.randrange(1, 70), 8 * random.randrange(1, 400)
    whole = torch.zeros(rows, columns + 8 * random.randrange(3), dtype=torch.bfloat16)
    more = torch.zeros(random.randrange(1, 9) * 1000, dtype=torch.bfloat16)
    pairs = [(whole[:, :columns], torch.ones(rows, columns, dtype=torch.bfloat16)), (more, torch.ones_like(more))]
    random.shuffle(pairs)
    work = DeviceWork(pairs, CPU)
    pieces = work.pieces()
    digests = digest_cuda.CudaDigests([(view, (0,) * view.dim(), view.dtype) for view, _ in pairs], SEED)
    for launch in digests._launches:
        tiles, waits, left = launch.behind(pieces.first, pieces.end)
        assert len(tiles) + len(left) == launch.tiles
        assert (waits[:, 1] == sorted(waits[:, 1])).all()
        unit, here = launch._kind.unit.itemsize, launch._bytes.data_ptr()
        for tile, (one, other) in zip(tiles.astype("int64").tolist(), waits.tolist()):
            first, step, _, _, height, width, _, _ = tile
            below = here + first * unit
            above = below + ((height - 1) * step + width) * unit
            written = [n for n, (low, high) in enumerate(zip(pieces.first, pieces.end)) if low < above and high > below]
            assert written and one <= written[0] and written[-1] <= other, (one, other, written)

# What is not counted throughout is not followed.
here = torch.zeros(64, 64)
assert DeviceWork([(here, torch.ones(64, 64).t()), (torch.zeros(5), torch.ones(5))], CPU).pieces() is None
looking = digest_cuda.CudaDigests([(here, (0, 0), here.dtype)], SEED, finite=True)
assert not looking.follow(pieces.first, pieces.end, pieces.arrived, pieces.programs, 3)
print("equal")
"""


def interpreted(script: str, tmp_path: Path) -> None:
    """Runs it in Triton's interpreter, which has to be chosen before Triton is imported."""
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


def test_each_tile_is_digested_once_it_has_arrived(tmp_path: Path) -> None:
    interpreted(SCRIPT, tmp_path)


def test_the_environment_says_how_many_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(BEHIND, raising=False)
    assert programs_behind() == PROGRAMS_BEHIND
    for said, expected in (("", PROGRAMS_BEHIND), ("0", 0), (" 3 ", 3)):
        monkeypatch.setenv(BEHIND, said)
        assert programs_behind() == expected
    for wrong in ("5", "-1", "2.5", "on"):
        monkeypatch.setenv(BEHIND, wrong)
        with pytest.raises(CkptEngineError, match=f"{BEHIND} must be 0 to 4, got '{wrong}'"):
            programs_behind()
