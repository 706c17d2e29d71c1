"""The whole transport interface: both sides of every way in which memory goes from its owner to a reader.

A transport moves bytes and decides nothing: which regions, which boxes and which transport are the plan's choice. What
there is of one is listed in core/transports.py.

The owner's side is a `Lender`, in the process that offers weights: it turns memory into a `Region`, whose locator is
all that a reader needs, says whether that memory is still the same, and takes it back.

The reader's side (`Transport`) makes the owner's memory readable here, and copies with strides and casts. It runs in
one thread of a worker inside an engine, or of a relay (so no grpc here). The order, for each plan and each update:

    1. transport.open(regions)    once a plan      may block on the system, maps or connects, reads no weights
    2. opened.prepare(moves)      once a plan      checks every move, builds the views; reads and writes nothing
    3. opened.check()             once an update   before the worker marks itself dirty: is the source still the same?
    4. prepared.run(on_bytes)     once an update   the first byte of a destination changes here and nowhere earlier
    5. opened.close()             after the next plan's `open`, so that what both use stays mapped

Steps 1 to 3 leave the engine's weights as they are, so a failure there needs no repair; 1 and 2 are done before the
engine pauses. Errors are CkptEngineError: UNAVAILABLE (the source is gone; another may serve), DATA_LOSS (what lies
there is not what was published), INVALID_ARGUMENT (a move does not fit its region or its destination),
DEADLINE_EXCEEDED. They name the source (`source_of`). What is there and cannot be opened here is a CannotOpenError.

Between relays of different hosts nothing is opened: a `ChunkAsker` asks a `ChunkLender` for chunks of a version, and a
`ChunkCarrier` may carry them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol, runtime_checkable

import torch

from ckpt_engine.copy.prepared import PreparedCopy
from ckpt_engine.core.problems import CkptEngineError, unavailable
from ckpt_engine.core.rates import Flow, Rate
from ckpt_engine.core.transports import FILES, GPU_MEMORY, HOST_MEMORY
from ckpt_engine.core.transports import Availability as Availability
from ckpt_engine.v1.weights_pb2 import Region

if TYPE_CHECKING:
    from ckpt_engine.delta.table import ChangeTable
    from ckpt_engine.transport.cuda_ipc.memory import AllocationRun as AllocationRun

OPEN_SECONDS = 60.0
"""How long opening may take by default."""


class CannotOpenError(CkptEngineError):
    """An offered region that this process cannot open: it may not, or its system refuses. Raised by `open`; its code is
    UNAVAILABLE. The same region is then opened another way, if there is one. Not raised if the owner has gone."""

    def __init__(self, message: str, region: Region) -> None:
        super().__init__(unavailable(message).problem)
        self.region = region


@dataclass(frozen=True, slots=True)
class Move:
    """One box, from where it lies in a region to where it belongs in the reader."""

    region: Region
    offset: int  # of the first element, bytes from the start of the region
    shape: tuple[int, ...]
    stride: tuple[int, ...]  # elements, one entry an axis
    dtype: str  # as torch spells it ("bfloat16")
    destination: torch.Tensor  # any strides, any device, of exactly this shape and dtype
    stored: str = ""  # the elements' dtype in the region, if it is another one: they are cast


class OpenedRegions(Protocol):
    """Regions of one or more sources, open for reading until `close`."""

    def prepare(self, moves: Sequence[Move]) -> PreparedCopy: ...

    def check(self) -> None:
        """Raises unless the regions are still those that were published. Cheap."""
        ...

    def offered(self) -> bool:
        """Whether new readers could still open all of them, as far as is known without asking their owners."""
        ...

    def close(self) -> None:
        """Forgets the regions; what no tensor, PreparedCopy or other OpenedRegions uses is unmapped. Never raises.

        GPU memory is unmapped if no other OpenedRegions uses it; a PreparedCopy of it then refuses to run.
        """
        ...


@runtime_checkable
class Leased(Protocol):
    """An addition to OpenedRegions whose owner waits for its readers before it writes to them."""

    def rest(self) -> None:
        """Ends the install that `open` or `check` began: nothing is read before the next `check`. Never raises."""
        ...


@runtime_checkable
class Viewable(Protocol):
    """An addition to OpenedRegions of mapped transports."""

    def view(
        self, region: Region, offset: int, shape: Sequence[int], stride: Sequence[int], dtype: str
    ) -> torch.Tensor:
        """Read-only memory of the source as a tensor, without a copy; writing to it is a fault. The mapping lives as
        long as the tensor; that of GPU memory until `close`, or until its owner withdraws it."""
        ...


@runtime_checkable
class Comparable(Protocol):
    """An addition to OpenedRegions whose owner holds two versions, laid out alike, and compares them for readers that
    can use it."""

    def use_changes(self) -> None:
        """Has the owner know, from the next `check` on, that this reader can use what differs. Asks nothing."""
        ...

    def changes(self, seconds: float) -> ChangeTable:
        """What differs between the two versions that the owner holds now, by where it lies in their memory. It stays
        as it is, whatever the owner does. seconds: how long the owner may take to answer; if it takes longer, regions
        stay as readable as they were. Raises UNAVAILABLE, saying why, if there is no such table; DATA_LOSS."""
        ...

    def slot_offset(self, region: Region, slot_bytes: int) -> int:
        """Where a region begins in the memory of its version, bytes. slot_bytes: as the table has it."""
        ...


class Transport(Protocol):
    """The reader's side, as plans use it. One instance a worker: it keeps mappings and connections between plans."""

    @property
    def name(self) -> str:
        """The transport's name, as in Region.transport."""
        ...

    def availability(self) -> Availability:
        """Tries it on this process, cheaply. Never raises."""
        ...

    def open(self, regions: Sequence[Region], seconds: float = OPEN_SECONDS) -> OpenedRegions:
        """Opens regions for reading. seconds: how long their owners may take to answer, all together; memory of this
        host answers at once. Raises CannotOpenError, naming the region, and CkptEngineError."""
        ...


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Memory of this process."""

    bytes: torch.Tensor  # uint8[size]
    descriptor: int  # of the memory file that it maps as a whole

    kind: ClassVar[str] = HOST_MEMORY


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """Memory of this process on one of its GPUs."""

    device: int
    run: AllocationRun  # the driver's allocations that it is made of

    kind: ClassVar[str] = GPU_MEMORY


@dataclass(frozen=True, slots=True)
class FileMemory:
    """`size` bytes from `offset` of a file as it is now."""

    path: str
    offset: int
    size: int

    kind: ClassVar[str] = FILES


Memory = HostMemory | GpuMemory | FileMemory


class Lender(Protocol):
    """The owner's side of a transport. One instance a source; any thread. It lends memory, and owns none."""

    def offer(self, id: int, memory: Memory) -> Region:
        """The region that lets readers reach this memory until it is withdrawn.

        Raises UNAVAILABLE, saying why, if such memory cannot be lent in this way.
        """
        ...

    def unchanged(self) -> bool:
        """Whether what was offered is still there and the same. Cheap: looks at no element."""
        ...

    def withdraw(self, seconds: float) -> None:
        """Takes all offers back: new readers are refused, and it returns once none keeps the owner from freeing memory.
        May be repeated.

        Raises DEADLINE_EXCEEDED if some have not let go within `seconds`.
        """
        ...

    def close(self) -> None:
        """Takes all offers back without waiting, and frees what lending took. May be repeated. Never raises."""
        ...


