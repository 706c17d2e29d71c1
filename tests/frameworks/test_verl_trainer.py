"""verl's own trainer end to end, as far as a processor lets it: see tests/frameworks/verl_trainer.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.frameworks.verl_trainer import problems, rehearse


@pytest.mark.slow
def test_what_verl_trains_is_served(tmp_path: Path) -> None:
    """Three steps: both replicas serve the last one's version, with the tokens of the model that verl saved then."""
    assert problems(rehearse(tmp_path, seconds=1000), rounding=0.01, near=1e-3) == []
