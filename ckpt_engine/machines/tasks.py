"""The work that machines ask their shells for, and what it results in.

Tasks are listed by the machine that asks: `ManagerTask`, `AgentTask`, `TrainerTask`. Those of relays, collectives and
the ledger have files of their own. Each says which part of the package does it, and what its `Done` carries. A task
that fails carries a Problem and no result. `seconds`: how long it may take; a shell answers by then, whatever the work
does.
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
    """What the manager's decisions need to know of one source's SourceTable."""

    source: str  # its id
    rank: int | None  # None: it is not a trainer rank
    table: manager_pb2.BlobRef
    stays_sealed: bool
    source_copies: int
    outlives: bool  # files: readable when the process that offers them is gone
    copied: tuple[weights_pb2.CopiedTensors, ...] = ()
    host: weights_pb2.Host = field(default_factory=weights_pb2.Host)
    ways: tuple[frozenset[str], ...] = ()  # the transports over which each of its regions is offered, equal ones once
    warnings: tuple[str, ...] = ()  # for the report


@dataclass(frozen=True)
class Published:
    """The merged tables of all sources of a lineage."""

    manifest: manager_pb2.BlobRef
    sources: tuple[SourceOffer, ...]
    tensors: int
    bytes: int
    handle: object = field(default=None, compare=False, repr=False)  # the shell's own; comes back in later tasks
    parts: frozenset[frozenset[str]] = frozenset()  # sets of source ids: one source of each set makes up the version


@dataclass(frozen=True)
class PlanWorker:
    """A worker that plans are to be compiled for."""

    key: WorkerKey
    needs: manager_pb2.BlobRef
    host: weights_pb2.Host
    transports: tuple[str, ...]
    shut: tuple[Shut, ...] = ()  # what it could not open


@dataclass(frozen=True)
class Compiled:
    """Plans of all workers, and what each source must digest for them."""

    plans: Mapping[WorkerKey, manager_pb2.BlobRef]
    atoms: Mapping[str, manager_pb2.BlobRef]  # source id -> Atoms; sources without atoms need not be asked
    bytes: Mapping[WorkerKey, int]  # that each worker reads
    handle: object = field(default=None, compare=False, repr=False)  # the shell's own; comes back in CombineSeals
    unfit: Mapping[str, weights_pb2.Problem] = field(default_factory=dict)  # why replicas have no plans, by name
    distances: Mapping[WorkerKey, int] = field(default_factory=dict)  # of the farthest source (core.reach.Distance)
    collective: CollectivePlan | None = None  # of the replicas that were to be in one
    edges: Mapping[WorkerKey, Sequence[manager_pb2.EdgeReport]] = field(default_factory=dict)  # if they were asked for


@dataclass(frozen=True)
class Combined:
    """What the sealed digests add up to."""

    root: bytes
    expected: Mapping[WorkerKey, manager_pb2.BlobRef]  # Digests, in the order of each worker's needs
    record: manager_pb2.BlobRef | None = None  # the SealedRecord of these weights; None: the plans came from one


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
    """What a holder, or a rank, offers of one version."""

    source: str  # its id
    table: manager_pb2.BlobRef
    record: manager_pb2.BlobRef | None  # None: it brings none
    rank: int | None = None  # None: it is not a trainer rank


@dataclass(frozen=True)
class Joined:
    """Sources of one version, joined."""

    published: Published | None  # None: all offers were refused
    record: manager_pb2.BlobRef | None  # one that hashes to the version's root; None: all offers were refused
    refused: Mapping[str, weights_pb2.Problem]  # why offers were left out, by source


@dataclass(frozen=True)
class JoinSources:
    """Join what holders offer of a version (core.publication.join_sources). Result: Joined.

    A record counts only if it hashes to the root of `identity`.
    """

    identity: Version
    offers: tuple[HeldOffer, ...]
    record: manager_pb2.BlobRef | None  # the manager's own
    seconds: float


@dataclass(frozen=True)
class CompilePlans:
    """Compile plans (core.plan.compile_plans), from cache if digests are equal, store them. Result: Compiled.

    Fails with DATA_LOSS unless `record` hashes to `root`.
    """

    published: Published
    workers: tuple[PlanWorker, ...]
    seconds: float
    record: manager_pb2.BlobRef | None = None  # of these weights, so that sources digest only what is finer
    root: bytes = b""
    collective: frozenset[str] = frozenset()  # replicas that get all that they need over a collective
    edges: bool = False  # whether the result is to have edges
    relays: frozenset[str] = frozenset()  # boot ids of hosts on which relays run, for messages about reach
    keeps_draft: bool = False  # a draft model without weights in this version keeps its own; else its replica is unfit


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
    """The result of sealing one source."""

    digests: manager_pb2.BlobRef  # in the order of the atoms
    copy_seconds: float
    digest_seconds: float
    broken: bytes = b""  # a communicator that cannot be used any more
    digested: float = 0.0  # when the digest ended, monotonic seconds; 0: unknown
    not_finite: tuple[str, ...] = ()  # tensors that hold NaN or infinity


# -------------------------------------------------------------------------------------------------------- of the agent


@dataclass(frozen=True)
class Words:
    """The page as read at one moment, and its verdict (gate.page.verdict): whether the weights are whole."""

    workers: tuple[manager_pb2.WorkerStatus, ...]  # EnginePage.read() as status messages; dead workers as NONE
    open: bool  # whether the weights are whole
    reason: str  # why they are not
    identity: weights_pb2.Identity | None
    guesses: manager_pb2.Guesses | None = None  # of the engine's draft, since the engine's start; None: it counts none
    requests: int | None = None  # that the gate has let in and that have ended, since the engine's start; None: no page
    failed_requests: int | None = None  # of these: the engine answered 5xx, or broke off


@dataclass(frozen=True)
class ReadWords:
    """Read the page. Result: Words. Takes hardly any time."""

    seconds: float = 5.0
    current: bool = True  # ask for the words of workers on other nodes first; False: use those heard last


@dataclass(frozen=True)
class PrepareEngine:
    """adapter.prepare(seconds). Result: None. The machine makes engine calls one at a time."""

    seconds: float


@dataclass(frozen=True)
class ScoreEngine:
    """adapter.score(tokens, more, seconds, cached). Result: core.check_verdict.Score."""

    tokens: tuple[int, ...]
    more: int
    seconds: float
    cached: bool = False


@dataclass(frozen=True)
class FindCheck:
    """Look up whether an engine passed its check on this host. Result: bool."""

    key: str  # names the engine, its version and the models that were checked
    seconds: float = 5.0


@dataclass(frozen=True)
class KeepCheck:
    """Store that an engine passed its check. Result: None. If this task fails, the check only runs again next time."""

    key: str
    seconds: float = 5.0


@dataclass(frozen=True)
class PauseEngine:
    """adapter.pause(mode, seconds), the adapter's default for PAUSE_MODE_UNSPECIFIED. Result: None."""

    mode: manager_pb2.PauseMode
    seconds: float


