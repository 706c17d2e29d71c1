"""When relays are filled, case by case; and what is said about it."""

from __future__ import annotations

import pytest

from ckpt_engine.core.reach import Distance
from ckpt_engine.machines.manager.relay_or_collective import prefetch_decision
from ckpt_engine.v1 import manager_pb2

AUTO, ALWAYS, NEVER = manager_pb2.PREFETCH_AUTO, manager_pb2.PREFETCH_ALWAYS, manager_pb2.PREFETCH_NEVER
INSTALLED, HELD = manager_pb2.UNTIL_INSTALLED, manager_pb2.UNTIL_HELD
GPU, PEER, MEMORY, FILE = Distance.SAME_GPU, Distance.NVLINK, Distance.HOST_MEMORY, Distance.FILE


@pytest.mark.parametrize(
    ("prefetch", "until", "readers", "filled", "why"),
    [
        (AUTO, INSTALLED, {}, "", "no replica that lacks the version"),
        (ALWAYS, HELD, {}, "", "no replica that lacks the version"),
        (AUTO, INSTALLED, {"a": GPU, "b": GPU}, "", "read the trainer's GPUs"),
        (AUTO, INSTALLED, {"a": PEER, "b": GPU}, "", "read the trainer's GPUs"),
        (AUTO, INSTALLED, {"a": MEMORY}, "", "a alone reads the trainer's memory"),
        (AUTO, INSTALLED, {"a": MEMORY, "b": GPU}, "", "filled: a alone"),
        (AUTO, INSTALLED, {"b": MEMORY, "a": MEMORY}, "ab", "these 2 replicas would read the same memory"),
        (AUTO, INSTALLED, {"a": MEMORY, "b": MEMORY, "c": GPU}, "ab", "filled for a, b: these 2"),
        (AUTO, INSTALLED, {"a": FILE}, "a", "would wait for files or a network"),
        (AUTO, INSTALLED, {"a": None, "b": GPU}, "a", "a cannot read the trainer's weights directly"),
        (NEVER, INSTALLED, {"a": None, "b": MEMORY}, "", "prefetch is 'never'"),
        (ALWAYS, INSTALLED, {"a": GPU}, "a", "prefetch is 'always'"),
        (AUTO, HELD, {"a": GPU, "b": MEMORY}, "ab", "goes on once relays hold"),
    ],
)
def test_who_is_installed_from_a_relay(
    prefetch: manager_pb2.Prefetch,
    until: manager_pb2.Until,
    readers: dict[str, int | None],
    filled: str,
    why: str,
) -> None:
    decision = prefetch_decision("relay a", prefetch, until, readers)
    assert "".join(decision.replicas) == filled
    assert why in decision.why
    assert decision.why.startswith("relay a is filled for" if filled else "relay a is not filled")
