"""Asks a manager how an update went: its report, and where workers are."""

from __future__ import annotations

import grpc

from ckpt_engine.channel import ManagerStub, error_of, open_channel
from ckpt_engine.core.problems import aborted, deadline, invalid, not_found
from ckpt_engine.leader import reached
from ckpt_engine.timeline.predicted import Whereabouts
from ckpt_engine.v1 import manager_pb2, weights_pb2

ASK_SECONDS = 10.0
"""How long one answer may take. An update that still runs is waited for only with `wait`."""

LOOK_SECONDS = 1.0


async def report_of(
    manager: str, version: int | None, lineage: str | None = None, wait: float | None = None, epoch: int | None = None
) -> tuple[manager_pb2.UpdateReport, Whereabouts]:
    """The report of the newest update to a version, or of the one of an epoch, and where its workers are now.

    lineage: of the version; None: the only one with such an update. wait: seconds to wait for an update that runs;
    None: it is not waited for. Raises CkptEngineError: what the manager answers; INVALID_ARGUMENT if several lineages
    have that version; NOT_FOUND if none has; ABORTED if the update of the epoch ended without a report;
    DEADLINE_EXCEEDED if it still runs.
    """
    seconds = LOOK_SECONDS if wait is None else wait
    async with open_channel(manager) as channel:
        stub = ManagerStub(await reached(channel))
        try:
            status = await stub.GetStatus(manager_pb2.GetStatusRequest(), timeout=ASK_SECONDS)
            if epoch is not None:
                update_request = manager_pb2.GetUpdateRequest(epoch=epoch, lineage=lineage or "")
                record = await stub.GetUpdate(update_request, timeout=ASK_SECONDS)
                if record.HasField("report"):
                    return record.report, Whereabouts.of(status)
                # It runs, or the manager ended in the middle, which WaitForUpdate tells apart.
                lineage, version = record.identity.lineage, record.identity.version
        except grpc.RpcError as error:
            raise error_of(error, manager) from None
        names = [lineage] if lineage else [each.lineage for each in status.lineages]
        if not names:
            raise not_found("this manager knows no lineage now: name the one that you mean with --lineage")
        found: list[manager_pb2.UpdateReport] = []
        unknown: list[str] = []
        for name in names:
            request = manager_pb2.WaitForUpdateRequest(lineage=name, version=version, timeout_seconds=seconds)
            try:
                found.append(await stub.WaitForUpdate(request, timeout=seconds + ASK_SECONDS))
            except grpc.RpcError as error:
                unknown.append(_reason_unknown(error, wait, manager))
    if not found:
        among = "" if lineage else "; a lineage that is forgotten is named with --lineage"
        raise not_found(f"{'; '.join(unknown)}{among}")
    if len(found) > 1:
        several = ", ".join(repr(report.identity.lineage) for report in found)
        raise invalid(f"version {version} is one of several lineages: name one of {several} with --lineage")
    if epoch not in (None, found[0].fence.epoch):
        raise aborted(
            f"update {epoch} has no report; the newest to its version {version} is epoch {found[0].fence.epoch}"
        )
    return found[0], Whereabouts.of(status)


def _reason_unknown(rpc_error: grpc.RpcError, wait: float | None, manager: str) -> str:
    """Why the manager knows no such update. Raises the error if there is another reason for having no report."""
    error = error_of(rpc_error, manager)
    if error.problem.code == weights_pb2.Problem.CODE_NOT_FOUND:
        return error.problem.message
    if error.problem.code == weights_pb2.Problem.CODE_DEADLINE_EXCEEDED and wait is None:
        raise deadline(f"{error.problem.message}; --wait waits for its end") from None
    raise error from None
