"""Fills a slot along with other relays: some chunks from holders of the version, the others from each other.

A chunk is digested as it lies in the slot and compared with the sealed record before it is passed on, so nothing is
passed on that was not sealed. A relay that loses its parent, or receives wrong bytes, goes on with the next alternate
by itself. Chunks that none of them passes on are read from the holders. A thread for each tree.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence

import numpy as np
import torch

from ckpt_engine.core.problems import CkptEngineError, aborted, data_loss, deadline, invalid, unavailable
from ckpt_engine.core.rates import Flow, Rate, rate_of
from ckpt_engine.core.relay_chunks import chunks_of, deal_chunks, filling_key
from ckpt_engine.core.relay_layout import SlotLayout
from ckpt_engine.core.sealed_record import ProvenRecord
from ckpt_engine.core.transports import make, transport_kinds
from ckpt_engine.digest.host import HostDigests
from ckpt_engine.relay.fill import NAMED, FillResult, Memory, Missing, Progress, SlotFilling
from ckpt_engine.relay.sources import Sources
from ckpt_engine.torch_dtypes import torch_dtype
from ckpt_engine.transport.base import PassedOn, Passing
from ckpt_engine.v1.manager_pb2 import FanOut
from ckpt_engine.v1.weights_pb2 import Problem, Region

AHEAD = 2
"""Chunks of a tree that are requested at a time: one comes while the next one is requested."""

LOOK_SECONDS = 0.2
"""Between two checks of a filling while others pass on to it."""

SLOW_SECONDS = 10.0
"""Once half of the trees are complete, a parent is left for an alternate if the rest of its tree would take longer than
this, and longer than the filling has taken so far."""

PassOn = Callable[[bytes, Sequence[Sequence[tuple[int, int]]]], Passing | None]
"""From (key, runs of each chunk) to a filling that readers can wait for; None: it cannot be passed on."""


class FanIn:
    """A slot's chunks, prepared; kept as long as its layout and sources are the same."""

    def __init__(self, layout: SlotLayout, memory: Memory, sources: Sources) -> None:
        self._layout = layout
        self._memory = memory
        self._sources = sources
        self._bytes = memory(0, (layout.size,), torch.uint8).numpy().data
        self._digests: dict[int, HostDigests] = {}
        self._direct: tuple[frozenset[int], SlotFilling] | None = None
        self.chunks = chunks_of(layout)

    def run(
        self,
        fan_out: FanOut,
        pass_on: PassOn,
        recorded: ProvenRecord,
        stop_at: float,
        cancelled: Callable[[], bool],
        progress: Progress = lambda done, total: None,
    ) -> FillResult:
        """Fills the slot, as `SlotFilling.run` does. When it returns or raises, nothing can land any more."""
        began = time.monotonic()
        key = filling_key(fan_out.plan, recorded.root, self.chunks)
        passing = pass_on(key, [each.runs for each in self.chunks])
        try:
            trees = _Trees(self, fan_out, key, passing, recorded, stop_at)
            missing, bytes_by_source, again, faults = trees.run(cancelled, progress)
        except BaseException as error:
            if passing is not None:
                why = error.problem.message if isinstance(error, CkptEngineError) else "its filling has failed"
                passing.end(f"it does not hold the version: {why}")
            raise
        sent = None
        if passing is not None:
            passing.finish()
            sent = passing.sent
        unique_faults = {fault.message: fault for fault in faults}
        return FillResult(
            missing,
            bytes_by_source,
            again,
            tuple(unique_faults.values())[:NAMED],
            time.monotonic() - began,
            sent,
            trees.received,
        )

    def direct(self, chunks: Collection[int]) -> SlotFilling:
        """A filling that reads these chunks, and cells outside all chunks, from holders of the version."""
        key = frozenset(chunks)
        if self._direct is None or self._direct[0] != key:
            self._direct = key, self._filling(chunks, others=True)
        return self._direct[1]

    def rest(self, chunks: Collection[int]) -> SlotFilling:
        """A filling that reads only these chunks."""
        return self._filling(chunks, others=False)

    def landing(self, number: int) -> list[memoryview]:
        """The memory of a chunk's runs."""
        return [self._bytes[offset : offset + length] for offset, length in self.chunks[number].runs]

    def wrong(self, number: int, recorded: ProvenRecord) -> list[int]:
        """The cells of a chunk that now differ from the sealed record."""
        chunk = self.chunks[number]
        if number not in self._digests:
            self._digests[number] = HostDigests([self._box(atom) for atom in chunk.atoms])
        sums = dict.fromkeys(chunk.cells, 0)
        for atom, value in zip(chunk.atoms, self._digests[number].run(), strict=True):
            cell = self._layout.atoms[atom].cell
            sums[cell] = (sums[cell] + value) % 2**64
        return [cell for cell, value in sums.items() if value != int(recorded.values[cell])]

    def name(self, cell: int) -> str:
        """The name of a cell's tensor."""
        tensor = int(np.searchsorted(self._layout.recorded.first, cell, side="right")) - 1
        return self._layout.recorded.record.manifest.tensors[tensor].name

    def _box(self, number: int) -> tuple[torch.Tensor, Sequence[int]]:
        atom = self._layout.atoms[number]
        dtype = torch_dtype(self._layout.recorded.record.manifest.tensors[atom.tensor].dtype)
        return self._memory(atom.offset, atom.box.shape, dtype), atom.box.start

    def _filling(self, chunks: Collection[int], others: bool) -> SlotFilling:
        cells = {cell for number in chunks for cell in self.chunks[number].cells}
        in_chunks = {cell for chunk in self.chunks for cell in chunk.cells}
        other_cells = {atom.cell for atom in self._layout.atoms} - cells
        return SlotFilling(
            self._layout, self._memory, self._sources, other_cells & in_chunks if others else other_cells
        )


