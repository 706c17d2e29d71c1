"""Public calls of the manager, each written once for `Client` and `AsyncClient`: method, request, time limit, and
how its answer is read.

Decides what a call asks and what its answer means. How it is sent and waited for is the clients' (client.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from google.protobuf.message import Message

from ckpt_engine.core.arguments import (
    checked_count,
    checked_epoch,
    checked_flag,
    checked_names,
    checked_version,
    choice,
)
from ckpt_engine.core.deadlines import Deadlines, check_seconds
from ckpt_engine.options import DEPLOY_ACTIONS, DeployAction, MemoryTag, RollbackOptions, UpdateOptions, options_message
from ckpt_engine.report import UpdateReport
from ckpt_engine.v1 import manager_pb2, weights_pb2

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Ask(Generic[Answer]):
    """One call: method, request, time limit, and how the answer is read."""

    method: str  # of the manager's service
    request: Message
    seconds: float  # that the call may take
    read: Callable[[Any], Answer]


def held_versions(status: manager_pb2.GetStatusResponse) -> list[manager_pb2.VersionStatus]:
    """The versions that can be read (from holders, ranks or files) or that replicas serve: by lineage, newest first."""
    found: dict[tuple[str, int, bytes], manager_pb2.VersionStatus] = {}

    def place(identity: weights_pb2.Identity) -> manager_pb2.VersionStatus:
        key = (identity.lineage, -identity.version, identity.root)
        return found.setdefault(key, manager_pb2.VersionStatus(identity=identity))

    for holder in status.holders:
        for held in holder.held if holder.connected else ():
            place(held).holders.append(f"{holder.kind} {holder.name}")
    for version in status.sealed:
        place(version.identity).holders.extend(version.holders)
    for replica in status.replicas:
        if replica.HasField("identity"):
            place(replica.identity).replicas.append(replica.name)
    for each in found.values():
        each.holders.sort()
        each.replicas.sort()
    return [found[key] for key in sorted(found)]


class Asks:
    """The calls, as both clients make them. limits: for calls without a timeout."""

    def __init__(self, address: str, limits: Deadlines) -> None:
        self.address = address
        self.limits = limits

    def status(self) -> Ask[manager_pb2.GetStatusResponse]:
        return Ask("GetStatus", manager_pb2.GetStatusRequest(), self.limits.status, _as_it_is)

    def from_directory(
        self,
        directory: str | os.PathLike[str],
        version: int | None,
        lineage: str | None,
        check_finite: bool,
        draft_directory: str | os.PathLike[str] | None,
        options: UpdateOptions,
    ) -> Ask[manager_pb2.UpdateEvent]:
        if version is not None:
            checked_version(version)
        checked_flag("check_finite", check_finite)
        wishes = options_message(options)
        request = manager_pb2.UpdateFromDirectoryRequest(
            directory=os.fsdecode(directory),
            lineage=lineage or "",
            version=version,
            check_finite=check_finite,
            draft_directory="" if draft_directory is None else os.fsdecode(draft_directory),
            options=wishes,
        )
        # A process has to start, and another update of the lineage may have to end, before this one begins.
        limit = wishes.timeout_seconds or self.limits.update
        seconds = self.limits.start + 2 * limit + 3 * self.limits.call_grace
        return Ask("UpdateFromDirectory", request, seconds, _as_it_is)

    def rollback(self, version: int, lineage: str | None, options: RollbackOptions) -> Ask[manager_pb2.UpdateEvent]:
        checked_version(version)
        wishes = options_message(options)
        request = manager_pb2.RollbackRequest(lineage=lineage or "", version=version, options=wishes)
        seconds = (wishes.timeout_seconds or self.limits.update) + self.limits.call_grace
        return Ask("Rollback", request, seconds, _as_it_is)

    def deploy(self, action: DeployAction, number: int | None, reason: str) -> Ask[manager_pb2.Deployment]:
        if number is not None:
            checked_epoch(number)
        what = choice("action", action, DEPLOY_ACTIONS)
        request = manager_pb2.SteerDeploymentRequest(number=number or 0, action=what, reason=reason)
        return Ask("SteerDeployment", request, self.limits.status, _as_it_is)

    def wait(self, lineage: str, version: int, timeout: float | None) -> Ask[UpdateReport]:
        checked_version(version)
        seconds = self.limits.update if timeout is None else timeout
        check_seconds("a timeout", seconds)
        request = manager_pb2.WaitForUpdateRequest(lineage=lineage, version=version, timeout_seconds=seconds)
        return Ask("WaitForUpdate", request, seconds + self.limits.call_grace, UpdateReport)

    def update(self, version: int | None, lineage: str | None, epoch: int | None) -> Ask[manager_pb2.UpdateRecord]:
        if version is not None:
            checked_version(version)
        if epoch is not None:
            checked_epoch(epoch)
        request = manager_pb2.GetUpdateRequest(epoch=epoch, lineage=lineage or "", version=version)
        return Ask("GetUpdate", request, self.limits.status, _as_it_is)

    def updates(self, limit: int, before: int | None) -> Ask[list[manager_pb2.UpdateRecord]]:
        checked_count("limit", limit, "updates")
        if before is not None:
            checked_epoch(before)
        request = manager_pb2.ListUpdatesRequest(before=before, limit=limit)
        return Ask("ListUpdates", request, self.limits.status, lambda answer: list(answer.updates))

    def sleep(
        self, level: int, replicas: Sequence[str], pool: str, timeout: float | None
    ) -> Ask[list[manager_pb2.SleepWakeResult]]:
        checked_count("level", level, "a level: 1 keeps weights on the host, 2 discards them")
        seconds = self._slowest(replicas, timeout)
        request = manager_pb2.SleepRequest(level=level, replicas=replicas, pool=pool, timeout_seconds=seconds)
        return Ask("Sleep", request, seconds + self.limits.call_grace, _results)

    def wake(
        self, tags: Sequence[MemoryTag], replicas: Sequence[str], pool: str, timeout: float | None
    ) -> Ask[list[manager_pb2.SleepWakeResult]]:
        checked_names("tags", tags)
        seconds = self._slowest(replicas, timeout)
        request = manager_pb2.WakeRequest(tags=tags, replicas=replicas, pool=pool, timeout_seconds=seconds)
        return Ask("Wake", request, seconds + self.limits.call_grace, _results)

    def _slowest(self, replicas: Sequence[str], timeout: float | None) -> float:
        checked_names("replicas", replicas)
        seconds = self.limits.sleep_wake if timeout is None else timeout
        check_seconds("a timeout", seconds)
        return seconds

    def retry(self, name: str) -> Ask[str]:
        return Ask("RetryReplica", manager_pb2.RetryReplicaRequest(name=name), self.limits.status, _message)

    def hold(self, name: str, reason: str) -> Ask[manager_pb2.OperatorHold]:
        request = manager_pb2.HoldReplicaRequest(name=name, reason=reason)
        return Ask("HoldReplica", request, self.limits.status, lambda answer: answer.hold)

    def release(self, name: str) -> Ask[str]:
        return Ask("ReleaseReplica", manager_pb2.ReleaseReplicaRequest(name=name), self.limits.status, _message)

    def evict(self, name: str, reason: str) -> Ask[bool]:
        request = manager_pb2.EvictReplicaRequest(name=name, reason=reason)
        return Ask("EvictReplica", request, self.limits.status, lambda answer: bool(answer.was_connected))

    def evict_lineage(self, lineage: str, reason: str) -> Ask[manager_pb2.EvictLineageResponse]:
        request = manager_pb2.EvictLineageRequest(lineage=lineage, reason=reason)
        return Ask("EvictLineage", request, self.limits.status, _as_it_is)

    def forget(self, lineage: str, dry_run: bool) -> Ask[list[str]]:
        checked_flag("dry_run", dry_run)
        request = manager_pb2.ForgetLineageRequest(lineage=lineage, dry_run=dry_run)
        return Ask("ForgetLineage", request, self.limits.status, lambda answer: list(answer.effects))

    def watch(self, watcher: str) -> manager_pb2.WatchReplicasRequest:
        return manager_pb2.WatchReplicasRequest(watcher=watcher)


class WatchedReplicas:
    """All replicas by name, from a stream of WatchReplicas."""

    def __init__(self) -> None:
        self.replicas: dict[str, manager_pb2.WatchedReplica] = {}

    def take(self, message: manager_pb2.WatchReplicasResponse) -> Mapping[str, manager_pb2.WatchedReplica] | None:
        """Takes a message; returns the replicas after it, None if it brought no news."""
        if message.snapshot:
            self.replicas = {}
        elif not message.replicas and not message.gone:
            return None
        self.replicas |= {each.name: each for each in message.replicas}
        for name in message.gone:
            self.replicas.pop(name, None)
        return dict(self.replicas)


def _as_it_is(answer: Any) -> Any:
    return answer


def _message(answer: Any) -> str:
    return str(answer.message)


def _results(answer: manager_pb2.SleepResponse | manager_pb2.WakeResponse) -> list[manager_pb2.SleepWakeResult]:
    return list(answer.results)
