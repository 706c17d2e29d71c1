"""A network of relays and origins in simulated time: which relay has which chunk when.

What relays ask, and what origins grant, is decided by the code of production (relay/chunk_search.py,
transport/tcp/lending.py). Here are only the hosts and the time. Every host sends and receives at the same time, each at
its own rate; a byte takes `latency` to arrive. A chunk is sent once it is verified, and verified when all of it has
arrived. An owner takes its askers in turn, a chunk each. Hosts die at given times; their peers hear of it later.
"""

from __future__ import annotations

import heapq
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ckpt_engine.relay.asking import LOOK_CHUNKS
from ckpt_engine.relay.chunk_search import ChunkSearch, Question, Trail
from ckpt_engine.transport.base import ChunkAsk, LentChunks
from ckpt_engine.transport.tcp.lending import Asker, TcpLending

NEVER = np.inf

LATENCY = 50e-6
"""Seconds."""

NOTICED = 0.05
"""Seconds after which the peers of a host that died know: a killed process closes its connections."""

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


class Host(NamedTuple):
    """A host's rates, bytes/s."""

    up: float
    down: float = 0.0
    verify: float = 0.0
    died: float = NEVER  # when


class Relay(NamedTuple):
    """A relay: its host, and by chunk that it wants the relays and origins to ask."""

    host: Host
    trails: dict[int, Trail]
    is_leaf: bool = False


@dataclass(frozen=True)
class Outcome:
    """What came of it, by host: relays, then origins, each in its order."""

    done: Floats  # when each relay had all that it wants, verified; NEVER: it never had
    sent: Floats  # bytes
    received: Floats  # bytes
    questions: Integers  # that each relay asked
    named: int  # answers of origins that name another relay
    grants: int  # chunks that origins granted
    grants_again: int  # of these, to another relay than before
    peers: Integers  # relays that each relay has asked


def simulate(sizes: Sequence[int], relays: Mapping[str, Relay], origins: Mapping[str, Host]) -> Outcome:
    """What comes of it. sizes: bytes of each chunk. relays, origins: by name, in their order."""
    return _Simulation(sizes, relays, origins).run()


@dataclass(eq=False, slots=True)
class _Connection:
    """What one relay asks another one, or an origin."""

    asker: _Node
    owner: _Node
    unanswered: deque[Question] = field(default_factory=deque)
    waits_turn: bool = False
    is_over: bool = False
    last_answer: float = 0.0  # when the last answer arrives: they come in the order of the questions


@dataclass(eq=False, slots=True)
class _Node:
    """A host in the simulation."""

    name: str
    host: Host
    lending: TcpLending | None = None  # of an origin
    search: ChunkSearch | None = None  # of a relay
    as_asker: Asker = field(default_factory=lambda: Asker(""))
    has: set[int] = field(default_factory=set)
    to_ask: list[str] = field(default_factory=list)  # relays and origins for which questions were queued
    asks: dict[str, _Connection] = field(default_factory=dict)
    askers: list[_Connection] = field(default_factory=list)
    waiting: dict[int, list[_Connection]] = field(default_factory=dict)  # by the chunk that is to be sent next
    turns: deque[_Connection] = field(default_factory=deque)
    is_sending: bool = False
    down_until: float = 0.0
    verify_until: float = 0.0
    first_came: float = NEVER
    done: float = NEVER
    sent: float = 0.0
    received: float = 0.0
    questions: int = 0


