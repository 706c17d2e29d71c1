"""Members as processes that vote before each update: killed and stopped before their vote, after it, and in the middle.

Nobody writes before *go*; whoever began stops; all of them end by themselves.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.collective.collective_processes import Processes

PATIENCE = 15.0

LEAD, WORKER = 0, 2
FAULTS = {"kill-vote": LEAD, "stop-vote": WORKER, "kill-voted": WORKER, "kill-middle": LEAD, "stop-middle": WORKER}
"""What happens to a member, and to which one in CI."""
CASES = [
    pytest.param(fault, member, id=f"{fault}-{name}", marks=() if member == first else pytest.mark.hours)
    for fault, first in FAULTS.items()
    for name, member in (("the lead", LEAD), ("a worker", WORKER))
]


class Armed(Processes):
    module = "tests.collective.arming_member"

    def further(self, silence: float, device: str) -> list[object]:
        return [PATIENCE]


def ends(case: str, fault: str, member: int) -> dict[int, list[dict[str, Any]]]:
    """What all others have told of the second update, the first of which goes well."""
    made = Armed(case, 2, {member: fault})
    try:
        said = made.said(but=[member])
    finally:
        made.close()
    for lines in said.values():
        assert {"go": 1} in lines
        assert {"version": 1, "wrong": []} in lines
    return {number: lines[lines.index({"version": 1, "wrong": []}) + 1 :] for number, lines in said.items()}


@pytest.mark.slow
def test_all_begin_and_all_get_what_was_sealed() -> None:
    for lines in ends("one", "-", -1).values():
        assert lines == [{"go": 2}, {"version": 2, "wrong": []}]


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "member"), CASES)
def test_a_member_that_is_not_there(fault: str, member: int) -> None:
    said = ends("one", fault, member)
    for lines in said.values():
        assert {"go": 2} in lines or lines[-1].keys() == {"back", "seconds"}, lines
        assert len(lines) <= 2
        assert "version" not in lines[-1] or fault.endswith("-middle")
    if fault.endswith("-vote"):
        assert all("back" in lines[-1] for lines in said.values()), said
    if fault.endswith("-middle"):
        assert any("stopped" in lines[-1] for lines in said.values()), said
