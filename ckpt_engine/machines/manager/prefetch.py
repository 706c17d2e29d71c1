"""The relays of one update, between sealing and the intent: who is filled for whom, and what came of it.

- A relay is a connected holder that says what it can be filled with. It is filled for replicas that have a worker
  which reaches it, and with what all workers of its host need, also those of replicas that are away now.
- It counts when its hello names the version under the very table of its answer.
- A relay that fails, leaves, or does not answer in time is left out with a reason; no replica is touched by that.
- The slot that replicas may be reading is never given up: that of the version which is being installed beside this
  update, or else of the lineage's last version.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ckpt_engine.core.problems import deadline, unavailable
from ckpt_engine.core.reach import by_directory
from ckpt_engine.machines.events import Compiled, WorkerKey
from ckpt_engine.machines.manager.course import Course
from ckpt_engine.machines.manager.members import Holder
from ckpt_engine.machines.manager.prefetch_rule import prefetch_decision
from ckpt_engine.machines.manager.state import State
from ckpt_engine.machines.manager.targets import Targets
from ckpt_engine.v1 import manager_pb2, weights_pb2

Problem = weights_pb2.Problem

TRANSPORT = "relay_memory"


@dataclass
class Filling:
    """One relay that is filled. session: of the process that answered. left_out: why it does not count."""

    relay: str
    replicas: tuple[str, ...]
    command: manager_pb2.FillRelay
    answer: manager_pb2.RelayFilled | None = None
    session: str = ""
    left_out: Problem | None = None


Place = tuple[str, str]
"""What decides which relays a process reaches: its host and its directory of relays."""


def near_relays(state: State, targets: Targets) -> dict[str, set[str]]:
    """By relay: the replicas with a worker that reaches it."""
    relays = [holder for holder in state.members.connected_holders() if holder.filling is not None]
    found: dict[str, set[str]] = {holder.source: set() for holder in relays}
    near: dict[Place, list[str]] = {}
    for worker in targets.workers():
        if TRANSPORT not in worker.transports:
            continue
        place = _place(worker.host)
        if place not in near:
            near[place] = [holder.source for holder in relays if by_directory(holder.host, worker.host).ok]
        for relay in near[place]:
            found[relay].add(worker.key[0])
    return found


def _place(host: weights_pb2.Host) -> Place:
    return host.boot_id, host.relay_directory


class Prefetch:
    """Of one update whose root and record are known. why: a sentence for each relay, whether it is filled or not."""

    def __init__(self, course: Course, targets: Targets, identity: weights_pb2.Identity) -> None:
        self._course = course
        self._state = course.state
        self._order = course.order
        self._targets = targets
        self._identity = identity
        self._fillings: dict[str, Filling] = {}
        self.why: list[str] = []

    def choose(self, compiled: Compiled, record: manager_pb2.BlobRef, before: Prefetch | None) -> None:
        """Decides which relays are filled. before: of the update whose installs go on: replicas read what it filled."""
        readers, known = self._readers(compiled.distances), self._needs()
        for holder in self._state.members.connected_holders():
            if holder.filling is None:
                continue
            decision = prefetch_decision(holder.source, self._order.prefetch, self._order.until, readers[holder.source])
            self.why.append(decision.why)
            if decision.replicas:
                own = {
                    digest: ref
                    for host, needs in known.values()
                    if by_directory(holder.host, host).ok
                    for digest, ref in needs.items()
                }
                command = self._command(holder, record, own, before)
                self._fillings[holder.source] = Filling(holder.source, decision.replicas, command)
        if not self.why:
            self.why.append("no relay has a session with this manager")

    def missing(self) -> list[Filling]:
        """Those that are waited for."""
        return [each for each in self._fillings.values() if each.left_out is None and not self._holds(each)]

    def held(self) -> list[Filling]:
        """Those that hold the version, and say so."""
        return [each for each in self._fillings.values() if each.left_out is None and self._holds(each)]

    def send(self, seconds: float) -> None:
        """Tells, again, everybody who has not answered."""
        for filling in self.missing():
            holder = self._state.members.holders.get(filling.relay)
            if holder is not None and filling.answer is None:
                command = manager_pb2.FillRelay()
                command.CopyFrom(filling.command)
                command.deadline_seconds = seconds
                self._state.send(holder, command)

    def take(self, holder: Holder, body: manager_pb2.RelayFilled) -> None:
        """An answer."""
        filling = self._fillings.get(holder.source)
        if filling is None or filling.left_out is not None:
            return
        filling.answer, filling.session = body, holder.session_id
        if body.HasField("problem"):
            filling.left_out = body.problem

    def lost(self, holder: Holder) -> None:
        """Its session ended: it has some time to come back."""
        if self._waits_for(holder):
            self._course.timer(f"relay {holder.source}", self._state.deadlines.lease)

    def back(self, holder: Holder) -> bool:
        """It said hello; whether it is one of these. Another process of this name holds nothing of what the one before
        it has brought."""
        filling = self._fillings.get(holder.source)
        if filling is None:
            return False
        self._course.cancel(f"relay {holder.source}")
        if filling.answer is not None and filling.session != holder.session_id:
            filling.answer = None
        return True

    def gone(self, source: str, why: str) -> None:
        """It will not come back, or has not in time."""
        filling = self._fillings.get(source)
        holder = self._state.members.holders.get(source)
        if filling is not None and filling.left_out is None and (holder is None or holder.peer is None):
            filling.left_out = unavailable(why).problem

    def overdue(self, seconds: float) -> None:
        """The time for filling is over, `seconds` after the update began."""
        for filling in self.missing():
            said = "does not say that it holds the version" if filling.answer is not None else "has not answered"
            filling.left_out = deadline(f"it {said} {seconds:.1f} s after the update began").problem

    def leave_out(self, relay: str, problem: Problem) -> None:
        """It was filled, and cannot be installed from."""
        filling = self._fillings[relay]
        filling.left_out = filling.left_out or problem

    def reports(self) -> list[manager_pb2.RelayReport]:
        """What each relay did."""
        return [
            manager_pb2.RelayReport(relay=each.relay, filled=each.answer, replicas=each.replicas)
            for each in self._fillings.values()
        ]

    def why_not(self) -> dict[str, Problem]:
        """By replica: why the relay that was to serve it does not count."""
        out = (each for each in self._fillings.values() if each.left_out is not None)
        return {name: each.left_out for each in out for name in each.replicas if each.left_out is not None}

    def warnings(self) -> list[str]:
        """What is well and yet not what was asked for."""
        if self._order.prefetch != manager_pb2.ALWAYS or self._fillings:
            return []
        return [f"prefetch is 'always', and no relay was filled, so replicas read the trainer: {'; '.join(self.why)}"]

    def said(self) -> str:
        """Why relays were filled or not, and why some do not count."""
        out = [
            f"{each.relay} is left out: {each.left_out.message}" for each in self._fillings.values() if each.left_out
        ]
        return "; ".join([*self.why, *out])

    def blobs(self) -> list[manager_pb2.BlobRef]:
        """Blobs that relays may fetch."""
        return [
            ref
            for filling in self._fillings.values()
            for ref in (filling.command.record, *filling.command.tables, *filling.command.needs)
        ]

    # -- who and what

    def _waits_for(self, holder: Holder) -> bool:
        filling = self._fillings.get(holder.source)
        return filling is not None and filling.left_out is None

    def _holds(self, filling: Filling) -> bool:
        holder = self._state.members.holders.get(filling.relay)
        if holder is None or holder.peer is None or filling.answer is None:
            return False
        return any(self._is_it(filling, held) for held in holder.held)

    def _table(self, relay: str) -> bytes:
        """The digest of the table by which this relay is read; empty if it is not."""
        filling = self._fillings.get(relay)
        return b"" if filling is None or filling.answer is None else filling.answer.table

    def _is_it(self, filling: Filling, held: manager_pb2.Held) -> bool:
        """Whether this is what it was filled with: it may hold the version in another slot too, for other needs."""
        return (
            filling.answer is not None and held.identity == self._identity and held.table.digest == filling.answer.table
        )

    def _readers(self, distances: Mapping[WorkerKey, int]) -> dict[str, dict[str, int | None]]:
        """By relay: the replicas that lack the version and reach it, each with the distance of what it would read."""
        lacking = set(self._targets.lacking(self._identity))
        farthest: dict[str, int | None] = {}
        for worker in self._targets.workers():
            own, known = distances.get(worker.key), farthest.get(worker.key[0], 0)
            farthest[worker.key[0]] = None if own is None or known is None else max(own, known)
        near = near_relays(self._state, self._targets)
        return {relay: {name: farthest[name] for name in names & lacking} for relay, names in near.items()}

    def _command(
        self,
        holder: Holder,
        record: manager_pb2.BlobRef,
        needs: Mapping[bytes, manager_pb2.BlobRef],
        before: Prefetch | None,
    ) -> manager_pb2.FillRelay:
        assert holder.filling is not None
        latest = self._state.versions.latest.get(self._order.lineage)
        others = [
            held.table
            for other in self._state.members.connected_holders()
            for held in other.held
            if held.identity == self._identity and other.source != holder.source
        ]
        return manager_pb2.FillRelay(
            fence=self._course.fence,
            identity=self._identity,
            record=record,
            tables=[*(source.table for source in self._order.published.sources), *others],
            needs=[needs[digest] for digest in sorted(needs)],
            everything=holder.filling.everything,
            keep=before._identity if before is not None else None if latest is None else latest.identity,
            keep_table=b"" if before is None else before._table(holder.source),
        )

    def _needs(self) -> dict[Place, tuple[weights_pb2.Host, dict[bytes, manager_pb2.BlobRef]]]:
        """Of all workers whose needs are known against this manifest, by where they are; each once."""
        manifest = self._order.published.manifest.digest
        known = [(worker.host, worker.needs) for worker in self._targets.workers()]
        known += [
            (prepared.host, prepared.needs)
            for replica in self._state.members.replicas.values()
            for prepared in replica.prepared.values()
            if prepared.manifest_digest == manifest
        ]
        found: dict[Place, tuple[weights_pb2.Host, dict[bytes, manager_pb2.BlobRef]]] = {}
        for host, needs in known:
            found.setdefault(_place(host), (host, {}))[1].setdefault(needs.digest, needs)
        return found
