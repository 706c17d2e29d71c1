"""Which tests of the suite repeat what others ask."""

from __future__ import annotations

from pathlib import Path

import pytest

_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A stage that is slow, of a server that is slow: each is asked without the other too."""
    for item in items:
        if _HERE in item.path.parents and len(list(item.iter_markers("slow"))) > 1:
            item.add_marker("hours")
