"""The work that machines ask their shells for, and what it results in.

They are listed by the machine that asks: `ManagerTask`, `AgentTask`, `TrainerTask`, and `RelayTask`, which has a file
of its own, as have those of collectives and of the ledger. Each says which part of the package does it, and what its
`Done` carries. A task that fails carries a Problem and no result. `seconds`: how long it may take; a shell answers by
then, whatever the work does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from ckpt_engine.core.offers import Shut
from ckpt_engine.core.sleeping import Sleeping
from ckpt_engine.core.version import Version
from ckpt_engine.machines.ledger_tasks import LedgerTask
from ckpt_engine.machines.part_tasks import CollectivePlan, RunPart, WorkerKey
from ckpt_engine.machines.relay.tasks import RelayTask
from ckpt_engine.v1 import manager_pb2, weights_pb2

# ------------------------------------------------------------------------------------------------------ of the manager


@dataclass(frozen=True)
class SourceOffer:
    """What the manager's decisions need to know of one source's SourceTable. rank: None if it is no trainer rank. host,
    ways: where it is, and the transports over which each of its regions is offered, equal ones once. warnings: for the
    report."""

    source: str
    rank: int | None
    table: manager_pb2.BlobRef
    stays_sealed: bool
    source_copies: int
    outlives: bool  # files: readable when the process that offers them is gone
    copied: tuple[weights_pb2.CopiedTensors, ...] = ()
    host: weights_pb2.Host = field(default_factory=weights_pb2.Host)
    ways: tuple[frozenset[str], ...] = ()
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Published:
    """The merged tables of all sources of a lineage. `handle` is the shell's own and comes back in later tasks.

    parts: sets of sources, by their ids, such that the version is made of one source of each.
    """

    manifest: manager_pb2.BlobRef
    sources: tuple[SourceOffer, ...]
    tensors: int
    bytes: int
    handle: object = field(default=None, compare=False, repr=False)
    parts: frozenset[frozenset[str]] = frozenset()


@dataclass(frozen=True)
class PlanWorker:
    """A worker that plans are wanted for. shut: what it could not open."""

    key: WorkerKey
    needs: manager_pb2.BlobRef
    host: weights_pb2.Host
    transports: tuple[str, ...]
    shut: tuple[Shut, ...] = ()


@dataclass(frozen=True)
class Compiled:
    """Plans of all workers, and what each source must digest for them. All of them are stored as blobs. Sources without
    atoms need not be asked.

    bytes: read by each worker. distances: of the farthest source that each worker reads (core.reach.Distance). handle:
    the shell's own, comes back in CombineSeals. unfit: replicas for which no plan can be made, and why; there are no
    plans for their workers. collective: of those that were to be in one, if there are any.
    """

    plans: Mapping[WorkerKey, manager_pb2.BlobRef]
    atoms: Mapping[str, manager_pb2.BlobRef]  # source id -> Atoms
    bytes: Mapping[WorkerKey, int]
    handle: object = field(default=None, compare=False, repr=False)
    unfit: Mapping[str, weights_pb2.Problem] = field(default_factory=dict)
    distances: Mapping[WorkerKey, int] = field(default_factory=dict)
    collective: CollectivePlan | None = None
    edges: Mapping[WorkerKey, Sequence[manager_pb2.EdgeReport]] = field(default_factory=dict)  # if they were asked for


@dataclass(frozen=True)
class Combined:
    """What the sealed digests add up to. `expected`: Digests in the order of each worker's needs, stored as blobs.

    record: the SealedRecord of these weights, a blob; None if the plans came from one.
    """

    root: bytes
    expected: Mapping[WorkerKey, manager_pb2.BlobRef]
    record: manager_pb2.BlobRef | None = None


@dataclass(frozen=True)
class MergeTables:
    """Merge the tables of all ranks (core.publication.merge_tables), store the manifest. Result: Published.

    Fails with the Problem that names tensors and ranks; NOT_FOUND if a table's blob is not held any more.
    """

    lineage: str
    tables: tuple[manager_pb2.BlobRef, ...]  # by rank
    seconds: float


@dataclass(frozen=True)
class HeldOffer:
    """What a holder, or a rank, offers of one version. source: its id. record: None if it brings none. rank: None if it
    is no trainer rank."""

    source: str
    table: manager_pb2.BlobRef
    record: manager_pb2.BlobRef | None
    rank: int | None = None


@dataclass(frozen=True)
class Joined:
    """Sources of one version, joined. record: one that hashes to the version's root. refused: offers that were left
    out, by their source. published, record: None if nothing is left."""

    published: Published | None
    record: manager_pb2.BlobRef | None
    refused: Mapping[str, weights_pb2.Problem]


@dataclass(frozen=True)
class JoinSources:
    """Join what holders offer of a version (core.publication.join_sources). Result: Joined.

    record: the manager's own, if it has one. A record counts only if it hashes to the root of `identity`.
    """

    identity: Version
    offers: tuple[HeldOffer, ...]
    record: manager_pb2.BlobRef | None
    seconds: float


@dataclass(frozen=True)
class CompilePlans:
    """Compile plans (core.plan.compile_plans), from cache if digests are equal, store them. Result: Compiled.

    record: what is known of these weights already; then sources digest only what is finer. Fails with DATA_LOSS unless
    it hashes to `root`. collective: replicas that get all that they need over a collective. edges: the result is to
    tell them. relays: boot ids of hosts on which relays run, for what is told of replicas that are out of reach.
    """

    published: Published
    workers: tuple[PlanWorker, ...]
    seconds: float
    record: manager_pb2.BlobRef | None = None
    root: bytes = b""
    collective: frozenset[str] = frozenset()
    edges: bool = False
    relays: frozenset[str] = frozenset()


@dataclass(frozen=True)
class CombineSeals:
    """Check that replicas' digests agree, add them up for each need and for the root. Result: Combined.

    With plans that came from a record: check that what is finer adds up to it.
    """

    published: Published
    compiled: Compiled
    digests: Mapping[str, manager_pb2.BlobRef]  # source id -> Digests
    seconds: float


ManagerTask: TypeAlias = MergeTables | JoinSources | CompilePlans | CombineSeals | LedgerTask

# ---------------------------------------------------------------------------------------------- of agents and trainers


@dataclass(frozen=True)
class PutBlobs:
    """Store blobs with the manager (client.put_blob each). Result: tuple of BlobRef, in their order."""

    blobs: tuple[bytes, ...]
    seconds: float


@dataclass(frozen=True)
class FetchBlobs:
    """Fetch blobs from the manager (client.get_blob each); the shell may keep some. Result: tuple of bytes."""

    refs: tuple[manager_pb2.BlobRef, ...]
    seconds: float


@dataclass(frozen=True)
class SealResult:
    """What sealing one source came to.

    digests: stored, in the order of the atoms. broken: a communicator with which nothing more can be begun.
    digested: when the digest ended, monotonic seconds; 0: not known. not_finite: tensors that hold NaN or infinity.
    """

    digests: manager_pb2.BlobRef
    copy_seconds: float
    digest_seconds: float
    broken: bytes = b""
    digested: float = 0.0
    not_finite: tuple[str, ...] = ()


# -------------------------------------------------------------------------------------------------------- of the agent


@dataclass(frozen=True)
class Words:
    """The page as read at one moment: EnginePage.read() as status messages (dead workers as NONE), and its verdict.

    open, reason, identity: words.state.verdict of the same words: whether the weights are whole.
    """

    workers: tuple[manager_pb2.WorkerStatus, ...]
    open: bool
    reason: str
    identity: weights_pb2.Identity | None


@dataclass(frozen=True)
class ReadWords:
    """Read the page. Result: Words. Takes no time to speak of."""

    seconds: float = 5.0
    current: bool = True  # ask for the words of workers on other nodes first; False: those heard last will do


@dataclass(frozen=True)
class PrepareEngine:
    """adapter.prepare(seconds). Result: None. The machine makes engine calls one at a time."""

    seconds: float


@dataclass(frozen=True)
class ScoreEngine:
    """adapter.score(tokens, more, seconds). Result: core.check_verdict.Score."""

    tokens: tuple[int, ...]
    more: int
    seconds: float


@dataclass(frozen=True)
class FindCheck:
    """Whether a check of an engine was passed on this host. Result: bool."""

    key: str
    seconds: float = 5.0


@dataclass(frozen=True)
class KeepCheck:
    """Keep that a check was passed. Result: None. Its failure costs another check later."""

    key: str
    seconds: float = 5.0


@dataclass(frozen=True)
class PauseEngine:
    """adapter.pause(mode, seconds), the adapter's default for PAUSE_MODE_UNSPECIFIED. Result: None."""

    mode: manager_pb2.PauseMode
    seconds: float


