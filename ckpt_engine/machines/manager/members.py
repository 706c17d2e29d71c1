"""The members: trainer ranks, holders and replicas; what is known of each, and which stream speaks for it.

Decides which hello is accepted, and which heartbeats tell nothing new. A member that lost its stream is remembered
until it says goodbye, is replaced or is forgotten.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

from ckpt_engine.core.manifest import other_format
from ckpt_engine.core.names import LINEAGE_BYTES, MEMBER_BYTES, check_line, check_pool
from ckpt_engine.core.offers import Shut, holder_id
from ckpt_engine.core.problems import aborted, invalid, not_found, precondition
from ckpt_engine.core.rates import Measured, Rate
from ckpt_engine.core.version import Fence, Version
from ckpt_engine.machines.events import HeldOffer, ManagerEvent, Message, Peer, SourceOffer
from ckpt_engine.v1 import manager_pb2, weights_pb2

MemberT = TypeVar("MemberT", "TrainerRank", "Holder", "Replica")
KeyT = TypeVar("KeyT", str, tuple[str, int])

MOST_HELD = 64
"""Versions that one holder may hold, far more than fit into a host."""

MOST_RANKS = 1 << 16
"""Far more than any run has: missing ranks are listed one by one, so an absurd number must not be accepted."""

MOST_SHUT = 256
"""Shut ways that are remembered of one replica, the newest: far more than its sources, of which each has one."""


@dataclass
class TrainerRank:
    """One trainer rank."""

    lineage: str
    rank: int
    world_size: int
    session_id: str
    host: weights_pb2.Host
    peer: Peer | None  # None while its session is lost
    heard: float  # when it was heard last, monotonic seconds
    table: manager_pb2.BlobRef | None = None  # None: it offers nothing
    sealed: Fence = field(default_factory=Fence)  # under which it was told to seal that last, by its hello


@dataclass(frozen=True)
class Holding:
    """One version that a holder holds."""

    identity: Version
    table: manager_pb2.BlobRef
    record: manager_pb2.BlobRef | None  # None: it brings none
    bytes: int = 0  # that it has, for people
    wanted_bytes: int = 0  # of all that it is to hold, for people; 0: unknown

    @classmethod
    def of(cls, held: manager_pb2.Held) -> Holding:
        """Makes it of what a hello says."""
        record = held.record if held.HasField("record") else None
        return cls(Version.of(held.identity), held.table, record, held.bytes, held.wanted_bytes)


@dataclass
class RelayWords:
    """What one relay has said of its fillings."""

    last_filled: manager_pb2.RelayFilled | None = None  # of the last one that ended
    progress: manager_pb2.RelayProgress | None = None  # of the one that goes on
    measured: Measured = field(default_factory=Measured)  # how fast its network was in its last fillings

    def note(self, body: object) -> None:
        """Remembers what a message says; others than about fillings are ignored."""
        match body:
            case manager_pb2.RelayProgress():
                self.progress = body
            case manager_pb2.RelayFilled():
                self.last_filled, self.progress = body, None
                turn = body.fence.epoch, body.attempt
                self.measured.filled(turn, _rate(body, "sent"), _rate(body, "received"))
            case manager_pb2.RelayPassedOn():
                if (sent := _rate(body, "sent")) is not None:
                    self.measured.passed_on((body.fence.epoch, body.attempt), sent)


def _rate(body: manager_pb2.RelayFilled | manager_pb2.RelayPassedOn, name: str) -> Rate | None:
    """The rate in a field of the message; None: it has none, or one that cannot have been measured."""
    if not body.HasField(name):
        return None
    rate: manager_pb2.Rate = getattr(body, name)
    fits = 0 < rate.bytes_per_second < float("inf") and 0 < rate.seconds < float("inf")
    return Rate(rate.bytes_per_second, rate.seconds) if fits else None


@dataclass
class Holder:
    """A member that holds sealed versions and is not a trainer rank."""

    kind: str  # for people
    name: str
    session_id: str
    host: weights_pb2.Host
    peer: Peer | None  # None while its session is lost
    heard: float  # when it was heard last, monotonic seconds
    held: tuple[Holding, ...] = ()
    filling: manager_pb2.Filling | None = None  # what it can be filled with; None: it cannot be filled
    words: RelayWords = field(default_factory=RelayWords)

    @property
    def source(self) -> str:
        """The id of what it offers, which no other holder and no rank has."""
        return holder_id(self.kind, self.name)


@dataclass(frozen=True)
class Unfit:
    """Why a replica's engine could not take a version."""

    problem: weights_pb2.Problem
    workers: tuple[bytes, ...]  # their boot ids
    manifest: bytes = b""  # digest of a manifest that it can never load; empty: another try may work


