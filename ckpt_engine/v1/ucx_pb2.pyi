from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class UcxLocator(_message.Message):
    __slots__ = ("arena", "slot", "offset", "token", "lanes")
    class Lane(_message.Message):
        __slots__ = ("metadata", "memory", "board")
        METADATA_FIELD_NUMBER: _ClassVar[int]
        MEMORY_FIELD_NUMBER: _ClassVar[int]
        BOARD_FIELD_NUMBER: _ClassVar[int]
        metadata: bytes
        memory: int
        board: int
        def __init__(self, metadata: _Optional[bytes] = ..., memory: _Optional[int] = ..., board: _Optional[int] = ...) -> None: ...
    ARENA_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    LANES_FIELD_NUMBER: _ClassVar[int]
    arena: bytes
    slot: int
    offset: int
    token: bytes
    lanes: _containers.RepeatedCompositeFieldContainer[UcxLocator.Lane]
    def __init__(self, arena: _Optional[bytes] = ..., slot: _Optional[int] = ..., offset: _Optional[int] = ..., token: _Optional[bytes] = ..., lanes: _Optional[_Iterable[_Union[UcxLocator.Lane, _Mapping]]] = ...) -> None: ...