@dataclass(frozen=True)
class InstallEngine:
    """adapter.install(epoch, seconds). Result: None. Epoch 0 only waits until all workers have returned from earlier
    calls: they get no order."""

    epoch: int
    seconds: float


@dataclass(frozen=True)
class StampEngine:
    """adapter.stamp(identity, seconds). Result: None. Its failure is told in the outcome, and changes it no further."""

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
    """Write the engine's mark into its page, where the gate reads it. Result: None. Takes hardly any time."""

    own_weights: bool
    sleeping: Sleeping
    seconds: float = 5.0


@dataclass(frozen=True)
class HoldRequests:
    """Write into the engine's page what the gate does with requests. Result: None. Takes hardly any time."""

    epoch: int  # of the update that requests wait for; 0: they are let in again
    hold_seconds: float  # that they wait at most, from now
    closed: bool = False  # all are refused: the engine does not compute although its weights are whole
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

    keep=False: on the trainer's own thread, which waits in update_weights; fails with FAILED_PRECONDITION if the rank
    does not wait there. keep=True: the sealed snapshot is only read, so any thread will do.
    """

    epoch: int
    version: int
    atoms: manager_pb2.BlobRef
    keep: bool
    seconds: float


TrainerTask: TypeAlias = PutBlobs | SealSource | RunPart

Task: TypeAlias = ManagerTask | AgentTask | TrainerTask | RelayTask
