from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Identity(_message.Message):
    __slots__ = ("lineage", "version", "root")
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ROOT_FIELD_NUMBER: _ClassVar[int]
    lineage: str
    version: int
    root: bytes
    def __init__(self, lineage: _Optional[str] = ..., version: _Optional[int] = ..., root: _Optional[bytes] = ...) -> None: ...

class Fence(_message.Message):
    __slots__ = ("cluster", "epoch")
    CLUSTER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    cluster: str
    epoch: int
    def __init__(self, cluster: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class Problem(_message.Message):
    __slots__ = ("code", "message", "tensors", "ranks", "replica", "kept")
    class Code(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        CODE_UNSPECIFIED: _ClassVar[Problem.Code]
        CODE_INVALID_ARGUMENT: _ClassVar[Problem.Code]
        CODE_FAILED_PRECONDITION: _ClassVar[Problem.Code]
        CODE_NOT_FOUND: _ClassVar[Problem.Code]
        CODE_ABORTED: _ClassVar[Problem.Code]
        CODE_UNAVAILABLE: _ClassVar[Problem.Code]
        CODE_DEADLINE_EXCEEDED: _ClassVar[Problem.Code]
        CODE_INTERNAL: _ClassVar[Problem.Code]
        CODE_DATA_LOSS: _ClassVar[Problem.Code]
        CODE_UNAUTHENTICATED: _ClassVar[Problem.Code]
        CODE_PERMISSION_DENIED: _ClassVar[Problem.Code]
    CODE_UNSPECIFIED: Problem.Code
    CODE_INVALID_ARGUMENT: Problem.Code
    CODE_FAILED_PRECONDITION: Problem.Code
    CODE_NOT_FOUND: Problem.Code
    CODE_ABORTED: Problem.Code
    CODE_UNAVAILABLE: Problem.Code
    CODE_DEADLINE_EXCEEDED: Problem.Code
    CODE_INTERNAL: Problem.Code
    CODE_DATA_LOSS: Problem.Code
    CODE_UNAUTHENTICATED: Problem.Code
    CODE_PERMISSION_DENIED: Problem.Code
    class KeptEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    code: Problem.Code
    message: str
    tensors: _containers.RepeatedScalarFieldContainer[str]
    ranks: _containers.RepeatedScalarFieldContainer[int]
    replica: str
    kept: _containers.ScalarMap[str, str]
    def __init__(self, code: _Optional[_Union[Problem.Code, str]] = ..., message: _Optional[str] = ..., tensors: _Optional[_Iterable[str]] = ..., ranks: _Optional[_Iterable[int]] = ..., replica: _Optional[str] = ..., kept: _Optional[_Mapping[str, str]] = ...) -> None: ...

class Host(_message.Message):
    __slots__ = ("boot_id", "pid_namespace", "name", "address", "gpus", "network_namespace", "relay_directory")
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    PID_NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    GPUS_FIELD_NUMBER: _ClassVar[int]
    NETWORK_NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    RELAY_DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    boot_id: str
    pid_namespace: str
    name: str
    address: str
    gpus: _containers.RepeatedCompositeFieldContainer[Gpu]
    network_namespace: str
    relay_directory: str
    def __init__(self, boot_id: _Optional[str] = ..., pid_namespace: _Optional[str] = ..., name: _Optional[str] = ..., address: _Optional[str] = ..., gpus: _Optional[_Iterable[_Union[Gpu, _Mapping]]] = ..., network_namespace: _Optional[str] = ..., relay_directory: _Optional[str] = ...) -> None: ...

class Gpu(_message.Message):
    __slots__ = ("uuid", "name", "pci", "reach")
    UUID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    PCI_FIELD_NUMBER: _ClassVar[int]
    REACH_FIELD_NUMBER: _ClassVar[int]
    uuid: bytes
    name: str
    pci: str
    reach: _containers.RepeatedCompositeFieldContainer[GpuReach]
    def __init__(self, uuid: _Optional[bytes] = ..., name: _Optional[str] = ..., pci: _Optional[str] = ..., reach: _Optional[_Iterable[_Union[GpuReach, _Mapping]]] = ...) -> None: ...

class GpuReach(_message.Message):
    __slots__ = ("uuid", "link")
    class Link(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        LINK_UNSPECIFIED: _ClassVar[GpuReach.Link]
        LINK_NONE: _ClassVar[GpuReach.Link]
        LINK_PCIE: _ClassVar[GpuReach.Link]
        LINK_NVLINK: _ClassVar[GpuReach.Link]
        LINK_PEER: _ClassVar[GpuReach.Link]
    LINK_UNSPECIFIED: GpuReach.Link
    LINK_NONE: GpuReach.Link
    LINK_PCIE: GpuReach.Link
    LINK_NVLINK: GpuReach.Link
    LINK_PEER: GpuReach.Link
    UUID_FIELD_NUMBER: _ClassVar[int]
    LINK_FIELD_NUMBER: _ClassVar[int]
    uuid: bytes
    link: GpuReach.Link
    def __init__(self, uuid: _Optional[bytes] = ..., link: _Optional[_Union[GpuReach.Link, str]] = ...) -> None: ...

class TensorSpec(_message.Message):
    __slots__ = ("name", "dtype", "shape")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ...) -> None: ...

class Manifest(_message.Message):
    __slots__ = ("tensors",)
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    tensors: _containers.RepeatedCompositeFieldContainer[TensorSpec]
    def __init__(self, tensors: _Optional[_Iterable[_Union[TensorSpec, _Mapping]]] = ...) -> None: ...

class Offer(_message.Message):
    __slots__ = ("transport", "locator")
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    LOCATOR_FIELD_NUMBER: _ClassVar[int]
    transport: str
    locator: bytes
    def __init__(self, transport: _Optional[str] = ..., locator: _Optional[bytes] = ...) -> None: ...

class OfferedRegion(_message.Message):
    __slots__ = ("id", "size", "offers")
    ID_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    OFFERS_FIELD_NUMBER: _ClassVar[int]
    id: int
    size: int
    offers: _containers.RepeatedCompositeFieldContainer[Offer]
    def __init__(self, id: _Optional[int] = ..., size: _Optional[int] = ..., offers: _Optional[_Iterable[_Union[Offer, _Mapping]]] = ...) -> None: ...

class Region(_message.Message):
    __slots__ = ("id", "transport", "size", "locator", "source")
    ID_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    LOCATOR_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    id: int
    transport: str
    size: int
    locator: bytes
    source: str
    def __init__(self, id: _Optional[int] = ..., transport: _Optional[str] = ..., size: _Optional[int] = ..., locator: _Optional[bytes] = ..., source: _Optional[str] = ...) -> None: ...

class SharedMemoryLocator(_message.Message):
    __slots__ = ("pid", "descriptor", "device", "inode")
    PID_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTOR_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    INODE_FIELD_NUMBER: _ClassVar[int]
    pid: int
    descriptor: int
    device: int
    inode: int
    def __init__(self, pid: _Optional[int] = ..., descriptor: _Optional[int] = ..., device: _Optional[int] = ..., inode: _Optional[int] = ...) -> None: ...

class FileLocator(_message.Message):
    __slots__ = ("path", "offset", "modified_nanoseconds", "file_size")
    PATH_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    MODIFIED_NANOSECONDS_FIELD_NUMBER: _ClassVar[int]
    FILE_SIZE_FIELD_NUMBER: _ClassVar[int]
    path: str
    offset: int
    modified_nanoseconds: int
    file_size: int
    def __init__(self, path: _Optional[str] = ..., offset: _Optional[int] = ..., modified_nanoseconds: _Optional[int] = ..., file_size: _Optional[int] = ...) -> None: ...

class CudaIpcLocator(_message.Message):
    __slots__ = ("kind", "parts", "pointer", "gpu_uuid", "pid", "started", "lease")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_UNSPECIFIED: _ClassVar[CudaIpcLocator.Kind]
        KIND_LEGACY: _ClassVar[CudaIpcLocator.Kind]
        KIND_PIECES: _ClassVar[CudaIpcLocator.Kind]
    KIND_UNSPECIFIED: CudaIpcLocator.Kind
    KIND_LEGACY: CudaIpcLocator.Kind
    KIND_PIECES: CudaIpcLocator.Kind
    class Part(_message.Message):
        __slots__ = ("size", "handle", "generation")
        SIZE_FIELD_NUMBER: _ClassVar[int]
        HANDLE_FIELD_NUMBER: _ClassVar[int]
        GENERATION_FIELD_NUMBER: _ClassVar[int]
        size: int
        handle: bytes
        generation: int
        def __init__(self, size: _Optional[int] = ..., handle: _Optional[bytes] = ..., generation: _Optional[int] = ...) -> None: ...
    KIND_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    POINTER_FIELD_NUMBER: _ClassVar[int]
    GPU_UUID_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    kind: CudaIpcLocator.Kind
    parts: _containers.RepeatedCompositeFieldContainer[CudaIpcLocator.Part]
    pointer: int
    gpu_uuid: bytes
    pid: int
    started: int
    lease: str
    def __init__(self, kind: _Optional[_Union[CudaIpcLocator.Kind, str]] = ..., parts: _Optional[_Iterable[_Union[CudaIpcLocator.Part, _Mapping]]] = ..., pointer: _Optional[int] = ..., gpu_uuid: _Optional[bytes] = ..., pid: _Optional[int] = ..., started: _Optional[int] = ..., lease: _Optional[str] = ...) -> None: ...

class NcclLocator(_message.Message):
    __slots__ = ("host", "port", "gpu")
    HOST_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    GPU_FIELD_NUMBER: _ClassVar[int]
    host: str
    port: int
    gpu: bytes
    def __init__(self, host: _Optional[str] = ..., port: _Optional[int] = ..., gpu: _Optional[bytes] = ...) -> None: ...

class CollectiveMeeting(_message.Message):
    __slots__ = ("host", "port", "key")
    HOST_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    host: str
    port: int
    key: bytes
    def __init__(self, host: _Optional[str] = ..., port: _Optional[int] = ..., key: _Optional[bytes] = ...) -> None: ...

class Shard(_message.Message):
    __slots__ = ("tensor", "start", "stop", "region", "offset", "stride", "stored_dtype", "encoding", "unchanged_since")
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    REGION_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    STRIDE_FIELD_NUMBER: _ClassVar[int]
    STORED_DTYPE_FIELD_NUMBER: _ClassVar[int]
    ENCODING_FIELD_NUMBER: _ClassVar[int]
    UNCHANGED_SINCE_FIELD_NUMBER: _ClassVar[int]
    tensor: int
    start: _containers.RepeatedScalarFieldContainer[int]
    stop: _containers.RepeatedScalarFieldContainer[int]
    region: int
    offset: int
    stride: _containers.RepeatedScalarFieldContainer[int]
    stored_dtype: str
    encoding: str
    unchanged_since: Identity
    def __init__(self, tensor: _Optional[int] = ..., start: _Optional[_Iterable[int]] = ..., stop: _Optional[_Iterable[int]] = ..., region: _Optional[int] = ..., offset: _Optional[int] = ..., stride: _Optional[_Iterable[int]] = ..., stored_dtype: _Optional[str] = ..., encoding: _Optional[str] = ..., unchanged_since: _Optional[_Union[Identity, _Mapping]] = ...) -> None: ...

class SourceTable(_message.Message):
    __slots__ = ("host", "rank", "tensors", "regions", "shards", "stays_sealed", "source_copies", "description", "id", "copied", "warnings")
    HOST_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    REGIONS_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    STAYS_SEALED_FIELD_NUMBER: _ClassVar[int]
    SOURCE_COPIES_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    COPIED_FIELD_NUMBER: _ClassVar[int]
    WARNINGS_FIELD_NUMBER: _ClassVar[int]
    host: Host
    rank: int
    tensors: _containers.RepeatedCompositeFieldContainer[TensorSpec]
    regions: _containers.RepeatedCompositeFieldContainer[OfferedRegion]
    shards: _containers.RepeatedCompositeFieldContainer[Shard]
    stays_sealed: bool
    source_copies: int
    description: str
    id: str
    copied: _containers.RepeatedCompositeFieldContainer[CopiedTensors]
    warnings: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, host: _Optional[_Union[Host, _Mapping]] = ..., rank: _Optional[int] = ..., tensors: _Optional[_Iterable[_Union[TensorSpec, _Mapping]]] = ..., regions: _Optional[_Iterable[_Union[OfferedRegion, _Mapping]]] = ..., shards: _Optional[_Iterable[_Union[Shard, _Mapping]]] = ..., stays_sealed: bool = ..., source_copies: _Optional[int] = ..., description: _Optional[str] = ..., id: _Optional[str] = ..., copied: _Optional[_Iterable[_Union[CopiedTensors, _Mapping]]] = ..., warnings: _Optional[_Iterable[str]] = ...) -> None: ...

class CopiedTensors(_message.Message):
    __slots__ = ("reason", "tensors", "bytes", "names", "rank", "ranks")
    REASON_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    reason: str
    tensors: int
    bytes: int
    names: _containers.RepeatedScalarFieldContainer[str]
    rank: int
    ranks: int
    def __init__(self, reason: _Optional[str] = ..., tensors: _Optional[int] = ..., bytes: _Optional[int] = ..., names: _Optional[_Iterable[str]] = ..., rank: _Optional[int] = ..., ranks: _Optional[int] = ...) -> None: ...

class Need(_message.Message):
    __slots__ = ("tensor", "start", "stop")
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    tensor: int
    start: _containers.RepeatedScalarFieldContainer[int]
    stop: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, tensor: _Optional[int] = ..., start: _Optional[_Iterable[int]] = ..., stop: _Optional[_Iterable[int]] = ...) -> None: ...

