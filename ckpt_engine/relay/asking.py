"""Asks other relays for the chunks of a version that no source of this host has, and verifies what they send.

Which relay is asked for which chunk next is decided by `ChunkSearch`. Here are the threads: one for each relay that is
asked. A relay that dies, stalls or sends what was not sealed costs its chunks another question, and is not asked again
in this filling.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence

from ckpt_engine.core.chunks import Chunk
from ckpt_engine.core.problems import CkptEngineError, aborted, deadline
from ckpt_engine.core.rates import Flow, Rate, rate_of
from ckpt_engine.relay.chunk_search import ChunkSearch, ChunkTable
from ckpt_engine.relay.delta_figures import DeltaFigures
from ckpt_engine.relay.deltas import DeltaTaker
from ckpt_engine.relay.fill import FillStop
from ckpt_engine.transport.askers import KeptAskers
from ckpt_engine.transport.base import ChunkAsker, ChunkDeltaError, ChunkLaterError, ChunkLending, ChunkRuns
from ckpt_engine.v1.weights_pb2 import Problem

LOOK_SECONDS = 0.2
"""Seconds between two looks at a filling, and between two rounds of questions for chunks that no relay in the order
brings."""

LOOK_CHUNKS = 8
"""Chunks that come between two looks for relays that are behind."""

SLOW_SECONDS = 10.0
"""Once half of the relays that are asked have sent all they were asked for, one is left for the next in the order if
the rest would take it longer than this, and longer than the filling has taken so far."""


class ChunkQuestions:
    """One filling from other relays. What its threads share is guarded by `_changed`.

    chunk_numbers: the chunks that are to come. runs: where each lies. wrong: names the tensors of a chunk's cells that
    lie there otherwise than they were sealed. lending: where chunks are passed on from; None: nowhere. deltas: takes
    those of chunks; None: all come in full.
    """

    def __init__(
        self,
        table: ChunkTable,
        chunk_numbers: Collection[int],
        chunks: Sequence[Chunk],
        runs: Callable[[int], ChunkRuns],
        wrong: Callable[[int], Sequence[str]],
        lending: ChunkLending | None,
        askers: KeptAskers,
        begin: Callable[[ChunkAsker], None],
        stop_at: float,
        deltas: DeltaTaker | None = None,
    ) -> None:
        self._chunks, self._runs, self._wrong = chunks, runs, wrong
        self._lending, self._askers, self._begin, self._stop_at = lending, askers, begin, stop_at
        self._deltas = deltas
        self._in_full: set[int] = set()  # chunks of which a delta was of no use
        self._changed = threading.Condition()
        self._stopped = False
        others = [each for each in table.table.relays if each.relay != table.name]
        self._regions = {each.relay: each.chunks for each in others if each.HasField("chunks")}
        self._origins = {each.relay for each in table.table.relays if each.origin}
        trails = table.trails(chunk_numbers)
        self._search = ChunkSearch(table.name, trails, self._regions, table.is_leaf, self._wake, self._strand)
        self._threads: dict[str, threading.Thread] = {}
        self._connections: dict[str, ChunkAsker] = {}
        self._next_round = 0.0
        self._first_came = 0.0  # when the first chunk came; 0: none has
        self._flows: dict[str, list[Flow]] = {}
        self.again = 0  # cells that came wrong
        self.faults: list[Problem] = []
        self.bytes_by_source: dict[str, int] = {}
        self.taken: set[int] = set()  # chunks that have come, verified
        self.figures = DeltaFigures(base=deltas.root if deltas is not None else b"")
        self.numbers = frozenset(chunk_numbers)

    @property
    def done_bytes(self) -> int:
        """Bytes that have come."""
        return sum(self.bytes_by_source.values())

    @property
    def received(self) -> Rate | None:
        """How fast others have sent; None for fewer than two, of which it is unknown which side is slow."""
        with self._changed:
            flows = [each for each in self._flows.values() if each]
        return rate_of(flows) if len(flows) > 1 else None

    def start(self) -> None:
        """Asks the first questions. Does not wait."""
        with self._changed:
            self._search.start()

    def also(self, numbers: Collection[int]) -> None:
        """Asks for more chunks; see ChunkSearch."""
        with self._changed:
            self.numbers |= frozenset(numbers)
            self._search.also(numbers)

    def finish(self, stop: FillStop, progress: Callable[[], None]) -> None:
        """Waits until all chunks have come, no relay is left to bring the others, or it is stopped to keep what has
        come. Nothing can land once it returns or raises. Raises ABORTED, DEADLINE_EXCEEDED."""
        began = time.monotonic()
        enough = began + (self._stop_at - began) / 2  # the other half is for other holders, or another table
        search = self._search
        try:
            while search.remaining and not (stop.ends and stop.keeps):
                now = time.monotonic()
                stop.check()
                if now >= self._stop_at:
                    raise deadline(
                        f"other relays did not send all of this version within {self._stop_at - began:.1f} s, the "
                        "deadline"
                    )
                with self._changed:
                    if search.is_stranded and (now >= enough or search.is_hopeless):
                        break
                    if now >= self._next_round:
                        self._next_round = now + LOOK_SECONDS
                        search.ask_all_now()
                    search.take_over(self._seconds())
                    self._leave_behind()
                    if search.remaining:
                        self._changed.wait(LOOK_SECONDS)
                self._leave_slow(time.monotonic() - began)
                progress()
        finally:
            self.stop()

    def stop(self) -> None:
        """Ends all questions: nothing can land once it returns, not even from a thread that is connecting."""
        with self._changed:
            self._stopped = True
            for name, connection in self._connections.items():
                if self._search.open(name):  # one without questions is kept for the next filling
                    connection.shut()
            self._changed.notify_all()
            threads = list(self._threads.values())
        for thread in threads:
            thread.join()

    def reasons(self) -> dict[int, str]:
        """Why chunks have not come, by chunk."""
        with self._changed:
            failed = "; ".join(dict.fromkeys(self._search.failed.values()))
            return {
                number: "; ".join(filter(None, (self._search.answers.get(number, ""), failed)))
                or "no relay was left to ask"
                for number in self._search.remaining
            }

    # -- under the lock

    def _wake(self, name: str) -> None:
        """Starts the thread that asks a relay for what is queued, or wakes it."""
        if name not in self._threads and not self._stopped:
            thread = self._threads[name] = threading.Thread(
                target=self._follow, args=(name,), name=f"ckpt-engine asks {name}", daemon=True
            )
            thread.start()
        self._changed.notify_all()

    def _strand(self, number: int) -> None:
        if self._lending is not None:
            self._lending.never(number)  # relays that have lost the same origin must not wait for us

    def _fail(self, name: str, problem: Problem) -> None:
        """Asks a relay no more in this filling."""
        if not self._stopped:
            self.faults.append(problem)
            self._search.lose(name, problem.message)
        self._changed.notify_all()

    def _seconds(self) -> float:
        """Since the first chunk came."""
        return time.monotonic() - self._first_came if self._first_came else 0.0

    def _leave_behind(self) -> None:
        """Leaves relays that are far behind, but for those that wait for the chunk themselves."""
        for name in self._search.behind(self._seconds()):
            connection = self._connections.get(name)
            if connection is not None and not connection.waits:
                connection.leave(f"{name} is far behind the other relays with what it was asked: it is left for others")

    def _leave_slow(self, seconds: float) -> None:
        """Leaves relays that send so slowly that the filling would take twice as long. Origins are not left: they have
        all that others lack."""
        with self._changed:
            busy = {name: owed for name in self._threads if (owed := self._search.owes(name))}
            if 2 * len(busy) > len(self._threads) + 1:
                return
            for name, owed in busy.items():
                connection = self._connections.get(name)
                coming = None if connection is None else connection.at_most()
                if connection is None or coming is None or name in self._origins:
                    continue
                landed, rate = coming
                more = (sum(self._chunks[each].bytes for each in owed) - landed) / rate
                if more > max(SLOW_SECONDS, seconds):
                    connection.leave(
                        f"{name} sends {rate / 1e6:.2g} MB/s at most, and would take {more:.0f} s more, where others "
                        f"took {seconds:.1f} s in all: it is left for another"
                    )

    # -- a relay's thread

    def _follow(self, name: str) -> None:
        """Asks one relay for what is queued for it, until the filling ends or the relay fails."""
        connection: ChunkAsker | None = None
        problem: Problem | None = None
        try:
            connection = self._askers.take(self._regions[name], name, self._stop_at)
            with self._changed:
                if self._stopped:
                    return
                self._connections[name] = connection
            self._begin(connection)
            while (number := self._ask_next(name, connection)) is not None:
                self._receive(name, connection, number)
        except CkptEngineError as error:
            problem = error.problem
        except Exception as error:  # a bug costs this relay, and neither the chunks nor the filling
            problem = Problem(code=Problem.CODE_INTERNAL, message=f"{name}: {type(error).__name__}: {error}")
        finally:
            with self._changed:
                self._connections.pop(name, None)
                if connection is not None:
                    self._flows.setdefault(name, []).extend(connection.flows)
            if connection is not None:
                if problem is None:
                    self._askers.put_back(connection)
                else:
                    connection.close()
            if problem is not None:
                with self._changed:
                    self._fail(name, problem)

    def _ask_next(self, name: str, connection: ChunkAsker) -> int | None:
        """Asks as many questions as may be open; waits for one if none is. Returns the chunk of the oldest one; None:
        the filling has ended."""
        while True:
            with self._changed:
                while (question := self._search.ask(name)) is None and not self._stopped:
                    if questions := self._search.open(name):
                        return questions[0][0]
                    self._changed.wait(LOOK_SECONDS)
                if question is None or self._stopped:
                    return None
            connection.ask(*question, self._is_based(question[0]))

    def _is_based(self, number: int) -> bool:
        """Whether a chunk may come as a delta."""
        return self._deltas is not None and number not in self._in_full and self._deltas.has(number)

    def _receive(self, name: str, connection: ChunkAsker, number: int) -> None:
        """Takes the answer to the oldest question."""
        try:
            answer = connection.receive(number, self._runs(number), self._moved)
        except ChunkDeltaError as error:
            self._ask_in_full(name, number, error.problem)
            return
        except CkptEngineError as error:
            if error.problem.code != Problem.CODE_NOT_FOUND:
                raise
            with self._changed:
                self._search.refused(name, number, error.problem.message, isinstance(error, ChunkLaterError))
            return
        if answer.relay:
            with self._changed:
                self._search.sent_to(name, number, answer.relay)
            return
        names = self._wrong(number)
        with self._changed:
            self.figures.network_bytes += answer.network_bytes
            if answer.is_delta and self._deltas is not None:
                self._deltas.settle(number, not names, self.figures)
            elif answer.why_whole:
                self.figures.whole[f"{name}: {answer.why_whole}"] += self._chunks[number].bytes
        if names and answer.is_delta:
            message = f"{name} sent {', '.join(names[:3])} as a delta that does not lead to what was sealed"
            self._ask_in_full(name, number, Problem(code=Problem.CODE_DATA_LOSS, message=message, tensors=names[:16]))
            return
        if names:
            with self._changed:
                self.again += len(self._chunks[number].cells)
            raise CkptEngineError(
                Problem(
                    code=Problem.CODE_DATA_LOSS,
                    message=f"{name} sent {', '.join(names[:3])} with other bytes than were sealed",
                    tensors=names[:16],
                )
            )
        if self._lending is not None:
            self._lending.verified(number)
        with self._changed:
            if number in self._search.remaining:
                self.taken.add(number)
                self.bytes_by_source[name] = self.bytes_by_source.get(name, 0) + self._chunks[number].bytes
            self._first_came = self._first_came or time.monotonic()
            self._search.came(name, number, self._seconds())
            if len(self.taken) % LOOK_CHUNKS == 0:
                self._leave_behind()
            if not self._search.remaining:
                self._changed.notify_all()

    def _ask_in_full(self, name: str, number: int, problem: Problem) -> None:
        """Asks the same relay for a chunk once more: either side's copy of the base may be at fault."""
        fault = Problem()
        fault.CopyFrom(problem)
        fault.message += ": it was asked for in full"
        with self._changed:
            self.again += len(self._chunks[number].cells)
            self.faults.append(fault)
            self._in_full.add(number)
            self._search.repeat(name, number)

    def _moved(self) -> None:
        if self._stopped:
            raise aborted("this filling has ended and no longer needs the chunk")
        if self._lending is not None:
            self._lending.moved()
