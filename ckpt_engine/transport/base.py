"""The whole transport interface: how a worker reads memory that a source offers.

A transport moves bytes and decides nothing: which regions, which boxes and which transport are the plan's choice.
All of it runs on the reader's side, in one thread of a worker process inside an engine (so no grpc here). The source's
side has no counterpart: whoever offers memory puts a `Region` in its `SourceTable`, and its locator is all that a
reader needs. The order, for each plan and each update of it:

    1. transport.open(regions)    once a plan      may block on the system, maps or connects, reads no weights
    2. opened.prepare(moves)      once a plan      checks every move, builds the views; reads and writes nothing
    3. opened.check()             once an update   before the worker marks itself dirty: is the source still the same?
    4. prepared.run(on_bytes)     once an update   the first byte of a destination changes here and nowhere earlier
    5. opened.close()             after the next plan's `open`, so that what both use stays mapped

Steps 1 to 3 leave the engine's weights as they are, so a failure there needs no repair. Errors are CkptEngineError:
UNAVAILABLE (the source is gone; another may serve), DATA_LOSS (what lies there is not what was published),
INVALID_ARGUMENT (a move does not fit its region or its destination).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from ckpt_engine.v1.weights_pb2 import Region


@dataclass(frozen=True, slots=True)
class Move:
    """One box, from where it lies in a region to where it belongs in the reader.

    offset: of the first element, bytes from the start of the region. stride: elements, one entry an axis.
    dtype: as torch spells it ("bfloat16"). destination: any strides, any device, of exactly this shape and dtype.
    stored: the elements' dtype in the region, if it is another one: they are cast on the way.
    """

    region: Region
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    destination: torch.Tensor
    stored: str = ""


@dataclass(frozen=True, slots=True)
class Availability:
    """Whether a transport can be used in this process; `reason` says why not, or what was found."""

    ok: bool
    reason: str


class PreparedCopy(Protocol):
    """Moves that were checked and made ready, to be run any number of times. Keeps its regions open."""

    @property
    def bytes(self) -> int:
        """What one run writes, in bytes."""
        ...

    @property
    def notes(self) -> tuple[str, ...]:
        """What is slower in this process than it could be, each with why; for the report."""
        ...

    def run(self, on_bytes: Callable[[int], None] | None = None) -> int:
        """Writes every destination and returns the bytes written. They have arrived when it returns.

        `on_bytes` is called in this thread with the bytes written since its last call (0 is possible), every few
        milliseconds of work.
        What it raises stops the copy there and comes out of `run`: that is how a deadline is kept.
        """
        ...


class OpenedRegions(Protocol):
    """Regions of one or more sources, open for reading until `close`."""

    def prepare(self, moves: Sequence[Move]) -> PreparedCopy: ...

    def check(self) -> None:
        """Raises unless the regions are still those that were published. Cheap."""
        ...

    def view(
        self, region: Region, offset: int, shape: Sequence[int], stride: Sequence[int], dtype: str
    ) -> torch.Tensor:
        """Read-only memory of the source as a tensor, without a copy; writing to it is a fault. Mapped transports only;
        the others raise INVALID_ARGUMENT. The mapping lives as long as the tensor; that of GPU memory until `close`, or
        until its owner withdraws it."""
        ...

    def close(self) -> None:
        """Forgets the regions; what no tensor, PreparedCopy or other OpenedRegions uses is unmapped. Never raises.

        GPU memory is unmapped if no other OpenedRegions uses it; a PreparedCopy of it then refuses to run.
        """
        ...


@runtime_checkable
class Leased(Protocol):
    """What OpenedRegions can do besides, if their owner waits for its readers before it writes to them."""

    def rest(self) -> None:
        """The install that `open` or `check` began is over: nothing is read before the next `check`. Never raises."""
        ...


class Transport(Protocol):
    """One way to read. One instance a worker: it holds what is worth keeping from one plan to the next."""

    @property
    def name(self) -> str:
        """As in Region.transport."""
        ...

    def availability(self) -> Availability:
        """Tries it on this process, cheaply. Never raises."""
        ...

    def open(self, regions: Sequence[Region]) -> OpenedRegions: ...