@dataclass(frozen=True, slots=True)
class ArenaMemory:
    """A relay's memory, all slots of it."""

    id: bytes  # 16 bytes, unique
    bytes: torch.Tensor  # uint8[slots * slot_bytes]; lenders only read it
    descriptor: int  # of the memory file that it maps as a whole; no process that gets it can write to it
    slot_bytes: int


@dataclass(frozen=True, slots=True)
class ArenaMapping:
    """A relay's memory before it is sealed: a process that maps its memory file now may write to it later."""

    descriptor: int  # of the memory file
    size: int  # bytes of all slots
    address: int  # where the relay's process maps it
    slot_bytes: int


@dataclass(frozen=True, slots=True)
class Network:
    """Where a relay is on its networks."""

    listen: str  # host:port to bind to; port 0: a free one
    address: str  # name or IP at which other hosts reach it; the same as Host.address
    slot_grace: float  # seconds that a reader may keep a slot which the relay wants to fill
    insecure: bool = False  # other hosts may be served without encryption


ChunkRuns = Sequence[tuple[int, int]]
"""(offset in the slot, length), bytes: where a chunk lies, in the order in which its bytes travel."""


class DeltaAnswer(NamedTuple):
    """A chunk as a delta against a base, or why it is sent in full."""

    body: bytes | None = None
    why: str = ""


