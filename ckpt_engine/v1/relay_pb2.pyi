from ckpt_engine.v1 import weights_pb2 as _weights_pb2
from ckpt_engine.v1 import manager_pb2 as _manager_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RelayMemoryLocator(_message.Message):
    __slots__ = ("directory", "socket", "arena", "slot", "offset")
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    SOCKET_FIELD_NUMBER: _ClassVar[int]
    ARENA_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    directory: str
    socket: str
    arena: bytes
    slot: int
    offset: int
    def __init__(self, directory: _Optional[str] = ..., socket: _Optional[str] = ..., arena: _Optional[bytes] = ..., slot: _Optional[int] = ..., offset: _Optional[int] = ...) -> None: ...

class FillRelay(_message.Message):
    __slots__ = ("fence", "identity", "record", "tables", "needs", "everything", "keep", "deadline_seconds")
    FENCE_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    NEEDS_FIELD_NUMBER: _ClassVar[int]
    EVERYTHING_FIELD_NUMBER: _ClassVar[int]
    KEEP_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    fence: _weights_pb2.Fence
    identity: _weights_pb2.Identity
    record: _manager_pb2.BlobRef
    tables: _containers.RepeatedCompositeFieldContainer[_manager_pb2.BlobRef]
    needs: _containers.RepeatedCompositeFieldContainer[_manager_pb2.BlobRef]
    everything: bool
    keep: _weights_pb2.Identity
    deadline_seconds: float
    def __init__(self, fence: _Optional[_Union[_weights_pb2.Fence, _Mapping]] = ..., identity: _Optional[_Union[_weights_pb2.Identity, _Mapping]] = ..., record: _Optional[_Union[_manager_pb2.BlobRef, _Mapping]] = ..., tables: _Optional[_Iterable[_Union[_manager_pb2.BlobRef, _Mapping]]] = ..., needs: _Optional[_Iterable[_Union[_manager_pb2.BlobRef, _Mapping]]] = ..., everything: bool = ..., keep: _Optional[_Union[_weights_pb2.Identity, _Mapping]] = ..., deadline_seconds: _Optional[float] = ...) -> None: ...

class RelayFilled(_message.Message):
    __slots__ = ("fence", "identity", "problem", "bytes", "missing", "missing_cells", "faults", "brought", "again", "overruled", "wait_seconds", "fill_seconds")
    class Brought(_message.Message):
        __slots__ = ("source", "bytes")
        SOURCE_FIELD_NUMBER: _ClassVar[int]
        BYTES_FIELD_NUMBER: _ClassVar[int]
        source: str
        bytes: int
        def __init__(self, source: _Optional[str] = ..., bytes: _Optional[int] = ...) -> None: ...
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
    def __init__(self, fence: _Optional[_Union[_weights_pb2.Fence, _Mapping]] = ..., identity: _Optional[_Union[_weights_pb2.Identity, _Mapping]] = ..., problem: _Optional[_Union[_weights_pb2.Problem, _Mapping]] = ..., bytes: _Optional[int] = ..., missing: _Optional[_Iterable[_Union[_weights_pb2.Problem, _Mapping]]] = ..., missing_cells: _Optional[int] = ..., faults: _Optional[_Iterable[_Union[_weights_pb2.Problem, _Mapping]]] = ..., brought: _Optional[_Iterable[_Union[RelayFilled.Brought, _Mapping]]] = ..., again: _Optional[int] = ..., overruled: _Optional[int] = ..., wait_seconds: _Optional[float] = ..., fill_seconds: _Optional[float] = ...) -> None: ...

class WithdrawRelay(_message.Message):
    __slots__ = ("fence", "identity")
    FENCE_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    fence: _weights_pb2.Fence
    identity: _weights_pb2.Identity
    def __init__(self, fence: _Optional[_Union[_weights_pb2.Fence, _Mapping]] = ..., identity: _Optional[_Union[_weights_pb2.Identity, _Mapping]] = ...) -> None: ...

class RelayWithdrawn(_message.Message):
    __slots__ = ("fence", "identity")
    FENCE_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    fence: _weights_pb2.Fence
    identity: _weights_pb2.Identity
    def __init__(self, fence: _Optional[_Union[_weights_pb2.Fence, _Mapping]] = ..., identity: _Optional[_Union[_weights_pb2.Identity, _Mapping]] = ...) -> None: ...