@dataclass
class ShutWays:
    """What the workers of one replica could not open, by worker process, transport and region."""

    _unopened: dict[tuple[bytes, str, bytes], weights_pb2.Unopened] = field(default_factory=dict)

    def note(self, workers: Sequence[manager_pb2.WorkerStatus], unopened: Iterable[weights_pb2.Unopened]) -> None:
        """Adds what workers could not open. workers: the present ones. What others could not open is forgotten, unless
        it is in `unopened`: new workers may be known here a little later than what they report."""
        new = {(each.boot_id, each.transport, each.locator): each for each in unopened if each.boot_id}
        boots = {worker.boot_id for worker in workers} | {key[0] for key in new}
        current = [(key, each) for key, each in (self._unopened | new).items() if key[0] in boots]
        self._unopened = dict(current[-MOST_SHUT:])

    def of(self, boot_id: bytes) -> tuple[Shut, ...]:
        """What one worker process could not open, sorted."""
        return tuple(sorted(Shut(*key[1:], each.reason) for key, each in self._unopened.items() if key[0] == boot_id))

    def unopened(self, boots: Iterable[bytes]) -> list[weights_pb2.Unopened]:
        """What these worker processes could not open."""
        present = set(boots)
        return [each for key, each in self._unopened.items() if key[0] in present]

    def forget(self) -> bool:
        """Forgets all, so that workers try again. Returns whether there was anything that they could not open."""
        any_shut = bool(self._unopened)
        self._unopened.clear()
        return any_shut


@dataclass
class Replica:
    """One rollout replica, as its agent reports it."""

    name: str
    session_id: str
    agent_epoch: int
    mode: manager_pb2.Mode
    host: weights_pb2.Host
    peer: Peer | None  # None while its session is lost
    heard: float  # when it was heard last, monotonic seconds
    pool: str = ""  # of the replicas that it is updated with
    engine: manager_pb2.Engine | None = None  # None until the agent has one that answers
    transports: tuple[str, ...] = ()
    workers: tuple[manager_pb2.WorkerStatus, ...] = ()
    identity: Version | None = None  # what all its workers hold; None if they do not agree
    prepared: dict[int, manager_pb2.PreparedWorker] = field(default_factory=dict)  # what workers last recorded, by rank
    serving: bool = False
    asleep: bool = False
    closed_reason: str = ""
    label_problem: str = ""
    engine_check: str = ""
    stage_memory: str = ""
    scrubs: tuple[manager_pb2.WorkerScrub, ...] = ()
    guesses: manager_pb2.Guesses | None = None  # of its draft model, since it holds its version
    # that its gate has let in and that have ended, since the engine's start, and of these, those that failed; None: no
    # heartbeat of this session has told
    requests: tuple[int, int] | None = None
    last_outcome: manager_pb2.ReplicaOutcome | None = None
    unfit: Unfit | None = None  # why it could not take the version that it was last asked to take; None: it could
    failure: str = ""  # why the last attempt for it alone failed; empty: it did not
    shut: ShutWays = field(default_factory=ShutWays)  # what its workers could not open

    @property
    def receives(self) -> bool:
        """Whether updates bring it weights."""
        return self.mode != manager_pb2.MODE_COLOCATED

    def take_workers(self, workers: Iterable[manager_pb2.WorkerStatus]) -> None:
        """Takes what its agent says of its workers."""
        self.workers = tuple(workers)
        held = {
            Version.of(each.identity) if each.state == manager_pb2.WORKER_STATE_CLEAN else None for each in self.workers
        }
        self.identity = held.pop() if len(held) == 1 else None

    def holds(self, identity: Version) -> bool:
        """Whether all its workers say that they hold this version."""
        return self.identity == identity

    def boot_ids(self) -> tuple[bytes, ...]:
        """Boot ids of its workers, by rank."""
        return tuple(worker.boot_id for worker in sorted(self.workers, key=lambda worker: worker.rank))

    def prepared_for(self, manifest_digest: bytes) -> list[manager_pb2.PreparedWorker] | None:
        """What its present workers recorded for a manifest, by rank; None if one has not."""
        workers = []
        for worker in sorted(self.workers, key=lambda worker: worker.rank):
            prepared = self.prepared.get(worker.rank)
            if (
                prepared is None
                or not worker.boot_id
                or prepared.boot_id != worker.boot_id
                or prepared.manifest_digest != manifest_digest
            ):
                return None
            workers.append(prepared)
        return workers or None

    def why_unfit(self) -> weights_pb2.Problem | None:
        """Why its present workers could not take a version; None: they could, or were not asked."""
        same = self.unfit is not None and self.unfit.workers == self.boot_ids()
        return self.unfit.problem if same and self.unfit is not None else None

    def never_loads(self, manifest_digest: bytes) -> Unfit | None:
        """Why its present workers can never load a manifest; None: that is not known."""
        if self.why_unfit() is None or self.unfit is None or self.unfit.manifest != manifest_digest:
            return None
        return self.unfit


