"""Reads a version from its holders: relays, and sources that stay sealed. Each tensor is verified before it is given.

No session is opened: the manager is asked once where the version lies. Used by one thread.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from math import prod
from typing import Any, Self, TypeVar

import grpc
import torch
from google.protobuf.message import DecodeError, Message

from ckpt_engine.channel import ManagerStub, blob_ref, error_of, open_blocking_channel
from ckpt_engine.core.arguments import checked_version
from ckpt_engine.core.boxes import whole
from ckpt_engine.core.chunks import chunks_of
from ckpt_engine.core.deadlines import Deadlines
from ckpt_engine.core.dtypes import itemsize
from ckpt_engine.core.problems import CkptEngineError, data_loss, error, precondition
from ckpt_engine.core.relay_layout import RelayAtom, SlotLayout, lay_out
from ckpt_engine.core.sealed_record import read_record
from ckpt_engine.host.facts import this_host
from ckpt_engine.relay.chunk_fill import ChunkFilling, SlotMemory
from ckpt_engine.relay.chunk_search import ChunkTable
from ckpt_engine.relay.sources import Sources
from ckpt_engine.torch_dtypes import torch_dtype
from ckpt_engine.transport.askers import KeptAskers
from ckpt_engine.transport.registry import all_transports
from ckpt_engine.v1 import manager_pb2
from ckpt_engine.v1.weights_pb2 import Problem, SealedRecord, SourceTable, TensorSpec

GROUP_BYTES = 256 << 20
"""Tensors up to so many bytes are brought together, into one buffer; a larger one comes by itself."""

NAME = "a reader"
"""The name under which it asks relays."""

MessageT = TypeVar("MessageT", bound=Message)


class Reader:
    """One version, as long as a holder has it. Use it as a context manager, or call `close`.

    address: the manager, host:port. lineage: None: the only one with a version that can be read. version: None: the
    lineage's latest. deadlines: None: the defaults, changed by CKPT_ENGINE_DEADLINES.

    The attributes lineage, version and root are those of the version that was found.

    Raises CkptEngineError: NOT_FOUND, naming what can be read, if no holder has it; PERMISSION_DENIED without a grant
    of a trainer, holder or replica; DATA_LOSS for a record that is not of this version; UNAVAILABLE.
    """

    def __init__(
        self,
        address: str,
        lineage: str | None = None,
        version: int | None = None,
        *,
        deadlines: Deadlines | None = None,
    ) -> None:
        if version is not None:
            checked_version(version)
        self._deadlines = deadlines or Deadlines.from_environment(os.environ)
        request = manager_pb2.LocateVersionRequest(lineage=lineage or "", version=version)
        with open_blocking_channel(address) as channel:
            stub = ManagerStub(channel)
            try:
                found = stub.LocateVersion(request, timeout=self._deadlines.blobs)
                record, *tables = (_blob(stub, ref, self._deadlines.blobs) for ref in (found.record, *found.tables))
            except grpc.RpcError as rpc_error:
                raise error_of(rpc_error, address) from None
        self.lineage, self.version = found.identity.lineage, found.identity.version
        self.root: str = found.identity.root.hex()
        self._record = read_record(_parse(SealedRecord, record), found.identity.root)
        self._specs = list(self._record.record.manifest.tensors)
        self._numbers = {spec.name: number for number, spec in enumerate(self._specs)}
        self._tables = [_parse(SourceTable, table) for table in tables]
        self._chunks = chunks_of(self._record)
        self._relays = self._table_of(found.relays)
        self._askers = KeptAskers(NAME)
        self._sources: Sources | None = None
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def names(self) -> list[str]:
        """Names of all tensors, sorted."""
        return sorted(self._numbers)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(map(_size, self._specs))

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one tensor. Raises NOT_FOUND."""
        return tuple(self._specs[self._number(name)].shape)

    def dtype(self, name: str) -> torch.dtype:
        """Dtype of one tensor, as it is served. Raises NOT_FOUND."""
        return torch_dtype(self._specs[self._number(name)].dtype)

    def nbytes_of(self, name: str) -> int:
        """Bytes of one tensor. Raises NOT_FOUND."""
        return _size(self._specs[self._number(name)])

    def tensors(self, names: Sequence[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields pairs of name and tensor (contiguous, on the CPU, the caller's own). names: only these, in this order;
        None: all, sorted by name. Some hundred MB are brought at a time.

        Raises CkptEngineError: NOT_FOUND for an unknown name, or if no holder within reach has a tensor any more;
        DATA_LOSS, naming the tensor, if all holders have other bytes; DEADLINE_EXCEEDED; FAILED_PRECONDITION if the
        reader was closed in between. Tensors yielded before are right.
        """
        numbers = [self._number(name) for name in (self.names if names is None else names)]
        layouts = [(group, self._layout(group)) for group in self._groups(numbers)]
        self._open(max((layout.size for _, layout in layouts), default=0))
        for group, layout in layouts:
            self._bring(layout, group)
            atoms: dict[int, list[RelayAtom]] = {number: [] for number in group}
            for atom in layout.atoms:
                if atom.tensor in atoms:
                    atoms[atom.tensor].append(atom)
            # Take all out of the buffer before yielding: the caller may ask for other tensors in between.
            yield from [(self._specs[number].name, self._assemble(number, atoms[number])) for number in group]

    def close(self) -> None:
        """Unmaps the sources. May be repeated; `tensors` may follow."""
        sources, self._sources = self._sources, None
        self._buffer = torch.empty(0, dtype=torch.uint8)
        if sources is not None:
            sources.close()
            self._askers.close()
            self._askers = KeptAskers(NAME)

    def _number(self, name: str) -> int:
        if name not in self._numbers:
            raise error(
                Problem.CODE_NOT_FOUND,
                f"version {self.version} of lineage {self.lineage!r} has no tensor {name!r}",
                [name],
            )
        return self._numbers[name]

    def _groups(self, numbers: Sequence[int]) -> Iterator[list[int]]:
        group: list[int] = []
        size = 0
        for number in numbers:
            nbytes = _size(self._specs[number])
            if group and size + nbytes > GROUP_BYTES:
                yield group
                group, size = [], 0
            group.append(number)
            size += nbytes
        if group:
            yield group

    def _layout(self, group: Sequence[int]) -> SlotLayout:
        boxes = [(number, whole(self._specs[number].shape)) for number in group if _size(self._specs[number])]
        # Relays send whole chunks, which may have parts of other tensors.
        return lay_out(self._record, [boxes], chunks=None if self._relays is None else self._chunks)

    def _open(self, size: int) -> None:
        """Opens sources that read into a buffer of so many bytes."""
        if self._sources is not None and len(self._buffer) >= size:
            return
        self.close()
        self._buffer = torch.empty(size, dtype=torch.uint8)
        self._sources = Sources(self._record, self._tables, all_transports(), this_host())

    def _table_of(self, relays: Iterable[manager_pb2.WantTable.Relay]) -> ChunkTable | None:
        """The relays of other hosts that hold the version; None: there are none. This process passes nothing on."""
        table = manager_pb2.WantTable(relays=relays, wants=[manager_pb2.WantTable.Wants(everything=True)])
        if not table.relays:
            return None
        for relay in table.relays:
            relay.origin, relay.wants = True, 0
        table.relays.add(relay=NAME, leaf=True)
        sizes = [chunk.bytes for chunk in self._chunks]
        return ChunkTable(NAME, sizes, [range(len(sizes))], table)

    def _bring(self, layout: SlotLayout, group: Collection[int]) -> None:
        if not layout.atoms:
            return
        if self._sources is None:
            raise precondition("the reader was closed while its tensors were read: ask for the others again")
        memory = SlotMemory(0, self._at, self._buffer.numpy().data)
        filling = ChunkFilling(layout, self._chunks, memory, self._sources)
        if self._relays is None:
            filling.check()
        until = time.monotonic() + self._deadlines.fill
        filled = filling.run(self._record, until, table=self._relays, askers=self._askers)
        for each in filled.missing:
            if int(self._record.cut.tensor[each.cell]) in group:
                raise CkptEngineError(each.problem)

    def _at(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return self._buffer[offset : offset + prod(shape) * dtype.itemsize].view(dtype).view(tuple(shape))

    def _assemble(self, number: int, atoms: Sequence[RelayAtom]) -> torch.Tensor:
        spec = self._specs[number]
        found = torch.empty(tuple(spec.shape), dtype=torch_dtype(spec.dtype))
        for atom in atoms:
            part = tuple(slice(start, stop) for start, stop in zip(atom.box.start, atom.box.stop, strict=True))
            found[part].copy_(self._at(atom.offset, atom.box.shape, found.dtype))
        return found


def _size(spec: TensorSpec) -> int:
    return prod(spec.shape) * itemsize(spec.dtype)


def _blob(stub: Any, ref: manager_pb2.BlobRef, seconds: float) -> bytes:
    """Fetches a blob. Raises grpc.RpcError, and DATA_LOSS for other bytes."""
    data = b"".join(chunk.data for chunk in stub.GetBlob(ref, timeout=seconds))
    if blob_ref(data) != ref:
        raise data_loss(f"a blob of {ref.size} bytes arrived as {len(data)} other bytes")
    return data


def _parse(kind: type[MessageT], data: bytes) -> MessageT:
    try:
        return kind.FromString(data)
    except DecodeError as decode_error:
        raise data_loss(f"a {kind.DESCRIPTOR.name} of {len(data)} bytes cannot be read") from decode_error
