from ckpt_engine.v1 import manager_pb2 as _manager_pb2
from ckpt_engine.v1 import weights_pb2 as _weights_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WorkerRequest(_message.Message):
    __slots__ = ("sequence", "rank", "boot_id", "want_prepare", "prepared", "want_install", "progress", "installed", "ready", "checked", "early", "scrub")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    WANT_PREPARE_FIELD_NUMBER: _ClassVar[int]
    PREPARED_FIELD_NUMBER: _ClassVar[int]
    WANT_INSTALL_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    INSTALLED_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    CHECKED_FIELD_NUMBER: _ClassVar[int]
    EARLY_FIELD_NUMBER: _ClassVar[int]
    SCRUB_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    rank: int
    boot_id: bytes
    want_prepare: WantOrder
    prepared: WorkerPrepared
    want_install: WantOrder
    progress: WorkerProgress
    installed: WorkerInstalled
    ready: WorkerReady
    checked: WorkerChecked
    early: WorkerEarly
    scrub: _manager_pb2.WorkerScrub
    def __init__(self, sequence: _Optional[int] = ..., rank: _Optional[int] = ..., boot_id: _Optional[bytes] = ..., want_prepare: _Optional[_Union[WantOrder, _Mapping]] = ..., prepared: _Optional[_Union[WorkerPrepared, _Mapping]] = ..., want_install: _Optional[_Union[WantOrder, _Mapping]] = ..., progress: _Optional[_Union[WorkerProgress, _Mapping]] = ..., installed: _Optional[_Union[WorkerInstalled, _Mapping]] = ..., ready: _Optional[_Union[WorkerReady, _Mapping]] = ..., checked: _Optional[_Union[WorkerChecked, _Mapping]] = ..., early: _Optional[_Union[WorkerEarly, _Mapping]] = ..., scrub: _Optional[_Union[_manager_pb2.WorkerScrub, _Mapping]] = ...) -> None: ...

class AgentReply(_message.Message):
    __slots__ = ("sequence", "prepare", "install", "acknowledged", "refused", "ready", "check")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    PREPARE_FIELD_NUMBER: _ClassVar[int]
    INSTALL_FIELD_NUMBER: _ClassVar[int]
    ACKNOWLEDGED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    CHECK_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    prepare: PrepareOrder
    install: InstallOrder
    acknowledged: Acknowledged
    refused: _weights_pb2.Problem
    ready: ReadyOrder
    check: CheckOrder
    def __init__(self, sequence: _Optional[int] = ..., prepare: _Optional[_Union[PrepareOrder, _Mapping]] = ..., install: _Optional[_Union[InstallOrder, _Mapping]] = ..., acknowledged: _Optional[_Union[Acknowledged, _Mapping]] = ..., refused: _Optional[_Union[_weights_pb2.Problem, _Mapping]] = ..., ready: _Optional[_Union[ReadyOrder, _Mapping]] = ..., check: _Optional[_Union[CheckOrder, _Mapping]] = ...) -> None: ...

