"""What of the tests one process runs, when several run at a time."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import LONGEST, ONE_ENGINE_AT_A_TIME, Files

TESTS = Path(__file__).parent
SUITE = "tests/conformance/test_conformance.py::test_this"


def scope_of(nodeid: str) -> str:
    return Files._split_scope(None, nodeid)


@pytest.mark.parametrize(
    ("one", "other", "together"),
    [
        ("tests/core/test_plan.py::test_this", "tests/core/test_plan.py::test_that[vllm]", True),
        ("tests/core/test_plan.py::test_this", "tests/core/test_boxes.py::test_this", False),
        (f"{SUITE}[vllm]", f"{SUITE}_too[vllm-keep]", True),
        (f"{SUITE}[vllm]", f"{SUITE}[sglang]", False),
        (f"{SUITE}[vllm-keep]", f"{SUITE}[vllm-by relay-keep]", False),
        (f"{SUITE}[vllm-by relay]", f"{SUITE}_too[vllm-by relay-idle-server]", True),
    ],
)
def test_tests_that_share_a_server_run_in_one_process(one: str, other: str, together: bool) -> None:
    assert (scope_of(one) == scope_of(other)) is together


def test_files_that_are_named_are_there() -> None:
    names = {path.name for path in TESTS.rglob("test_*.py")}
    assert {*LONGEST, *ONE_ENGINE_AT_A_TIME} <= names
