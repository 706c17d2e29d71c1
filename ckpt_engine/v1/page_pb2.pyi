from ckpt_engine.v1 import manager_pb2 as _manager_pb2
from ckpt_engine.v1 import weights_pb2 as _weights_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PageOverview(_message.Message):
    __slots__ = ("asker", "now", "cluster", "epoch", "software_version", "manager", "warnings", "phase", "waiting_for", "refused", "lineages", "holders", "replicas")
    ASKER_FIELD_NUMBER: _ClassVar[int]
    NOW_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SOFTWARE_VERSION_FIELD_NUMBER: _ClassVar[int]
    MANAGER_FIELD_NUMBER: _ClassVar[int]
    WARNINGS_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    LINEAGES_FIELD_NUMBER: _ClassVar[int]
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    asker: PageAsker
    now: float
    cluster: str
    epoch: int
    software_version: str
    manager: str
    warnings: _containers.RepeatedScalarFieldContainer[str]
    phase: str
    waiting_for: _containers.RepeatedScalarFieldContainer[str]
    refused: int
    lineages: _containers.RepeatedCompositeFieldContainer[_manager_pb2.LineageStatus]
    holders: _containers.RepeatedCompositeFieldContainer[_manager_pb2.HolderStatus]
    replicas: _containers.RepeatedCompositeFieldContainer[PageReplica]
    def __init__(self, asker: _Optional[_Union[PageAsker, _Mapping]] = ..., now: _Optional[float] = ..., cluster: _Optional[str] = ..., epoch: _Optional[int] = ..., software_version: _Optional[str] = ..., manager: _Optional[str] = ..., warnings: _Optional[_Iterable[str]] = ..., phase: _Optional[str] = ..., waiting_for: _Optional[_Iterable[str]] = ..., refused: _Optional[int] = ..., lineages: _Optional[_Iterable[_Union[_manager_pb2.LineageStatus, _Mapping]]] = ..., holders: _Optional[_Iterable[_Union[_manager_pb2.HolderStatus, _Mapping]]] = ..., replicas: _Optional[_Iterable[_Union[PageReplica, _Mapping]]] = ...) -> None: ...

class PageAsker(_message.Message):
    __slots__ = ("name", "operates")
    NAME_FIELD_NUMBER: _ClassVar[int]
    OPERATES_FIELD_NUMBER: _ClassVar[int]
    name: str
    operates: bool
    def __init__(self, name: _Optional[str] = ..., operates: bool = ...) -> None: ...

class PageReplica(_message.Message):
    __slots__ = ("watched", "quarantined", "drift", "hold", "unfit", "lag", "host", "workers", "pause_seconds", "scrub", "probe")
    WATCHED_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    DRIFT_FIELD_NUMBER: _ClassVar[int]
    HOLD_FIELD_NUMBER: _ClassVar[int]
    UNFIT_FIELD_NUMBER: _ClassVar[int]
    LAG_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    PAUSE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SCRUB_FIELD_NUMBER: _ClassVar[int]
    PROBE_FIELD_NUMBER: _ClassVar[int]
    watched: _manager_pb2.WatchedReplica
    quarantined: bool
    drift: str
    hold: str
    unfit: str
    lag: int
    host: str
    workers: int
    pause_seconds: float
    scrub: str
    probe: str
    def __init__(self, watched: _Optional[_Union[_manager_pb2.WatchedReplica, _Mapping]] = ..., quarantined: bool = ..., drift: _Optional[str] = ..., hold: _Optional[str] = ..., unfit: _Optional[str] = ..., lag: _Optional[int] = ..., host: _Optional[str] = ..., workers: _Optional[int] = ..., pause_seconds: _Optional[float] = ..., scrub: _Optional[str] = ..., probe: _Optional[str] = ...) -> None: ...

class PageHistory(_message.Message):
    __slots__ = ("updates", "refused")
    UPDATES_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    updates: _containers.RepeatedCompositeFieldContainer[PageUpdate]
    refused: _containers.RepeatedCompositeFieldContainer[_manager_pb2.UpdateRefusal]
    def __init__(self, updates: _Optional[_Iterable[_Union[PageUpdate, _Mapping]]] = ..., refused: _Optional[_Iterable[_Union[_manager_pb2.UpdateRefusal, _Mapping]]] = ...) -> None: ...

class PageUpdate(_message.Message):
    __slots__ = ("epoch", "identity", "time", "ok", "verified", "seconds", "bytes", "stages", "outcomes", "pauses", "problems", "warnings")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    OK_FIELD_NUMBER: _ClassVar[int]
    VERIFIED_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    PAUSES_FIELD_NUMBER: _ClassVar[int]
    PROBLEMS_FIELD_NUMBER: _ClassVar[int]
    WARNINGS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    identity: _weights_pb2.Identity
    time: float
    ok: bool
    verified: bool
    seconds: float
    bytes: int
    stages: _containers.RepeatedCompositeFieldContainer[_manager_pb2.StageSeconds]
    outcomes: _containers.RepeatedCompositeFieldContainer[PageOutcome]
    pauses: PagePauses
    problems: _containers.RepeatedCompositeFieldContainer[_weights_pb2.Problem]
    warnings: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, epoch: _Optional[int] = ..., identity: _Optional[_Union[_weights_pb2.Identity, _Mapping]] = ..., time: _Optional[float] = ..., ok: bool = ..., verified: bool = ..., seconds: _Optional[float] = ..., bytes: _Optional[int] = ..., stages: _Optional[_Iterable[_Union[_manager_pb2.StageSeconds, _Mapping]]] = ..., outcomes: _Optional[_Iterable[_Union[PageOutcome, _Mapping]]] = ..., pauses: _Optional[_Union[PagePauses, _Mapping]] = ..., problems: _Optional[_Iterable[_Union[_weights_pb2.Problem, _Mapping]]] = ..., warnings: _Optional[_Iterable[str]] = ...) -> None: ...

class PageOutcome(_message.Message):
    __slots__ = ("outcome", "replicas")
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    outcome: _manager_pb2.Outcome
    replicas: int
    def __init__(self, outcome: _Optional[_Union[_manager_pb2.Outcome, str]] = ..., replicas: _Optional[int] = ...) -> None: ...

class PagePauses(_message.Message):
    __slots__ = ("replicas", "p50", "p99", "longest")
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    P50_FIELD_NUMBER: _ClassVar[int]
    P99_FIELD_NUMBER: _ClassVar[int]
    LONGEST_FIELD_NUMBER: _ClassVar[int]
    replicas: int
    p50: float
    p99: float
    longest: float
    def __init__(self, replicas: _Optional[int] = ..., p50: _Optional[float] = ..., p99: _Optional[float] = ..., longest: _Optional[float] = ...) -> None: ...
