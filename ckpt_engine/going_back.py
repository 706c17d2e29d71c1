"""Bringing replicas back to a version that is still held: for operators and their programs. No trainer need exist."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import grpc

from ckpt_engine.client import error_of, manager_stub, open_blocking_channel
from ckpt_engine.core.deadlines import Deadlines, check_seconds
from ckpt_engine.core.problems import internal, invalid
from ckpt_engine.report import UpdateReport
from ckpt_engine.v1 import manager_pb2

Progress = Callable[[manager_pb2.UpdateProgress], object]


def rollback(
    address: str,
    version: int,
    lineage: str = "",
    *,
    pause_mode: str | None = None,
    timeout: float | None = None,
    replicas: Sequence[str] = (),
    pool: str = "",
    on_progress: Progress | None = None,
    deadlines: Deadlines | None = None,
) -> UpdateReport:
    """Brings replicas back to a version that relays, or other holders, hold. Returns when it is over.

    address: the manager, host:port. version: by its number. lineage: of which run; empty: the only one of which that
    number is held. pause_mode: "keep" (the engine's default), "abort", "wait" or "in_place". timeout: of the whole
    rollback, seconds; none: the manager's default. pool: of the replicas. replicas: only these; empty: all of the pool
    that are registered and receive weights. on_progress: called on this thread with each UpdateProgress; what it raises
    ends the wait. deadlines: none: the defaults, changed by CKPT_ENGINE_DEADLINES.

    Versions that are sealed later count on above the highest number ever used. Replicas that start late or again are
    brought to the version that was gone back to, until the next update.

    Returns the report also if some replicas failed: look at `report.ok`. Raises CkptEngineError when it was refused (no
    replica was touched): NOT_FOUND, naming what is held by whom, if nobody holds the version; INVALID_ARGUMENT if
    several lineages are meant; FAILED_PRECONDITION if what is held cannot be believed or read, or no replica can take
    it; ABORTED while an update of the lineage runs. KeyboardInterrupt ends the call, which is taken back unless the
    intent is on the disk already.
    """
    check_version(version)
    check_asked(pause_mode, timeout, replicas)
    request = manager_pb2.RollbackRequest(
        lineage=lineage,
        version=version,
        pause_mode=manager_pb2.PAUSE_MODE_UNSPECIFIED if pause_mode is None else pause_mode.upper(),
        timeout_seconds=timeout or 0.0,
        replicas=replicas,
        pool=pool,
    )
    limits = deadlines or Deadlines.from_environment(os.environ)
    return reported(address, "Rollback", request, (timeout or limits.update) + limits.call_grace, on_progress)


def check_version(version: int) -> None:
    """Refuses a version that counts no steps: INVALID_ARGUMENT."""
    if isinstance(version, bool) or not isinstance(version, int) or not 0 <= version < 1 << 63:
        raise invalid(f"version {version!r} is not a count of steps: give a whole number from 0")


def check_asked(pause_mode: str | None, timeout: float | None, replicas: Sequence[str]) -> None:
    """Checks what an update is asked for with. Raises INVALID_ARGUMENT."""
    modes = [name.lower() for name, number in manager_pb2.PauseMode.items() if number]
    if pause_mode is not None and pause_mode not in modes:
        raise invalid(f"pause_mode {pause_mode!r} is none of {', '.join(modes)}")
    if timeout is not None:
        check_seconds("a timeout", timeout)
    if isinstance(replicas, str):
        raise invalid(f"replicas is a list of names: [{replicas!r}]")


def reported(address: str, method: str, request: Any, seconds: float, on_progress: Progress | None) -> UpdateReport:
    """Makes a call of the manager that streams UpdateEvents, and returns its report. Raises CkptEngineError."""
    report: manager_pb2.UpdateReport | None = None
    with open_blocking_channel(address) as channel:
        call: Any = getattr(manager_stub(channel), method)(request, timeout=seconds)
        try:
            for event in call:
                if event.HasField("report"):
                    report = event.report
                elif on_progress is not None:
                    on_progress(event.progress)
        except grpc.RpcError as error:
            raise error_of(error, address) from error
        finally:
            call.cancel()
    if report is None:
        raise internal(f"the manager ended {method} without a report")
    return UpdateReport(report)