DeltaSource = Callable[[int, bytes, float | None], DeltaAnswer]
"""Makes deltas: (chunk, root of the base, bytes a second that the way to the asker carries or None) to an answer."""


class ChunkDeltas(Protocol):
    """Takes deltas of one filling's chunks."""

    @property
    def root(self) -> bytes:
        """The root of the base, 32 bytes."""
        ...

    def apply(self, number: int, body: bytes) -> None:
        """Lets a chunk land, from its delta. Raises DATA_LOSS if that cannot be read."""
        ...


class ChunkAnswer(NamedTuple):
    """The answer to a question for a chunk. Without `relay` the chunk has landed."""

    relay: str = ""  # the one that has the chunk granted
    network_bytes: int = 0  # that came for it, heads of messages included
    is_delta: bool = False  # it came as a delta
    why_whole: str = ""  # why it came in full, where a delta was asked for


@dataclass(frozen=True, slots=True)
class LentChunks:
    """The chunks of one version in one slot, as they are lent to relays of other hosts."""

    slot: int
    key: bytes  # 16 bytes, by which askers name the version (`core.chunks.chunk_key`)
    runs: Callable[[int], ChunkRuns]  # where a chunk lies
    chunks: Collection[int]  # that the slot is to hold; others are refused at once
    # Called on any thread with the rate at which chunks were sent, whenever the last asker has left.
    passed: Callable[[Rate], None] = lambda rate: None
    deltas: DeltaSource | None = None  # of chunks that are verified; on any thread. None: all are sent in full


class ChunkLending(Protocol):
    """One version in one slot, as relays of other hosts ask for its chunks. It lasts from the begin of the filling
    until the slot is retired. Any thread."""

    @property
    def sent(self) -> Rate | None:
        """How fast its chunks were sent by now; None if that is unknown."""
        ...

    def verified(self, chunk: int) -> None:
        """Notes that a chunk lies in the slot as it was sealed, and is not written any more: it may be sent."""
        ...

    def never(self, chunk: int) -> None:
        """Notes that a chunk will not come from here, as far as is known; `verified` may follow all the same."""
        ...

    def moved(self) -> None:
        """Notes that bytes have come, which shows waiting askers that the filling makes progress."""
        ...

    def finish(self) -> None:
        """Ends the filling: verified chunks are sent until the slot is retired, no others come."""
        ...

    def resume(self) -> None:
        """Notes that a finished filling goes on: chunks that are missing may still come. Those that are there are
        noted as verified again."""
        ...

    def end(self, why: str) -> None:
        """Ends a filling that has failed: nothing of it is sent any more."""
        ...


class ChunkLender(Protocol):
    """The owner's side of the one verb between relays: *chunk N of root R, when you have it verified*. One instance an
    arena; any thread."""

    @property
    def chunks(self) -> Region:
        """Where other relays ask for chunks, whatever the slots hold."""
        ...

    @property
    def readers(self) -> int:
        """Relays that are connected now."""
        ...

    def lend(self, lent: LentChunks) -> ChunkLending:
        """Begins the filling of a slot without readers."""
        ...

    def refuse(self, slot: int) -> None:
        """Refuses further questions about the slot. Does not wait."""
        ...

    def retire(self, slot: int) -> int:
        """Refuses as `refuse` does, and waits for the askers that are being sent some of the slot, for at most
        `slot_grace` each. Returns how many were overruled: nothing of the slot is sent to them any more."""
        ...

    def close(self) -> None:
        """Ends every lending and every connection. May be repeated. Never raises."""
        ...


class ChunkAsk(IntEnum):
    """How a chunk is asked for."""

    WAIT = 0  # send it once it is verified
    GRANT = 1  # of an origin: send it, or name the relay to which it was granted
    GRANT_ANOTHER = 2  # the same, since the relay that was named does not bring it
    NOW = 3  # send it if it is verified now


class ChunkLaterError(CkptEngineError):
    """The owner does not have a chunk now (ChunkAsk.NOW), and may have it later. NOT_FOUND."""


class ChunkDeltaError(CkptEngineError):
    """The delta of a chunk cannot be read. DATA_LOSS; the connection goes on."""