Member: TypeAlias = TrainerRank | Holder | Replica

Hello: TypeAlias = manager_pb2.TrainerHello | manager_pb2.HolderHello | manager_pb2.ReplicaHello


@dataclass(frozen=True, slots=True)
class RankId:
    """Names a trainer rank."""

    lineage: str
    rank: int


@dataclass(frozen=True, slots=True)
class HolderId:
    """Names a holder."""

    source: str  # the id of what it offers


@dataclass(frozen=True, slots=True)
class ReplicaId:
    """Names a replica."""

    name: str


MemberId: TypeAlias = RankId | HolderId | ReplicaId
"""Names a member, in any of its processes. For timers."""


def member_id(member: Member) -> MemberId:
    """The id of a member."""
    if isinstance(member, TrainerRank):
        return RankId(member.lineage, member.rank)
    return HolderId(member.source) if isinstance(member, Holder) else ReplicaId(member.name)


@dataclass
class Members:
    """All members."""

    cluster: str  # of this manager's ledger; a member that served another one is refused
    trainers: dict[tuple[str, int], TrainerRank] = field(default_factory=dict)
    replicas: dict[str, Replica] = field(default_factory=dict)
    holders: dict[str, Holder] = field(default_factory=dict)  # by the id of what they offer
    by_peer: dict[Peer, Member] = field(default_factory=dict)

    def ranks(self, lineage: str) -> dict[int, TrainerRank]:
        """The known ranks of a lineage, by rank."""
        trainers = (trainer for trainer in self.trainers.values() if trainer.lineage == lineage)
        return {trainer.rank: trainer for trainer in sorted(trainers, key=lambda trainer: trainer.rank)}

    def source(self, lineage: str, offer: SourceOffer) -> TrainerRank | Holder | None:
        """The member that offers a source; None: it is not connected, or does not offer this table any more."""
        if offer.rank is None:
            holder = self.holders.get(offer.source)
            offers = holder is not None and any(held.table == offer.table for held in holder.held)
            return holder if holder is not None and holder.peer is not None and offers else None
        trainer = self.trainers.get((lineage, offer.rank))
        if trainer is None or trainer.peer is None or trainer.table != offer.table:
            return None
        return trainer

    def get(self, member: MemberId) -> Member | None:
        """The member with this id; None: it is unknown, or forgotten."""
        match member:
            case RankId(lineage, rank):
                return self.trainers.get((lineage, rank))
            case HolderId(source):
                return self.holders.get(source)
            case ReplicaId(name):
                return self.replicas.get(name)

    def connected_holders(self) -> list[Holder]:
        """The holders that have a session, sorted by the id of what they offer."""
        return [self.holders[source] for source in sorted(self.holders) if self.holders[source].peer is not None]

    def offers(self, identity: Version) -> tuple[HeldOffer, ...]:
        """What connected holders offer of a version."""
        return tuple(
            HeldOffer(holder.source, held.table, held.record)
            for holder in self.connected_holders()
            for held in holder.held
            if held.identity == identity
        )

    def replica(self, name: str) -> Replica:
        """The replica of this name. Raises NOT_FOUND, naming the known ones."""
        replica = self.replicas.get(name)
        if replica is None:
            names = ", ".join(sorted(self.replicas))
            hint = f"known are: {names}" if names else "none is known"
            raise not_found(f"there is no replica {name!r} ({hint})", replica=name)
        return replica

    def receivers(self) -> list[Replica]:
        """Connected replicas to which updates bring weights, sorted by name."""
        names = sorted(self.replicas)
        return [self.replicas[name] for name in names if self.replicas[name].receives and self.replicas[name].peer]

    def last_heard(self) -> float | None:
        """When one of them was heard last, in monotonic seconds, if all have lost their sessions without a goodbye;
        None: one has a session, or none is known."""
        if self.by_peer:
            return None
        known: list[Member] = [*self.trainers.values(), *self.replicas.values(), *self.holders.values()]
        return max((member.heard for member in known), default=None)

    def lose(self, peer: Peer) -> Member | None:
        """Takes the stream away from its member. Returns the member; None: the stream spoke for none."""
        member = self.by_peer.pop(peer, None)
        if member is not None:
            member.peer = None
            if isinstance(member, Replica):
                member.serving = False
                member.closed_reason = "its agent is not connected"
        return member

    def forget(self, member: Member) -> None:
        """Forgets a member."""
        if member.peer is not None:
            self.by_peer.pop(member.peer, None)
        if isinstance(member, TrainerRank):
            self.trainers.pop((member.lineage, member.rank), None)
        elif isinstance(member, Holder):
            self.holders.pop(member.source, None)
        else:
            self.replicas.pop(member.name, None)

    def check_speaker(self, peer: Peer, hello: Hello) -> None:
        """Raises INVALID_ARGUMENT if this stream speaks for another member already."""
        speaks = self.by_peer.get(peer)
        if speaks is not None and speaker(speaks) != speaker(hello):
            raise invalid(f"one session speaks for one member: this one for {speaker(speaks)}, not {speaker(hello)}")

    # -- hellos: all return the member and the stream that it spoke over before, or raise CkptEngineError

    def hello(self, peer: Peer, hello: Hello, now: float) -> tuple[Member, Peer | None]:
        """Takes a member of any kind in. Raises what the method of its kind raises."""
        self._check_cluster(hello.cluster)
        if other := other_format(speaker(hello), hello.digest_format, "its manager"):
            raise precondition(other)
        if isinstance(hello, manager_pb2.TrainerHello):
            return self.trainer_hello(peer, hello, now)
        if isinstance(hello, manager_pb2.HolderHello):
            return self.holder_hello(peer, hello, now)
        return self.replica_hello(peer, hello, now)

    def known(self, hello: Hello) -> Member | None:
        """The member that said hello under this name before; None: none did."""
        if isinstance(hello, manager_pb2.TrainerHello):
            return self.trainers.get((hello.lineage, hello.rank))
        if isinstance(hello, manager_pb2.HolderHello):
            return self.holders.get(holder_id(hello.kind, hello.name))
        return self.replicas.get(hello.name)

    def holder_hello(self, peer: Peer, hello: manager_pb2.HolderHello, now: float) -> tuple[Holder, Peer | None]:
        """Takes a holder in. Raises ABORTED if another process is connected under its name, and INVALID_ARGUMENT for a
        hello that does not fit."""
        if not hello.kind or " " in hello.kind or hello.kind == "rank":
            raise invalid(f"a holder needs a kind of one word, not 'rank': {hello.kind!r}")
        check_line("a holder's kind", hello.kind, MEMBER_BYTES)
        check_line("a holder's name", hello.name, MEMBER_BYTES)
        if len(hello.held) > MOST_HELD:
            raise invalid(f"a holder holds at most {MOST_HELD} versions, not {len(hello.held)}")
        holder = Holder(
            hello.kind, hello.name, hello.session_id, hello.host, peer, now, tuple(map(Holding.of, hello.held))
        )
        if hello.HasField("filling"):
            holder.filling = hello.filling
        old = self.holders.get(holder.source)
        if old is not None and old.session_id == hello.session_id:
            holder.words = old.words
        if old is not None and old.peer is not None and old.session_id != hello.session_id:
            raise aborted(
                f"{holder.source} is connected from host {old.host.name!r} as another process: give this one another "
                "name, or stop that one first"
            )
        return holder, self._speaks(peer, holder, None if old is None else old.peer, self.holders, holder.source)

    def _speaks(
        self, peer: Peer, member: MemberT, before: Peer | None, members: dict[KeyT, MemberT], key: KeyT
    ) -> Peer | None:
        """Lets a stream speak for a member from now on. Returns the stream before, which does not any more."""
        if before is not None:
            self.by_peer.pop(before, None)
        members[key] = member
        self.by_peer[peer] = member
        return before

    def trainer_hello(self, peer: Peer, hello: manager_pb2.TrainerHello, now: float) -> tuple[TrainerRank, Peer | None]:
        """Takes a rank in. Raises ABORTED if another process is connected as this rank, and INVALID_ARGUMENT or
        FAILED_PRECONDITION for a hello that does not fit."""
        check_line("a lineage's name", hello.lineage, LINEAGE_BYTES)
        if hello.world_size > MOST_RANKS:
            raise invalid(f"a lineage has at most {MOST_RANKS} ranks, not {hello.world_size}")
        if not hello.rank < hello.world_size:
            raise invalid(f"there is no rank {hello.rank} among {hello.world_size} ranks")
        ranks = self.ranks(hello.lineage)
        old = ranks.get(hello.rank)
        if old is not None and old.peer is not None and old.session_id != hello.session_id:
            raise aborted(
                f"rank {hello.rank} of lineage {hello.lineage!r} is connected from host {old.host.name!r} as another "
                f"process: stop that one first, or give this run a lineage of its own",
                ranks=(hello.rank,),
            )
        for other in ranks.values():
            if other.world_size == hello.world_size or other.rank == hello.rank:
                continue
            if other.peer is not None:
                raise invalid(
                    f"rank {hello.rank} says that lineage {hello.lineage!r} has {hello.world_size} ranks, "
                    f"rank {other.rank} said {other.world_size}",
                    ranks=(hello.rank, other.rank),
                )
            self.forget(other)
        trainer = TrainerRank(
            hello.lineage, hello.rank, hello.world_size, hello.session_id, hello.host, peer, now, _table(hello)
        )
        trainer.sealed = Fence.of(hello.sealed)
        before = None if old is None else old.peer
        return trainer, self._speaks(peer, trainer, before, self.trainers, (hello.lineage, hello.rank))

    def replica_hello(self, peer: Peer, hello: manager_pb2.ReplicaHello, now: float) -> tuple[Replica, Peer | None]:
        """Takes a replica in. Raises ABORTED if its agent was overtaken or the name is taken, INVALID_ARGUMENT or
        FAILED_PRECONDITION for a hello that does not fit."""
        check_line("a replica's name", hello.name, MEMBER_BYTES)
        check_pool(hello.pool)
        old = self.replicas.get(hello.name)
        if old is not None and old.session_id != hello.session_id:
            self._check_agent(old, hello)
        replica = Replica(
            hello.name, hello.session_id, hello.agent_epoch, hello.mode, hello.host, peer, now, hello.pool
        )
        if hello.HasField("engine"):
            replica.engine = hello.engine
        replica.transports = tuple(hello.transports)
        replica.take_workers(hello.workers)
        replica.prepared = {prepared.rank: prepared for prepared in hello.prepared}
        replica.asleep = hello.asleep
        replica.closed_reason = "its agent has just connected"
        before = None
        if old is not None:
            before, replica.last_outcome, replica.unfit = old.peer, old.last_outcome, old.unfit
            replica.shut, replica.failure = old.shut, old.failure
            if before == peer:
                replica.serving, replica.closed_reason = old.serving, old.closed_reason
                replica.label_problem, replica.engine_check = old.label_problem, old.engine_check
                replica.stage_memory, replica.scrubs = old.stage_memory, old.scrubs
                replica.guesses = old.guesses
        if hello.HasField("last_outcome"):
            last_outcome = None if old is None else old.last_outcome
            is_repeated = last_outcome is not None and last_outcome.fence.epoch >= hello.last_outcome.fence.epoch
            replica.last_outcome = hello.last_outcome
            replica.shut.note(hello.workers, () if is_repeated else hello.last_outcome.unopened)
        return replica, self._speaks(peer, replica, before, self.replicas, hello.name)

    def _check_cluster(self, cluster: str) -> None:
        if cluster and cluster != self.cluster:
            raise precondition(
                f"it served cluster {cluster}, this manager is of cluster {self.cluster} (another ledger): "
                "it goes on as it is and asks again. To have it back at once, give this manager that cluster "
                f"(`ckpt-engine manager --cluster {cluster}` with a fresh ledger, if that of the cluster is lost), or "
                "restart it to have it join this one"
            )

    def _check_agent(self, old: Replica, hello: manager_pb2.ReplicaHello) -> None:
        same_engine = _same_engine(old, hello)
        if same_engine and hello.agent_epoch < old.agent_epoch:
            raise aborted(
                f"agent {hello.agent_epoch} of replica {hello.name!r} was overtaken by agent {old.agent_epoch}",
                replica=hello.name,
            )
        if old.peer is not None and (not same_engine or hello.agent_epoch == old.agent_epoch):
            raise aborted(
                f"a replica named {hello.name!r} is connected from host {old.host.name!r} with another engine: "
                "give this one another name, or stop that one first",
                replica=hello.name,
            )


