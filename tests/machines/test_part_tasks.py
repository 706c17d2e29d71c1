"""What the tasks of a collective show of themselves, in logs and in the errors of tests."""

from __future__ import annotations

from ckpt_engine.machines.part_tasks import CollectivePlan, RunPart
from ckpt_engine.v1 import manager_pb2


def test_the_key_of_a_meeting_is_not_shown() -> None:
    key = b"a key of thirty-two random bytes"
    plan = CollectivePlan(("rank 0",), manager_pb2.BlobRef(), meeting=key)
    part = RunPart(1, 1, manager_pb2.Collective(meeting=key), 0, 1.0)
    assert "thirty-two" not in f"{plan!r} {part!r}"