class Accounted(_message.Message):
    __slots__ = ("name", "kind", "bytes", "note")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_UNSPECIFIED: _ClassVar[Accounted.Kind]
        KIND_LOADED: _ClassVar[Accounted.Kind]
        KIND_FILLED: _ClassVar[Accounted.Kind]
        KIND_DERIVED: _ClassVar[Accounted.Kind]
        KIND_CONSTANT: _ClassVar[Accounted.Kind]
        KIND_KEPT: _ClassVar[Accounted.Kind]
    KIND_UNSPECIFIED: Accounted.Kind
    KIND_LOADED: Accounted.Kind
    KIND_FILLED: Accounted.Kind
    KIND_DERIVED: Accounted.Kind
    KIND_CONSTANT: Accounted.Kind
    KIND_KEPT: Accounted.Kind
    NAME_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    name: str
    kind: Accounted.Kind
    bytes: int
    note: str
    def __init__(self, name: _Optional[str] = ..., kind: _Optional[_Union[Accounted.Kind, str]] = ..., bytes: _Optional[int] = ..., note: _Optional[str] = ...) -> None: ...

class WorkerNeeds(_message.Message):
    __slots__ = ("manifest_digest", "needs", "accounted", "elsewhere", "absent", "absent_parts", "unfilled_parts")
    MANIFEST_DIGEST_FIELD_NUMBER: _ClassVar[int]
    NEEDS_FIELD_NUMBER: _ClassVar[int]
    ACCOUNTED_FIELD_NUMBER: _ClassVar[int]
    ELSEWHERE_FIELD_NUMBER: _ClassVar[int]
    ABSENT_FIELD_NUMBER: _ClassVar[int]
    ABSENT_PARTS_FIELD_NUMBER: _ClassVar[int]
    UNFILLED_PARTS_FIELD_NUMBER: _ClassVar[int]
    manifest_digest: bytes
    needs: _containers.RepeatedCompositeFieldContainer[Need]
    accounted: _containers.RepeatedCompositeFieldContainer[Accounted]
    elsewhere: _containers.RepeatedScalarFieldContainer[int]
    absent: _containers.RepeatedScalarFieldContainer[int]
    absent_parts: _containers.RepeatedScalarFieldContainer[str]
    unfilled_parts: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, manifest_digest: _Optional[bytes] = ..., needs: _Optional[_Iterable[_Union[Need, _Mapping]]] = ..., accounted: _Optional[_Iterable[_Union[Accounted, _Mapping]]] = ..., elsewhere: _Optional[_Iterable[int]] = ..., absent: _Optional[_Iterable[int]] = ..., absent_parts: _Optional[_Iterable[str]] = ..., unfilled_parts: _Optional[_Iterable[str]] = ...) -> None: ...