class _Simulation:
    def __init__(self, sizes: Sequence[int], relays: Mapping[str, Relay], origins: Mapping[str, Host]) -> None:
        self._sizes = sizes
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._count = 0
        self._granted: dict[int, str] = {}
        self._named = self._grants = self._grants_again = 0
        changed = threading.Condition()
        changed.acquire()  # for all of the simulation, which has one thread
        every = range(len(sizes))
        lent = LentChunks(0, b"", lambda chunk: (), every)
        self._relays = {name: _Node(name, each.host, as_asker=Asker(name)) for name, each in relays.items()}
        self._origins = {
            name: _Node(name, host, TcpLending(lent, changed), has=set(every)) for name, host in origins.items()
        }
        self._nodes = {**self._relays, **self._origins}
        for name, each in relays.items():
            node = self._relays[name]
            node.search = ChunkSearch(
                name, each.trails, self._nodes.keys() - {name}, each.is_leaf, node.to_ask.append, self._strand
            )

    def run(self) -> Outcome:
        """Everything that happens."""
        for node in self._relays.values():
            if node.host.died < NEVER:
                self._at(node.host.died + NOTICED, partial(self._notice, node))
            assert node.search is not None
            node.search.start()
            if not node.search.remaining:
                node.done = 0.0
        for node in self._relays.values():
            self._ask(node, 0.0)
        while self._events:
            now, _, event = heapq.heappop(self._events)
            event(now)
        nodes = list(self._relays.values())
        return Outcome(
            np.array([each.done for each in nodes]),
            np.array([each.sent for each in (*nodes, *self._origins.values())]),
            np.array([each.received for each in nodes]),
            np.array([each.questions for each in nodes]),
            self._named,
            self._grants,
            self._grants_again,
            np.array([len(each.asks.keys() & self._relays.keys()) for each in nodes]),
        )

    def _at(self, when: float, event: Callable[[float], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (when, self._count, event))

    def _strand(self, number: int) -> None:
        raise AssertionError(f"no relay in its order, and no origin, brings chunk {number}")

    # -- askers

    def _ask(self, node: _Node, now: float) -> None:
        """Asks what may be asked of the relays for which questions were queued."""
        while node.to_ask:
            name = node.to_ask.pop()
            if (connection := node.asks.get(name)) is None:
                connection = node.asks[name] = _Connection(node, self._nodes[name])
                self._nodes[name].askers.append(connection)
            if now < connection.owner.host.died + NOTICED:
                self._fill(connection, now)
            elif not connection.is_over:
                self._leave(connection, now)

    def _fill(self, connection: _Connection, now: float) -> None:
        node, owner = connection.asker, connection.owner
        assert node.search is not None
        while (question := node.search.ask(owner.name)) is not None:
            connection.unanswered.append(question)
            node.questions += 1
        self._take_turn(connection)
        self._serve(owner, now)

    def _came(self, connection: _Connection, number: int, now: float) -> None:
        node, owner = connection.asker, connection.owner
        if connection.is_over or now >= node.host.died:
            return
        assert node.search is not None
        node.first_came = min(node.first_came, now)
        node.search.came(owner.name, number, now - node.first_came)
        if owner.lending is not None:
            owner.lending.release(node.as_asker, number, True, None)
        node.has.add(number)
        if not node.search.remaining:
            node.done = now
        for waiting in node.waiting.pop(number, ()):
            self._take_turn(waiting)
        self._serve(node, now)
        self._fill(connection, now)
        self._ask(node, now)
        if len(node.has) % LOOK_CHUNKS == 0:
            for name in node.search.behind(now - node.first_came):
                self._leave(node.asks[name], now)

    def _sent_to(self, connection: _Connection, number: int, name: str, now: float) -> None:
        node = connection.asker
        if now < node.host.died and not connection.is_over:
            assert node.search is not None
            node.search.sent_to(connection.owner.name, number, name)
            self._fill(connection, now)
            self._ask(node, now)

    def _leave(self, connection: _Connection, now: float) -> None:
        connection.is_over = True
        connection.unanswered.clear()
        assert connection.asker.search is not None
        connection.asker.search.lose(connection.owner.name, "it was left")
        self._ask(connection.asker, now)

    def _notice(self, node: _Node, now: float) -> None:
        """All peers of a relay that died know it."""
        for origin in self._origins.values():
            assert origin.lending is not None
            origin.lending.void(node.as_asker)
        for connection in node.askers:
            if not connection.is_over and now < connection.asker.host.died:
                self._leave(connection, now)

    # -- owners

    def _take_turn(self, connection: _Connection) -> None:
        """Has a connection wait for its turn once its next question can be answered."""
        if connection.waits_turn or connection.is_over or not connection.unanswered:
            return
        number, _ = connection.unanswered[0]
        if number not in connection.owner.has:
            connection.owner.waiting.setdefault(number, []).append(connection)
            return
        connection.waits_turn = True
        connection.owner.turns.append(connection)

    def _serve(self, owner: _Node, now: float) -> None:
        """Answers the next question, if the owner is not sending."""
        while not owner.is_sending and owner.turns and now < owner.host.died:
            connection = owner.turns.popleft()
            connection.waits_turn = False
            if connection.is_over or not connection.unanswered or now >= connection.asker.host.died:
                continue
            number, how = connection.unanswered.popleft()
            if owner.lending is not None and how in (ChunkAsk.GRANT, ChunkAsk.GRANT_ANOTHER):
                name = self._grant(owner.lending, number, connection.asker, how)
                if name:
                    self._answer(connection, now + 2 * LATENCY, partial(self._sent_to, connection, number, name))
                    self._take_turn(connection)
                    continue
            self._take_turn(connection)
            self._send(connection, number, now)

    def _grant(self, lending: TcpLending, number: int, asker: _Node, how: ChunkAsk) -> str:
        """The relay to which an origin sends this one; empty: it has the grant."""
        if name := lending.grant(number, asker.as_asker, how == ChunkAsk.GRANT_ANOTHER):
            self._named += 1
        elif (before := self._granted.get(number)) != asker.name:
            self._grants += 1
            self._grants_again += before is not None
            self._granted[number] = asker.name
        return name

    def _send(self, connection: _Connection, number: int, now: float) -> None:
        owner, asker, size = connection.owner, connection.asker, self._sizes[number]
        takes = size / owner.host.up
        owner.is_sending = True
        owner.sent += size
        if owner.host.died < now + takes:
            return
        self._at(now + takes, partial(self._sent, owner))
        # All that send to a host share its network; it is busy for as long as it needs for the bytes.
        asker.down_until = max(asker.down_until, now + LATENCY) + size / asker.host.down
        whole = max(asker.down_until, now + LATENCY + takes)
        asker.verify_until = max(asker.verify_until, whole) + size / asker.host.verify
        asker.received += size
        self._answer(connection, asker.verify_until, partial(self._came, connection, number))

    def _answer(self, connection: _Connection, when: float, event: Callable[[float], None]) -> None:
        connection.last_answer = max(connection.last_answer, when)
        self._at(connection.last_answer, event)

    def _sent(self, owner: _Node, now: float) -> None:
        owner.is_sending = False
        self._serve(owner, now)
