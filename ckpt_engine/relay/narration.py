"""A relay's log for people: one plain line for each event. Pure."""

from __future__ import annotations

from ckpt_engine.core.sizes import human_bytes
from ckpt_engine.machines.events import SessionEnded
from ckpt_engine.machines.relay.tasks import CountSlot, FillSlot, LetGoOf, RelayTask, SlotFilled
from ckpt_engine.v1 import manager_pb2, weights_pb2


def lost(manager: str, ended: SessionEnded) -> str:
    """Why there is no session, and what the relay does about it."""
    if ended.patience:
        remedy = f"waiting up to {ended.patience:.0f} s, in case that is a relay that has died"
        return f"refused by the manager at {manager}: {ended.problem.message}; {remedy}"
    return f"no session with the manager at {manager}: {ended.problem.message}; trying again until it is there"


def failed(task: RelayTask, problem: weights_pb2.Problem) -> str:
    """Why a task failed."""
    if isinstance(task, LetGoOf):
        return f"memory that its owner takes back stays mapped: {problem.message}"
    return f"{_version(task)} is not brought: {problem.message}"


def done(task: RelayTask, result: object) -> str:
    """The outcome of a task; empty: of no interest to people."""
    match task, result:
        case CountSlot(), int(size):
            return f"{_version(task)} is to be brought: {human_bytes(size)}"
        case FillSlot(), SlotFilled():
            return f"{_version(task)} is held: {filled(result.answer)}"
        case _:
            return ""


def filled(report: manager_pb2.RelayFilled) -> str:
    """What a filling brought."""
    sources = ", ".join(f"{human_bytes(each.bytes)} from {each.source}" for each in report.brought) or "nothing"
    seconds = report.fill_seconds
    speed = f" ({sum(each.bytes for each in report.brought) / seconds / 1e9:.2f} GB/s)" if seconds > 0 else ""
    line = f"{sources} in {seconds:.2f} s{speed}"
    if report.delta_bytes:
        share = report.changed_bytes / report.delta_bytes
        line += f", {human_bytes(report.delta_bytes)} of it as changes ({share:.2%} had changed)"
        line += f", {human_bytes(report.network_bytes)} on the network"
    if report.whole:
        line += f", {human_bytes(sum(each.bytes for each in report.whole))} in full ({report.whole[0].reason})"
    if report.again:
        line += f", {report.again} pieces read again"
    if report.overruled:
        line += f", {report.overruled} readers overruled after {report.wait_seconds:.1f} s"
    if report.missing_cells:
        line += f", {report.missing_cells} pieces missing: {report.missing[0].message}"
    return line


def _version(task: CountSlot | FillSlot) -> str:
    identity = task.command.identity
    return f"version {identity.version} of {identity.lineage}"