class ChunkAsker(Protocol):
    """The asker's side: a connection to one relay, kept from version to version (`askers.py`). One thread at a time,
    except for `waits`, `at_most`, `leave` and `shut`.

    Made of (offered, owner, name, stop_at): an OfferedRegion with the owner's `ChunkLender.chunks`, and the regions of
    its carriers; its name for messages; the name under which the asker is known to other relays ("relay h1"); and the
    monotonic time until which connecting may take. Raises UNAVAILABLE, DEADLINE_EXCEEDED, DATA_LOSS, each naming the
    owner.
    """

    @property
    def owner(self) -> str:
        """The relay, as messages name it."""
        ...

    @property
    def flows(self) -> Sequence[Flow]:
        """Bytes that it has received since `begin`, and when."""
        ...

    def begin(self, key: bytes, slot: int, memory: memoryview, deltas: ChunkDeltas | None = None) -> None:
        """Begins a filling: of this version, into this memory, which is all of a slot of this relay's arena. deltas:
        take what is asked for as a delta; None: nothing is."""
        ...

    def ask(self, chunk: int, how: ChunkAsk = ChunkAsk.WAIT, based: bool = False) -> None:
        """Asks for a chunk; answers come in the order of the questions. based: a delta is welcome."""
        ...

    def receive(self, chunk: int, runs: ChunkRuns, moved: Callable[[], None]) -> ChunkAnswer:
        """Waits for the answer to the oldest question, and lets the chunk land in these runs of the memory. moved:
        called whenever bytes have come; after an exception of it the connection cannot be used any more.

        Returns once the chunk has landed, or with the name of the relay that has the chunk granted. Raises NOT_FOUND if
        the owner will not have this chunk, ChunkLaterError if it does not have it now, ChunkDeltaError if it came as a
        delta that cannot be read: the connection goes on. All else ends it.
        """
        ...

    @property
    def waits(self) -> bool:
        """Whether the owner has said that it waits itself for the chunk of the oldest question. Any thread."""
        ...

    def at_most(self) -> tuple[int, float] | None:
        """Upper bounds for the current chunk: bytes that are here or about to be, and bytes a second; None between
        chunks. Any thread."""
        ...

    def end(self) -> bool:
        """Ends the filling that `begin` began: nothing can land any more. False: the connection cannot be kept for
        another one. Never raises."""
        ...

    def leave(self, why: str) -> None:
        """Shuts the connection; a waiting thread raises UNAVAILABLE with this reason. Any thread."""
        ...

    def shut(self) -> None:
        """Shuts the connection, which wakes up a waiting thread. Any thread."""
        ...

    def close(self) -> None:
        """Closes the connection, on the thread that uses it; nothing can land once it returns. May be repeated."""
        ...


class CarriedChunk(Protocol):
    """A chunk that is being read from another relay's memory."""

    def poll(self) -> int:
        """Does pending work and returns the bytes that have landed by now; all of them: the read has ended. Does not
        wait. Raises CkptEngineError once it has failed; bytes may land all the same until `sever` has returned."""
        ...


class CarrierLink(Protocol):
    """A connection to another relay's memory. One thread."""

    def read(self, slot: int, remote: ChunkRuns, memory: memoryview, local: ChunkRuns) -> CarriedChunk:
        """Asks for a chunk that lies in the runs `remote` of a slot of the owner. It is to land in the runs `local` of
        `memory`, a slot of this relay. Does not wait for bytes. Raises CkptEngineError."""
        ...

    def sever(self) -> None:
        """Ends the link. When it returns, nothing that was asked for can land any more. May be repeated. Never raises:
        a carrier that cannot be sure ends the process that could still write."""
        ...


class ChunkCarrier(Protocol):
    """Reads chunks from the memory of other relays by means of processes that write to this relay's, once their owner
    has said where a chunk lies. One instance an arena; any thread.

    Their writes may land after the relay has stopped waiting for them. So `CarrierLink.sever` and `close` make sure
    that nothing lands any more, or end the relay.
    """

    @property
    def reserved(self) -> list[int]:
        """Bytes that each slot has taken, which the arena sets whenever that changes."""
        ...

    @property
    def takes_all(self) -> bool:
        """Whether all memory of the arena must be reserved before `region` is asked for."""
        ...

    @property
    def region(self) -> Region:
        """Where other relays' carriers read this arena. Raises UNAVAILABLE, DEADLINE_EXCEEDED."""
        ...

    def close(self) -> None:
        """Ends every process that could still write. May be repeated. Never raises."""
        ...


def source_of(region: Region) -> str:
    """The source of a region as messages name it."""
    return f"{region.source or 'its source'} (region {region.id} over {region.transport})"
