"""Runs the simulation with a rule taken out, and looks whether some seed notices."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.simulation.scenario import Machines, Slant, run_seed
from tests.simulation.world import BrokenPromiseError

SEEDS = 80

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
    for seed in range(SEEDS):
        try:
            run_seed(seed, machines, crashes=slant is not None or bool(seed % 2), slant=slant)
        except BrokenPromiseError as error:
            if not isinstance(error.__cause__, BrokenPromiseError):
                raise  # a mistake in the mistake
            return
    pytest.fail(f"{SEEDS} seeds did not notice: {mistake.__doc__}")
