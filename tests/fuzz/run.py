"""Many damaged inputs for every reader: `python -m tests.fuzz.run --inputs 1000000 [--atheris]`.

Each reader runs in a process of its own, so that its memory is its own. Prints a table, and the input that broke a
reader as bytes that `--replay` takes; ends with 1 then. With --atheris, Google's coverage-guided fuzzer chooses the
inputs (our mutation is one of its ways) and follows which lines of our code they reach; without it, the mutation alone.
"""

from __future__ import annotations

import argparse
import ast
import math
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

MEBIBYTE = 1 << 20


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=100_000, help="for all readers together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--atheris", action="store_true")
    parser.add_argument("--target", default="", help="only this reader")
    parser.add_argument("--replay", default="", help="one input, as printed")
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.atheris and options.alone:
        return _with_atheris(options)
    from tests.fuzz.targets import TARGETS, refused

    chosen = [target for target in TARGETS if options.target in ("", target.name)]
    if options.replay:
        with chosen[0].open() as take:
            print("refused" if refused(take, ast.literal_eval(options.replay)) else "taken")
        return 0
    if options.alone:
        return _alone(chosen[0], options.inputs, options.seed)
    share = options.inputs / sum(target.weight for target in chosen)
    failed = 0
    print(f"{'reader':<20}{'inputs':>10}{'refused':>10}{'seconds':>9}{'MiB before':>12}{'MiB after':>11}")
    for target in chosen:
        command = [sys.executable, "-m", "tests.fuzz.run", "--alone", "--target", target.name, "--inputs"]
        command += [str(math.ceil(share * target.weight)), "--seed", str(options.seed)]
        command += ["--atheris"] if options.atheris else []
        done = subprocess.run(command, capture_output=True, text=True, timeout=7200)
        found = [line for line in done.stdout.splitlines() if line.startswith(target.name)]
        print(
            "\n".join(found) or f"{target.name:<20} ended with {done.returncode}\n{done.stdout}{done.stderr[-4000:]}",
            flush=True,
        )
        failed += done.returncode != 0
    print(f"{len(chosen) - failed} of {len(chosen)} readers held")
    return 1 if failed else 0


def _alone(target: object, count: int, seed: int) -> int:
    from tests.fuzz.targets import Target, inputs, refused

    assert isinstance(target, Target)
    stream = inputs(target, random.Random(f"{target.name} {seed}"))
    meter = _Meter(target.name)
    while meter.inputs < count:
        with target.open() as take:
            for _ in range(min(target.lives, count - meter.inputs)):
                data = next(stream)
                try:
                    meter.saw(refused(take, data), count)
                except Exception:
                    print(f"{target.name}: broken by --replay '{data!r}'", flush=True)
                    raise
    meter.print()
    return 0


def _with_atheris(options: argparse.Namespace) -> int:
    import atheris

    with atheris.instrument_imports(include=["ckpt_engine"]):
        from tests.fuzz.targets import TARGETS, refused
    from tests.fuzz.mutation import mutated

    target = next(target for target in TARGETS if target.name == options.target)
    meter, lives = _Meter(target.name), 0
    opened = target.open()
    take = opened.__enter__()

    def one(data: bytes) -> None:
        nonlocal opened, take, lives
        lives += 1
        if lives % target.lives == 0:
            opened.__exit__(None, None, None)
            opened = target.open()
            take = opened.__enter__()
        try:
            meter.saw(refused(take, data), options.inputs)
        except BaseException:
            print(f"{target.name}: broken by --replay '{data!r}'", flush=True)
            raise
        if meter.inputs == options.inputs:
            meter.print()

    def mutator(data: bytes, most: int, seed: int) -> bytes:
        rng = random.Random(seed)
        if rng.random() < 0.3:
            return bytes(atheris.Mutate(data, most))
        return mutated(data or rng.choice(list(target.seeds)), target.kind, rng)[:most]

    flags = [
        f"-runs={options.inputs}",
        "-max_len=4096",
        "-len_control=0",
        "-rss_limit_mb=4096",
        f"-seed={options.seed + 1}",
    ]
    corpus = tempfile.mkdtemp(prefix="fuzz-")
    for number, seed in enumerate(target.seeds):
        (Path(corpus) / f"seed-{number}").write_bytes(seed)
    atheris.Setup([sys.argv[0], *flags, corpus], one, custom_mutator=mutator)
    atheris.Fuzz()  # ends the process
    return 0


class _Meter:
    """Counts, and this process's memory after a tenth of the inputs and at the end."""

    def __init__(self, name: str) -> None:
        self._name, self._began = name, time.monotonic()
        self._process = psutil.Process()
        self._refused = self._before = self.inputs = 0

    def saw(self, refused: bool, count: int) -> None:
        self.inputs += 1
        self._refused += refused
        if self.inputs == max(1, count // 10):
            self._before = self._process.memory_info().rss

    def print(self) -> None:
        seconds, after = time.monotonic() - self._began, self._process.memory_info().rss
        memory = f"{self._before / MEBIBYTE:>12.1f}{after / MEBIBYTE:>11.1f}"
        print(f"{self._name:<20}{self.inputs:>10}{self._refused:>10}{seconds:>9.1f}{memory}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