@dataclass(frozen=True)
class InstallEngine:
    """adapter.install(epoch, seconds). Result: None. Epoch 0 is for nothing but to wait until all workers have come
    back from earlier calls: they get no order."""

    epoch: int
    seconds: float


@dataclass(frozen=True)
class StampEngine:
    """adapter.stamp(identity, seconds). Result: None. Its failure changes no outcome, which says that it failed."""

    identity: weights_pb2.Identity
    seconds: float


@dataclass(frozen=True)
class ResumeEngine:
    """adapter.resume(seconds). Result: None."""

    seconds: float


@dataclass(frozen=True)
class SleepEngine:
    """adapter.sleep(level, seconds). Result: None. Never before what it discards is marked as discarded."""

    level: int
    seconds: float


@dataclass(frozen=True)
class DiscardEngine:
    """adapter.discard(seconds): every worker says that it holds nothing. Result: None."""

    seconds: float


@dataclass(frozen=True)
class MarkEngine:
    """Write the engine's mark into its page, where the gate reads it. Result: None. Takes no time to speak of."""

    own_weights: bool
    sleeping: Sleeping
    seconds: float = 5.0


@dataclass(frozen=True)
class HoldRequests:
    """Write into the engine's page what the gate does with requests. Result: None. Takes no time to speak of.

    epoch: of the update for whose end they wait, at most `hold_seconds` from now; 0: they are let in again.
    closed: nobody waits, and nobody is let in: the engine does not compute although its weights are whole.
    """

    epoch: int
    hold_seconds: float
    closed: bool = False
    seconds: float = 5.0


