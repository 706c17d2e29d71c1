from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable
from typing import ClassVar as _ClassVar, Optional as _Optional

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

class TcpLocator(_message.Message):
    __slots__ = ("addresses", "arena", "token", "certificate")
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    ARENA_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    addresses: _containers.RepeatedScalarFieldContainer[str]
    arena: bytes
    token: bytes
    certificate: bytes
    def __init__(self, addresses: _Optional[_Iterable[str]] = ..., arena: _Optional[bytes] = ..., token: _Optional[bytes] = ..., certificate: _Optional[bytes] = ...) -> None: ...
