from ckpt_engine.v1 import weights_pb2 as _weights_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WorkerState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WORKER_STATE_UNSPECIFIED: _ClassVar[WorkerState]
    WORKER_STATE_NONE: _ClassVar[WorkerState]
    WORKER_STATE_DIRTY: _ClassVar[WorkerState]
    WORKER_STATE_CLEAN: _ClassVar[WorkerState]

class Mode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MODE_UNSPECIFIED: _ClassVar[Mode]
    MODE_STANDALONE: _ClassVar[Mode]
    MODE_HYBRID: _ClassVar[Mode]
    MODE_COLOCATED: _ClassVar[Mode]

class PauseMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PAUSE_MODE_UNSPECIFIED: _ClassVar[PauseMode]
    PAUSE_MODE_KEEP: _ClassVar[PauseMode]
    PAUSE_MODE_ABORT: _ClassVar[PauseMode]
    PAUSE_MODE_WAIT: _ClassVar[PauseMode]
    PAUSE_MODE_IN_PLACE: _ClassVar[PauseMode]

class Stage(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STAGE_UNSPECIFIED: _ClassVar[Stage]
    STAGE_PLAN: _ClassVar[Stage]
    STAGE_QUIESCE: _ClassVar[Stage]
    STAGE_TRANSFER: _ClassVar[Stage]
    STAGE_INSTALL: _ClassVar[Stage]
    STAGE_VERIFY: _ClassVar[Stage]
    STAGE_RESUME: _ClassVar[Stage]
    STAGE_READY: _ClassVar[Stage]

class Outcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OUTCOME_UNSPECIFIED: _ClassVar[Outcome]
    OUTCOME_NEW_SERVING: _ClassVar[Outcome]
    OUTCOME_OLD_SERVING: _ClassVar[Outcome]
    OUTCOME_QUARANTINED: _ClassVar[Outcome]
    OUTCOME_PLANNED: _ClassVar[Outcome]
    OUTCOME_NOT_REACHED: _ClassVar[Outcome]

class Prefetch(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PREFETCH_UNSPECIFIED: _ClassVar[Prefetch]
    PREFETCH_AUTO: _ClassVar[Prefetch]
    PREFETCH_ALWAYS: _ClassVar[Prefetch]
    PREFETCH_NEVER: _ClassVar[Prefetch]

class Until(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    UNTIL_UNSPECIFIED: _ClassVar[Until]
    UNTIL_INSTALLED: _ClassVar[Until]
    UNTIL_HELD: _ClassVar[Until]
    UNTIL_FIRST_WAVE: _ClassVar[Until]

class Newer(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    NEWER_UNSPECIFIED: _ClassVar[Newer]
    NEWER_SUPERSEDE: _ClassVar[Newer]
    NEWER_WAIT: _ClassVar[Newer]

class Draft(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DRAFT_UNSPECIFIED: _ClassVar[Draft]
    DRAFT_UPDATE: _ClassVar[Draft]
    DRAFT_KEEP: _ClassVar[Draft]

class ReplicaState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REPLICA_STATE_UNSPECIFIED: _ClassVar[ReplicaState]
    REPLICA_STATE_SERVING: _ClassVar[ReplicaState]
    REPLICA_STATE_DRAINING: _ClassVar[ReplicaState]
    REPLICA_STATE_ASLEEP: _ClassVar[ReplicaState]
    REPLICA_STATE_CLOSED: _ClassVar[ReplicaState]
    REPLICA_STATE_AWAY: _ClassVar[ReplicaState]
WORKER_STATE_UNSPECIFIED: WorkerState
WORKER_STATE_NONE: WorkerState
WORKER_STATE_DIRTY: WorkerState
WORKER_STATE_CLEAN: WorkerState
MODE_UNSPECIFIED: Mode
MODE_STANDALONE: Mode
MODE_HYBRID: Mode
MODE_COLOCATED: Mode
PAUSE_MODE_UNSPECIFIED: PauseMode
PAUSE_MODE_KEEP: PauseMode
PAUSE_MODE_ABORT: PauseMode
PAUSE_MODE_WAIT: PauseMode
PAUSE_MODE_IN_PLACE: PauseMode
STAGE_UNSPECIFIED: Stage
STAGE_PLAN: Stage
STAGE_QUIESCE: Stage
STAGE_TRANSFER: Stage
STAGE_INSTALL: Stage
STAGE_VERIFY: Stage
STAGE_RESUME: Stage
STAGE_READY: Stage
OUTCOME_UNSPECIFIED: Outcome
OUTCOME_NEW_SERVING: Outcome
OUTCOME_OLD_SERVING: Outcome
OUTCOME_QUARANTINED: Outcome
OUTCOME_PLANNED: Outcome
OUTCOME_NOT_REACHED: Outcome
PREFETCH_UNSPECIFIED: Prefetch
PREFETCH_AUTO: Prefetch
PREFETCH_ALWAYS: Prefetch
PREFETCH_NEVER: Prefetch
UNTIL_UNSPECIFIED: Until
UNTIL_INSTALLED: Until
UNTIL_HELD: Until
UNTIL_FIRST_WAVE: Until
NEWER_UNSPECIFIED: Newer
NEWER_SUPERSEDE: Newer
NEWER_WAIT: Newer
DRAFT_UNSPECIFIED: Draft
DRAFT_UPDATE: Draft
DRAFT_KEEP: Draft
REPLICA_STATE_UNSPECIFIED: ReplicaState
REPLICA_STATE_SERVING: ReplicaState
REPLICA_STATE_DRAINING: ReplicaState
REPLICA_STATE_ASLEEP: ReplicaState
REPLICA_STATE_CLOSED: ReplicaState
REPLICA_STATE_AWAY: ReplicaState

class BlobRef(_message.Message):
    __slots__ = ("digest", "size")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    digest: bytes
    size: int
    def __init__(self, digest: _Optional[bytes] = ..., size: _Optional[int] = ...) -> None: ...

class BlobChunk(_message.Message):
    __slots__ = ("ref", "data")
    REF_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    ref: BlobRef
    data: bytes
    def __init__(self, ref: _Optional[_Union[BlobRef, _Mapping]] = ..., data: _Optional[bytes] = ...) -> None: ...

class HasBlobResponse(_message.Message):
    __slots__ = ("present",)
    PRESENT_FIELD_NUMBER: _ClassVar[int]
    present: bool
    def __init__(self, present: bool = ...) -> None: ...

class TrainerHello(_message.Message):
    __slots__ = ("cluster", "lineage", "rank", "world_size", "session_id", "host", "table", "epoch", "digest_format", "sealed")
    CLUSTER_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FORMAT_FIELD_NUMBER: _ClassVar[int]
    SEALED_FIELD_NUMBER: _ClassVar[int]
    cluster: str
    lineage: str
    rank: int
    world_size: int
    session_id: str
    host: _weights_pb2.Host
    table: BlobRef
    epoch: int
    digest_format: int
    sealed: _weights_pb2.Fence
    def __init__(self, cluster: _Optional[str] = ..., lineage: _Optional[str] = ..., rank: _Optional[int] = ..., world_size: _Optional[int] = ..., session_id: _Optional[str] = ..., host: _Optional[_Union[_weights_pb2.Host, _Mapping]] = ..., table: _Optional[_Union[BlobRef, _Mapping]] = ..., epoch: _Optional[int] = ..., digest_format: _Optional[int] = ..., sealed: _Optional[_Union[_weights_pb2.Fence, _Mapping]] = ...) -> None: ...

class TrainerMessage(_message.Message):
    __slots__ = ("hello", "publish", "sealed", "heartbeat", "goodbye", "took_part")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    PUBLISH_FIELD_NUMBER: _ClassVar[int]
    SEALED_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    GOODBYE_FIELD_NUMBER: _ClassVar[int]
    TOOK_PART_FIELD_NUMBER: _ClassVar[int]
    hello: TrainerHello
    publish: Publish
    sealed: Sealed
    heartbeat: Heartbeat
    goodbye: Goodbye
    took_part: TookPart
    def __init__(self, hello: _Optional[_Union[TrainerHello, _Mapping]] = ..., publish: _Optional[_Union[Publish, _Mapping]] = ..., sealed: _Optional[_Union[Sealed, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., goodbye: _Optional[_Union[Goodbye, _Mapping]] = ..., took_part: _Optional[_Union[TookPart, _Mapping]] = ...) -> None: ...

class TrainerCommand(_message.Message):
    __slots__ = ("welcome", "refused", "publication_accepted", "seal", "release", "heartbeat", "take_part")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    PUBLICATION_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    SEAL_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    TAKE_PART_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    refused: Refused
    publication_accepted: PublicationAccepted
    seal: Seal
    release: Release
    heartbeat: Heartbeat
    take_part: TakePart
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., refused: _Optional[_Union[Refused, _Mapping]] = ..., publication_accepted: _Optional[_Union[PublicationAccepted, _Mapping]] = ..., seal: _Optional[_Union[Seal, _Mapping]] = ..., release: _Optional[_Union[Release, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., take_part: _Optional[_Union[TakePart, _Mapping]] = ...) -> None: ...

class Collective(_message.Message):
    __slots__ = ("members", "plan", "meeting", "communicator", "arm_seconds")
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    MEETING_FIELD_NUMBER: _ClassVar[int]
    COMMUNICATOR_FIELD_NUMBER: _ClassVar[int]
    ARM_SECONDS_FIELD_NUMBER: _ClassVar[int]
    members: _containers.RepeatedScalarFieldContainer[str]
    plan: BlobRef
    meeting: bytes
    communicator: bytes
    arm_seconds: float
    def __init__(self, members: _Optional[_Iterable[str]] = ..., plan: _Optional[_Union[BlobRef, _Mapping]] = ..., meeting: _Optional[bytes] = ..., communicator: _Optional[bytes] = ..., arm_seconds: _Optional[float] = ...) -> None: ...

class TakePart(_message.Message):
    __slots__ = ("fence", "collective", "member", "deadline_seconds", "sealed")
    FENCE_FIELD_NUMBER: _ClassVar[int]
    COLLECTIVE_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SEALED_FIELD_NUMBER: _ClassVar[int]
    fence: _weights_pb2.Fence
    collective: Collective
    member: int
    deadline_seconds: float
    sealed: _weights_pb2.Fence
    def __init__(self, fence: _Optional[_Union[_weights_pb2.Fence, _Mapping]] = ..., collective: _Optional[_Union[Collective, _Mapping]] = ..., member: _Optional[int] = ..., deadline_seconds: _Optional[float] = ..., sealed: _Optional[_Union[_weights_pb2.Fence, _Mapping]] = ...) -> None: ...

class TookPart(_message.Message):
    __slots__ = ("fence", "problem", "blamed")
    FENCE_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    BLAMED_FIELD_NUMBER: _ClassVar[int]
    fence: _weights_pb2.Fence
    problem: _weights_pb2.Problem
    blamed: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, fence: _Optional[_Union[_weights_pb2.Fence, _Mapping]] = ..., problem: _Optional[_Union[_weights_pb2.Problem, _Mapping]] = ..., blamed: _Optional[_Iterable[str]] = ...) -> None: ...

class Publish(_message.Message):
    __slots__ = ("table",)
    TABLE_FIELD_NUMBER: _ClassVar[int]
    table: BlobRef
    def __init__(self, table: _Optional[_Union[BlobRef, _Mapping]] = ...) -> None: ...

class PublicationAccepted(_message.Message):
    __slots__ = ("table", "manifest")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    table: BlobRef
    manifest: BlobRef
    def __init__(self, table: _Optional[_Union[BlobRef, _Mapping]] = ..., manifest: _Optional[_Union[BlobRef, _Mapping]] = ...) -> None: ...

class Seal(_message.Message):
    __slots__ = ("fence", "version", "atoms", "keep", "deadline_seconds")
    FENCE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ATOMS_FIELD_NUMBER: _ClassVar[int]
    KEEP_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    fence: _weights_pb2.Fence
    version: int
    atoms: BlobRef
    keep: bool
    deadline_seconds: float
    def __init__(self, fence: _Optional[_Union[_weights_pb2.Fence, _Mapping]] = ..., version: _Optional[int] = ..., atoms: _Optional[_Union[BlobRef, _Mapping]] = ..., keep: bool = ..., deadline_seconds: _Optional[float] = ...) -> None: ...

class Sealed(_message.Message):
    __slots__ = ("fence", "atoms", "digests", "copy_seconds", "digest_seconds", "problem", "broken_communicator", "span", "digested", "not_finite", "not_finite_tensors")
    FENCE_FIELD_NUMBER: _ClassVar[int]
    ATOMS_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    COPY_SECONDS_FIELD_NUMBER: _ClassVar[int]
    DIGEST_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    BROKEN_COMMUNICATOR_FIELD_NUMBER: _ClassVar[int]
    SPAN_FIELD_NUMBER: _ClassVar[int]
    DIGESTED_FIELD_NUMBER: _ClassVar[int]
    NOT_FINITE_FIELD_NUMBER: _ClassVar[int]
    NOT_FINITE_TENSORS_FIELD_NUMBER: _ClassVar[int]
    fence: _weights_pb2.Fence
    atoms: BlobRef
    digests: BlobRef
    copy_seconds: float
    digest_seconds: float
    problem: _weights_pb2.Problem
    broken_communicator: bytes
    span: Span
    digested: float
    not_finite: _containers.RepeatedScalarFieldContainer[str]
    not_finite_tensors: int
    def __init__(self, fence: _Optional[_Union[_weights_pb2.Fence, _Mapping]] = ..., atoms: _Optional[_Union[BlobRef, _Mapping]] = ..., digests: _Optional[_Union[BlobRef, _Mapping]] = ..., copy_seconds: _Optional[float] = ..., digest_seconds: _Optional[float] = ..., problem: _Optional[_Union[_weights_pb2.Problem, _Mapping]] = ..., broken_communicator: _Optional[bytes] = ..., span: _Optional[_Union[Span, _Mapping]] = ..., digested: _Optional[float] = ..., not_finite: _Optional[_Iterable[str]] = ..., not_finite_tensors: _Optional[int] = ...) -> None: ...

class Span(_message.Message):
    __slots__ = ("begin", "seconds", "ahead", "error")
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    AHEAD_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    begin: float
    seconds: float
    ahead: float
    error: float
    def __init__(self, begin: _Optional[float] = ..., seconds: _Optional[float] = ..., ahead: _Optional[float] = ..., error: _Optional[float] = ...) -> None: ...

class Release(_message.Message):
    __slots__ = ("fence",)
    FENCE_FIELD_NUMBER: _ClassVar[int]
    fence: _weights_pb2.Fence
    def __init__(self, fence: _Optional[_Union[_weights_pb2.Fence, _Mapping]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("fence", "lease_seconds", "heartbeat_seconds", "clock", "digest_format")
    FENCE_FIELD_NUMBER: _ClassVar[int]
    LEASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FORMAT_FIELD_NUMBER: _ClassVar[int]
    fence: _weights_pb2.Fence
    lease_seconds: float
    heartbeat_seconds: float
    clock: float
    digest_format: int
    def __init__(self, fence: _Optional[_Union[_weights_pb2.Fence, _Mapping]] = ..., lease_seconds: _Optional[float] = ..., heartbeat_seconds: _Optional[float] = ..., clock: _Optional[float] = ..., digest_format: _Optional[int] = ...) -> None: ...

class Refused(_message.Message):
    __slots__ = ("problem",)
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    problem: _weights_pb2.Problem
    def __init__(self, problem: _Optional[_Union[_weights_pb2.Problem, _Mapping]] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("sequence", "clock")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    clock: float
    def __init__(self, sequence: _Optional[int] = ..., clock: _Optional[float] = ...) -> None: ...

class Goodbye(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class Held(_message.Message):
    __slots__ = ("identity", "table", "record", "bytes", "wanted_bytes")
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    WANTED_BYTES_FIELD_NUMBER: _ClassVar[int]
    identity: _weights_pb2.Identity
    table: BlobRef
    record: BlobRef
    bytes: int
    wanted_bytes: int
    def __init__(self, identity: _Optional[_Union[_weights_pb2.Identity, _Mapping]] = ..., table: _Optional[_Union[BlobRef, _Mapping]] = ..., record: _Optional[_Union[BlobRef, _Mapping]] = ..., bytes: _Optional[int] = ..., wanted_bytes: _Optional[int] = ...) -> None: ...

class HolderHello(_message.Message):
    __slots__ = ("cluster", "kind", "name", "session_id", "host", "epoch", "held", "filling", "digest_format")
    CLUSTER_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    FILLING_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FORMAT_FIELD_NUMBER: _ClassVar[int]
    cluster: str
    kind: str
    name: str
    session_id: str
    host: _weights_pb2.Host
    epoch: int
    held: _containers.RepeatedCompositeFieldContainer[Held]
    filling: Filling
    digest_format: int
    def __init__(self, cluster: _Optional[str] = ..., kind: _Optional[str] = ..., name: _Optional[str] = ..., session_id: _Optional[str] = ..., host: _Optional[_Union[_weights_pb2.Host, _Mapping]] = ..., epoch: _Optional[int] = ..., held: _Optional[_Iterable[_Union[Held, _Mapping]]] = ..., filling: _Optional[_Union[Filling, _Mapping]] = ..., digest_format: _Optional[int] = ...) -> None: ...

class Filling(_message.Message):
    __slots__ = ("memory_bytes", "everything", "gpu_context_bytes", "reads", "lends", "chunks")
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    EVERYTHING_FIELD_NUMBER: _ClassVar[int]
    GPU_CONTEXT_BYTES_FIELD_NUMBER: _ClassVar[int]
    READS_FIELD_NUMBER: _ClassVar[int]
    LENDS_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    memory_bytes: int
    everything: bool
    gpu_context_bytes: int
    reads: _containers.RepeatedScalarFieldContainer[str]
    lends: _containers.RepeatedScalarFieldContainer[str]
    chunks: _weights_pb2.OfferedRegion
    def __init__(self, memory_bytes: _Optional[int] = ..., everything: bool = ..., gpu_context_bytes: _Optional[int] = ..., reads: _Optional[_Iterable[str]] = ..., lends: _Optional[_Iterable[str]] = ..., chunks: _Optional[_Union[_weights_pb2.OfferedRegion, _Mapping]] = ...) -> None: ...

class HolderMessage(_message.Message):
    __slots__ = ("hello", "sealed", "heartbeat", "goodbye", "filled", "progress", "passed_on")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    SEALED_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    GOODBYE_FIELD_NUMBER: _ClassVar[int]
    FILLED_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    PASSED_ON_FIELD_NUMBER: _ClassVar[int]
    hello: HolderHello
    sealed: Sealed
    heartbeat: Heartbeat
    goodbye: Goodbye
    filled: RelayFilled
    progress: RelayProgress
    passed_on: RelayPassedOn
    def __init__(self, hello: _Optional[_Union[HolderHello, _Mapping]] = ..., sealed: _Optional[_Union[Sealed, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., goodbye: _Optional[_Union[Goodbye, _Mapping]] = ..., filled: _Optional[_Union[RelayFilled, _Mapping]] = ..., progress: _Optional[_Union[RelayProgress, _Mapping]] = ..., passed_on: _Optional[_Union[RelayPassedOn, _Mapping]] = ...) -> None: ...

class HolderCommand(_message.Message):
    __slots__ = ("welcome", "refused", "publication_accepted", "seal", "release", "heartbeat", "fill", "let_go")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    PUBLICATION_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    SEAL_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    FILL_FIELD_NUMBER: _ClassVar[int]
    LET_GO_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    refused: Refused
    publication_accepted: PublicationAccepted
    seal: Seal
    release: Release
    heartbeat: Heartbeat
    fill: FillRelay
    let_go: LetGo
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., refused: _Optional[_Union[Refused, _Mapping]] = ..., publication_accepted: _Optional[_Union[PublicationAccepted, _Mapping]] = ..., seal: _Optional[_Union[Seal, _Mapping]] = ..., release: _Optional[_Union[Release, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., fill: _Optional[_Union[FillRelay, _Mapping]] = ..., let_go: _Optional[_Union[LetGo, _Mapping]] = ...) -> None: ...

class WorkerStatus(_message.Message):
    __slots__ = ("rank", "boot_id", "pid", "state", "epoch", "identity", "node")
    RANK_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    rank: int
    boot_id: bytes
    pid: int
    state: WorkerState
    epoch: int
    identity: _weights_pb2.Identity
    node: int
    def __init__(self, rank: _Optional[int] = ..., boot_id: _Optional[bytes] = ..., pid: _Optional[int] = ..., state: _Optional[_Union[WorkerState, str]] = ..., epoch: _Optional[int] = ..., identity: _Optional[_Union[_weights_pb2.Identity, _Mapping]] = ..., node: _Optional[int] = ...) -> None: ...

class Engine(_message.Message):
    __slots__ = ("kind", "version", "url", "pause_modes", "refused_modes")
    class RefusedModesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: str
        def __init__(self, key: _Optional[int] = ..., value: _Optional[str] = ...) -> None: ...
    KIND_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    URL_FIELD_NUMBER: _ClassVar[int]
    PAUSE_MODES_FIELD_NUMBER: _ClassVar[int]
    REFUSED_MODES_FIELD_NUMBER: _ClassVar[int]
    kind: str
    version: str
    url: str
    pause_modes: _containers.RepeatedScalarFieldContainer[PauseMode]
    refused_modes: _containers.ScalarMap[int, str]
    def __init__(self, kind: _Optional[str] = ..., version: _Optional[str] = ..., url: _Optional[str] = ..., pause_modes: _Optional[_Iterable[_Union[PauseMode, str]]] = ..., refused_modes: _Optional[_Mapping[int, str]] = ...) -> None: ...

class ReplicaHello(_message.Message):
    __slots__ = ("cluster", "name", "session_id", "agent_epoch", "engine", "mode", "host", "workers", "transports", "prepared", "last_outcome", "asleep", "epoch", "pool", "digest_format")
    CLUSTER_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    AGENT_EPOCH_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    PREPARED_FIELD_NUMBER: _ClassVar[int]
    LAST_OUTCOME_FIELD_NUMBER: _ClassVar[int]
    ASLEEP_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FORMAT_FIELD_NUMBER: _ClassVar[int]
    cluster: str
    name: str
    session_id: str
    agent_epoch: int
    engine: Engine
    mode: Mode
    host: _weights_pb2.Host
    workers: _containers.RepeatedCompositeFieldContainer[WorkerStatus]
    transports: _containers.RepeatedScalarFieldContainer[str]
    prepared: _containers.RepeatedCompositeFieldContainer[PreparedWorker]
    last_outcome: ReplicaOutcome
    asleep: bool
    epoch: int
    pool: str
    digest_format: int
    def __init__(self, cluster: _Optional[str] = ..., name: _Optional[str] = ..., session_id: _Optional[str] = ..., agent_epoch: _Optional[int] = ..., engine: _Optional[_Union[Engine, _Mapping]] = ..., mode: _Optional[_Union[Mode, str]] = ..., host: _Optional[_Union[_weights_pb2.Host, _Mapping]] = ..., workers: _Optional[_Iterable[_Union[WorkerStatus, _Mapping]]] = ..., transports: _Optional[_Iterable[str]] = ..., prepared: _Optional[_Iterable[_Union[PreparedWorker, _Mapping]]] = ..., last_outcome: _Optional[_Union[ReplicaOutcome, _Mapping]] = ..., asleep: bool = ..., epoch: _Optional[int] = ..., pool: _Optional[str] = ..., digest_format: _Optional[int] = ...) -> None: ...

class ReplicaMessage(_message.Message):
    __slots__ = ("hello", "heartbeat", "prepared", "progress", "outcome", "sealed", "sleep_wake_done", "goodbye")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    PREPARED_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    SEALED_FIELD_NUMBER: _ClassVar[int]
    SLEEP_WAKE_DONE_FIELD_NUMBER: _ClassVar[int]
    GOODBYE_FIELD_NUMBER: _ClassVar[int]
    hello: ReplicaHello
    heartbeat: ReplicaHeartbeat
    prepared: Prepared
    progress: Progress
    outcome: ReplicaOutcome
    sealed: Sealed
    sleep_wake_done: SleepWakeDone
    goodbye: Goodbye
    def __init__(self, hello: _Optional[_Union[ReplicaHello, _Mapping]] = ..., heartbeat: _Optional[_Union[ReplicaHeartbeat, _Mapping]] = ..., prepared: _Optional[_Union[Prepared, _Mapping]] = ..., progress: _Optional[_Union[Progress, _Mapping]] = ..., outcome: _Optional[_Union[ReplicaOutcome, _Mapping]] = ..., sealed: _Optional[_Union[Sealed, _Mapping]] = ..., sleep_wake_done: _Optional[_Union[SleepWakeDone, _Mapping]] = ..., goodbye: _Optional[_Union[Goodbye, _Mapping]] = ...) -> None: ...

class ReplicaCommand(_message.Message):
    __slots__ = ("welcome", "refused", "prepare", "install", "abandon", "outcome_received", "seal", "sleep_wake", "heartbeat", "not_brought")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    PREPARE_FIELD_NUMBER: _ClassVar[int]
    INSTALL_FIELD_NUMBER: _ClassVar[int]
    ABANDON_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_RECEIVED_FIELD_NUMBER: _ClassVar[int]
    SEAL_FIELD_NUMBER: _ClassVar[int]
    SLEEP_WAKE_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    NOT_BROUGHT_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    refused: Refused
    prepare: Prepare
    install: Install
    abandon: Abandon
    outcome_received: OutcomeReceived
    seal: SealForReaders
    sleep_wake: SleepWake
    heartbeat: Heartbeat
    not_brought: NotBrought
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., refused: _Optional[_Union[Refused, _Mapping]] = ..., prepare: _Optional[_Union[Prepare, _Mapping]] = ..., install: _Optional[_Union[Install, _Mapping]] = ..., abandon: _Optional[_Union[Abandon, _Mapping]] = ..., outcome_received: _Optional[_Union[OutcomeReceived, _Mapping]] = ..., seal: _Optional[_Union[SealForReaders, _Mapping]] = ..., sleep_wake: _Optional[_Union[SleepWake, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., not_brought: _Optional[_Union[NotBrought, _Mapping]] = ...) -> None: ...

class NotBrought(_message.Message):
    __slots__ = ("identity", "reason")
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    identity: _weights_pb2.Identity
    reason: str
    def __init__(self, identity: _Optional[_Union[_weights_pb2.Identity, _Mapping]] = ..., reason: _Optional[str] = ...) -> None: ...

class ReplicaHeartbeat(_message.Message):
    __slots__ = ("sequence", "workers", "serving", "asleep", "closed_reason", "label_problem", "engine_check", "stage_memory", "guesses", "scrubs", "requests", "failed_requests")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    SERVING_FIELD_NUMBER: _ClassVar[int]
    ASLEEP_FIELD_NUMBER: _ClassVar[int]
    CLOSED_REASON_FIELD_NUMBER: _ClassVar[int]
    LABEL_PROBLEM_FIELD_NUMBER: _ClassVar[int]
    ENGINE_CHECK_FIELD_NUMBER: _ClassVar[int]
    STAGE_MEMORY_FIELD_NUMBER: _ClassVar[int]
    GUESSES_FIELD_NUMBER: _ClassVar[int]
    SCRUBS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    FAILED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    workers: _containers.RepeatedCompositeFieldContainer[WorkerStatus]
    serving: bool
    asleep: bool
    closed_reason: str
    label_problem: str
    engine_check: str
    stage_memory: str
    guesses: Guesses
    scrubs: _containers.RepeatedCompositeFieldContainer[WorkerScrub]
    requests: int
    failed_requests: int
    def __init__(self, sequence: _Optional[int] = ..., workers: _Optional[_Iterable[_Union[WorkerStatus, _Mapping]]] = ..., serving: bool = ..., asleep: bool = ..., closed_reason: _Optional[str] = ..., label_problem: _Optional[str] = ..., engine_check: _Optional[str] = ..., stage_memory: _Optional[str] = ..., guesses: _Optional[_Union[Guesses, _Mapping]] = ..., scrubs: _Optional[_Iterable[_Union[WorkerScrub, _Mapping]]] = ..., requests: _Optional[int] = ..., failed_requests: _Optional[int] = ...) -> None: ...

class WorkerScrub(_message.Message):
    __slots__ = ("rank", "boot_id", "interval_seconds", "bytes", "unscrubbed", "passes", "passed_at", "pass_seconds", "idle", "differences", "last")
    RANK_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    INTERVAL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    UNSCRUBBED_FIELD_NUMBER: _ClassVar[int]
    PASSES_FIELD_NUMBER: _ClassVar[int]
    PASSED_AT_FIELD_NUMBER: _ClassVar[int]
    PASS_SECONDS_FIELD_NUMBER: _ClassVar[int]
    IDLE_FIELD_NUMBER: _ClassVar[int]
    DIFFERENCES_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    rank: int
    boot_id: bytes
    interval_seconds: float
    bytes: int
    unscrubbed: _containers.RepeatedCompositeFieldContainer[Unscrubbed]
    passes: int
    passed_at: float
    pass_seconds: float
    idle: str
    differences: int
    last: ScrubDifference
    def __init__(self, rank: _Optional[int] = ..., boot_id: _Optional[bytes] = ..., interval_seconds: _Optional[float] = ..., bytes: _Optional[int] = ..., unscrubbed: _Optional[_Iterable[_Union[Unscrubbed, _Mapping]]] = ..., passes: _Optional[int] = ..., passed_at: _Optional[float] = ..., pass_seconds: _Optional[float] = ..., idle: _Optional[str] = ..., differences: _Optional[int] = ..., last: _Optional[_Union[ScrubDifference, _Mapping]] = ...) -> None: ...

class Unscrubbed(_message.Message):
    __slots__ = ("reason", "bytes", "tensors")
    REASON_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    reason: str
    bytes: int
    tensors: int
    def __init__(self, reason: _Optional[str] = ..., bytes: _Optional[int] = ..., tensors: _Optional[int] = ...) -> None: ...

class ScrubDifference(_message.Message):
    __slots__ = ("rank", "tensor", "start", "stop", "identity", "epoch", "at")
    RANK_FIELD_NUMBER: _ClassVar[int]
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    rank: int
    tensor: str
    start: _containers.RepeatedScalarFieldContainer[int]
    stop: _containers.RepeatedScalarFieldContainer[int]
    identity: _weights_pb2.Identity
    epoch: int
    at: float
    def __init__(self, rank: _Optional[int] = ..., tensor: _Optional[str] = ..., start: _Optional[_Iterable[int]] = ..., stop: _Optional[_Iterable[int]] = ..., identity: _Optional[_Union[_weights_pb2.Identity, _Mapping]] = ..., epoch: _Optional[int] = ..., at: _Optional[float] = ...) -> None: ...

class Guesses(_message.Message):
    __slots__ = ("guessed", "accepted")
    GUESSED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    guessed: int
    accepted: int
    def __init__(self, guessed: _Optional[int] = ..., accepted: _Optional[int] = ...) -> None: ...

class Prepare(_message.Message):
    __slots__ = ("fence", "manifest", "deadline_seconds")
    FENCE_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    fence: _weights_pb2.Fence
    manifest: BlobRef
    deadline_seconds: float
    def __init__(self, fence: _Optional[_Union[_weights_pb2.Fence, _Mapping]] = ..., manifest: _Optional[_Union[BlobRef, _Mapping]] = ..., deadline_seconds: _Optional[float] = ...) -> None: ...

class PreparedWorker(_message.Message):
    __slots__ = ("rank", "needs", "host", "boot_id", "manifest_digest")
    RANK_FIELD_NUMBER: _ClassVar[int]
    NEEDS_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_DIGEST_FIELD_NUMBER: _ClassVar[int]
    rank: int
    needs: BlobRef
    host: _weights_pb2.Host
    boot_id: bytes
    manifest_digest: bytes
    def __init__(self, rank: _Optional[int] = ..., needs: _Optional[_Union[BlobRef, _Mapping]] = ..., host: _Optional[_Union[_weights_pb2.Host, _Mapping]] = ..., boot_id: _Optional[bytes] = ..., manifest_digest: _Optional[bytes] = ...) -> None: ...

class Prepared(_message.Message):
    __slots__ = ("fence", "manifest_digest", "workers", "problem")
    FENCE_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_DIGEST_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    fence: _weights_pb2.Fence
    manifest_digest: bytes
    workers: _containers.RepeatedCompositeFieldContainer[PreparedWorker]
    problem: _weights_pb2.Problem
    def __init__(self, fence: _Optional[_Union[_weights_pb2.Fence, _Mapping]] = ..., manifest_digest: _Optional[bytes] = ..., workers: _Optional[_Iterable[_Union[PreparedWorker, _Mapping]]] = ..., problem: _Optional[_Union[_weights_pb2.Problem, _Mapping]] = ...) -> None: ...

class WorkerInstall(_message.Message):
    __slots__ = ("rank", "plan", "expected", "member")
    RANK_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    rank: int
    plan: BlobRef
    expected: BlobRef
    member: int
    def __init__(self, rank: _Optional[int] = ..., plan: _Optional[_Union[BlobRef, _Mapping]] = ..., expected: _Optional[_Union[BlobRef, _Mapping]] = ..., member: _Optional[int] = ...) -> None: ...

class Install(_message.Message):
    __slots__ = ("fence", "identity", "workers", "pause_mode", "deadline_seconds", "collective", "waits", "probe")
    FENCE_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    PAUSE_MODE_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    COLLECTIVE_FIELD_NUMBER: _ClassVar[int]
    WAITS_FIELD_NUMBER: _ClassVar[int]
    PROBE_FIELD_NUMBER: _ClassVar[int]
    fence: _weights_pb2.Fence
    identity: _weights_pb2.Identity
    workers: _containers.RepeatedCompositeFieldContainer[WorkerInstall]
    pause_mode: PauseMode
    deadline_seconds: float
    collective: Collective
    waits: bool
    probe: BlobRef
    def __init__(self, fence: _Optional[_Union[_weights_pb2.Fence, _Mapping]] = ..., identity: _Optional[_Union[_weights_pb2.Identity, _Mapping]] = ..., workers: _Optional[_Iterable[_Union[WorkerInstall, _Mapping]]] = ..., pause_mode: _Optional[_Union[PauseMode, str]] = ..., deadline_seconds: _Optional[float] = ..., collective: _Optional[_Union[Collective, _Mapping]] = ..., waits: bool = ..., probe: _Optional[_Union[BlobRef, _Mapping]] = ...) -> None: ...

class Abandon(_message.Message):
    __slots__ = ("fence", "reason")
    FENCE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    fence: _weights_pb2.Fence
    reason: str
    def __init__(self, fence: _Optional[_Union[_weights_pb2.Fence, _Mapping]] = ..., reason: _Optional[str] = ...) -> None: ...

class OutcomeReceived(_message.Message):
    __slots__ = ("fence",)
    FENCE_FIELD_NUMBER: _ClassVar[int]
    fence: _weights_pb2.Fence
    def __init__(self, fence: _Optional[_Union[_weights_pb2.Fence, _Mapping]] = ...) -> None: ...

class SealForReaders(_message.Message):
    __slots__ = ("fence", "table", "atoms", "deadline_seconds")
    FENCE_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    ATOMS_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    fence: _weights_pb2.Fence
    table: BlobRef
    atoms: BlobRef
    deadline_seconds: float
    def __init__(self, fence: _Optional[_Union[_weights_pb2.Fence, _Mapping]] = ..., table: _Optional[_Union[BlobRef, _Mapping]] = ..., atoms: _Optional[_Union[BlobRef, _Mapping]] = ..., deadline_seconds: _Optional[float] = ...) -> None: ...

class SleepWake(_message.Message):
    __slots__ = ("fence", "wake", "level", "tags", "deadline_seconds")
    FENCE_FIELD_NUMBER: _ClassVar[int]
    WAKE_FIELD_NUMBER: _ClassVar[int]
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    TAGS_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    fence: _weights_pb2.Fence
    wake: bool
    level: int
    tags: _containers.RepeatedScalarFieldContainer[str]
    deadline_seconds: float
    def __init__(self, fence: _Optional[_Union[_weights_pb2.Fence, _Mapping]] = ..., wake: bool = ..., level: _Optional[int] = ..., tags: _Optional[_Iterable[str]] = ..., deadline_seconds: _Optional[float] = ...) -> None: ...

class SleepWakeDone(_message.Message):
    __slots__ = ("fence", "problem")
    FENCE_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    fence: _weights_pb2.Fence
    problem: _weights_pb2.Problem
    def __init__(self, fence: _Optional[_Union[_weights_pb2.Fence, _Mapping]] = ..., problem: _Optional[_Union[_weights_pb2.Problem, _Mapping]] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("fence", "stage", "bytes_done", "bytes_total", "goes_back", "steps", "ready")
    FENCE_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    BYTES_DONE_FIELD_NUMBER: _ClassVar[int]
    BYTES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    GOES_BACK_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    fence: _weights_pb2.Fence
    stage: Stage
    bytes_done: int
    bytes_total: int
    goes_back: bool
    steps: int
    ready: bool
    def __init__(self, fence: _Optional[_Union[_weights_pb2.Fence, _Mapping]] = ..., stage: _Optional[_Union[Stage, str]] = ..., bytes_done: _Optional[int] = ..., bytes_total: _Optional[int] = ..., goes_back: bool = ..., steps: _Optional[int] = ..., ready: bool = ...) -> None: ...

class StageSeconds(_message.Message):
    __slots__ = ("stage", "seconds")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    stage: Stage
    seconds: float
    def __init__(self, stage: _Optional[_Union[Stage, str]] = ..., seconds: _Optional[float] = ...) -> None: ...

class EdgeReport(_message.Message):
    __slots__ = ("source_rank", "worker_rank", "transport", "reason", "bytes", "source")
    SOURCE_RANK_FIELD_NUMBER: _ClassVar[int]
    WORKER_RANK_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    source_rank: int
    worker_rank: int
    transport: str
    reason: str
    bytes: int
    source: str
    def __init__(self, source_rank: _Optional[int] = ..., worker_rank: _Optional[int] = ..., transport: _Optional[str] = ..., reason: _Optional[str] = ..., bytes: _Optional[int] = ..., source: _Optional[str] = ...) -> None: ...

class WorkerReport(_message.Message):
    __slots__ = ("rank", "bytes", "tensors", "verified", "verified_as_loaded", "copies", "transfer_seconds", "install_seconds", "verify_seconds", "problem", "by_loader", "span", "early_bytes", "early_seconds", "quantised", "absent", "parts", "by_changes", "changed_elements", "in_full", "since_full")
    RANK_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    VERIFIED_FIELD_NUMBER: _ClassVar[int]
    VERIFIED_AS_LOADED_FIELD_NUMBER: _ClassVar[int]
    COPIES_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_SECONDS_FIELD_NUMBER: _ClassVar[int]
    INSTALL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    VERIFY_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    BY_LOADER_FIELD_NUMBER: _ClassVar[int]
    SPAN_FIELD_NUMBER: _ClassVar[int]
    EARLY_BYTES_FIELD_NUMBER: _ClassVar[int]
    EARLY_SECONDS_FIELD_NUMBER: _ClassVar[int]
    QUANTISED_FIELD_NUMBER: _ClassVar[int]
    ABSENT_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    BY_CHANGES_FIELD_NUMBER: _ClassVar[int]
    CHANGED_ELEMENTS_FIELD_NUMBER: _ClassVar[int]
    IN_FULL_FIELD_NUMBER: _ClassVar[int]
    SINCE_FULL_FIELD_NUMBER: _ClassVar[int]
    rank: int
    bytes: int
    tensors: int
    verified: int
    verified_as_loaded: int
    copies: int
    transfer_seconds: float
    install_seconds: float
    verify_seconds: float
    problem: _weights_pb2.Problem
    by_loader: _containers.RepeatedScalarFieldContainer[str]
    span: Span
    early_bytes: int
    early_seconds: float
    quantised: _containers.RepeatedCompositeFieldContainer[QuantisedLayers]
    absent: _containers.RepeatedCompositeFieldContainer[AbsentTensors]
    parts: _containers.RepeatedCompositeFieldContainer[PartReport]
    by_changes: int
    changed_elements: int
    in_full: str
    since_full: int
    def __init__(self, rank: _Optional[int] = ..., bytes: _Optional[int] = ..., tensors: _Optional[int] = ..., verified: _Optional[int] = ..., verified_as_loaded: _Optional[int] = ..., copies: _Optional[int] = ..., transfer_seconds: _Optional[float] = ..., install_seconds: _Optional[float] = ..., verify_seconds: _Optional[float] = ..., problem: _Optional[_Union[_weights_pb2.Problem, _Mapping]] = ..., by_loader: _Optional[_Iterable[str]] = ..., span: _Optional[_Union[Span, _Mapping]] = ..., early_bytes: _Optional[int] = ..., early_seconds: _Optional[float] = ..., quantised: _Optional[_Iterable[_Union[QuantisedLayers, _Mapping]]] = ..., absent: _Optional[_Iterable[_Union[AbsentTensors, _Mapping]]] = ..., parts: _Optional[_Iterable[_Union[PartReport, _Mapping]]] = ..., by_changes: _Optional[int] = ..., changed_elements: _Optional[int] = ..., in_full: _Optional[str] = ..., since_full: _Optional[int] = ...) -> None: ...

class AbsentTensors(_message.Message):
    __slots__ = ("prefix", "tensors", "bytes", "reason")
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    prefix: str
    tensors: int
    bytes: int
    reason: str
    def __init__(self, prefix: _Optional[str] = ..., tensors: _Optional[int] = ..., bytes: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class PartReport(_message.Message):
    __slots__ = ("part", "handling", "bytes", "tensors", "verified", "shared")
    class Handling(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        HANDLING_UNSPECIFIED: _ClassVar[PartReport.Handling]
        HANDLING_INSTALLED: _ClassVar[PartReport.Handling]
        HANDLING_LEFT: _ClassVar[PartReport.Handling]
        HANDLING_KEPT: _ClassVar[PartReport.Handling]
    HANDLING_UNSPECIFIED: PartReport.Handling
    HANDLING_INSTALLED: PartReport.Handling
    HANDLING_LEFT: PartReport.Handling
    HANDLING_KEPT: PartReport.Handling
    PART_FIELD_NUMBER: _ClassVar[int]
    HANDLING_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    VERIFIED_FIELD_NUMBER: _ClassVar[int]
    SHARED_FIELD_NUMBER: _ClassVar[int]
    part: str
    handling: PartReport.Handling
    bytes: int
    tensors: int
    verified: int
    shared: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, part: _Optional[str] = ..., handling: _Optional[_Union[PartReport.Handling, str]] = ..., bytes: _Optional[int] = ..., tensors: _Optional[int] = ..., verified: _Optional[int] = ..., shared: _Optional[_Iterable[str]] = ...) -> None: ...

class QuantisedLayers(_message.Message):
    __slots__ = ("published", "method", "layers", "names")
    PUBLISHED_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    published: bool
    method: str
    layers: int
    names: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, published: bool = ..., method: _Optional[str] = ..., layers: _Optional[int] = ..., names: _Optional[_Iterable[str]] = ...) -> None: ...

class StageEntered(_message.Message):
    __slots__ = ("stage", "after")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    stage: Stage
    after: float
    def __init__(self, stage: _Optional[_Union[Stage, str]] = ..., after: _Optional[float] = ...) -> None: ...

class ReplicaOutcome(_message.Message):
    __slots__ = ("replica", "fence", "outcome", "problem", "before", "after", "bytes", "edges", "stages", "pause_seconds", "sync_seconds", "workers", "label_problem", "unopened", "span", "entered", "pause_after", "operator_hold", "cannot_load", "differences", "probe")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    FENCE_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    EDGES_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    PAUSE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SYNC_SECONDS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    LABEL_PROBLEM_FIELD_NUMBER: _ClassVar[int]
    UNOPENED_FIELD_NUMBER: _ClassVar[int]
    SPAN_FIELD_NUMBER: _ClassVar[int]
    ENTERED_FIELD_NUMBER: _ClassVar[int]
    PAUSE_AFTER_FIELD_NUMBER: _ClassVar[int]
    OPERATOR_HOLD_FIELD_NUMBER: _ClassVar[int]
    CANNOT_LOAD_FIELD_NUMBER: _ClassVar[int]
    DIFFERENCES_FIELD_NUMBER: _ClassVar[int]
    PROBE_FIELD_NUMBER: _ClassVar[int]
    replica: str
    fence: _weights_pb2.Fence
    outcome: Outcome
    problem: _weights_pb2.Problem
    before: _weights_pb2.Identity
    after: _weights_pb2.Identity
    bytes: int
    edges: _containers.RepeatedCompositeFieldContainer[EdgeReport]
    stages: _containers.RepeatedCompositeFieldContainer[StageSeconds]
    pause_seconds: float
    sync_seconds: float
    workers: _containers.RepeatedCompositeFieldContainer[WorkerReport]
    label_problem: str
    unopened: _containers.RepeatedCompositeFieldContainer[_weights_pb2.Unopened]
    span: Span
    entered: _containers.RepeatedCompositeFieldContainer[StageEntered]
    pause_after: float
    operator_hold: bool
    cannot_load: bool
    differences: _containers.RepeatedCompositeFieldContainer[ScrubDifference]
    probe: ProbeAnswer
    def __init__(self, replica: _Optional[str] = ..., fence: _Optional[_Union[_weights_pb2.Fence, _Mapping]] = ..., outcome: _Optional[_Union[Outcome, str]] = ..., problem: _Optional[_Union[_weights_pb2.Problem, _Mapping]] = ..., before: _Optional[_Union[_weights_pb2.Identity, _Mapping]] = ..., after: _Optional[_Union[_weights_pb2.Identity, _Mapping]] = ..., bytes: _Optional[int] = ..., edges: _Optional[_Iterable[_Union[EdgeReport, _Mapping]]] = ..., stages: _Optional[_Iterable[_Union[StageSeconds, _Mapping]]] = ..., pause_seconds: _Optional[float] = ..., sync_seconds: _Optional[float] = ..., workers: _Optional[_Iterable[_Union[WorkerReport, _Mapping]]] = ..., label_problem: _Optional[str] = ..., unopened: _Optional[_Iterable[_Union[_weights_pb2.Unopened, _Mapping]]] = ..., span: _Optional[_Union[Span, _Mapping]] = ..., entered: _Optional[_Iterable[_Union[StageEntered, _Mapping]]] = ..., pause_after: _Optional[float] = ..., operator_hold: bool = ..., cannot_load: bool = ..., differences: _Optional[_Iterable[_Union[ScrubDifference, _Mapping]]] = ..., probe: _Optional[_Union[ProbeAnswer, _Mapping]] = ...) -> None: ...

class ProbeScores(_message.Message):
    __slots__ = ("sequences", "bounds", "clip", "seconds")
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    BOUNDS_FIELD_NUMBER: _ClassVar[int]
    CLIP_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    sequences: _containers.RepeatedCompositeFieldContainer[ProbeSequence]
    bounds: ProbeBounds
    clip: float
    seconds: float
    def __init__(self, sequences: _Optional[_Iterable[_Union[ProbeSequence, _Mapping]]] = ..., bounds: _Optional[_Union[ProbeBounds, _Mapping]] = ..., clip: _Optional[float] = ..., seconds: _Optional[float] = ...) -> None: ...

class ProbeSequence(_message.Message):
    __slots__ = ("tokens", "log_probabilities", "top")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOG_PROBABILITIES_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    log_probabilities: _containers.RepeatedScalarFieldContainer[float]
    top: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, tokens: _Optional[_Iterable[int]] = ..., log_probabilities: _Optional[_Iterable[float]] = ..., top: _Optional[_Iterable[int]] = ...) -> None: ...

class ProbeBounds(_message.Message):
    __slots__ = ("mean", "p99", "largest", "kl", "clipped", "flips")
    MEAN_FIELD_NUMBER: _ClassVar[int]
    P99_FIELD_NUMBER: _ClassVar[int]
    LARGEST_FIELD_NUMBER: _ClassVar[int]
    KL_FIELD_NUMBER: _ClassVar[int]
    CLIPPED_FIELD_NUMBER: _ClassVar[int]
    FLIPS_FIELD_NUMBER: _ClassVar[int]
    mean: float
    p99: float
    largest: float
    kl: float
    clipped: float
    flips: float
    def __init__(self, mean: _Optional[float] = ..., p99: _Optional[float] = ..., largest: _Optional[float] = ..., kl: _Optional[float] = ..., clipped: _Optional[float] = ..., flips: _Optional[float] = ...) -> None: ...

class ProbeFigures(_message.Message):
    __slots__ = ("tokens", "mean", "p99", "largest", "kl", "clipped", "flips")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    MEAN_FIELD_NUMBER: _ClassVar[int]
    P99_FIELD_NUMBER: _ClassVar[int]
    LARGEST_FIELD_NUMBER: _ClassVar[int]
    KL_FIELD_NUMBER: _ClassVar[int]
    CLIPPED_FIELD_NUMBER: _ClassVar[int]
    FLIPS_FIELD_NUMBER: _ClassVar[int]
    tokens: int
    mean: float
    p99: float
    largest: float
    kl: float
    clipped: float
    flips: float
    def __init__(self, tokens: _Optional[int] = ..., mean: _Optional[float] = ..., p99: _Optional[float] = ..., largest: _Optional[float] = ..., kl: _Optional[float] = ..., clipped: _Optional[float] = ..., flips: _Optional[float] = ...) -> None: ...

class ProbeAnswer(_message.Message):
    __slots__ = ("engine", "before", "cached", "broken", "broken_cached", "problem", "seconds", "accepted_before", "accepted")
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    BROKEN_FIELD_NUMBER: _ClassVar[int]
    BROKEN_CACHED_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_BEFORE_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    engine: ProbeFigures
    before: ProbeFigures
    cached: ProbeFigures
    broken: _containers.RepeatedScalarFieldContainer[str]
    broken_cached: _containers.RepeatedScalarFieldContainer[str]
    problem: _weights_pb2.Problem
    seconds: float
    accepted_before: float
    accepted: float
    def __init__(self, engine: _Optional[_Union[ProbeFigures, _Mapping]] = ..., before: _Optional[_Union[ProbeFigures, _Mapping]] = ..., cached: _Optional[_Union[ProbeFigures, _Mapping]] = ..., broken: _Optional[_Iterable[str]] = ..., broken_cached: _Optional[_Iterable[str]] = ..., problem: _Optional[_Union[_weights_pb2.Problem, _Mapping]] = ..., seconds: _Optional[float] = ..., accepted_before: _Optional[float] = ..., accepted: _Optional[float] = ...) -> None: ...

class ProbeFinding(_message.Message):
    __slots__ = ("cause", "replicas", "reason")
    class Cause(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        CAUSE_UNSPECIFIED: _ClassVar[ProbeFinding.Cause]
        CAUSE_ALL: _ClassVar[ProbeFinding.Cause]
        CAUSE_REPLICA: _ClassVar[ProbeFinding.Cause]
        CAUSE_CACHE: _ClassVar[ProbeFinding.Cause]
        CAUSE_DRAFT: _ClassVar[ProbeFinding.Cause]
        CAUSE_UNKNOWN: _ClassVar[ProbeFinding.Cause]
        CAUSE_SILENT: _ClassVar[ProbeFinding.Cause]
    CAUSE_UNSPECIFIED: ProbeFinding.Cause
    CAUSE_ALL: ProbeFinding.Cause
    CAUSE_REPLICA: ProbeFinding.Cause
    CAUSE_CACHE: ProbeFinding.Cause
    CAUSE_DRAFT: ProbeFinding.Cause
    CAUSE_UNKNOWN: ProbeFinding.Cause
    CAUSE_SILENT: ProbeFinding.Cause
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    cause: ProbeFinding.Cause
    replicas: _containers.RepeatedScalarFieldContainer[str]
    reason: str
    def __init__(self, cause: _Optional[_Union[ProbeFinding.Cause, str]] = ..., replicas: _Optional[_Iterable[str]] = ..., reason: _Optional[str] = ...) -> None: ...

class DeployCondition(_message.Message):
    __slots__ = ("name", "value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: float
    def __init__(self, name: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...

class UpdateOptions(_message.Message):
    __slots__ = ("pause_mode", "timeout_seconds", "min_replicas", "replicas", "pool", "prefetch", "until", "dry_run", "draft", "strategy", "wave_replicas", "wave_share", "conditions", "newer")
    PAUSE_MODE_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    MIN_REPLICAS_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    PREFETCH_FIELD_NUMBER: _ClassVar[int]
    UNTIL_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    DRAFT_FIELD_NUMBER: _ClassVar[int]
    STRATEGY_FIELD_NUMBER: _ClassVar[int]
    WAVE_REPLICAS_FIELD_NUMBER: _ClassVar[int]
    WAVE_SHARE_FIELD_NUMBER: _ClassVar[int]
    CONDITIONS_FIELD_NUMBER: _ClassVar[int]
    NEWER_FIELD_NUMBER: _ClassVar[int]
    pause_mode: PauseMode
    timeout_seconds: float
    min_replicas: int
    replicas: _containers.RepeatedScalarFieldContainer[str]
    pool: str
    prefetch: Prefetch
    until: Until
    dry_run: bool
    draft: Draft
    strategy: str
    wave_replicas: int
    wave_share: float
    conditions: _containers.RepeatedCompositeFieldContainer[DeployCondition]
    newer: Newer
    def __init__(self, pause_mode: _Optional[_Union[PauseMode, str]] = ..., timeout_seconds: _Optional[float] = ..., min_replicas: _Optional[int] = ..., replicas: _Optional[_Iterable[str]] = ..., pool: _Optional[str] = ..., prefetch: _Optional[_Union[Prefetch, str]] = ..., until: _Optional[_Union[Until, str]] = ..., dry_run: bool = ..., draft: _Optional[_Union[Draft, str]] = ..., strategy: _Optional[str] = ..., wave_replicas: _Optional[int] = ..., wave_share: _Optional[float] = ..., conditions: _Optional[_Iterable[_Union[DeployCondition, _Mapping]]] = ..., newer: _Optional[_Union[Newer, str]] = ...) -> None: ...

class Deployment(_message.Message):
    __slots__ = ("number", "base", "base_epoch", "target", "strategy", "wave_replicas", "conditions", "newer", "pause_mode", "min_replicas", "wave_seconds", "pool", "selection", "participants", "waves", "state", "approved", "paused", "reason", "waits_for", "requests", "failed_requests")
    class State(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        STATE_UNSPECIFIED: _ClassVar[Deployment.State]
        STATE_UNDECIDED: _ClassVar[Deployment.State]
        STATE_DEPLOYED: _ClassVar[Deployment.State]
        STATE_UNDONE: _ClassVar[Deployment.State]
    STATE_UNSPECIFIED: Deployment.State
    STATE_UNDECIDED: Deployment.State
    STATE_DEPLOYED: Deployment.State
    STATE_UNDONE: Deployment.State
    class Wave(_message.Message):
        __slots__ = ("epoch", "replicas")
        EPOCH_FIELD_NUMBER: _ClassVar[int]
        REPLICAS_FIELD_NUMBER: _ClassVar[int]
        epoch: int
        replicas: _containers.RepeatedScalarFieldContainer[str]
        def __init__(self, epoch: _Optional[int] = ..., replicas: _Optional[_Iterable[str]] = ...) -> None: ...
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    BASE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    STRATEGY_FIELD_NUMBER: _ClassVar[int]
    WAVE_REPLICAS_FIELD_NUMBER: _ClassVar[int]
    CONDITIONS_FIELD_NUMBER: _ClassVar[int]
    NEWER_FIELD_NUMBER: _ClassVar[int]
    PAUSE_MODE_FIELD_NUMBER: _ClassVar[int]
    MIN_REPLICAS_FIELD_NUMBER: _ClassVar[int]
    WAVE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    SELECTION_FIELD_NUMBER: _ClassVar[int]
    PARTICIPANTS_FIELD_NUMBER: _ClassVar[int]
    WAVES_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    APPROVED_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    WAITS_FOR_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    FAILED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    number: int
    base: _weights_pb2.Identity
    base_epoch: int
    target: _weights_pb2.Identity
    strategy: str
    wave_replicas: int
    conditions: _containers.RepeatedCompositeFieldContainer[DeployCondition]
    newer: Newer
    pause_mode: PauseMode
    min_replicas: int
    wave_seconds: float
    pool: str
    selection: _containers.RepeatedScalarFieldContainer[str]
    participants: _containers.RepeatedScalarFieldContainer[str]
    waves: _containers.RepeatedCompositeFieldContainer[Deployment.Wave]
    state: Deployment.State
    approved: int
    paused: bool
    reason: str
    waits_for: str
    requests: int
    failed_requests: int
    def __init__(self, number: _Optional[int] = ..., base: _Optional[_Union[_weights_pb2.Identity, _Mapping]] = ..., base_epoch: _Optional[int] = ..., target: _Optional[_Union[_weights_pb2.Identity, _Mapping]] = ..., strategy: _Optional[str] = ..., wave_replicas: _Optional[int] = ..., conditions: _Optional[_Iterable[_Union[DeployCondition, _Mapping]]] = ..., newer: _Optional[_Union[Newer, str]] = ..., pause_mode: _Optional[_Union[PauseMode, str]] = ..., min_replicas: _Optional[int] = ..., wave_seconds: _Optional[float] = ..., pool: _Optional[str] = ..., selection: _Optional[_Iterable[str]] = ..., participants: _Optional[_Iterable[str]] = ..., waves: _Optional[_Iterable[_Union[Deployment.Wave, _Mapping]]] = ..., state: _Optional[_Union[Deployment.State, str]] = ..., approved: _Optional[int] = ..., paused: bool = ..., reason: _Optional[str] = ..., waits_for: _Optional[str] = ..., requests: _Optional[int] = ..., failed_requests: _Optional[int] = ...) -> None: ...

class SteerDeploymentRequest(_message.Message):
    __slots__ = ("number", "action", "reason")
    class Action(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        ACTION_UNSPECIFIED: _ClassVar[SteerDeploymentRequest.Action]
        ACTION_APPROVE: _ClassVar[SteerDeploymentRequest.Action]
        ACTION_PAUSE: _ClassVar[SteerDeploymentRequest.Action]
        ACTION_RESUME: _ClassVar[SteerDeploymentRequest.Action]
        ACTION_UNDO: _ClassVar[SteerDeploymentRequest.Action]
    ACTION_UNSPECIFIED: SteerDeploymentRequest.Action
    ACTION_APPROVE: SteerDeploymentRequest.Action
    ACTION_PAUSE: SteerDeploymentRequest.Action
    ACTION_RESUME: SteerDeploymentRequest.Action
    ACTION_UNDO: SteerDeploymentRequest.Action
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    ACTION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    number: int
    action: SteerDeploymentRequest.Action
    reason: str
    def __init__(self, number: _Optional[int] = ..., action: _Optional[_Union[SteerDeploymentRequest.Action, str]] = ..., reason: _Optional[str] = ...) -> None: ...

class UpdateWeightsRequest(_message.Message):
    __slots__ = ("lineage", "rank", "session_id", "version", "options", "adapts", "probe", "sealed")
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    ADAPTS_FIELD_NUMBER: _ClassVar[int]
    PROBE_FIELD_NUMBER: _ClassVar[int]
    SEALED_FIELD_NUMBER: _ClassVar[int]
    lineage: str
    rank: int
    session_id: str
    version: int
    options: UpdateOptions
    adapts: bool
    probe: BlobRef
    sealed: _weights_pb2.Fence
    def __init__(self, lineage: _Optional[str] = ..., rank: _Optional[int] = ..., session_id: _Optional[str] = ..., version: _Optional[int] = ..., options: _Optional[_Union[UpdateOptions, _Mapping]] = ..., adapts: bool = ..., probe: _Optional[_Union[BlobRef, _Mapping]] = ..., sealed: _Optional[_Union[_weights_pb2.Fence, _Mapping]] = ...) -> None: ...

class UpdateFromDirectoryRequest(_message.Message):
    __slots__ = ("directory", "lineage", "version", "options", "check_finite", "draft_directory")
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    CHECK_FINITE_FIELD_NUMBER: _ClassVar[int]
    DRAFT_DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    directory: str
    lineage: str
    version: int
    options: UpdateOptions
    check_finite: bool
    draft_directory: str
    def __init__(self, directory: _Optional[str] = ..., lineage: _Optional[str] = ..., version: _Optional[int] = ..., options: _Optional[_Union[UpdateOptions, _Mapping]] = ..., check_finite: bool = ..., draft_directory: _Optional[str] = ...) -> None: ...

class RollbackRequest(_message.Message):
    __slots__ = ("lineage", "version", "options")
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    lineage: str
    version: int
    options: UpdateOptions
    def __init__(self, lineage: _Optional[str] = ..., version: _Optional[int] = ..., options: _Optional[_Union[UpdateOptions, _Mapping]] = ...) -> None: ...

class WaitForUpdateRequest(_message.Message):
    __slots__ = ("lineage", "version", "timeout_seconds")
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    lineage: str
    version: int
    timeout_seconds: float
    def __init__(self, lineage: _Optional[str] = ..., version: _Optional[int] = ..., timeout_seconds: _Optional[float] = ...) -> None: ...

class GetUpdateRequest(_message.Message):
    __slots__ = ("epoch", "lineage", "version")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    lineage: str
    version: int
    def __init__(self, epoch: _Optional[int] = ..., lineage: _Optional[str] = ..., version: _Optional[int] = ...) -> None: ...

class UpdateRecord(_message.Message):
    __slots__ = ("epoch", "identity", "time", "report")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    identity: _weights_pb2.Identity
    time: float
    report: UpdateReport
    def __init__(self, epoch: _Optional[int] = ..., identity: _Optional[_Union[_weights_pb2.Identity, _Mapping]] = ..., time: _Optional[float] = ..., report: _Optional[_Union[UpdateReport, _Mapping]] = ...) -> None: ...

class ListUpdatesRequest(_message.Message):
    __slots__ = ("before", "limit")
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    before: int
    limit: int
    def __init__(self, before: _Optional[int] = ..., limit: _Optional[int] = ...) -> None: ...

class ListUpdatesResponse(_message.Message):
    __slots__ = ("updates", "next_before", "refused")
    UPDATES_FIELD_NUMBER: _ClassVar[int]
    NEXT_BEFORE_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    updates: _containers.RepeatedCompositeFieldContainer[UpdateRecord]
    next_before: int
    refused: _containers.RepeatedCompositeFieldContainer[UpdateRefusal]
    def __init__(self, updates: _Optional[_Iterable[_Union[UpdateRecord, _Mapping]]] = ..., next_before: _Optional[int] = ..., refused: _Optional[_Iterable[_Union[UpdateRefusal, _Mapping]]] = ...) -> None: ...

class UpdateRefusal(_message.Message):
    __slots__ = ("lineage", "version", "time", "problem")
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    lineage: str
    version: int
    time: float
    problem: _weights_pb2.Problem
    def __init__(self, lineage: _Optional[str] = ..., version: _Optional[int] = ..., time: _Optional[float] = ..., problem: _Optional[_Union[_weights_pb2.Problem, _Mapping]] = ...) -> None: ...

class RelayReport(_message.Message):
    __slots__ = ("relay", "filled", "replicas", "relays", "upstream", "stage")
    RELAY_FIELD_NUMBER: _ClassVar[int]
    FILLED_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    RELAYS_FIELD_NUMBER: _ClassVar[int]
    UPSTREAM_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    relay: str
    filled: RelayFilled
    replicas: _containers.RepeatedScalarFieldContainer[str]
    relays: _containers.RepeatedScalarFieldContainer[str]
    upstream: _containers.RepeatedScalarFieldContainer[str]
    stage: int
    def __init__(self, relay: _Optional[str] = ..., filled: _Optional[_Union[RelayFilled, _Mapping]] = ..., replicas: _Optional[_Iterable[str]] = ..., relays: _Optional[_Iterable[str]] = ..., upstream: _Optional[_Iterable[str]] = ..., stage: _Optional[int] = ...) -> None: ...

class UpdateEvent(_message.Message):
    __slots__ = ("progress", "report", "refusal")
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    progress: UpdateProgress
    report: UpdateReport
    refusal: _weights_pb2.Problem
    def __init__(self, progress: _Optional[_Union[UpdateProgress, _Mapping]] = ..., report: _Optional[_Union[UpdateReport, _Mapping]] = ..., refusal: _Optional[_Union[_weights_pb2.Problem, _Mapping]] = ...) -> None: ...

class UpdateProgress(_message.Message):
    __slots__ = ("replica", "stage", "bytes_done", "bytes_total", "message")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    BYTES_DONE_FIELD_NUMBER: _ClassVar[int]
    BYTES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    replica: str
    stage: Stage
    bytes_done: int
    bytes_total: int
    message: str
    def __init__(self, replica: _Optional[str] = ..., stage: _Optional[_Union[Stage, str]] = ..., bytes_done: _Optional[int] = ..., bytes_total: _Optional[int] = ..., message: _Optional[str] = ...) -> None: ...

class UpdateReport(_message.Message):
    __slots__ = ("fence", "identity", "ok", "replicas", "seconds", "stages", "bytes", "tensors", "source_copies", "verified", "warnings", "copied", "relays", "prefetch", "held", "collective", "timeline", "not_finite", "dry_run", "deployment", "probe")
    FENCE_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    OK_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_COPIES_FIELD_NUMBER: _ClassVar[int]
    VERIFIED_FIELD_NUMBER: _ClassVar[int]
    WARNINGS_FIELD_NUMBER: _ClassVar[int]
    COPIED_FIELD_NUMBER: _ClassVar[int]
    RELAYS_FIELD_NUMBER: _ClassVar[int]
    PREFETCH_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    COLLECTIVE_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    NOT_FINITE_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    DEPLOYMENT_FIELD_NUMBER: _ClassVar[int]
    PROBE_FIELD_NUMBER: _ClassVar[int]
    fence: _weights_pb2.Fence
    identity: _weights_pb2.Identity
    ok: bool
    replicas: _containers.RepeatedCompositeFieldContainer[ReplicaOutcome]
    seconds: float
    stages: _containers.RepeatedCompositeFieldContainer[StageSeconds]
    bytes: int
    tensors: int
    source_copies: int
    verified: bool
    warnings: _containers.RepeatedScalarFieldContainer[str]
    copied: _containers.RepeatedCompositeFieldContainer[_weights_pb2.CopiedTensors]
    relays: _containers.RepeatedCompositeFieldContainer[RelayReport]
    prefetch: str
    held: bool
    collective: str
    timeline: Timeline
    not_finite: _containers.RepeatedScalarFieldContainer[str]
    dry_run: bool
    deployment: Deployment
    probe: _containers.RepeatedCompositeFieldContainer[ProbeFinding]
    def __init__(self, fence: _Optional[_Union[_weights_pb2.Fence, _Mapping]] = ..., identity: _Optional[_Union[_weights_pb2.Identity, _Mapping]] = ..., ok: bool = ..., replicas: _Optional[_Iterable[_Union[ReplicaOutcome, _Mapping]]] = ..., seconds: _Optional[float] = ..., stages: _Optional[_Iterable[_Union[StageSeconds, _Mapping]]] = ..., bytes: _Optional[int] = ..., tensors: _Optional[int] = ..., source_copies: _Optional[int] = ..., verified: bool = ..., warnings: _Optional[_Iterable[str]] = ..., copied: _Optional[_Iterable[_Union[_weights_pb2.CopiedTensors, _Mapping]]] = ..., relays: _Optional[_Iterable[_Union[RelayReport, _Mapping]]] = ..., prefetch: _Optional[str] = ..., held: bool = ..., collective: _Optional[str] = ..., timeline: _Optional[_Union[Timeline, _Mapping]] = ..., not_finite: _Optional[_Iterable[str]] = ..., dry_run: bool = ..., deployment: _Optional[_Union[Deployment, _Mapping]] = ..., probe: _Optional[_Iterable[_Union[ProbeFinding, _Mapping]]] = ...) -> None: ...

class Timeline(_message.Message):
    __slots__ = ("began", "phases", "sources")
    class Phase(_message.Message):
        __slots__ = ("name", "after")
        NAME_FIELD_NUMBER: _ClassVar[int]
        AFTER_FIELD_NUMBER: _ClassVar[int]
        name: str
        after: float
        def __init__(self, name: _Optional[str] = ..., after: _Optional[float] = ...) -> None: ...
    class Source(_message.Message):
        __slots__ = ("source", "copy_seconds", "digest_seconds", "span", "digested", "host", "gpu")
        SOURCE_FIELD_NUMBER: _ClassVar[int]
        COPY_SECONDS_FIELD_NUMBER: _ClassVar[int]
        DIGEST_SECONDS_FIELD_NUMBER: _ClassVar[int]
        SPAN_FIELD_NUMBER: _ClassVar[int]
        DIGESTED_FIELD_NUMBER: _ClassVar[int]
        HOST_FIELD_NUMBER: _ClassVar[int]
        GPU_FIELD_NUMBER: _ClassVar[int]
        source: str
        copy_seconds: float
        digest_seconds: float
        span: Span
        digested: float
        host: str
        gpu: bool
        def __init__(self, source: _Optional[str] = ..., copy_seconds: _Optional[float] = ..., digest_seconds: _Optional[float] = ..., span: _Optional[_Union[Span, _Mapping]] = ..., digested: _Optional[float] = ..., host: _Optional[str] = ..., gpu: bool = ...) -> None: ...
    BEGAN_FIELD_NUMBER: _ClassVar[int]
    PHASES_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    began: float
    phases: _containers.RepeatedCompositeFieldContainer[Timeline.Phase]
    sources: _containers.RepeatedCompositeFieldContainer[Timeline.Source]
    def __init__(self, began: _Optional[float] = ..., phases: _Optional[_Iterable[_Union[Timeline.Phase, _Mapping]]] = ..., sources: _Optional[_Iterable[_Union[Timeline.Source, _Mapping]]] = ...) -> None: ...

class SleepRequest(_message.Message):
    __slots__ = ("replicas", "level", "timeout_seconds", "pool")
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    replicas: _containers.RepeatedScalarFieldContainer[str]
    level: int
    timeout_seconds: float
    pool: str
    def __init__(self, replicas: _Optional[_Iterable[str]] = ..., level: _Optional[int] = ..., timeout_seconds: _Optional[float] = ..., pool: _Optional[str] = ...) -> None: ...

class SleepResponse(_message.Message):
    __slots__ = ("results",)
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[SleepWakeResult]
    def __init__(self, results: _Optional[_Iterable[_Union[SleepWakeResult, _Mapping]]] = ...) -> None: ...

class WakeRequest(_message.Message):
    __slots__ = ("replicas", "tags", "timeout_seconds", "pool")
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    TAGS_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    replicas: _containers.RepeatedScalarFieldContainer[str]
    tags: _containers.RepeatedScalarFieldContainer[str]
    timeout_seconds: float
    pool: str
    def __init__(self, replicas: _Optional[_Iterable[str]] = ..., tags: _Optional[_Iterable[str]] = ..., timeout_seconds: _Optional[float] = ..., pool: _Optional[str] = ...) -> None: ...

class WakeResponse(_message.Message):
    __slots__ = ("results",)
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[SleepWakeResult]
    def __init__(self, results: _Optional[_Iterable[_Union[SleepWakeResult, _Mapping]]] = ...) -> None: ...

class SleepWakeResult(_message.Message):
    __slots__ = ("replica", "problem")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    replica: str
    problem: _weights_pb2.Problem
    def __init__(self, replica: _Optional[str] = ..., problem: _Optional[_Union[_weights_pb2.Problem, _Mapping]] = ...) -> None: ...

class RetryReplicaRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class RetryReplicaResponse(_message.Message):
    __slots__ = ("message",)
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    message: str
    def __init__(self, message: _Optional[str] = ...) -> None: ...

class HoldReplicaRequest(_message.Message):
    __slots__ = ("name", "reason")
    NAME_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    name: str
    reason: str
    def __init__(self, name: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class HoldReplicaResponse(_message.Message):
    __slots__ = ("hold",)
    HOLD_FIELD_NUMBER: _ClassVar[int]
    hold: OperatorHold
    def __init__(self, hold: _Optional[_Union[OperatorHold, _Mapping]] = ...) -> None: ...

class OperatorHold(_message.Message):
    __slots__ = ("since", "reason")
    SINCE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    since: float
    reason: str
    def __init__(self, since: _Optional[float] = ..., reason: _Optional[str] = ...) -> None: ...

class ReleaseReplicaRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class ReleaseReplicaResponse(_message.Message):
    __slots__ = ("message",)
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    message: str
    def __init__(self, message: _Optional[str] = ...) -> None: ...

class EvictReplicaRequest(_message.Message):
    __slots__ = ("name", "reason")
    NAME_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    name: str
    reason: str
    def __init__(self, name: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class EvictReplicaResponse(_message.Message):
    __slots__ = ("was_connected",)
    WAS_CONNECTED_FIELD_NUMBER: _ClassVar[int]
    was_connected: bool
    def __init__(self, was_connected: bool = ...) -> None: ...

class EvictLineageRequest(_message.Message):
    __slots__ = ("lineage", "reason")
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    lineage: str
    reason: str
    def __init__(self, lineage: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class EvictLineageResponse(_message.Message):
    __slots__ = ("ranks", "connected")
    RANKS_FIELD_NUMBER: _ClassVar[int]
    CONNECTED_FIELD_NUMBER: _ClassVar[int]
    ranks: int
    connected: int
    def __init__(self, ranks: _Optional[int] = ..., connected: _Optional[int] = ...) -> None: ...

class ForgetLineageRequest(_message.Message):
    __slots__ = ("lineage", "dry_run")
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    lineage: str
    dry_run: bool
    def __init__(self, lineage: _Optional[str] = ..., dry_run: bool = ...) -> None: ...

class ForgetLineageResponse(_message.Message):
    __slots__ = ("effects",)
    EFFECTS_FIELD_NUMBER: _ClassVar[int]
    effects: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, effects: _Optional[_Iterable[str]] = ...) -> None: ...

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LineageStatus(_message.Message):
    __slots__ = ("lineage", "latest", "world_size", "connected", "published", "replicas", "sources")
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    LATEST_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    CONNECTED_FIELD_NUMBER: _ClassVar[int]
    PUBLISHED_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    lineage: str
    latest: _weights_pb2.Identity
    world_size: int
    connected: int
    published: int
    replicas: int
    sources: int
    def __init__(self, lineage: _Optional[str] = ..., latest: _Optional[_Union[_weights_pb2.Identity, _Mapping]] = ..., world_size: _Optional[int] = ..., connected: _Optional[int] = ..., published: _Optional[int] = ..., replicas: _Optional[int] = ..., sources: _Optional[int] = ...) -> None: ...

class TrainerStatus(_message.Message):
    __slots__ = ("lineage", "rank", "world_size", "connected", "published", "description", "gpus")
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    CONNECTED_FIELD_NUMBER: _ClassVar[int]
    PUBLISHED_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    GPUS_FIELD_NUMBER: _ClassVar[int]
    lineage: str
    rank: int
    world_size: int
    connected: bool
    published: bool
    description: str
    gpus: _containers.RepeatedCompositeFieldContainer[_weights_pb2.Gpu]
    def __init__(self, lineage: _Optional[str] = ..., rank: _Optional[int] = ..., world_size: _Optional[int] = ..., connected: bool = ..., published: bool = ..., description: _Optional[str] = ..., gpus: _Optional[_Iterable[_Union[_weights_pb2.Gpu, _Mapping]]] = ...) -> None: ...

class WorkerGpus(_message.Message):
    __slots__ = ("rank", "gpus")
    RANK_FIELD_NUMBER: _ClassVar[int]
    GPUS_FIELD_NUMBER: _ClassVar[int]
    rank: int
    gpus: _containers.RepeatedCompositeFieldContainer[_weights_pb2.Gpu]
    def __init__(self, rank: _Optional[int] = ..., gpus: _Optional[_Iterable[_Union[_weights_pb2.Gpu, _Mapping]]] = ...) -> None: ...

class HolderStatus(_message.Message):
    __slots__ = ("kind", "name", "connected", "held", "description", "filling", "last_filled", "progress", "slow", "shares")
    KIND_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    CONNECTED_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    FILLING_FIELD_NUMBER: _ClassVar[int]
    LAST_FILLED_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    SLOW_FIELD_NUMBER: _ClassVar[int]
    SHARES_FIELD_NUMBER: _ClassVar[int]
    kind: str
    name: str
    connected: bool
    held: _containers.RepeatedCompositeFieldContainer[_weights_pb2.Identity]
    description: str
    filling: Filling
    last_filled: RelayFilled
    progress: RelayProgress
    slow: str
    shares: _containers.RepeatedCompositeFieldContainer[VersionShare]
    def __init__(self, kind: _Optional[str] = ..., name: _Optional[str] = ..., connected: bool = ..., held: _Optional[_Iterable[_Union[_weights_pb2.Identity, _Mapping]]] = ..., description: _Optional[str] = ..., filling: _Optional[_Union[Filling, _Mapping]] = ..., last_filled: _Optional[_Union[RelayFilled, _Mapping]] = ..., progress: _Optional[_Union[RelayProgress, _Mapping]] = ..., slow: _Optional[str] = ..., shares: _Optional[_Iterable[_Union[VersionShare, _Mapping]]] = ...) -> None: ...

class VersionShare(_message.Message):
    __slots__ = ("identity", "bytes", "wanted_bytes", "coming")
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    WANTED_BYTES_FIELD_NUMBER: _ClassVar[int]
    COMING_FIELD_NUMBER: _ClassVar[int]
    identity: _weights_pb2.Identity
    bytes: int
    wanted_bytes: int
    coming: bool
    def __init__(self, identity: _Optional[_Union[_weights_pb2.Identity, _Mapping]] = ..., bytes: _Optional[int] = ..., wanted_bytes: _Optional[int] = ..., coming: bool = ...) -> None: ...

class ReplicaStatus(_message.Message):
    __slots__ = ("name", "engine", "mode", "connected", "serving", "asleep", "closed_reason", "workers", "identity", "last_outcome", "host", "unfit", "label_problem", "pool", "gpus", "unopened", "engine_check", "desired", "drift", "hold", "stage_memory", "guesses", "scrubs")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    CONNECTED_FIELD_NUMBER: _ClassVar[int]
    SERVING_FIELD_NUMBER: _ClassVar[int]
    ASLEEP_FIELD_NUMBER: _ClassVar[int]
    CLOSED_REASON_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    LAST_OUTCOME_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    UNFIT_FIELD_NUMBER: _ClassVar[int]
    LABEL_PROBLEM_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    GPUS_FIELD_NUMBER: _ClassVar[int]
    UNOPENED_FIELD_NUMBER: _ClassVar[int]
    ENGINE_CHECK_FIELD_NUMBER: _ClassVar[int]
    DESIRED_FIELD_NUMBER: _ClassVar[int]
    DRIFT_FIELD_NUMBER: _ClassVar[int]
    HOLD_FIELD_NUMBER: _ClassVar[int]
    STAGE_MEMORY_FIELD_NUMBER: _ClassVar[int]
    GUESSES_FIELD_NUMBER: _ClassVar[int]
    SCRUBS_FIELD_NUMBER: _ClassVar[int]
    name: str
    engine: Engine
    mode: Mode
    connected: bool
    serving: bool
    asleep: bool
    closed_reason: str
    workers: _containers.RepeatedCompositeFieldContainer[WorkerStatus]
    identity: _weights_pb2.Identity
    last_outcome: ReplicaOutcome
    host: _weights_pb2.Host
    unfit: _weights_pb2.Problem
    label_problem: str
    pool: str
    gpus: _containers.RepeatedCompositeFieldContainer[WorkerGpus]
    unopened: _containers.RepeatedCompositeFieldContainer[_weights_pb2.Unopened]
    engine_check: str
    desired: _weights_pb2.Identity
    drift: Drift
    hold: OperatorHold
    stage_memory: str
    guesses: Guesses
    scrubs: _containers.RepeatedCompositeFieldContainer[WorkerScrub]
    def __init__(self, name: _Optional[str] = ..., engine: _Optional[_Union[Engine, _Mapping]] = ..., mode: _Optional[_Union[Mode, str]] = ..., connected: bool = ..., serving: bool = ..., asleep: bool = ..., closed_reason: _Optional[str] = ..., workers: _Optional[_Iterable[_Union[WorkerStatus, _Mapping]]] = ..., identity: _Optional[_Union[_weights_pb2.Identity, _Mapping]] = ..., last_outcome: _Optional[_Union[ReplicaOutcome, _Mapping]] = ..., host: _Optional[_Union[_weights_pb2.Host, _Mapping]] = ..., unfit: _Optional[_Union[_weights_pb2.Problem, _Mapping]] = ..., label_problem: _Optional[str] = ..., pool: _Optional[str] = ..., gpus: _Optional[_Iterable[_Union[WorkerGpus, _Mapping]]] = ..., unopened: _Optional[_Iterable[_Union[_weights_pb2.Unopened, _Mapping]]] = ..., engine_check: _Optional[str] = ..., desired: _Optional[_Union[_weights_pb2.Identity, _Mapping]] = ..., drift: _Optional[_Union[Drift, _Mapping]] = ..., hold: _Optional[_Union[OperatorHold, _Mapping]] = ..., stage_memory: _Optional[str] = ..., guesses: _Optional[_Union[Guesses, _Mapping]] = ..., scrubs: _Optional[_Iterable[_Union[WorkerScrub, _Mapping]]] = ...) -> None: ...

class Drift(_message.Message):
    __slots__ = ("reason", "seconds", "next_attempt_seconds")
    REASON_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    NEXT_ATTEMPT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    reason: str
    seconds: float
    next_attempt_seconds: float
    def __init__(self, reason: _Optional[str] = ..., seconds: _Optional[float] = ..., next_attempt_seconds: _Optional[float] = ...) -> None: ...

class LocateVersionRequest(_message.Message):
    __slots__ = ("lineage", "version")
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    lineage: str
    version: int
    def __init__(self, lineage: _Optional[str] = ..., version: _Optional[int] = ...) -> None: ...

class LocateVersionResponse(_message.Message):
    __slots__ = ("identity", "record", "tables", "relays")
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    RELAYS_FIELD_NUMBER: _ClassVar[int]
    identity: _weights_pb2.Identity
    record: BlobRef
    tables: _containers.RepeatedCompositeFieldContainer[BlobRef]
    relays: _containers.RepeatedCompositeFieldContainer[WantTable.Relay]
    def __init__(self, identity: _Optional[_Union[_weights_pb2.Identity, _Mapping]] = ..., record: _Optional[_Union[BlobRef, _Mapping]] = ..., tables: _Optional[_Iterable[_Union[BlobRef, _Mapping]]] = ..., relays: _Optional[_Iterable[_Union[WantTable.Relay, _Mapping]]] = ...) -> None: ...

class VersionStatus(_message.Message):
    __slots__ = ("identity", "holders", "replicas")
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    identity: _weights_pb2.Identity
    holders: _containers.RepeatedScalarFieldContainer[str]
    replicas: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, identity: _Optional[_Union[_weights_pb2.Identity, _Mapping]] = ..., holders: _Optional[_Iterable[str]] = ..., replicas: _Optional[_Iterable[str]] = ...) -> None: ...

class ListVersionsResponse(_message.Message):
    __slots__ = ("versions",)
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    versions: _containers.RepeatedCompositeFieldContainer[VersionStatus]
    def __init__(self, versions: _Optional[_Iterable[_Union[VersionStatus, _Mapping]]] = ...) -> None: ...

class ListReplicasResponse(_message.Message):
    __slots__ = ("replicas",)
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    replicas: _containers.RepeatedCompositeFieldContainer[ReplicaStatus]
    def __init__(self, replicas: _Optional[_Iterable[_Union[ReplicaStatus, _Mapping]]] = ...) -> None: ...

class Health(_message.Message):
    __slots__ = ("status", "cluster", "phase", "software_version", "warnings")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    SOFTWARE_VERSION_FIELD_NUMBER: _ClassVar[int]
    WARNINGS_FIELD_NUMBER: _ClassVar[int]
    status: str
    cluster: str
    phase: str
    software_version: str
    warnings: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, status: _Optional[str] = ..., cluster: _Optional[str] = ..., phase: _Optional[str] = ..., software_version: _Optional[str] = ..., warnings: _Optional[_Iterable[str]] = ...) -> None: ...

class Holding(_message.Message):
    __slots__ = ("owner", "bytes")
    OWNER_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    owner: str
    bytes: int
    def __init__(self, owner: _Optional[str] = ..., bytes: _Optional[int] = ...) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("fence", "phase", "latest", "trainers", "replicas", "software_version", "holdings", "warnings", "holders", "lineages", "waiting_for", "sealed", "deployments")
    FENCE_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    LATEST_FIELD_NUMBER: _ClassVar[int]
    TRAINERS_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    SOFTWARE_VERSION_FIELD_NUMBER: _ClassVar[int]
    HOLDINGS_FIELD_NUMBER: _ClassVar[int]
    WARNINGS_FIELD_NUMBER: _ClassVar[int]
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    LINEAGES_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
    SEALED_FIELD_NUMBER: _ClassVar[int]
    DEPLOYMENTS_FIELD_NUMBER: _ClassVar[int]
    fence: _weights_pb2.Fence
    phase: str
    latest: _weights_pb2.Identity
    trainers: _containers.RepeatedCompositeFieldContainer[TrainerStatus]
    replicas: _containers.RepeatedCompositeFieldContainer[ReplicaStatus]
    software_version: str
    holdings: _containers.RepeatedCompositeFieldContainer[Holding]
    warnings: _containers.RepeatedScalarFieldContainer[str]
    holders: _containers.RepeatedCompositeFieldContainer[HolderStatus]
    lineages: _containers.RepeatedCompositeFieldContainer[LineageStatus]
    waiting_for: _containers.RepeatedScalarFieldContainer[str]
    sealed: _containers.RepeatedCompositeFieldContainer[VersionStatus]
    deployments: _containers.RepeatedCompositeFieldContainer[Deployment]
    def __init__(self, fence: _Optional[_Union[_weights_pb2.Fence, _Mapping]] = ..., phase: _Optional[str] = ..., latest: _Optional[_Union[_weights_pb2.Identity, _Mapping]] = ..., trainers: _Optional[_Iterable[_Union[TrainerStatus, _Mapping]]] = ..., replicas: _Optional[_Iterable[_Union[ReplicaStatus, _Mapping]]] = ..., software_version: _Optional[str] = ..., holdings: _Optional[_Iterable[_Union[Holding, _Mapping]]] = ..., warnings: _Optional[_Iterable[str]] = ..., holders: _Optional[_Iterable[_Union[HolderStatus, _Mapping]]] = ..., lineages: _Optional[_Iterable[_Union[LineageStatus, _Mapping]]] = ..., waiting_for: _Optional[_Iterable[str]] = ..., sealed: _Optional[_Iterable[_Union[VersionStatus, _Mapping]]] = ..., deployments: _Optional[_Iterable[_Union[Deployment, _Mapping]]] = ...) -> None: ...

class WatchReplicasRequest(_message.Message):
    __slots__ = ("watcher",)
    WATCHER_FIELD_NUMBER: _ClassVar[int]
    watcher: str
    def __init__(self, watcher: _Optional[str] = ...) -> None: ...

class WatchedReplica(_message.Message):
    __slots__ = ("name", "url", "engine", "engine_version", "state", "reason", "identity", "next", "pause_mode", "label_problem", "pool")
    NAME_FIELD_NUMBER: _ClassVar[int]
    URL_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    ENGINE_VERSION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    PAUSE_MODE_FIELD_NUMBER: _ClassVar[int]
    LABEL_PROBLEM_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    name: str
    url: str
    engine: str
    engine_version: str
    state: ReplicaState
    reason: str
    identity: _weights_pb2.Identity
    next: _weights_pb2.Identity
    pause_mode: PauseMode
    label_problem: str
    pool: str
    def __init__(self, name: _Optional[str] = ..., url: _Optional[str] = ..., engine: _Optional[str] = ..., engine_version: _Optional[str] = ..., state: _Optional[_Union[ReplicaState, str]] = ..., reason: _Optional[str] = ..., identity: _Optional[_Union[_weights_pb2.Identity, _Mapping]] = ..., next: _Optional[_Union[_weights_pb2.Identity, _Mapping]] = ..., pause_mode: _Optional[_Union[PauseMode, str]] = ..., label_problem: _Optional[str] = ..., pool: _Optional[str] = ...) -> None: ...

class WatchReplicasResponse(_message.Message):
    __slots__ = ("fence", "run", "sequence", "snapshot", "settling", "replicas", "gone", "latest")
    FENCE_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    SETTLING_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    GONE_FIELD_NUMBER: _ClassVar[int]
    LATEST_FIELD_NUMBER: _ClassVar[int]
    fence: _weights_pb2.Fence
    run: str
    sequence: int
    snapshot: bool
    settling: bool
    replicas: _containers.RepeatedCompositeFieldContainer[WatchedReplica]
    gone: _containers.RepeatedScalarFieldContainer[str]
    latest: _containers.RepeatedCompositeFieldContainer[_weights_pb2.Identity]
    def __init__(self, fence: _Optional[_Union[_weights_pb2.Fence, _Mapping]] = ..., run: _Optional[str] = ..., sequence: _Optional[int] = ..., snapshot: bool = ..., settling: bool = ..., replicas: _Optional[_Iterable[_Union[WatchedReplica, _Mapping]]] = ..., gone: _Optional[_Iterable[str]] = ..., latest: _Optional[_Iterable[_Union[_weights_pb2.Identity, _Mapping]]] = ...) -> None: ...

class FillRelay(_message.Message):
    __slots__ = ("fence", "identity", "record", "tables", "needs", "everything", "keep", "deadline_seconds", "keep_table", "attempt", "want_table", "within")
    FENCE_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    NEEDS_FIELD_NUMBER: _ClassVar[int]
    EVERYTHING_FIELD_NUMBER: _ClassVar[int]
    KEEP_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    KEEP_TABLE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    WANT_TABLE_FIELD_NUMBER: _ClassVar[int]
    WITHIN_FIELD_NUMBER: _ClassVar[int]
    fence: _weights_pb2.Fence
    identity: _weights_pb2.Identity
    record: BlobRef
    tables: _containers.RepeatedCompositeFieldContainer[BlobRef]
    needs: _containers.RepeatedCompositeFieldContainer[BlobRef]
    everything: bool
    keep: _weights_pb2.Identity
    deadline_seconds: float
    keep_table: bytes
    attempt: int
    want_table: WantTable
    within: _containers.RepeatedCompositeFieldContainer[BlobRef]
    def __init__(self, fence: _Optional[_Union[_weights_pb2.Fence, _Mapping]] = ..., identity: _Optional[_Union[_weights_pb2.Identity, _Mapping]] = ..., record: _Optional[_Union[BlobRef, _Mapping]] = ..., tables: _Optional[_Iterable[_Union[BlobRef, _Mapping]]] = ..., needs: _Optional[_Iterable[_Union[BlobRef, _Mapping]]] = ..., everything: bool = ..., keep: _Optional[_Union[_weights_pb2.Identity, _Mapping]] = ..., deadline_seconds: _Optional[float] = ..., keep_table: _Optional[bytes] = ..., attempt: _Optional[int] = ..., want_table: _Optional[_Union[WantTable, _Mapping]] = ..., within: _Optional[_Iterable[_Union[BlobRef, _Mapping]]] = ...) -> None: ...

class WantTable(_message.Message):
    __slots__ = ("wants", "relays")
    class Wants(_message.Message):
        __slots__ = ("needs", "everything", "within")
        NEEDS_FIELD_NUMBER: _ClassVar[int]
        EVERYTHING_FIELD_NUMBER: _ClassVar[int]
        WITHIN_FIELD_NUMBER: _ClassVar[int]
        needs: _containers.RepeatedCompositeFieldContainer[BlobRef]
        everything: bool
        within: _containers.RepeatedCompositeFieldContainer[BlobRef]
        def __init__(self, needs: _Optional[_Iterable[_Union[BlobRef, _Mapping]]] = ..., everything: bool = ..., within: _Optional[_Iterable[_Union[BlobRef, _Mapping]]] = ...) -> None: ...
    class Relay(_message.Message):
        __slots__ = ("relay", "chunks", "wants", "origin", "leaf")
        RELAY_FIELD_NUMBER: _ClassVar[int]
        CHUNKS_FIELD_NUMBER: _ClassVar[int]
        WANTS_FIELD_NUMBER: _ClassVar[int]
        ORIGIN_FIELD_NUMBER: _ClassVar[int]
        LEAF_FIELD_NUMBER: _ClassVar[int]
        relay: str
        chunks: _weights_pb2.OfferedRegion
        wants: int
        origin: bool
        leaf: bool
        def __init__(self, relay: _Optional[str] = ..., chunks: _Optional[_Union[_weights_pb2.OfferedRegion, _Mapping]] = ..., wants: _Optional[int] = ..., origin: bool = ..., leaf: bool = ...) -> None: ...
    WANTS_FIELD_NUMBER: _ClassVar[int]
    RELAYS_FIELD_NUMBER: _ClassVar[int]
    wants: _containers.RepeatedCompositeFieldContainer[WantTable.Wants]
    relays: _containers.RepeatedCompositeFieldContainer[WantTable.Relay]
    def __init__(self, wants: _Optional[_Iterable[_Union[WantTable.Wants, _Mapping]]] = ..., relays: _Optional[_Iterable[_Union[WantTable.Relay, _Mapping]]] = ...) -> None: ...

class RelayFilled(_message.Message):
    __slots__ = ("fence", "identity", "problem", "bytes", "missing", "missing_cells", "faults", "brought", "again", "overruled", "wait_seconds", "fill_seconds", "table", "attempt", "sent", "received", "span", "wanted_bytes", "network_bytes", "delta_bytes", "changed_bytes", "delta_base", "whole", "densest")
    class Brought(_message.Message):
        __slots__ = ("source", "bytes")
        SOURCE_FIELD_NUMBER: _ClassVar[int]
        BYTES_FIELD_NUMBER: _ClassVar[int]
        source: str
        bytes: int
        def __init__(self, source: _Optional[str] = ..., bytes: _Optional[int] = ...) -> None: ...
    class Whole(_message.Message):
        __slots__ = ("reason", "bytes")
        REASON_FIELD_NUMBER: _ClassVar[int]
        BYTES_FIELD_NUMBER: _ClassVar[int]
        reason: str
        bytes: int
        def __init__(self, reason: _Optional[str] = ..., bytes: _Optional[int] = ...) -> None: ...
    class Density(_message.Message):
        __slots__ = ("tensor", "changed", "elements")
        TENSOR_FIELD_NUMBER: _ClassVar[int]
        CHANGED_FIELD_NUMBER: _ClassVar[int]
        ELEMENTS_FIELD_NUMBER: _ClassVar[int]
        tensor: str
        changed: int
        elements: int
        def __init__(self, tensor: _Optional[str] = ..., changed: _Optional[int] = ..., elements: _Optional[int] = ...) -> None: ...
    FENCE_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    MISSING_CELLS_FIELD_NUMBER: _ClassVar[int]
    FAULTS_FIELD_NUMBER: _ClassVar[int]
    BROUGHT_FIELD_NUMBER: _ClassVar[int]
    AGAIN_FIELD_NUMBER: _ClassVar[int]
    OVERRULED_FIELD_NUMBER: _ClassVar[int]
    WAIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    FILL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    SENT_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    SPAN_FIELD_NUMBER: _ClassVar[int]
    WANTED_BYTES_FIELD_NUMBER: _ClassVar[int]
    NETWORK_BYTES_FIELD_NUMBER: _ClassVar[int]
    DELTA_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHANGED_BYTES_FIELD_NUMBER: _ClassVar[int]
    DELTA_BASE_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    DENSEST_FIELD_NUMBER: _ClassVar[int]
    fence: _weights_pb2.Fence
    identity: _weights_pb2.Identity
    problem: _weights_pb2.Problem
    bytes: int
    missing: _containers.RepeatedCompositeFieldContainer[_weights_pb2.Problem]
    missing_cells: int
    faults: _containers.RepeatedCompositeFieldContainer[_weights_pb2.Problem]
    brought: _containers.RepeatedCompositeFieldContainer[RelayFilled.Brought]
    again: int
    overruled: int
    wait_seconds: float
    fill_seconds: float
    table: bytes
    attempt: int
    sent: Rate
    received: Rate
    span: Span
    wanted_bytes: int
    network_bytes: int
    delta_bytes: int
    changed_bytes: int
    delta_base: bytes
    whole: _containers.RepeatedCompositeFieldContainer[RelayFilled.Whole]
    densest: _containers.RepeatedCompositeFieldContainer[RelayFilled.Density]
    def __init__(self, fence: _Optional[_Union[_weights_pb2.Fence, _Mapping]] = ..., identity: _Optional[_Union[_weights_pb2.Identity, _Mapping]] = ..., problem: _Optional[_Union[_weights_pb2.Problem, _Mapping]] = ..., bytes: _Optional[int] = ..., missing: _Optional[_Iterable[_Union[_weights_pb2.Problem, _Mapping]]] = ..., missing_cells: _Optional[int] = ..., faults: _Optional[_Iterable[_Union[_weights_pb2.Problem, _Mapping]]] = ..., brought: _Optional[_Iterable[_Union[RelayFilled.Brought, _Mapping]]] = ..., again: _Optional[int] = ..., overruled: _Optional[int] = ..., wait_seconds: _Optional[float] = ..., fill_seconds: _Optional[float] = ..., table: _Optional[bytes] = ..., attempt: _Optional[int] = ..., sent: _Optional[_Union[Rate, _Mapping]] = ..., received: _Optional[_Union[Rate, _Mapping]] = ..., span: _Optional[_Union[Span, _Mapping]] = ..., wanted_bytes: _Optional[int] = ..., network_bytes: _Optional[int] = ..., delta_bytes: _Optional[int] = ..., changed_bytes: _Optional[int] = ..., delta_base: _Optional[bytes] = ..., whole: _Optional[_Iterable[_Union[RelayFilled.Whole, _Mapping]]] = ..., densest: _Optional[_Iterable[_Union[RelayFilled.Density, _Mapping]]] = ...) -> None: ...

class Rate(_message.Message):
    __slots__ = ("bytes_per_second", "seconds")
    BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    bytes_per_second: float
    seconds: float
    def __init__(self, bytes_per_second: _Optional[float] = ..., seconds: _Optional[float] = ...) -> None: ...

class RelayPassedOn(_message.Message):
    __slots__ = ("fence", "attempt", "sent")
    FENCE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    SENT_FIELD_NUMBER: _ClassVar[int]
    fence: _weights_pb2.Fence
    attempt: int
    sent: Rate
    def __init__(self, fence: _Optional[_Union[_weights_pb2.Fence, _Mapping]] = ..., attempt: _Optional[int] = ..., sent: _Optional[_Union[Rate, _Mapping]] = ...) -> None: ...

class RelayProgress(_message.Message):
    __slots__ = ("fence", "bytes_done", "bytes_total", "identity")
    FENCE_FIELD_NUMBER: _ClassVar[int]
    BYTES_DONE_FIELD_NUMBER: _ClassVar[int]
    BYTES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    fence: _weights_pb2.Fence
    bytes_done: int
    bytes_total: int
    identity: _weights_pb2.Identity
    def __init__(self, fence: _Optional[_Union[_weights_pb2.Fence, _Mapping]] = ..., bytes_done: _Optional[int] = ..., bytes_total: _Optional[int] = ..., identity: _Optional[_Union[_weights_pb2.Identity, _Mapping]] = ...) -> None: ...

class LetGo(_message.Message):
    __slots__ = ("tables",)
    TABLES_FIELD_NUMBER: _ClassVar[int]
    tables: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, tables: _Optional[_Iterable[bytes]] = ...) -> None: ...
