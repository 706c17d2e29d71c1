"""Finds updates of the ledger by epoch, or by lineage and version, and returns them as messages. It decides which
update a request means, and what the error for an unknown one says. gRPC, HTTP and traces use it.
"""

from __future__ import annotations

from ckpt_engine.core.problems import CkptEngineError, aborted, invalid, not_found, precondition
from ckpt_engine.machines.manager.waits import unknown_version
from ckpt_engine.manager.ledger import Ledger, Record
from ckpt_engine.manager.refusals import Refusal, Refusals
from ckpt_engine.v1 import manager_pb2

NAMED = 4
"""Updates that are named to a caller that asks for an unknown one."""

EPOCHS = 1 << 62
"""Epochs and versions are below it; SQLite's integers could not hold much greater ones."""

PAGE = 50
MOST = 200
"""Updates in one answer: by default, and at most."""


PAGE_BYTES = 16 << 20
"""Most bytes of one answer, unless a single update has more: clients accept messages a few times as large."""


async def find_update(ledger: Ledger, request: manager_pb2.GetUpdateRequest) -> Record:
    """Finds the update that a request names. Raises INVALID_ARGUMENT for a request that names none or several, and
    NOT_FOUND, naming known updates, for an unknown one."""
    if request.HasField("epoch") == request.HasField("version"):
        raise invalid("name an update by its epoch, or by its version (and lineage): one of the two")
    if request.HasField("version"):
        return await _newest_to(ledger, request.version, request.lineage)
    if request.lineage:
        raise invalid(f"an epoch is enough to name an update: leave out the lineage, {request.lineage!r}")
    record = await ledger.record(request.epoch) if request.epoch < EPOCHS else None
    if record is None:
        last = [describe_update(each) for each in await ledger.history(None, NAMED)]
        newest = f"the last ones are {'; '.join(last)}" if last else "none is, since none has come so far"
        raise not_found(f"no update with epoch {request.epoch} is kept: {newest}")
    return record


async def list_updates(
    ledger: Ledger, refusals: Refusals, request: manager_pb2.ListUpdatesRequest
) -> manager_pb2.ListUpdatesResponse:
    """Lists whole reports, newest first, fewer than the limit if they are large. Raises INVALID_ARGUMENT for a limit
    that is too high."""
    limit = request.limit or PAGE
    if limit > MOST:
        raise invalid(f"an answer has at most {MOST} updates, not {limit}: ask for the next ones with before")
    before = min(request.before, EPOCHS) if request.HasField("before") else None
    records = await ledger.history(before, limit + 1)
    answer, size = manager_pb2.ListUpdatesResponse(), 0
    for record in records[:limit]:
        update = message(record)
        size += update.ByteSize()
        if answer.updates and size > PAGE_BYTES:
            break
        answer.updates.append(update)
    if len(records) > len(answer.updates):
        answer.next_before = answer.updates[-1].epoch
    if before is None:
        answer.refused.extend(refusal_message(each) for each in refusals.newest_first(limit))
    return answer


def message(record: Record) -> manager_pb2.UpdateRecord:
    """A record as a message."""
    return manager_pb2.UpdateRecord(
        epoch=record.epoch, identity=record.identity.message(), time=record.time, report=record.report
    )


def refusal_message(refusal: Refusal) -> manager_pb2.UpdateRefusal:
    """A refusal as a message."""
    return manager_pb2.UpdateRefusal(
        lineage=refusal.lineage, version=refusal.version, time=refusal.time, problem=refusal.problem
    )


def describe_update(record: Record) -> str:
    """An update as messages name it."""
    return f"epoch {record.epoch} (version {record.identity.number} of lineage {record.identity.lineage!r})"


def no_report(ledger: Ledger, record: Record) -> CkptEngineError:
    """The error for an update without a report: it runs, or the manager ended during it."""
    if record.epoch <= ledger.epoch:
        return aborted(f"the manager ended during {describe_update(record)}, so there is no report of it to draw")
    return precondition(f"{describe_update(record)} has no report yet: ask again when it is over")


async def _newest_to(ledger: Ledger, version: int, lineage: str) -> Record:
    """Finds the newest update to a version, without late replicas' catch-ups. lineage: empty: the only one that has
    the version."""
    versions = await ledger.identities()
    lineages = [lineage] if lineage else sorted({each.lineage for each in versions if each.number == version})
    if len(lineages) > 1:
        raise invalid(f"version {version} is one of several lineages: name one of {', '.join(lineages)} as lineage")
    unknown = []
    for each in lineages or list(dict.fromkeys(each.lineage for each in reversed(versions)))[:NAMED]:
        last = await ledger.last_update(each, version if 0 <= version < EPOCHS else -1)
        record = None if last.epoch is None else await ledger.record(last.epoch)
        if record is not None:
            return record
        unknown.append(unknown_version((each, version), last.last).message)
    raise not_found("; ".join(unknown) or f"no update to version {version} is kept, nor to any other one")
