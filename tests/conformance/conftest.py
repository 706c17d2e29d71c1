"""Which tests of the suite repeat what others ask."""

from __future__ import annotations

from pathlib import Path

import pytest

_HERE = Path(__file__).parent

_ASKED_OF_ANOTHER = (
    "weights[vllm-install-worker]",
    "weights[sglang-transfer-server]",
    "weights[transformers-install-worker]",
)
"""A killed server comes back, and so does one whose worker is killed: both are asked of the reference engine, and of
each real engine one of them, since it costs a start; transformers has both in one process. The other one is slow."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A stage that is slow, of a server that is slow: each is asked without the other too."""
    for item in items:
        if item.nodeid.endswith(_ASKED_OF_ANOTHER):
            item.add_marker("slow")
        if _HERE in item.path.parents and len(list(item.iter_markers("slow"))) > 1:
            item.add_marker("hours")
