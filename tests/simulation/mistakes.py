"""Runs the simulation with a rule taken out, and looks whether some seed notices.

The seeds that noticed last time stand in noticed.json and are tried first, since a search may take half a minute. They
prove no more than any other seed: where one is missing or has nothing to say any more, the search goes on as ever, and
pytest's summary warns of it. `python -m tests.simulation.mistakes` brings noticed.json up to date.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.simulation.scenario import Machines, Slant, run_seed
from tests.simulation.world import BrokenPromiseError

SEEDS = 300
NOTICED = Path(__file__).parent / "noticed.json"

Patch = pytest.MonkeyPatch
Mistake = Callable[[Patch], Machines | None]


def name_of(mistake: Mistake) -> str:
    """As test ids show it."""
    return mistake.__name__


def must_be_noticed(mistake: Mistake, patch: Patch, slant: Slant | None = None) -> None:
    """Fails if no seed breaks a promise with it. Every other seed kills and stops processes too.

    slant: brings about more often what the rule is for, to save time.
    """
    machines = mistake(patch)
    name = f"{mistake.__module__.rpartition('.')[2]}.{mistake.__name__}"
    known = _noticed().get(name)
    for seed in (*([] if known is None else [known]), *range(SEEDS)):
        try:
            run_seed(seed, machines, crashes=slant is not None or bool(seed % 2), slant=slant)
        except BrokenPromiseError as error:
            if not isinstance(error.__cause__, BrokenPromiseError):
                raise  # a mistake in the mistake
            if seed != known:
                said = f"noticed.json has {known} for {name}, {seed} noticed: run python -m tests.simulation.mistakes"
                warnings.warn(said, stacklevel=2)
            _noticing[name] = seed
            return
    pytest.fail(f"{SEEDS} seeds did not notice: {mistake.__doc__}")


_noticing: dict[str, int] = {}
"""By test file and mistake, the seeds that noticed in this process."""


@cache
def _noticed() -> dict[str, int]:
    """By test file and mistake, the seeds that noticed last time."""
    found: dict[str, int] = json.loads(NOTICED.read_text())
    return found


def _update() -> int:
    """Runs every such test and writes down what noticed."""
    from tests.simulation import mistakes  # the module that the tests import: this one runs as __main__

    ended = pytest.main(
        ["-q", "-m", "slow or not slow", "-k", "notices_without or mistake_is_found", "tests/simulation"]
    )
    if ended == pytest.ExitCode.OK:
        NOTICED.write_text(json.dumps(dict(sorted(mistakes._noticing.items())), indent=1) + "\n")
    return int(ended)


if __name__ == "__main__":
    sys.exit(_update())
