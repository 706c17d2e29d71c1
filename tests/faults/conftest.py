"""What the tests of faults share: tiny models, made once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.matrix import make_models
from tests.faults.prober import Expected


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Expected]:
    """A model directory without weights, weights of each seed, and what those answer."""
    return make_models(tmp_path_factory.mktemp("models"))