class Piece(_message.Message):
    __slots__ = ("need", "source", "region", "offset", "start", "stop", "stride", "stored_dtype")
    NEED_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    REGION_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STRIDE_FIELD_NUMBER: _ClassVar[int]
    STORED_DTYPE_FIELD_NUMBER: _ClassVar[int]
    need: int
    source: int
    region: int
    offset: int
    start: _containers.RepeatedScalarFieldContainer[int]
    stop: _containers.RepeatedScalarFieldContainer[int]
    stride: _containers.RepeatedScalarFieldContainer[int]
    stored_dtype: str
    def __init__(self, need: _Optional[int] = ..., source: _Optional[int] = ..., region: _Optional[int] = ..., offset: _Optional[int] = ..., start: _Optional[_Iterable[int]] = ..., stop: _Optional[_Iterable[int]] = ..., stride: _Optional[_Iterable[int]] = ..., stored_dtype: _Optional[str] = ...) -> None: ...

class PlanSource(_message.Message):
    __slots__ = ("rank", "host", "transport", "reason", "regions", "source", "others")
    RANK_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    REGIONS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    OTHERS_FIELD_NUMBER: _ClassVar[int]
    rank: int
    host: Host
    transport: str
    reason: str
    regions: _containers.RepeatedCompositeFieldContainer[Region]
    source: str
    others: _containers.RepeatedCompositeFieldContainer[OtherWay]
    def __init__(self, rank: _Optional[int] = ..., host: _Optional[_Union[Host, _Mapping]] = ..., transport: _Optional[str] = ..., reason: _Optional[str] = ..., regions: _Optional[_Iterable[_Union[Region, _Mapping]]] = ..., source: _Optional[str] = ..., others: _Optional[_Iterable[_Union[OtherWay, _Mapping]]] = ...) -> None: ...

