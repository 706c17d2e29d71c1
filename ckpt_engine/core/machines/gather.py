"""The ranks' calls of one update, from the first to the last.

Decides which calls belong together, when all are there, which version they mean and which replicas it is for. Changes
nothing: what comes out is an Order, a Problem, or the wish to wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ckpt_engine.core.machines.events import Call, Key
from ckpt_engine.core.machines.manager_state import State, describe
from ckpt_engine.core.machines.order import Order
from ckpt_engine.core.machines.publications import Publications
from ckpt_engine.core.machines.selection import min_replicas_of, replicas_for
from ckpt_engine.core.problems import CkptEngineError, aborted, invalid, precondition
from ckpt_engine.v1 import manager_pb2

GATHER: Key = ("gather",)


@dataclass
class Gather:
    """Calls of one lineage. end: by when the update must have reported, for the most impatient caller."""

    state: State
    publications: Publications
    lineage: str
    started: float
    end: float = float("inf")
    calls: dict[int, Call] = field(default_factory=dict)
    requests: dict[int, manager_pb2.UpdateWeightsRequest] = field(default_factory=dict)

    def join(self, call: Call, request: manager_pb2.UpdateWeightsRequest, now: float) -> None:
        """Takes a rank's call in. Raises ABORTED (for this call alone) if it cannot be part of this update."""
        rank = request.rank
        if request.lineage != self.lineage:
            raise aborted(f"another update runs: {self.describe()}")
        if rank in self.calls:
            raise aborted(f"rank {rank} of lineage {self.lineage!r} has called already", ranks=(rank,))
        trainer = self.state.members.trainers.get((self.lineage, rank))
        if trainer is not None and request.session_id and trainer.session_id != request.session_id:
            raise aborted(
                f"rank {rank} of lineage {self.lineage!r} is another process on host {trainer.host.name!r}",
                ranks=(rank,),
            )
        self.calls[rank] = call
        self.requests[rank] = request
        self.end = min(self.end, now + (request.timeout_seconds or self.state.deadlines.update))
        self.state.set_timer(
            GATHER, min(self.started + self.state.deadlines.gather, self.end - self.state.deadlines.report) - now
        )

    def leave(self, rank: int) -> None:
        """A rank's call was cancelled; it may call again."""
        del self.calls[rank]
        del self.requests[rank]

    def describe(self) -> str:
        """What is going on, for who must wait for it."""
        return f"gathering ranks of lineage {self.lineage!r}: {', '.join(self._missing()) or 'all are there'}"

    def order(self, now: float) -> Order | None:
        """What the ranks want, once all are there; None: wait. Raises CkptEngineError if it must be refused."""
        self._check_agreement()
        publication = self.publications.get(self.lineage)
        if not self._missing() and publication.problem is not None:
            raise CkptEngineError(publication.problem)
        if self._missing() or publication.published is None:
            return None
        request = self.requests[min(self.requests)]
        return Order(
            lineage=self.lineage,
            version=self._version(),
            published=publication.published,
            replicas=replicas_for(self.state, request, now),
            calls=self.calls,
            pause_mode=request.pause_mode,
            min_replicas=min_replicas_of(request),
            selection=frozenset(request.replicas) or None,
            end=self.end,
        )

    def overdue(self) -> CkptEngineError:
        """The refusal when ranks did not come in time; names them, and tables that do not agree."""
        publication = self.publications.get(self.lineage)
        if not self._missing() and publication.problem is not None:
            return CkptEngineError(publication.problem)
        missing = self._missing()
        reason = "; ".join(missing) if missing else "the tables of its ranks are still being merged"
        return precondition(
            f"the update of lineage {self.lineage!r} cannot begin: {reason}", ranks=self._missing_ranks()
        )

    def _missing(self) -> list[str]:
        """What is missing of which rank."""
        ranks = self.state.members.ranks(self.lineage)
        if not ranks:
            return ["no rank has a session"]
        missing = []
        for rank in range(next(iter(ranks.values())).world_size):
            trainer = ranks.get(rank)
            if trainer is None or trainer.peer is None:
                missing.append(f"rank {rank} has no session")
            elif trainer.table is None:
                missing.append(f"rank {rank} has not published")
            elif rank not in self.calls:
                missing.append(f"rank {rank} has not called update_weights")
        return missing

    def _missing_ranks(self) -> Sequence[int]:
        ranks = self.state.members.ranks(self.lineage)
        world_size = next(iter(ranks.values())).world_size if ranks else 0
        return [
            rank
            for rank in range(world_size)
            if rank not in ranks or ranks[rank].peer is None or ranks[rank].table is None or rank not in self.calls
        ]

    def _check_agreement(self) -> None:
        """All ranks must ask for the same; else nobody knows what was meant."""
        versions = {rank: self._meant(request) for rank, request in self.requests.items()}
        if len(set(versions.values())) > 1:
            said = ", ".join(f"rank {rank}: {versions[rank]}" for rank in sorted(versions))
            raise invalid(f"the ranks ask for different versions: {said}", ranks=sorted(versions))
        wishes = {
            rank: (request.pause_mode, min_replicas_of(request), tuple(sorted(request.replicas)))
            for rank, request in self.requests.items()
        }
        if len(set(wishes.values())) > 1:
            raise invalid("the ranks differ in pause mode, replicas or min_replicas", ranks=sorted(wishes))

    def _meant(self, request: manager_pb2.UpdateWeightsRequest) -> int:
        """The version that a request means: its own, or the lineage's next. A new lineage begins with 0."""
        if request.HasField("version"):
            return request.version
        last = self.state.last.get(self.lineage)
        return 0 if last is None else last.version + 1

    def _version(self) -> int:
        version = self._meant(self.requests[min(self.requests)])
        last = self.state.last.get(self.lineage)
        if version < 0:
            raise invalid(f"version {version} is negative")
        if last is not None and version < last.version:
            raise precondition(
                f"version {version} goes backwards: {describe(last)} was installed before; start a new lineage"
            )
        return version
