"""Whether an engine can be paused in the mode that an update asks for. Pure.

It decides from what the adapter declared, before anything is paused. It does not know what a mode does.
"""

from __future__ import annotations

from ckpt_engine.core.enums import enum_word
from ckpt_engine.core.problems import invalid
from ckpt_engine.v1 import manager_pb2


def check_pause_mode(replica: str, engine: manager_pb2.Engine, mode: manager_pb2.PauseMode) -> None:
    """Raises INVALID_ARGUMENT if `engine` declares its pause modes, and `mode` is not one of them.

    PAUSE_MODE_UNSPECIFIED is any engine's default. An engine that declares no modes is not checked.
    """
    if mode == manager_pb2.PAUSE_MODE_UNSPECIFIED or not engine.pause_modes or mode in engine.pause_modes:
        return
    able = ", ".join(mode_name(each) for each in engine.pause_modes)
    reason = f" ({engine.refused_modes[mode]})" if mode in engine.refused_modes else ""
    raise invalid(
        f"replica {replica!r} runs {engine.kind} {engine.version}, which cannot be paused in mode {mode_name(mode)!r}"
        f"{reason}; it can in: {able}. Ask for one of these, or name replicas that can",
        replica=replica,
    )


def mode_name(mode: manager_pb2.PauseMode) -> str:
    """The mode as users write it: "in_place". An unknown mode is named by its number."""
    modes = manager_pb2.PauseMode.values()
    return enum_word(manager_pb2.PauseMode, mode) if mode in modes else f"number {mode}"
