"""Publishes directories of one lineage, one after the other, and brings replicas to each.

A directory stays published until the next one, so that late replicas can be served from it. Used on one thread.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt_engine.client import Client
from ckpt_engine.core.deadlines import Deadlines
from ckpt_engine.core.problems import CkptEngineError, error, not_found, precondition
from ckpt_engine.extras import require
from ckpt_engine.options import Progress, options_message, options_of
from ckpt_engine.publishing.roots import check_file, inside, resolve
from ckpt_engine.source.safetensors import read_directory
from ckpt_engine.v1 import manager_pb2

if TYPE_CHECKING:
    from ckpt_engine.trainer import Trainer

Files = tuple[tuple[str, int, int, int, int, int], ...]
"""Each file: path, device, inode, bytes, and the times (nanoseconds) of the last change of content and of inode."""

Paths = tuple[Path, Path | None]
"""The target's directory, and the draft's, if there is one."""

STALE_HEARTBEATS = 3
"""Heartbeats within which a replica has reported that it serves."""

log = logging.getLogger("ckpt_engine.publishing")


class Publisher:
    """Publishes directories of one lineage, one after the other.

    address: the manager. roots: what may be published lies below one of them.
    """

    def __init__(self, address: str, lineage: str, roots: Sequence[Path], deadlines: Deadlines) -> None:
        self._address, self._lineage, self._roots, self._deadlines = address, lineage, roots, deadlines
        self._trainer: Trainer | None = None
        self._last: tuple[bytes, Files, manager_pb2.UpdateReport] | None = None

    def update(
        self, request: manager_pb2.UpdateFromDirectoryRequest, on_progress: Progress
    ) -> manager_pb2.UpdateReport:
        """Brings replicas to a directory. A repeated request for unchanged files that are served returns the last
        report.

        Raises CkptEngineError: as `roots.resolve` and `source.safetensors.read_directory`, before any other process is
        asked, and as `Trainer.publish` and `Trainer.update_weights`.
        """
        try:
            paths = self._paths(request)
            path, files = paths[0], self._files(paths)
        except CkptEngineError as refusal:
            problem = refusal.problem
            raise error(
                problem.code, f"{problem.message} (on {socket.gethostname()}, the manager's host)", problem.tensors
            ) from refusal
        if self._repeats(request, files):
            assert self._last is not None
            log.info("asked again for %s, which is served already as version %s", path, self._last[2].identity.version)
            return self._last[2]
        require("trainer", "torch", "numpy", what=f"publishing {path} on the manager's host")
        self._last = self._last if request.options.dry_run else None
        try:
            report = self._bring(request, paths, files, on_progress)
        except BaseException:
            self.close()
            raise
        if report.ok and not report.dry_run:
            self._last = _request_key(request), files, report
        return report

    def close(self) -> None:
        """Says goodbye to the manager. `update` may follow."""
        trainer, self._trainer = self._trainer, None
        if trainer is not None:
            trainer.close()

    def _bring(
        self, request: manager_pb2.UpdateFromDirectoryRequest, paths: Paths, files: Files, on_progress: Progress
    ) -> manager_pb2.UpdateReport:
        from ckpt_engine.trainer import Trainer  # takes seconds, for which no refusal above should wait

        trainer = self._trainer
        if trainer is None:
            trainer = self._trainer = Trainer(self._address, 0, 1, self._lineage, deadlines=self._deadlines)
        trainer.publish(paths[0], draft=paths[1], check_finite=request.check_finite)
        # The trainer has opened the files once more by name.
        if self._paths(request) != paths or self._files(paths) != files:
            where = " or ".join(str(path) for path in paths if path is not None)
            raise precondition(f"files of {where} changed while they were opened: call again when they lie still")
        return trainer.update_weights(
            request.version if request.HasField("version") else None,
            on_progress=on_progress,
            **options_of(request.options),
        ).message

    def _paths(self, request: manager_pb2.UpdateFromDirectoryRequest) -> Paths:
        """The directories of a request. Raises as `roots.resolve`."""
        draft = request.draft_directory
        return resolve(request.directory, self._roots), resolve(draft, self._roots) if draft else None

    def _files(self, paths: Paths) -> Files:
        """Identifies the files. Raises as `read_directory`, and as `check_file` for each before it is opened."""
        files = []
        found = (read_directory(path, lambda file: check_file(file, self._roots)) for path in paths if path is not None)
        for header in chain.from_iterable(found):
            real = inside(header.path, self._roots)
            try:
                of = os.stat(real)
            except OSError as os_error:
                raise not_found(f"cannot look at {header.path}: {os_error.strerror}") from os_error
            files.append((str(real), of.st_dev, of.st_ino, of.st_size, of.st_mtime_ns, of.st_ctime_ns))
        return tuple(files)

    def _repeats(self, request: manager_pb2.UpdateFromDirectoryRequest, files: Files) -> bool:
        """Whether the request equals the last one, and all replicas that took that update still serve it."""
        if self._last is None:
            return False
        last_request, last_files, report = self._last
        same_version = not request.HasField("version") or request.version == report.identity.version
        if not same_version or _request_key(request) != last_request or last_files != files:
            return False
        # A heartbeat from before the end of the last update may still say that a replica is closed.
        end = time.monotonic() + STALE_HEARTBEATS * self._deadlines.heartbeat
        while not (serving := still_served(report, self._status())) and time.monotonic() < end:
            time.sleep(self._deadlines.heartbeat / 4)
        return serving

    def _status(self) -> manager_pb2.GetStatusResponse:
        with Client(self._address, deadlines=self._deadlines) as client:
            return client.status()


def still_served(report: manager_pb2.UpdateReport, status: manager_pb2.GetStatusResponse) -> bool:
    """Whether each replica that took an update serves its version, or has only reported since that it lost it: then it
    has started again, and the manager brings it up."""
    took = {each.replica: each.fence for each in report.replicas if each.outcome == manager_pb2.OUTCOME_NEW_SERVING}
    have = {
        replica.name
        for replica in status.replicas
        if replica.connected and replica.workers and not replica.asleep
        if (
            replica.serving
            if replica.identity == report.identity
            # The outcome may be known before the heartbeat that tells what it holds.
            else replica.last_outcome.fence == took.get(replica.name) and not replica.HasField("unfit")
        )
    }
    return took.keys() <= have


def _request_key(request: manager_pb2.UpdateFromDirectoryRequest) -> bytes:
    """What two requests for the same update have in common. Directories are identified by their files; the version is
    compared with the one that the update got."""
    same = manager_pb2.UpdateFromDirectoryRequest()
    same.CopyFrom(request)
    same.ClearField("directory")
    same.draft_directory = "given" if request.draft_directory else ""
    same.ClearField("version")
    same.options.CopyFrom(options_message(options_of(request.options)))
    return same.SerializeToString(deterministic=True)
