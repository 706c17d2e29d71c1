"""A collective from GPU 0 to GPU 1 between processes, over NCCL: what arrives, and how it ends when a member does."""

from __future__ import annotations

from typing import Any

import pytest

from tests.collective.collective_processes import processes


def test_versions_arrive_as_they_were_sealed(two_gpus: Any) -> None:
    with processes("pair", 3, {}, "cuda") as all_of_it:
        said = all_of_it.said()
        assert [each["version"] for each in said[1]] == [1, 2, 3], said
        assert not any(each["wrong"] for each in said[1])


@pytest.mark.parametrize("fault", ["kill", "stop", "fail"])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_member_that_ends_in_the_middle_is_named_by_the_other(two_gpus: Any, fault: str, victim: int) -> None:
    with processes("pair", 2, {victim: fault}, "cuda") as all_of_it:
        said = all_of_it.said(but=[] if fault == "fail" else [victim])
        for number in said:
            last = said[number][-1]
            assert "code" in last, said
            assert all_of_it.case.members[victim].name in last["message"], said
