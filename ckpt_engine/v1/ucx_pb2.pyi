from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class UcxLocator(_message.Message):
    __slots__ = ("slot_bytes", "lanes")
    class Lane(_message.Message):
        __slots__ = ("metadata", "memory")
        METADATA_FIELD_NUMBER: _ClassVar[int]
        MEMORY_FIELD_NUMBER: _ClassVar[int]
        metadata: bytes
        memory: int
        def __init__(self, metadata: _Optional[bytes] = ..., memory: _Optional[int] = ...) -> None: ...
    SLOT_BYTES_FIELD_NUMBER: _ClassVar[int]
    LANES_FIELD_NUMBER: _ClassVar[int]
    slot_bytes: int
    lanes: _containers.RepeatedCompositeFieldContainer[UcxLocator.Lane]
    def __init__(self, slot_bytes: _Optional[int] = ..., lanes: _Optional[_Iterable[_Union[UcxLocator.Lane, _Mapping]]] = ...) -> None: ...
