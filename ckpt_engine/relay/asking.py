"""Asks other relays for the chunks of a version that no source of this host has, and verifies what they send.

It decides which relay is asked for which chunk next, by the order of the version's table (core/chunk_order.py): first
the relays before this one, then an origin, which sends the chunk or names the relay that brings it. A relay that dies,
stalls or sends what was not sealed costs its chunks another question, and is not asked again in this filling. A chunk
that no relay in the order brings is asked of every relay from time to time, for those that have it by then: none of
these questions waits, so relays never wait for each other in a circle. A thread for each relay that is questions.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from ckpt_engine.core.chunk_order import ChunkOrder, ChunkRelay
from ckpt_engine.core.chunks import Chunk
from ckpt_engine.core.problems import CkptEngineError, aborted, deadline
from ckpt_engine.core.rates import Flow, Rate, rate_of
from ckpt_engine.relay.fill import FillStop
from ckpt_engine.transport.askers import KeptAskers
from ckpt_engine.transport.base import ChunkAsk, ChunkAsker, ChunkLaterError, ChunkLending, ChunkRuns
from ckpt_engine.v1.manager_pb2 import WantTable
from ckpt_engine.v1.weights_pb2 import Problem

AHEAD = 2
"""Chunks that are asked of one relay at a time: one comes while the next one is asked for."""

LOOK_SECONDS = 0.2
"""Seconds between two looks at a filling, and between two rounds of questions for chunks that no relay in the order
has."""

SLOW_SECONDS = 10.0
"""Once half of the relays that are asked have sent all they were asked for, one is left for the next in the order if
the rest would take it longer than this, and longer than the filling has taken so far."""


@dataclass
class Search:
    """One chunk that has not come yet."""

    order: deque[str]  # relays to ask before an origin
    origins: deque[str]
    named: str = ""  # the relay to which an origin has sent us
    tried: set[str] = field(default_factory=set)  # relays that have said no, or failed


@dataclass(frozen=True)
class ChunkTable:
    """The relays of a version, as one of them sees it."""

    name: str  # of this relay
    sizes: Sequence[int]  # bytes of each chunk
    sets: Sequence[Collection[int]]  # the chunks of each of the table's `wants`
    table: WantTable

    def searches(self, numbers: Collection[int]) -> dict[int, Search]:
        """For each of these chunks the relays to ask: those before this one, then origins, each chunk beginning with
        another origin. Raises INVALID_ARGUMENT for a table that contradicts itself."""
        origins = sorted((each.relay, each.wants) for each in self.table.relays if each.origin)
        others = [each for each in self.table.relays if not each.origin]
        order = ChunkOrder(
            self.sizes, self.sets, [ChunkRelay(each.relay, each.wants, 0.0 if each.leaf else 1.0) for each in others]
        )
        own = next((frozenset(self.sets[each.wants]) for each in others if each.relay == self.name), frozenset[int]())
        found = {}
        for number in sorted(numbers):
            before = order.before(self.name, number) if number in own else ()
            holders = [name for name, wants in origins if name != self.name and number in self.sets[wants]]
            turn = number % len(holders) if holders else 0
            found[number] = Search(deque(before), deque(holders[turn:] + holders[:turn]))
        return found


class ChunkQuestions:
    """One filling from other relays. What its threads share is guarded by `_changed`.

    chunk_numbers: the chunks that are to come. runs: where each lies. wrong: names the tensors of a chunk's cells that
    lie there otherwise than they were sealed. lending: where chunks are passed on from; None: nowhere.
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
    ) -> None:
        self._table, self._chunks, self._runs, self._wrong = table, chunks, runs, wrong
        self._lending, self._askers, self._begin, self._stop_at = lending, askers, begin, stop_at
        self._changed = threading.Condition()
        self._stopped = False
        others = [each for each in table.table.relays if each.relay != table.name]
        self._regions = {each.relay: each.chunks for each in others if each.HasField("chunks")}
        self._origins = {each.relay for each in table.table.relays if each.origin}
        self._is_leaf = any(each.leaf for each in table.table.relays if each.relay == table.name)
        self._queues: dict[str, list[tuple[int, int]]] = {}  # by relay, a heap of (chunk, how)
        self._flying: dict[str, int] = {}  # by relay, bytes that are asked for
        self._threads: dict[str, threading.Thread] = {}
        self._connections: dict[str, ChunkAsker] = {}
        self._failed: dict[str, Problem] = {}  # relays that are not asked again
        self._answers: dict[int, str] = {}  # by chunk, the last reason why it did not come
        self._stranded: dict[int, deque[str]] = {}  # chunks that no relay in the order brings: relays to ask now
        self._asked_now: set[int] = set()  # those of them that a relay is asked for
        self._refusals: dict[int, set[str]] = {}  # by chunk, relays that will not have it, as far as they know
        self._next_round = 0.0
        self._flows: dict[str, list[Flow]] = {}
        self.again = 0  # cells that came wrong
        self.faults: list[Problem] = []
        self.bytes_by_source: dict[str, int] = {}
        self.taken: set[int] = set()  # chunks that have come, verified
        self.numbers = frozenset(chunk_numbers)
        self._searches = table.searches(chunk_numbers)

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
            for number in self._searches:
                self._place(number)

    def also(self, numbers: Collection[int]) -> None:
        """Asks for more chunks: sources were to bring them, and could not. Only for what relays have by now: they may
        be waiting for this one, which is an origin of these chunks, and would wait in a circle."""
        with self._changed:
            self.numbers |= frozenset(numbers)
            for number in sorted(numbers):
                self._searches[number] = Search(deque(), deque())
                self._place(number)

    def finish(self, stop: FillStop, progress: Callable[[], None]) -> None:
        """Waits until all chunks have come, no relay is left to bring the others, or it is stopped to keep what has
        come. Nothing can land once it returns or raises. Raises ABORTED, DEADLINE_EXCEEDED."""
        began = time.monotonic()
        enough = began + (self._stop_at - began) / 2  # the other half is for other holders, or another table
        try:
            while self._searches and not (stop.asked and stop.keeps):
                now = time.monotonic()
                stop.check()
                if now >= self._stop_at:
                    raise deadline(
                        f"other relays did not send all of this version within {self._stop_at - began:.1f} s, the "
                        "deadline"
                    )
                with self._changed:
                    if len(self._stranded) == len(self._searches) and (now >= enough or self._is_hopeless()):
                        break
                    if self._stranded and now >= self._next_round:
                        self._ask_all_now(now)
                    if self._searches:
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
                if self._flying.get(name):  # one without questions is kept for the next filling
                    connection.shut()
            self._changed.notify_all()
            threads = list(self._threads.values())
        for thread in threads:
            thread.join()

    def reasons(self) -> dict[int, str]:
        """Why chunks have not come, by chunk."""
        with self._changed:
            failed = "; ".join(dict.fromkeys(problem.message for problem in self._failed.values()))
            return {
                number: "; ".join(filter(None, (self._answers.get(number, ""), failed))) or "no relay was left to ask"
                for number in self._searches
            }

    # -- which relay is asked next; under the lock

    def _place(self, number: int) -> None:
        """Asks the next relay for a chunk."""
        search = self._searches[number]
        while search.order:
            name = search.order.popleft()
            if self._may_ask(name, search):
                self._queue(name, number, ChunkAsk.WAIT)
                return
        while search.origins:
            name = search.origins[0]
            if self._may_ask(name, search):
                how = ChunkAsk.GRANT_ANOTHER if search.named else ChunkAsk.GRANT
                self._queue(name, number, ChunkAsk.WAIT if self._is_leaf else how)
                return
            search.origins.popleft()
        if self._lending is not None:
            self._lending.never(number)  # relays that have lost the same origin must not wait for us
        self._stranded.setdefault(number, deque())

    def _may_ask(self, name: str, search: Search) -> bool:
        return name in self._regions and name not in self._failed and name not in search.tried

    def _queue(self, name: str, number: int, how: ChunkAsk) -> None:
        heapq.heappush(self._queues.setdefault(name, []), (number, how))
        if name not in self._threads:
            thread = self._threads[name] = threading.Thread(
                target=self._follow, args=(name,), name=f"ckpt-engine asks {name}", daemon=True
            )
            thread.start()
        self._changed.notify_all()

    def _living(self) -> list[str]:
        return [name for name in self._regions if name not in self._failed]

    def _is_hopeless(self) -> bool:
        """Whether no relay that can be asked will have any of the chunks that are stranded."""
        living = frozenset(self._living())
        return all(living <= self._refusals.get(number, set()) for number in self._stranded)

    def _ask_all_now(self, now: float) -> None:
        """Asks the next relay for each chunk that is stranded, if that has it by now."""
        self._next_round = now + LOOK_SECONDS
        living = sorted(self._living())
        for number, names in self._stranded.items():
            if number in self._asked_now:
                continue
            if not names:
                names.extend(living[number % len(living) :] + living[: number % len(living)] if living else ())
            while names:
                if (name := names.popleft()) not in self._failed:
                    self._asked_now.add(number)
                    self._queue(name, number, ChunkAsk.NOW)
                    break

    def _refused(self, name: str, number: int, how: int, why: str, may_come: bool) -> None:
        """Takes that a relay does not bring a chunk. may_come: not now."""
        if number not in self._searches:
            return
        self._answers[number] = why
        if how == ChunkAsk.NOW:
            self._asked_now.discard(number)
            refusals = self._refusals.setdefault(number, set())
            (refusals.discard if may_come else refusals.add)(name)
            return
        search = self._searches[number]
        if name != search.named:
            search.tried.add(name)
        self._place(number)

    def _sent_to(self, origin: str, number: int, name: str) -> None:
        """Takes that an origin names the relay that brings a chunk."""
        search = self._searches[number]
        search.named = name
        if self._may_ask(name, search) and name != self._table.name:
            self._queue(name, number, ChunkAsk.WAIT)
        else:
            self._queue(origin, number, ChunkAsk.GRANT_ANOTHER)

    def _fail(self, name: str, problem: Problem, numbers: Collection[tuple[int, int]]) -> None:
        """Asks a relay no more in this filling; its chunks are asked of others. numbers: that it was asked for."""
        if not self._stopped:
            self._failed.setdefault(name, problem)
            self.faults.append(problem)
        waiting = [*numbers, *self._queues.pop(name, [])]
        for number, how in waiting:
            if how == ChunkAsk.NOW:
                self._asked_now.discard(number)
            elif number in self._searches and not self._stopped:
                self._answers[number] = problem.message
                self._place(number)
        self._changed.notify_all()

    def _leave_slow(self, seconds: float) -> None:
        """Leaves relays that send so slowly that the filling would take twice as long. Origins are not left: they have
        all that others lack."""
        with self._changed:
            busy = [name for name, queue in self._queues.items() if queue or self._flying.get(name)]
            if 2 * len(busy) > len(self._threads) + 1:
                return
            for name in busy:
                connection = self._connections.get(name)
                coming = None if connection is None else connection.at_most()
                if connection is None or coming is None or name in self._origins:
                    continue
                landed, rate = coming
                remaining = self._flying.get(name, 0) + sum(
                    self._chunks[each].bytes for each, _ in self._queues.get(name, [])
                )
                more = (remaining - landed) / rate
                if more > max(SLOW_SECONDS, seconds):
                    connection.leave(
                        f"{name} sends {rate / 1e6:.2g} MB/s at most, and would take {more:.0f} s more, where others "
                        f"took {seconds:.1f} s in all: it is left for another"
                    )

    # -- a relay's thread

    def _follow(self, name: str) -> None:
        """Asks one relay for what is queued for it, until the filling ends or the relay fails."""
        questions: deque[tuple[int, int]] = deque()
        connection: ChunkAsker | None = None
        problem: Problem | None = None
        try:
            connection = self._askers.take(self._regions[name], name, self._stop_at)
            with self._changed:
                if self._stopped:
                    return
                self._connections[name] = connection
            self._begin(connection)
            while self._ask_next(name, connection, questions):
                number, how = questions[0]
                self._receive(name, connection, number, how)
                questions.popleft()
                with self._changed:
                    self._flying[name] -= self._chunks[number].bytes
        except CkptEngineError as error:
            problem = error.problem
        except Exception as error:  # a bug costs this relay, and neither the chunks nor the filling
            problem = Problem(code=Problem.INTERNAL, message=f"{name}: {type(error).__name__}: {error}")
        finally:
            with self._changed:
                self._connections.pop(name, None)
                self._flying.pop(name, None)
                if connection is not None:
                    self._flows.setdefault(name, []).extend(connection.flows)
            if connection is not None:
                if problem is None:
                    self._askers.put_back(connection)
                else:
                    connection.close()
            if problem is not None:
                with self._changed:
                    self._fail(name, problem, questions)

    def _ask_next(self, name: str, connection: ChunkAsker, questions: deque[tuple[int, int]]) -> bool:
        """Asks as many questions as may be in flight; waits for one if none is. False: the filling has ended."""
        while True:
            with self._changed:
                queue = self._queues[name]
                while not queue and not questions and not self._stopped:
                    self._changed.wait(LOOK_SECONDS)
                if self._stopped or not (queue or questions):
                    return False
                if not queue or len(questions) >= AHEAD:
                    return True
                number, how = heapq.heappop(queue)
                if number not in self._searches:
                    continue
                questions.append((number, how))
                self._flying[name] = self._flying.get(name, 0) + self._chunks[number].bytes
            connection.ask(number, ChunkAsk(how))

    def _receive(self, name: str, connection: ChunkAsker, number: int, how: int) -> None:
        try:
            to = connection.receive(number, self._runs(number), self._moved)
        except CkptEngineError as error:
            if error.problem.code != Problem.NOT_FOUND:
                raise
            with self._changed:
                self._refused(name, number, how, error.problem.message, isinstance(error, ChunkLaterError))
            return
        if to:
            with self._changed:
                self._sent_to(name, number, to)
            return
        names = self._wrong(number)
        if names:
            with self._changed:
                self.again += len(self._chunks[number].cells)
            raise CkptEngineError(
                Problem(
                    code=Problem.DATA_LOSS,
                    message=f"{name} sent {', '.join(names[:3])} with other bytes than were sealed",
                    tensors=names[:16],
                )
            )
        if self._lending is not None:
            self._lending.verified(number)
        with self._changed:
            if self._searches.pop(number, None) is not None:
                self.taken.add(number)
                size = self._chunks[number].bytes
                self.bytes_by_source[name] = self.bytes_by_source.get(name, 0) + size
            self._stranded.pop(number, None)
            self._answers.pop(number, None)
            if not self._searches:
                self._changed.notify_all()

    def _moved(self) -> None:
        if self._stopped:
            raise aborted("this filling has ended and no longer needs the chunk")
        if self._lending is not None:
            self._lending.moved()
