"""Bringing replicas to a checkpoint directory that the manager's host holds: for programs that have no trainer."""

from __future__ import annotations

import os
from collections.abc import Sequence

from ckpt_engine.core.deadlines import Deadlines
from ckpt_engine.core.names import check_pool
from ckpt_engine.core.problems import invalid
from ckpt_engine.going_back import Progress, check_asked, check_version, reported
from ckpt_engine.report import UpdateReport
from ckpt_engine.v1 import manager_pb2


def update_from_directory(
    address: str,
    directory: str | os.PathLike[str],
    version: int | None = None,
    lineage: str = "",
    *,
    pause_mode: str | None = None,
    timeout: float | None = None,
    min_replicas: int | None = None,
    replicas: Sequence[str] = (),
    pool: str = "",
    prefetch: str = "auto",
    until: str = "installed",
    check_finite: bool = False,
    dry_run: bool = False,
    on_progress: Progress | None = None,
    deadlines: Deadlines | None = None,
) -> UpdateReport:
    """Brings replicas to the safetensors files of a directory, without a trainer. Returns when it is over.

    address: the manager, host:port; it was started with `--allow-directory`. directory: its absolute path, the same on
    the manager's host and on those of the replicas (or of relays); or that of one file. version: none: the lineage's
    last one plus one. lineage: what it counts in; empty: "directory". on_progress: called on this thread with each
    UpdateProgress; what it raises ends the wait, and the update goes on. deadlines: none: the defaults, changed by
    CKPT_ENGINE_DEADLINES. All else as for `Trainer.update_weights` and `Trainer.publish`.

    Asked again for files that are unchanged, and that all who took them serve, it returns the same report.

    Raises CkptEngineError when it was refused (no replica was touched): NOT_FOUND, INVALID_ARGUMENT or DATA_LOSS for
    what is no whole checkpoint, PERMISSION_DENIED outside the roots, FAILED_PRECONDITION as `Trainer.update_weights`;
    UNAVAILABLE or DEADLINE_EXCEEDED if it could not be brought to a report.
    """
    if version is not None:
        check_version(version)
    check_pool(pool)
    check_asked(pause_mode, timeout, replicas)
    if prefetch not in ("auto", "always", "never"):
        raise invalid(f"prefetch {prefetch!r} is none of auto, always, never")
    if until not in ("installed", "held"):
        raise invalid(f"until {until!r} is none of installed, held")
    if min_replicas is not None and (isinstance(min_replicas, bool) or not 0 <= min_replicas < 1 << 31):
        raise invalid(f"min_replicas {min_replicas!r} is not a number of replicas: give a whole number from 0")
    request = manager_pb2.UpdateFromDirectoryRequest(
        directory=os.fspath(directory),
        lineage=lineage,
        version=version,
        pause_mode=manager_pb2.PAUSE_MODE_UNSPECIFIED if pause_mode is None else pause_mode.upper(),
        timeout_seconds=timeout or 0.0,
        min_replicas=min_replicas,
        replicas=replicas,
        prefetch=prefetch.upper(),
        until=until.upper(),
        pool=pool,
        check_finite=check_finite,
        dry_run=dry_run,
    )
    limits = deadlines or Deadlines.from_environment(os.environ)
    # A process has to start, and another update of the lineage may have to end, before this one begins.
    seconds = limits.start + 2 * (timeout or limits.update) + 3 * limits.call_grace
    return reported(address, "UpdateFromDirectory", request, seconds, on_progress)