class _Trees:
    """One filling. What its threads share is guarded by `_changed`."""

    def __init__(
        self,
        slot: FanIn,
        fan_out: FanOut,
        key: bytes,
        passing: Passing | None,
        recorded: ProvenRecord,
        stop_at: float,
    ) -> None:
        self._slot, self._key, self._passing, self._recorded, self._stop_at = slot, key, passing, recorded, stop_at
        self._peers = fan_out.peers
        self._changed = threading.Condition()
        self._connections: set[PassedOn] = set()
        self._parents: dict[PassedOn, int] = {}  # connections that may be left: bytes that are still to come
        self._stopped = False
        self._taken: set[int] = set()  # chunks that others have passed on, verified
        self._again = 0  # cells that came wrong
        self._done = 0  # bytes that others have passed on
        self._faults: list[Problem] = []
        self._bytes_by_source: dict[str, int] = {}
        self._flows: dict[str, list[Flow]] = {}  # by owner
        self._direct: list[int] = []  # chunks that are read from holders of the version
        self._whole = {cell: number for number, chunk in enumerate(slot.chunks) for cell in chunk.cells}
        self._missing = [len(chunk.cells) for chunk in slot.chunks]
        by_tree = deal_chunks(slot.chunks, _shares(fan_out))
        self._threads: list[threading.Thread] = []
        for number, (tree, chunks) in enumerate(zip(fan_out.trees, by_tree, strict=True)):
            if not tree.ask:
                self._direct += chunks
                continue
            name, arguments = f"ckpt-engine tree {number}", (list(tree.ask), deque(chunks))
            self._threads.append(threading.Thread(target=self._follow, args=arguments, name=name, daemon=True))
        self._following = len(self._threads)
        self._total = sum(chunk.bytes for chunk in slot.chunks)

    def run(
        self, cancelled: Callable[[], bool], progress: Progress
    ) -> tuple[tuple[Missing, ...], dict[str, int], int, list[Problem]]:
        """Fills the slot: missing cells, bytes by source, how many cells were read again, and faults."""
        direct = 0

        def report(done: int, total: int) -> None:
            if self._passing is not None and done:
                self._passing.moved()
            progress(direct + done + self._done, self._total)

        began = time.monotonic()
        enough = began + (self._stop_at - began) / 2  # the other half is for what peers have not passed on
        try:
            for thread in self._threads:
                thread.start()
            first = self._slot.direct(self._direct).run(
                self._recorded, self._stop_at, cancelled, report, self._note_cells
            )
            direct = sum(first.bytes_by_source.values())
            self._give_up(self._direct)
            while self._following:
                if cancelled():
                    raise aborted("a newer command replaced the filling of this version")
                if time.monotonic() >= self._stop_at:
                    raise deadline(
                        f"peers did not pass on all of this version within {self._stop_at - began:.1f} s, the deadline"
                    )
                if time.monotonic() >= enough:
                    break
                with self._changed:
                    if self._following:
                        self._changed.wait(LOOK_SECONDS)
                self._leave_slow(time.monotonic() - began)
                report(0, 0)
        finally:
            self._stop()
        filled = [first]
        if remaining := set(range(len(self._slot.chunks))).difference(self._direct, self._taken):
            rest = self._slot.rest(remaining)
            filled.append(rest.run(self._recorded, self._stop_at, cancelled, report, self._note_cells))
        for each in filled:
            for source, size in each.bytes_by_source.items():
                self._bytes_by_source[source] = self._bytes_by_source.get(source, 0) + size
            self._faults += each.faults
            self._again += each.again
        missing = sorted((one for each in filled for one in each.missing), key=lambda one: one.cell)
        return tuple(missing), self._bytes_by_source, self._again, self._faults

    def _leave_slow(self, seconds: float) -> None:
        """Leaves parents that send so slowly that the filling would take twice as long. An alternate is dropped only if
        its connection fails: otherwise all relays might end up reading the holders of the version."""
        with self._changed:
            if 2 * self._following > len(self._threads) + 1:
                return
            for connection, remaining in list(self._parents.items()):
                if (coming := connection.at_most()) is None:
                    continue
                landed, rate = coming
                more = (remaining - landed) / rate
                if more > max(SLOW_SECONDS, seconds):
                    del self._parents[connection]
                    connection.leave(
                        f"{connection.owner} sends {rate / 1e6:.2g} MB/s at most, and would take {more:.0f} s more, "
                        f"where others took {seconds:.1f} s in all: it is left for another"
                    )

    @property
    def received(self) -> Rate | None:
        """How fast others have passed on to it; None for fewer than two, of which it is unknown which side is slow."""
        with self._changed:  # a thread that connected late may still end
            flows = [each for each in self._flows.values() if each]  # the others have sent nothing
        return rate_of(flows) if len(flows) > 1 else None

    def _give_up(self, chunks: Collection[int]) -> None:
        """Gives up those of these chunks that have not come: relays that lost the same source must not wait for us."""
        if self._passing is not None:
            for number in chunks:
                if self._missing[number]:
                    self._passing.never(number)

    def _stop(self) -> None:
        """Stops the trees: nothing can land in the slot once it returns, not even from a thread that is connecting."""
        with self._changed:
            self._stopped = True
            for connection in self._connections:
                connection.shut()
            while self._connections:  # they have been woken up
                self._changed.wait(LOOK_SECONDS)

    def _note_cells(self, cells: Collection[int]) -> None:
        """Notes cells that were read from holders of the version; verified chunks may be passed on."""
        if self._passing is None:
            return
        for cell in cells:
            number = self._whole.get(cell)
            if number is not None:
                self._missing[number] -= 1
                if not self._missing[number]:
                    self._passing.verified(number)

    # -- a tree's thread

    def _follow(self, ask: Sequence[int], chunks: deque[int]) -> None:
        """Reads a tree's chunks from its first peer, and falls back to the next one. Chunks that none passes on are
        read from holders of the version afterwards."""
        problem: Problem | None = None
        for place, each in enumerate(ask):
            if not chunks or self._stopped:
                break
            peer = self._peers[each]
            try:
                self._read(peer.relay, peer.region, chunks, not place)
            except CkptEngineError as error:
                problem = error.problem
            except Exception as error:  # a bug costs this parent, and neither the chunks nor the filling
                problem = Problem(code=Problem.INTERNAL, message=f"{peer.relay}: {type(error).__name__}: {error}")
            if problem is not None and not self._stopped:
                with self._changed:
                    self._faults.append(problem)
        with self._changed:
            self._following -= 1
            self._changed.notify_all()

    def _read(self, owner: str, region: Region, chunks: deque[int], parent: bool) -> None:
        connection = _connection(region, owner, self._key, self._stop_at)
        try:
            with self._changed:
                if self._stopped:
                    return
                self._connections.add(connection)
            requested, remaining = 0, sum(self._slot.chunks[number].bytes for number in chunks)
            while chunks:
                while requested < min(AHEAD, len(chunks)):
                    connection.ask(chunks[requested])
                    requested += 1
                number = chunks[0]
                if parent:
                    with self._changed:
                        self._parents[connection] = remaining
                connection.receive(number, self._slot.landing(number), self._note_bytes)
                self._take(owner, number)
                chunks.popleft()
                remaining -= self._slot.chunks[number].bytes
                requested -= 1
        finally:
            with self._changed:
                self._flows.setdefault(owner, []).extend(connection.flows)
                self._connections.discard(connection)
                self._parents.pop(connection, None)
                self._changed.notify_all()
            connection.close()

    def _note_bytes(self) -> None:
        if self._stopped:
            raise aborted("this filling has ended and no longer needs the chunk")
        if self._passing is not None:
            self._passing.moved()

    def _take(self, owner: str, number: int) -> None:
        """Verifies a chunk that has come; then others may read it. Raises DATA_LOSS."""
        if wrong := self._slot.wrong(number, self._recorded):
            names = sorted({self._slot.name(cell) for cell in wrong})
            with self._changed:
                self._again += len(wrong)
            raise data_loss(
                f"{owner} passed on {', '.join(names[:3])} with other bytes than were sealed", names[:NAMED]
            )
        if self._passing is not None:
            self._passing.verified(number)
        with self._changed:
            self._taken.add(number)
            size = self._slot.chunks[number].bytes
            self._done += size
            self._bytes_by_source[owner] = self._bytes_by_source.get(owner, 0) + size


def _shares(fan_out: FanOut) -> list[int]:
    """The shares of the trees. Raises INVALID_ARGUMENT for an inconsistent plan."""
    peers = [number for tree in fan_out.trees for number in tree.ask]
    if any(number >= len(fan_out.peers) for number in peers):
        raise invalid(f"a plan names peer {max(peers)}, and has {len(fan_out.peers)}")
    shares = [tree.share for tree in fan_out.trees]
    if not shares or not all(shares):
        raise invalid(f"a plan has trees with shares {shares}; each needs one, and there has to be a tree")
    return shares


def _connection(region: Region, owner: str, key: bytes, stop_at: float) -> PassedOn:
    """Connects to a relay that passes on what it is being filled with. Raises UNAVAILABLE and as PassedOn."""
    kind = transport_kinds().get(region.transport)
    if kind is None or kind.passed is None:
        raise unavailable(
            f"{owner} passes on over {region.transport or 'no transport'!r}, and this relay does not know how to read "
            "that; bring both to one version"
        )
    connection: PassedOn = make(kind.passed, region, owner, key, stop_at)
    return connection