@dataclass(frozen=True)
class WakeEngine:
    """adapter.wake(tags, seconds). Result: None."""

    tags: tuple[str, ...]
    seconds: float


@dataclass(frozen=True)
class SealDirectory:
    """Open the source that `table` describes as its reader, digest `atoms`, store the Digests. Result: SealResult.

    Only for sources that stay sealed without a process (files). Fails if it cannot be opened on this host.
    """

    table: manager_pb2.BlobRef
    atoms: manager_pb2.BlobRef
    seconds: float


EngineTask: TypeAlias = (
    PrepareEngine
    | ScoreEngine
    | PauseEngine
    | InstallEngine
    | StampEngine
    | ResumeEngine
    | DiscardEngine
    | SleepEngine
    | WakeEngine
)
AgentTask: TypeAlias = (
    PutBlobs | FetchBlobs | ReadWords | MarkEngine | HoldRequests | EngineTask | SealDirectory | FindCheck | KeepCheck
)

# ------------------------------------------------------------------------------------------------------ of the trainer


@dataclass(frozen=True)
class SealSource:
    """Fetch the Atoms, source.check(), source.seal(keep), source.digest(atoms), store the Digests. Result: SealResult.

    keep=False: on the trainer's own thread, which waits in update_weights; a rank that is not there fails with
    FAILED_PRECONDITION. keep=True: the sealed snapshot is only read, so any thread will do.
    """

    epoch: int
    version: int
    atoms: manager_pb2.BlobRef
    keep: bool
    seconds: float


TrainerTask: TypeAlias = PutBlobs | SealSource | RunPart

Task: TypeAlias = ManagerTask | AgentTask | TrainerTask | RelayTask