class WantOrder(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Acknowledged(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PrepareOrder(_message.Message):
    __slots__ = ("fence", "manifest", "deadline_seconds")
    FENCE_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    fence: _weights_pb2.Fence
    manifest: bytes
    deadline_seconds: float
    def __init__(self, fence: _Optional[_Union[_weights_pb2.Fence, _Mapping]] = ..., manifest: _Optional[bytes] = ..., deadline_seconds: _Optional[float] = ...) -> None: ...

class WorkerPrepared(_message.Message):
    __slots__ = ("fence", "needs", "host", "problem", "digest_format", "model", "stage_memory")
    FENCE_FIELD_NUMBER: _ClassVar[int]
    NEEDS_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FORMAT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    STAGE_MEMORY_FIELD_NUMBER: _ClassVar[int]
    fence: _weights_pb2.Fence
    needs: bytes
    host: _weights_pb2.Host
    problem: _weights_pb2.Problem
    digest_format: int
    model: str
    stage_memory: str
    def __init__(self, fence: _Optional[_Union[_weights_pb2.Fence, _Mapping]] = ..., needs: _Optional[bytes] = ..., host: _Optional[_Union[_weights_pb2.Host, _Mapping]] = ..., problem: _Optional[_Union[_weights_pb2.Problem, _Mapping]] = ..., digest_format: _Optional[int] = ..., model: _Optional[str] = ..., stage_memory: _Optional[str] = ...) -> None: ...

class CheckOrder(_message.Message):
    __slots__ = ("fence", "manifest_digest", "seed", "by_engine", "deadline_seconds")
    FENCE_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_DIGEST_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    BY_ENGINE_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    fence: _weights_pb2.Fence
    manifest_digest: bytes
    seed: int
    by_engine: bool
    deadline_seconds: float
    def __init__(self, fence: _Optional[_Union[_weights_pb2.Fence, _Mapping]] = ..., manifest_digest: _Optional[bytes] = ..., seed: _Optional[int] = ..., by_engine: bool = ..., deadline_seconds: _Optional[float] = ...) -> None: ...

class WorkerChecked(_message.Message):
    __slots__ = ("fence", "problem")
    FENCE_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    fence: _weights_pb2.Fence
    problem: _weights_pb2.Problem
    def __init__(self, fence: _Optional[_Union[_weights_pb2.Fence, _Mapping]] = ..., problem: _Optional[_Union[_weights_pb2.Problem, _Mapping]] = ...) -> None: ...

class ReadyOrder(_message.Message):
    __slots__ = ("fence", "plan", "deadline_seconds", "asleep", "collective", "expected")
    FENCE_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    ASLEEP_FIELD_NUMBER: _ClassVar[int]
    COLLECTIVE_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_FIELD_NUMBER: _ClassVar[int]
    fence: _weights_pb2.Fence
    plan: bytes
    deadline_seconds: float
    asleep: bool
    collective: CollectiveOrder
    expected: bytes
    def __init__(self, fence: _Optional[_Union[_weights_pb2.Fence, _Mapping]] = ..., plan: _Optional[bytes] = ..., deadline_seconds: _Optional[float] = ..., asleep: bool = ..., collective: _Optional[_Union[CollectiveOrder, _Mapping]] = ..., expected: _Optional[bytes] = ...) -> None: ...

class CollectiveOrder(_message.Message):
    __slots__ = ("members", "member", "plan", "meeting", "communicator", "arm_seconds")
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    MEETING_FIELD_NUMBER: _ClassVar[int]
    COMMUNICATOR_FIELD_NUMBER: _ClassVar[int]
    ARM_SECONDS_FIELD_NUMBER: _ClassVar[int]
    members: _containers.RepeatedScalarFieldContainer[str]
    member: int
    plan: bytes
    meeting: bytes
    communicator: bytes
    arm_seconds: float
    def __init__(self, members: _Optional[_Iterable[str]] = ..., member: _Optional[int] = ..., plan: _Optional[bytes] = ..., meeting: _Optional[bytes] = ..., communicator: _Optional[bytes] = ..., arm_seconds: _Optional[float] = ...) -> None: ...

class WorkerReady(_message.Message):
    __slots__ = ("fence", "plans", "problem", "unopened", "stages", "stage_memory", "early_bytes")
    FENCE_FIELD_NUMBER: _ClassVar[int]
    PLANS_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    UNOPENED_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    STAGE_MEMORY_FIELD_NUMBER: _ClassVar[int]
    EARLY_BYTES_FIELD_NUMBER: _ClassVar[int]
    fence: _weights_pb2.Fence
    plans: _containers.RepeatedScalarFieldContainer[bytes]
    problem: _weights_pb2.Problem
    unopened: _containers.RepeatedCompositeFieldContainer[_weights_pb2.Unopened]
    stages: bool
    stage_memory: str
    early_bytes: int
    def __init__(self, fence: _Optional[_Union[_weights_pb2.Fence, _Mapping]] = ..., plans: _Optional[_Iterable[bytes]] = ..., problem: _Optional[_Union[_weights_pb2.Problem, _Mapping]] = ..., unopened: _Optional[_Iterable[_Union[_weights_pb2.Unopened, _Mapping]]] = ..., stages: bool = ..., stage_memory: _Optional[str] = ..., early_bytes: _Optional[int] = ...) -> None: ...

class WorkerEarly(_message.Message):
    __slots__ = ("fence", "bytes_done", "bytes_total", "verified", "problem")
    FENCE_FIELD_NUMBER: _ClassVar[int]
    BYTES_DONE_FIELD_NUMBER: _ClassVar[int]
    BYTES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    VERIFIED_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    fence: _weights_pb2.Fence
    bytes_done: int
    bytes_total: int
    verified: bool
    problem: _weights_pb2.Problem
    def __init__(self, fence: _Optional[_Union[_weights_pb2.Fence, _Mapping]] = ..., bytes_done: _Optional[int] = ..., bytes_total: _Optional[int] = ..., verified: bool = ..., problem: _Optional[_Union[_weights_pb2.Problem, _Mapping]] = ...) -> None: ...

class InstallOrder(_message.Message):
    __slots__ = ("fence", "identity", "plan", "expected", "deadline_seconds", "collective")
    FENCE_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    COLLECTIVE_FIELD_NUMBER: _ClassVar[int]
    fence: _weights_pb2.Fence
    identity: _weights_pb2.Identity
    plan: bytes
    expected: bytes
    deadline_seconds: float
    collective: CollectiveOrder
    def __init__(self, fence: _Optional[_Union[_weights_pb2.Fence, _Mapping]] = ..., identity: _Optional[_Union[_weights_pb2.Identity, _Mapping]] = ..., plan: _Optional[bytes] = ..., expected: _Optional[bytes] = ..., deadline_seconds: _Optional[float] = ..., collective: _Optional[_Union[CollectiveOrder, _Mapping]] = ...) -> None: ...

class WorkerProgress(_message.Message):
    __slots__ = ("fence", "stage", "bytes_done", "bytes_total")
    FENCE_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    BYTES_DONE_FIELD_NUMBER: _ClassVar[int]
    BYTES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    fence: _weights_pb2.Fence
    stage: _manager_pb2.Stage
    bytes_done: int
    bytes_total: int
    def __init__(self, fence: _Optional[_Union[_weights_pb2.Fence, _Mapping]] = ..., stage: _Optional[_Union[_manager_pb2.Stage, str]] = ..., bytes_done: _Optional[int] = ..., bytes_total: _Optional[int] = ...) -> None: ...

class WorkerInstalled(_message.Message):
    __slots__ = ("fence", "report", "edges", "seconds")
    FENCE_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    EDGES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    fence: _weights_pb2.Fence
    report: _manager_pb2.WorkerReport
    edges: _containers.RepeatedCompositeFieldContainer[_manager_pb2.EdgeReport]
    seconds: float
    def __init__(self, fence: _Optional[_Union[_weights_pb2.Fence, _Mapping]] = ..., report: _Optional[_Union[_manager_pb2.WorkerReport, _Mapping]] = ..., edges: _Optional[_Iterable[_Union[_manager_pb2.EdgeReport, _Mapping]]] = ..., seconds: _Optional[float] = ...) -> None: ...

class NodeMessage(_message.Message):
    __slots__ = ("session_id", "sequence", "node_rank", "nodes", "kind", "transports", "leader_session", "generation", "running", "reason", "workers", "looked", "request", "digest_format")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    NODE_RANK_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    LEADER_SESSION_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    LOOKED_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FORMAT_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    sequence: int
    node_rank: int
    nodes: int
    kind: str
    transports: _containers.RepeatedScalarFieldContainer[str]
    leader_session: bytes
    generation: int
    running: bool
    reason: str
    workers: _containers.RepeatedCompositeFieldContainer[_manager_pb2.WorkerStatus]
    looked: int
    request: WorkerRequest
    digest_format: int
    def __init__(self, session_id: _Optional[bytes] = ..., sequence: _Optional[int] = ..., node_rank: _Optional[int] = ..., nodes: _Optional[int] = ..., kind: _Optional[str] = ..., transports: _Optional[_Iterable[str]] = ..., leader_session: _Optional[bytes] = ..., generation: _Optional[int] = ..., running: bool = ..., reason: _Optional[str] = ..., workers: _Optional[_Iterable[_Union[_manager_pb2.WorkerStatus, _Mapping]]] = ..., looked: _Optional[int] = ..., request: _Optional[_Union[WorkerRequest, _Mapping]] = ..., digest_format: _Optional[int] = ...) -> None: ...

class NodeCommand(_message.Message):
    __slots__ = ("session_id", "generation", "run", "master_address", "master_port", "look", "refused", "rank", "boot_id", "reply")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    MASTER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    MASTER_PORT_FIELD_NUMBER: _ClassVar[int]
    LOOK_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    REPLY_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    generation: int
    run: bool
    master_address: str
    master_port: int
    look: int
    refused: _weights_pb2.Problem
    rank: int
    boot_id: bytes
    reply: AgentReply
    def __init__(self, session_id: _Optional[bytes] = ..., generation: _Optional[int] = ..., run: bool = ..., master_address: _Optional[str] = ..., master_port: _Optional[int] = ..., look: _Optional[int] = ..., refused: _Optional[_Union[_weights_pb2.Problem, _Mapping]] = ..., rank: _Optional[int] = ..., boot_id: _Optional[bytes] = ..., reply: _Optional[_Union[AgentReply, _Mapping]] = ...) -> None: ...