class OtherWay(_message.Message):
    __slots__ = ("transport", "reason", "regions")
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    REGIONS_FIELD_NUMBER: _ClassVar[int]
    transport: str
    reason: str
    regions: _containers.RepeatedCompositeFieldContainer[Region]
    def __init__(self, transport: _Optional[str] = ..., reason: _Optional[str] = ..., regions: _Optional[_Iterable[_Union[Region, _Mapping]]] = ...) -> None: ...

class Unopened(_message.Message):
    __slots__ = ("worker_rank", "transport", "source", "locator", "reason", "boot_id")
    WORKER_RANK_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    LOCATOR_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    worker_rank: int
    transport: str
    source: str
    locator: bytes
    reason: str
    boot_id: bytes
    def __init__(self, worker_rank: _Optional[int] = ..., transport: _Optional[str] = ..., source: _Optional[str] = ..., locator: _Optional[bytes] = ..., reason: _Optional[str] = ..., boot_id: _Optional[bytes] = ...) -> None: ...

class WorkerPlan(_message.Message):
    __slots__ = ("manifest_digest", "needs_digest", "sources", "pieces", "bytes")
    MANIFEST_DIGEST_FIELD_NUMBER: _ClassVar[int]
    NEEDS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    PIECES_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    manifest_digest: bytes
    needs_digest: bytes
    sources: _containers.RepeatedCompositeFieldContainer[PlanSource]
    pieces: _containers.RepeatedCompositeFieldContainer[Piece]
    bytes: int
    def __init__(self, manifest_digest: _Optional[bytes] = ..., needs_digest: _Optional[bytes] = ..., sources: _Optional[_Iterable[_Union[PlanSource, _Mapping]]] = ..., pieces: _Optional[_Iterable[_Union[Piece, _Mapping]]] = ..., bytes: _Optional[int] = ...) -> None: ...

