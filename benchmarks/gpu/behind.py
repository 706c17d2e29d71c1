"""Copy and digest of Qwen3-8B within one GPU, without an engine: the digest after the copy, and behind it with several
numbers of programs a multiprocessor. What is the fastest goes into `PROGRAMS_BEHIND` of ckpt_engine/digest/cuda.py.

    python -m benchmarks.gpu.behind -o FILE [--rounds 20] [--small]

All ways in turns, a round each, from idle, as an install does: seconds from before the copy is launched to the digests
on the host. Each round has new weights, and each way's digests must be those of the source. Prints a line a way, and
last, alone in a line, `BEST N`: the programs of the fastest way, 0 if that is digesting after the copy.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.gpu.measure import rounded, versions
from benchmarks.gpu.qwen3_8b import BYTES, SHAPES, Tree, renew
from ckpt_engine.copy import copy_kernel
from ckpt_engine.copy.copying import TensorCopy
from ckpt_engine.digest.prepared import PreparedDigests, prepare_digests

Pairs = list[tuple[torch.Tensor, torch.Tensor]]

SHARES = (1, 2, 3, 4)
PIECES = (16, 64, 256)
"""Programs of a piece: 1, 4 and 16 MiB."""


class Way:
    """One way of copying and digesting, made ready."""

    def __init__(self, pairs: Pairs, share: int, piece: int) -> None:
        """share: programs a multiprocessor; 0: after the copy."""
        self.name = f"behind, {share} programs, pieces of {piece * 64} KiB" if share else "after the copy"
        self.share = share
        before, copy_kernel.PIECE_PROGRAMS = copy_kernel.PIECE_PROGRAMS, piece
        try:
            self.copy = TensorCopy(pairs)
            self.digests: PreparedDigests = prepare_digests([(view, (0,) * view.dim()) for view, _ in pairs])
            if share:
                pieces = self.copy.pieces()
                assert pieces is not None
                told = (pieces.first, pieces.end, pieces.arrived, pieces.programs)
                assert self.digests.follow(*told, share)
        finally:
            copy_kernel.PIECE_PROGRAMS = before
        self.copied: list[float] = []
        self.seconds: list[float] = []
        self.again = 0

    def run(self) -> list[int]:
        """One copy, digested."""
        began = time.perf_counter()
        if self.share:
            self.digests.begin(self.copy.clear())
        self.copy.run()
        copied = time.perf_counter()
        found = self.digests.run()
        self.seconds.append(time.perf_counter() - began)
        self.copied.append(copied - began)
        ((_, digests),) = self.digests._cuda
        self.again += digests._missed is not None and bool(int(digests._missed))
        return found


def pairs_of(small: bool) -> tuple[Tree | None, Pairs]:
    """(destination, source) of each tensor."""
    if small:
        sources = [torch.randn(shape, device="cuda").bfloat16() for shape in ((4096, 4096), (12288, 4096), (4096,))]
        return None, [(torch.zeros_like(source), source) for source in sources]
    model = Tree("cuda:0")
    places = [torch.empty(shape, dtype=torch.bfloat16, device="cuda:0") for shape in SHAPES.values()]
    return model, list(zip(places, (parameter.detach() for parameter in model.parameters()), strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--small", action="store_true", help="120 MB only")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("needs an NVIDIA GPU", file=sys.stderr)
        return 2
    model, pairs = pairs_of(options.small)
    sealed = prepare_digests([(source, (0,) * source.dim()) for _, source in pairs])
    ways = [Way(pairs, 0, 64), *(Way(pairs, share, 64) for share in SHARES)]
    ways += [Way(pairs, 2, piece) for piece in PIECES if piece != 64]
    wrong = 0
    for number in range(options.rounds + 2):
        for way in ways:
            if model is not None:
                renew(model, number)
            else:
                for _, source in pairs:
                    source.normal_()
            expected = sealed.run()
            torch.cuda.synchronize()
            wrong += way.run() != expected
    told: dict[str, Any] = {}
    for way in ways:
        kept = way.seconds[2:]
        told[way.name] = {
            "median": median(kept),
            "worst": max(kept),
            "copied": median(way.copied[2:]),
            "digested again": way.again,
        }
        print(
            f"RESULT {way.name}: {1e3 * median(kept):.2f} ms (worst {1e3 * max(kept):.2f}), "
            f"copied after {1e3 * median(way.copied[2:]):.2f} ms, digested again {way.again} times",
            flush=True,
        )
    best = min(ways, key=lambda way: median(way.seconds[2:]))
    found = {
        "fields": {"seconds": "from before the copy is launched to the digests on the host"},
        "bytes": BYTES if model is not None else sum(source.nbytes for _, source in pairs),
        "rounds": options.rounds,
        "digests that differed": wrong,
        "seconds": told,
        "versions": versions(),
    }
    options.output.write_text(json.dumps(rounded(found), indent=1) + "\n")
    print(f"digests that differed: {wrong}")
    print(f"BEST {0 if wrong else best.share}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
