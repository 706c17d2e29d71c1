"""A network of relays and origins in simulated time: which relay has which chunk when, if all keep to one order.

Every host sends and receives at the same time, each at its own rate; a byte takes `latency` to arrive. A chunk is sent
once it is verified, and verified when all of it has arrived. A relay asks each peer for its chunks in rising order, at
most `window` at a time; an owner takes its askers in turn, a chunk each. An origin grants a chunk to one asker and
names that relay to the others. Hosts die at given times; their peers hear of it later.

The same function runs interpreted, for tests, and compiled by numba, for large runs.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

NEVER = np.inf
OWN_COLUMN = -2
NO_RELAY = -1

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


class Rules(NamedTuple):
    """What relays do."""

    window: int = 2  # questions that a peer is asked at a time
    in_order: bool = True  # a peer answers in the order of the questions; else whichever chunk it has
    enough: int = (
        4  # outstanding questions: with fewer, chunks that wait for a peer with much to send are asked of others
    )
    late: float = 0.25  # of all chunks: a peer that is so far behind with a chunk is left
    latency: float = 50e-6  # seconds
    noticed: float = (
        0.05  # seconds after which the peers of a host that died know: a killed process closes its connections
    )


@dataclass(frozen=True)
class Traffic:
    """What travels. Relays are numbered from 0, and origins behind them."""

    sizes: Floats  # bytes of each chunk
    origins: Integers  # of each chunk, the origin that has it
    wanted: npt.NDArray[np.bool_]  # [relay, chunk]
    first: Integers  # of each chunk, the relay that asks the origin; NO_RELAY: each asks
    column: Integers  # of each chunk, the number of its column
    asks: Integers  # [2, column, relay]: the relay that each asks, and the next one; OWN_COLUMN: the first; NO_RELAY


@dataclass(frozen=True)
class Network:
    """Rates in bytes/s, of relays and then of origins."""

    up: Floats
    down: Floats
    verify: Floats
    died: Floats  # when, or NEVER; of relays


@dataclass(frozen=True)
class Outcome:
    """What came of it, by host: relays, then origins."""

    done: Floats  # when each relay had all that it wants, verified; NEVER: it never had
    sent: Floats  # bytes
    received: Floats  # bytes
    questions: Integers  # that each relay asked
    named: int  # answers of origins that name another relay
    grants: int  # chunks that origins granted
    grants_again: int  # of these, to another relay than before
    peers: Integers  # relays that each relay has asked
    events: int


class _State(NamedTuple):
    """Arrays that the simulation changes. A connection is asker * nodes + owner, a question asker * chunks + chunk."""

    sizes: Floats
    origins: Integers
    first: Integers
    column: Integers
    asks: Integers
    up: Floats
    down: Floats
    verify: Floats
    died: Floats
    rank: npt.NDArray[np.int32]  # by question: of the chunk among those that the relay asks relays for
    of_relays: Integers  # by relay: how many such chunks it wants, and has
    count: Integers  # chunks that a relay wants
    stage: npt.NDArray[np.int8]  # by question
    named: npt.NDArray[np.int32]  # by question: the relay that an origin has named
    begun: npt.NDArray[np.bool_]  # by question: it is being answered
    following: npt.NDArray[np.int32]  # by question: the next in its queue
    todo: npt.NDArray[np.int32]  # by connection: the first question to ask, the last, and their number
    asked: npt.NDArray[np.int32]  # by connection: the first unanswered question, the last, and their number
    left: npt.NDArray[np.bool_]  # by connection
    is_known: npt.NDArray[np.bool_]  # by connection
    by_owner: npt.NDArray[np.int32]  # by connection: the next one of its owner
    by_asker: npt.NDArray[np.int32]
    owner_head: npt.NDArray[np.int32]
    asker_head: npt.NDArray[np.int32]
    is_queued: npt.NDArray[np.bool_]  # by connection: it waits for its turn
    queue: npt.NDArray[np.int32]  # by connection: the next that waits
    queue_ends: npt.NDArray[np.int32]  # by owner: the first and the last that wait
    sending: npt.NDArray[np.bool_]
    granted: npt.NDArray[np.int32]  # by chunk
    served: npt.NDArray[np.bool_]  # by chunk: the granted relay has it
    gone: npt.NDArray[np.bool_]  # by relay
    have: Integers
    waiting: Integers  # questions that each relay has to ask yet
    open: Integers  # questions of each relay that are asked and not answered
    down_until: Floats
    verify_until: Floats
    done: Floats
    sent: Floats
    received: Floats
    questions: Integers
    totals: Integers  # named, grants, grants again, events


MATE, SECOND, GRANT, GRANTED, ANOTHER, DONE, UNWANTED = range(7)
FREE, VERIFIED, NAMED, NOTICED = range(4)


def simulate(traffic: Traffic, network: Network, rules: Rules, compiled: bool = False) -> Outcome:
    """What comes of it."""
    relays, chunks = traffic.wanted.shape
    nodes = len(network.up)

    def ends(count: int) -> npt.NDArray[np.int32]:
        return np.tile(np.array([-1, -1, 0], dtype=np.int32), (count, 1))

    def none(*shape: int) -> npt.NDArray[np.int32]:
        return np.full(shape, -1, dtype=np.int32)

    def no(*shape: int) -> npt.NDArray[np.bool_]:
        return np.zeros(shape, dtype=np.bool_)

    state = _State(
        sizes=traffic.sizes,
        origins=traffic.origins,
        first=traffic.first,
        column=traffic.column,
        asks=traffic.asks,
        up=network.up,
        down=network.down,
        verify=network.verify,
        died=network.died,
        rank=none(relays * chunks),
        of_relays=np.zeros((relays, 2), dtype=np.int64),
        count=traffic.wanted.sum(axis=1).astype(np.int64),
        stage=np.where(traffic.wanted, MATE, UNWANTED).astype(np.int8).reshape(-1),
        named=none(relays * chunks),
        begun=no(relays * chunks),
        following=none(relays * chunks),
        todo=ends(relays * nodes),
        asked=ends(relays * nodes),
        left=no(relays * nodes),
        is_known=no(relays * nodes),
        by_owner=none(relays * nodes),
        by_asker=none(relays * nodes),
        owner_head=none(nodes),
        asker_head=none(relays),
        is_queued=no(relays * nodes),
        queue=none(relays * nodes),
        queue_ends=none(nodes, 2),
        sending=no(nodes),
        granted=none(chunks),
        served=no(chunks),
        gone=no(relays),
        have=np.zeros(relays, dtype=np.int64),
        waiting=np.zeros(relays, dtype=np.int64),
        open=np.zeros(relays, dtype=np.int64),
        down_until=np.zeros(relays),
        verify_until=np.zeros(relays),
        done=np.full(relays, NEVER),
        sent=np.zeros(nodes),
        received=np.zeros(relays),
        questions=np.zeros(relays, dtype=np.int64),
        totals=np.zeros(4, dtype=np.int64),
    )
    run = _compiled() if compiled else _functions(lambda function: function)
    run(state, rules)
    peers = state.is_known.reshape(relays, nodes)[:, :relays].sum(axis=1).astype(np.int64)
    named, grants, again, events = state.totals.tolist()
    return Outcome(state.done, state.sent, state.received, state.questions, named, grants, again, peers, events)


@cache
def _compiled() -> Any:
    import numba

    return _functions(numba.njit)


def _functions(jit: Callable[[Any], Any]) -> Any:
    """The simulation, of functions that `jit` has compiled."""

    @jit
    def push(heap: Any, s: _State, when: float, kind: int, one: int, other: int, chunk: int) -> None:
        s.totals[3] += 1
        heapq.heappush(heap, (when, s.totals[3], kind, one, other, chunk))

    @jit
    def append(ends: Any, following: Any, at: int, question: int) -> None:
        following[question] = -1
        if ends[at, 2] == 0:
            ends[at, 0] = question
        else:
            following[ends[at, 1]] = question
        ends[at, 1] = question
        ends[at, 2] += 1

    @jit
    def insert(ends: Any, following: Any, at: int, question: int) -> None:
        """Puts a question behind those for lower chunks."""
        if ends[at, 2] == 0 or question > ends[at, 1]:
            append(ends, following, at, question)
            return
        before = -1
        each = ends[at, 0]
        while each < question:
            before = each
            each = following[each]
        following[question] = each
        if before < 0:
            ends[at, 0] = question
        else:
            following[before] = question
        ends[at, 2] += 1

    @jit
    def remove(ends: Any, following: Any, at: int, question: int) -> None:
        before = -1
        each = ends[at, 0]
        while each != question:
            before = each
            each = following[each]
        if before < 0:
            ends[at, 0] = following[question]
        else:
            following[before] = following[question]
        if ends[at, 1] == question:
            ends[at, 1] = before
        ends[at, 2] -= 1

    @jit
    def answerable(s: _State, rules: Rules, connection: int) -> int:
        """The question of a connection that may be answered now; -1: none."""
        owner = connection % len(s.up)
        chunks = len(s.sizes)
        question = s.asked[connection, 0]
        while question >= 0:
            if not s.begun[question]:
                if owner >= len(s.down) or s.stage[owner * chunks + question % chunks] == DONE:
                    return question
                if rules.in_order:
                    return -1
            question = s.following[question]
        return -1

    @jit
    def enqueue(s: _State, rules: Rules, connection: int) -> None:
        """Has a connection wait for its turn, if it has a question that may be answered."""
        owner = connection % len(s.up)
        if s.is_queued[connection] or s.left[connection] or answerable(s, rules, connection) < 0:
            return
        s.is_queued[connection] = True
        s.queue[connection] = -1
        if s.queue_ends[owner, 0] < 0:
            s.queue_ends[owner, 0] = connection
        else:
            s.queue[s.queue_ends[owner, 1]] = connection
        s.queue_ends[owner, 1] = connection

    @jit
    def fill(s: _State, rules: Rules, connection: int) -> None:
        """Asks as much as may be asked at a time."""
        asker = connection // len(s.up)
        while s.asked[connection, 2] < rules.window and s.todo[connection, 2] > 0:
            question = s.todo[connection, 0]
            s.todo[connection, 0] = s.following[question]
            s.todo[connection, 2] -= 1
            append(s.asked, s.following, connection, question)
            s.questions[asker] += 1
            s.waiting[asker] -= 1
            s.open[asker] += 1
        enqueue(s, rules, connection)

    @jit
    def place(s: _State, asker: int, chunk: int) -> int:
        """Puts a question where its stage says. Returns the connection."""
        chunks, nodes, relays = len(s.sizes), len(s.up), len(s.down)
        question = asker * chunks + chunk
        column = s.column[chunk]
        while True:
            stage = s.stage[question]
            if stage == MATE:
                owner = s.asks[0, column, asker]
                if owner == OWN_COLUMN:
                    owner = s.first[chunk]
            elif stage == SECOND:
                owner = s.asks[1, column, asker]
            elif stage == GRANTED:
                owner = s.named[question]
            else:
                owner = relays + s.origins[chunk]
            is_gone = 0 <= owner < relays and s.gone[owner]
            if owner >= 0 and owner != asker and not is_gone and not s.left[asker * nodes + owner]:
                break
            s.stage[question] += 1
        connection = asker * nodes + owner
        if not s.is_known[connection]:
            s.is_known[connection] = True
            s.by_owner[connection] = s.owner_head[owner]
            s.owner_head[owner] = connection
            s.by_asker[connection] = s.asker_head[asker]
            s.asker_head[asker] = connection
        insert(s.todo, s.following, connection, question)
        s.waiting[asker] += 1
        return connection

    @jit
    def serve(s: _State, heap: Any, rules: Rules, owner: int, now: float) -> None:
        """Answers the next question, if the owner is not sending."""
        chunks, nodes, relays = len(s.sizes), len(s.up), len(s.down)
        if owner < relays and now >= s.died[owner]:
            return
        while not s.sending[owner] and s.queue_ends[owner, 0] >= 0:
            connection = s.queue_ends[owner, 0]
            s.queue_ends[owner, 0] = s.queue[connection]
            s.is_queued[connection] = False
            asker = connection // nodes
            question = answerable(s, rules, connection)
            if question < 0 or s.left[connection] or now >= s.died[asker]:
                continue
            chunk = question % chunks
            if owner >= relays and s.first[chunk] >= 0:
                granted = s.granted[chunk]
                is_void = granted >= 0 and s.gone[granted] and not s.served[chunk]
                is_again = s.stage[question] == ANOTHER and granted == s.named[question]
                if granted >= 0 and granted != asker and not is_void and not is_again:
                    remove(s.asked, s.following, connection, question)
                    s.open[asker] -= 1
                    s.named[question] = granted
                    s.stage[question] = GRANTED
                    s.totals[0] += 1
                    push(heap, s, now + 2 * rules.latency, NAMED, asker, owner, chunk)
                    fill(s, rules, connection)
                    continue
                if granted != asker:
                    s.totals[1] += 1
                    s.totals[2] += granted >= 0
                    s.granted[chunk] = asker
                    s.served[chunk] = False
            s.begun[question] = True
            s.sending[owner] = True
            takes = s.sizes[chunk] / s.up[owner]
            s.sent[owner] += s.sizes[chunk]
            enqueue(s, rules, connection)
            if owner < relays and s.died[owner] < now + takes:
                continue
            push(heap, s, now + takes, FREE, owner, 0, 0)
            # All that send to a host share its network; it is busy for as long as it needs for the bytes.
            s.down_until[asker] = max(s.down_until[asker], now + rules.latency) + s.sizes[chunk] / s.down[asker]
            whole = max(s.down_until[asker], now + rules.latency + takes)
            s.verify_until[asker] = max(s.verify_until[asker], whole) + s.sizes[chunk] / s.verify[asker]
            s.received[asker] += s.sizes[chunk]
            push(heap, s, s.verify_until[asker], VERIFIED, asker, owner, chunk)

    @jit
    def leave(s: _State, heap: Any, rules: Rules, connection: int, now: float) -> None:
        """Asks others for all that a peer was asked, and was to be asked."""
        chunks, nodes = len(s.sizes), len(s.up)
        asker = connection // nodes
        s.left[connection] = True
        s.open[asker] -= s.asked[connection, 2]
        s.waiting[asker] -= s.todo[connection, 2]
        for turn in range(2):
            ends = s.asked if turn == 0 else s.todo
            question = ends[connection, 0]
            for _ in range(ends[connection, 2]):
                after = s.following[question]
                s.begun[question] = False
                other = place(s, asker, question % chunks)
                fill(s, rules, other)
                serve(s, heap, rules, other % nodes, now)
                question = after
            ends[connection, 2] = 0
            ends[connection, 0] = -1

    @jit
    def relieve(s: _State, heap: Any, rules: Rules, asker: int, now: float) -> None:
        """With too little outstanding, asks others for what waits for the relay with most to send."""
        chunks, nodes, relays = len(s.sizes), len(s.up), len(s.down)
        while s.open[asker] < rules.enough and s.waiting[asker] > 0:
            longest, found = 0, -1
            connection = s.asker_head[asker]
            while connection >= 0:
                if (
                    connection % nodes < relays
                    and s.todo[connection, 2] > longest
                    and not s.left[connection]
                    and s.stage[s.todo[connection, 0]] != GRANTED
                ):
                    longest, found = s.todo[connection, 2], connection
                connection = s.by_asker[connection]
            if found < 0:
                return
            question = s.todo[found, 0]
            s.todo[found, 0] = s.following[question]
            s.todo[found, 2] -= 1
            s.waiting[asker] -= 1
            s.stage[question] += 1
            other = place(s, asker, question % chunks)
            fill(s, rules, other)
            serve(s, heap, rules, other % nodes, now)

    @jit
    def check_late(s: _State, heap: Any, rules: Rules, asker: int, now: float) -> None:
        """Leaves the first relays of chunks that are far behind with what they were asked."""
        nodes = len(s.up)
        connection = s.asker_head[asker]
        while connection >= 0:
            question = s.asked[connection, 0]
            if question >= 0 and s.stage[question] == MATE and not s.left[connection]:
                is_first = s.first[question % len(s.sizes)] == connection % nodes
                if is_first and s.of_relays[asker, 1] - s.rank[question] > rules.late * s.of_relays[asker, 0]:
                    leave(s, heap, rules, connection, now)
            connection = s.by_asker[connection]

    @jit
    def verified(s: _State, heap: Any, rules: Rules, asker: int, owner: int, chunk: int, now: float) -> None:
        chunks, nodes, relays = len(s.sizes), len(s.up), len(s.down)
        connection = asker * nodes + owner
        question = asker * chunks + chunk
        if s.left[connection] or now >= s.died[asker]:
            return
        remove(s.asked, s.following, connection, question)
        s.open[asker] -= 1
        s.stage[question] = DONE
        if owner >= relays and s.granted[chunk] == asker:
            s.served[chunk] = True
        s.have[asker] += 1
        s.of_relays[asker, 1] += s.rank[question] >= 0
        if s.have[asker] == s.count[asker]:
            s.done[asker] = now
        other = s.owner_head[asker]
        while other >= 0:
            if s.asked[other, 2] > 0:
                enqueue(s, rules, other)
            other = s.by_owner[other]
        serve(s, heap, rules, asker, now)
        fill(s, rules, connection)
        serve(s, heap, rules, owner, now)
        if s.todo[connection, 2] == 0:
            relieve(s, heap, rules, asker, now)
        if s.have[asker] % 8 == 0:
            check_late(s, heap, rules, asker, now)

    @jit
    def run(s: _State, rules: Rules) -> None:
        chunks, nodes, relays = len(s.sizes), len(s.up), len(s.down)
        heap = [(0.0, 0, 0, 0, 0, 0)]
        heap.pop()
        for relay in range(relays):
            if s.died[relay] < np.inf:
                push(heap, s, s.died[relay] + rules.noticed, NOTICED, relay, 0, 0)
            for chunk in range(chunks):
                if s.stage[relay * chunks + chunk] == MATE:
                    if s.first[chunk] == relay or s.first[chunk] < 0:
                        s.stage[relay * chunks + chunk] = GRANT
                    else:
                        s.rank[relay * chunks + chunk] = s.of_relays[relay, 0]
                        s.of_relays[relay, 0] += 1
                    place(s, relay, chunk)
            if s.count[relay] == 0:
                s.done[relay] = 0.0
        for connection in range(relays * nodes):
            if s.is_known[connection]:
                fill(s, rules, connection)
        for node in range(nodes):
            serve(s, heap, rules, node, 0.0)
        while len(heap) > 0:
            now, _, kind, one, other, chunk = heapq.heappop(heap)
            if kind == FREE:
                s.sending[one] = False
                serve(s, heap, rules, one, now)
            elif kind == VERIFIED:
                verified(s, heap, rules, one, other, chunk, now)
            elif kind == NAMED:
                if now < s.died[one]:
                    connection = place(s, one, chunk)
                    fill(s, rules, connection)
                    serve(s, heap, rules, connection % nodes, now)
            else:
                s.gone[one] = True
                connection = s.owner_head[one]
                while connection >= 0:
                    if not s.left[connection] and now < s.died[connection // nodes]:
                        leave(s, heap, rules, connection, now)
                    connection = s.by_owner[connection]

    return run