def tells_nothing(event: ManagerEvent, members: Members) -> bool:
    """Whether an event is a heartbeat that says nothing new. Call it before the event is taken."""
    if not isinstance(event, Message):
        return False
    if not isinstance(event.body, manager_pb2.ReplicaHeartbeat):
        return isinstance(event.body, manager_pb2.Heartbeat)
    replica = members.by_peer.get(event.peer)
    return isinstance(replica, Replica) and _beat_content(replica) == _beat_content(event.body)


def take_beat(replica: Replica, beat: manager_pb2.ReplicaHeartbeat) -> None:
    """Takes a replica's heartbeat."""
    replica.take_workers(beat.workers)
    replica.serving, replica.asleep = beat.serving, beat.asleep
    replica.closed_reason, replica.label_problem = beat.closed_reason, beat.label_problem
    replica.engine_check, replica.stage_memory = beat.engine_check, beat.stage_memory
    replica.scrubs = tuple(beat.scrubs)
    replica.guesses = beat.guesses if beat.HasField("guesses") else None
    if beat.HasField("requests"):
        replica.requests = beat.requests, beat.failed_requests


def _beat_content(source: Replica | manager_pb2.ReplicaHeartbeat) -> tuple[object, ...]:
    words = source.closed_reason, source.label_problem, source.engine_check, source.stage_memory
    scrubs = [(each.passes, each.differences, each.idle) for each in source.scrubs]
    guesses = source.guesses or manager_pb2.Guesses()
    counts = guesses.guessed, guesses.accepted
    return source.serving, source.asleep, *words, *counts, tuple(source.workers), scrubs


def speaker(member: Member | Hello) -> str:
    """A member's name, for people."""
    if isinstance(member, TrainerRank | manager_pb2.TrainerHello):
        return f"rank {member.rank} of lineage {member.lineage!r}"
    if isinstance(member, Holder | manager_pb2.HolderHello):
        return holder_id(member.kind, member.name)
    return f"replica {member.name!r}"


def _table(hello: manager_pb2.TrainerHello) -> manager_pb2.BlobRef | None:
    return hello.table if hello.HasField("table") else None


def _same_engine(old: Replica, hello: manager_pb2.ReplicaHello) -> bool:
    """Whether a hello is of the engine that is known already. Compares workers' boot ids, which no two engines share.
    Engines without workers are compared by address, host and network namespace."""
    before, now = _boots(old.workers), _boots(hello.workers)
    if before and now:
        return bool(before & now)
    old_place, new_place = ((host.boot_id, host.network_namespace) for host in (old.host, hello.host))
    return old_place == new_place and old.engine == (hello.engine if hello.HasField("engine") else None)


def _boots(workers: Iterable[manager_pb2.WorkerStatus]) -> set[bytes]:
    return {worker.boot_id for worker in workers if worker.boot_id}
