"""What a relay tells people: one plain line for each thing that happened. Pure."""

from __future__ import annotations

from ckpt_engine.machines.events import SessionEnded
from ckpt_engine.machines.relay.tasks import CountSlot, FillSlot, LetGoOf, RelayTask, SlotFilled
from ckpt_engine.report import human_bytes
from ckpt_engine.v1 import manager_pb2, weights_pb2


def lost(manager: str, ended: SessionEnded) -> str:
    """Why there is no session, and what becomes of that."""
    if ended.patience:
        left = f"waiting up to {ended.patience:.0f} s, in case that is a relay that has died"
        return f"refused by the manager at {manager}: {ended.problem.message}; {left}"
    return f"no session with the manager at {manager}: {ended.problem.message}; trying again until it is there"


def failed(task: RelayTask, problem: weights_pb2.Problem) -> str:
    """What was not done, and why."""
    if isinstance(task, LetGoOf):
        return f"memory that its owner takes back stays mapped: {problem.message}"
    return f"{_version(task)} is not brought: {problem.message}"


def done(task: RelayTask, result: object) -> str:
    """What is so now; empty: nothing that people wait for."""
    match task, result:
        case CountSlot(), int(size):
            return f"{_version(task)} is to be brought: {human_bytes(size)}"
        case FillSlot(), SlotFilled():
            return f"{_version(task)} is held: {filled(result.answer)}"
        case _:
            return ""


def filled(told: manager_pb2.RelayFilled) -> str:
    """What a filling brought."""
    brought = ", ".join(f"{human_bytes(each.bytes)} from {each.source}" for each in told.brought) or "nothing"
    seconds = told.fill_seconds
    speed = f" ({sum(each.bytes for each in told.brought) / seconds / 1e9:.2f} GB/s)" if seconds > 0 else ""
    said = f"{brought} in {seconds:.2f} s{speed}"
    if told.again:
        said += f", {told.again} pieces read again"
    if told.overruled:
        said += f", {told.overruled} readers overruled after {told.wait_seconds:.1f} s"
    if told.missing_cells:
        said += f", {told.missing_cells} pieces missing: {told.missing[0].message}"
    return said


def _version(task: CountSlot | FillSlot) -> str:
    identity = task.command.identity
    return f"version {identity.version} of {identity.lineage}"