class Atom(_message.Message):
    __slots__ = ("shard", "start", "stop")
    SHARD_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    shard: int
    start: _containers.RepeatedScalarFieldContainer[int]
    stop: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, shard: _Optional[int] = ..., start: _Optional[_Iterable[int]] = ..., stop: _Optional[_Iterable[int]] = ...) -> None: ...

class Atoms(_message.Message):
    __slots__ = ("table_digest", "atoms")
    TABLE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    ATOMS_FIELD_NUMBER: _ClassVar[int]
    table_digest: bytes
    atoms: _containers.RepeatedCompositeFieldContainer[Atom]
    def __init__(self, table_digest: _Optional[bytes] = ..., atoms: _Optional[_Iterable[_Union[Atom, _Mapping]]] = ...) -> None: ...

class SealedRecord(_message.Message):
    __slots__ = ("manifest", "cells", "digests", "groups")
    class Cell(_message.Message):
        __slots__ = ("tensor", "start", "stop")
        TENSOR_FIELD_NUMBER: _ClassVar[int]
        START_FIELD_NUMBER: _ClassVar[int]
        STOP_FIELD_NUMBER: _ClassVar[int]
        tensor: int
        start: _containers.RepeatedScalarFieldContainer[int]
        stop: _containers.RepeatedScalarFieldContainer[int]
        def __init__(self, tensor: _Optional[int] = ..., start: _Optional[_Iterable[int]] = ..., stop: _Optional[_Iterable[int]] = ...) -> None: ...
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    CELLS_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    manifest: Manifest
    cells: _containers.RepeatedCompositeFieldContainer[SealedRecord.Cell]
    digests: _containers.RepeatedScalarFieldContainer[int]
    groups: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, manifest: _Optional[_Union[Manifest, _Mapping]] = ..., cells: _Optional[_Iterable[_Union[SealedRecord.Cell, _Mapping]]] = ..., digests: _Optional[_Iterable[int]] = ..., groups: _Optional[_Iterable[int]] = ...) -> None: ...

