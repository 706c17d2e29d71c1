"""The order of an update's stages, which their numbers in the protocol do not follow. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from ckpt_engine.v1 import manager_pb2

STAGES = (
    manager_pb2.STAGE_PLAN,
    manager_pb2.STAGE_READY,
    manager_pb2.STAGE_QUIESCE,
    manager_pb2.STAGE_TRANSFER,
    manager_pb2.STAGE_INSTALL,
    manager_pb2.STAGE_VERIFY,
    manager_pb2.STAGE_RESUME,
)
"""The stages, in the order of an update in one replica."""


def later(one: manager_pb2.Stage, other: manager_pb2.Stage) -> manager_pb2.Stage:
    """The later of two stages. An unknown one, from a newer member, counts as the earliest."""
    return max(one, other, key=_place)


def in_order(seconds: Mapping[manager_pb2.Stage, float]) -> list[manager_pb2.StageSeconds]:
    """The seconds of stages as messages, in the order of the stages."""
    return [manager_pb2.StageSeconds(stage=stage, seconds=seconds[stage]) for stage in sorted(seconds, key=_place)]


def _place(stage: manager_pb2.Stage) -> int:
    return STAGES.index(stage) if stage in STAGES else -1