class ArchivedVersion(_message.Message):
    __slots__ = ("identity", "record", "tensors", "shards", "bytes", "wanted_bytes")
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    WANTED_BYTES_FIELD_NUMBER: _ClassVar[int]
    identity: Identity
    record: SealedRecord
    tensors: _containers.RepeatedCompositeFieldContainer[TensorSpec]
    shards: _containers.RepeatedCompositeFieldContainer[Shard]
    bytes: int
    wanted_bytes: int
    def __init__(self, identity: _Optional[_Union[Identity, _Mapping]] = ..., record: _Optional[_Union[SealedRecord, _Mapping]] = ..., tensors: _Optional[_Iterable[_Union[TensorSpec, _Mapping]]] = ..., shards: _Optional[_Iterable[_Union[Shard, _Mapping]]] = ..., bytes: _Optional[int] = ..., wanted_bytes: _Optional[int] = ...) -> None: ...

class Digests(_message.Message):
    __slots__ = ("values",)
    VALUES_FIELD_NUMBER: _ClassVar[int]
    values: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, values: _Optional[_Iterable[int]] = ...) -> None: ...

class CollectivePlan(_message.Message):
    __slots__ = ("members", "wants", "dtypes", "bucket_bytes", "slots")
    class Member(_message.Message):
        __slots__ = ("name", "host", "is_source", "gpu")
        NAME_FIELD_NUMBER: _ClassVar[int]
        HOST_FIELD_NUMBER: _ClassVar[int]
        IS_SOURCE_FIELD_NUMBER: _ClassVar[int]
        GPU_FIELD_NUMBER: _ClassVar[int]
        name: str
        host: str
        is_source: bool
        gpu: bytes
        def __init__(self, name: _Optional[str] = ..., host: _Optional[str] = ..., is_source: bool = ..., gpu: _Optional[bytes] = ...) -> None: ...
    class Want(_message.Message):
        __slots__ = ("workers", "source", "tensor", "start", "stop")
        WORKERS_FIELD_NUMBER: _ClassVar[int]
        SOURCE_FIELD_NUMBER: _ClassVar[int]
        TENSOR_FIELD_NUMBER: _ClassVar[int]
        START_FIELD_NUMBER: _ClassVar[int]
        STOP_FIELD_NUMBER: _ClassVar[int]
        workers: _containers.RepeatedScalarFieldContainer[int]
        source: int
        tensor: int
        start: _containers.RepeatedScalarFieldContainer[int]
        stop: _containers.RepeatedScalarFieldContainer[int]
        def __init__(self, workers: _Optional[_Iterable[int]] = ..., source: _Optional[int] = ..., tensor: _Optional[int] = ..., start: _Optional[_Iterable[int]] = ..., stop: _Optional[_Iterable[int]] = ...) -> None: ...
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    WANTS_FIELD_NUMBER: _ClassVar[int]
    DTYPES_FIELD_NUMBER: _ClassVar[int]
    BUCKET_BYTES_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    members: _containers.RepeatedCompositeFieldContainer[CollectivePlan.Member]
    wants: _containers.RepeatedCompositeFieldContainer[CollectivePlan.Want]
    dtypes: _containers.RepeatedScalarFieldContainer[str]
    bucket_bytes: int
    slots: int
    def __init__(self, members: _Optional[_Iterable[_Union[CollectivePlan.Member, _Mapping]]] = ..., wants: _Optional[_Iterable[_Union[CollectivePlan.Want, _Mapping]]] = ..., dtypes: _Optional[_Iterable[str]] = ..., bucket_bytes: _Optional[int] = ..., slots: _Optional[int] = ...) -> None: ...
