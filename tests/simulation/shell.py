"""What the three simulated shells share: timers, tasks, streams that lose, repeat and reorder.

A shell keeps the promises of machines/events.py and nothing more. Its machine is a black box to it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from google.protobuf.message import Message as ProtobufMessage

from ckpt_engine.core.problems import CkptEngineError, deadline, internal
from ckpt_engine.machines.events import Done, Key, Message, Peer, PeerLost
from ckpt_engine.machines.wire import pack, unpack
from tests.simulation.world import Process, Signal, Steps, World

EXCUSED = 3.0
"""Seconds after having been stopped in which a process may be late."""


@dataclass
class Faults:
    """How bad the world is; `Faults()` is a good one. Probabilities, and seconds for delays.

    loss, duplicate: of one message on a stream. delay: the longest that a message takes (each its own, so they
    overtake each other). task: that a task fails. slow: that a task or a worker takes longer than it may. engine_no,
    engine_hang, engine_lies: that an engine call is refused, does what it should much later, or says that all is done
    although its workers were not called. worker_early, worker_late: that a worker fails before or after its first byte.
    stamp_no: that an engine does not take the version that it is told. half_open: that one end of a broken stream hears
    nothing of it. read_late, write_late: that a worker is stopped between looking at the clock and reading, or before
    its first byte. drift: how much faster or slower than time a process's clock may go, as a share of it. cuts:
    (member, whether towards the manager) for each way on which nothing gets through. cannot_open: that a worker may not
    open what a source offers it. wire: that a relay's read over the network fails. wire_delay: the longest that such a
    read takes. wire_cuts: pairs of hosts between which none leads.
    """

    loss: float = 0.0
    duplicate: float = 0.0
    delay: float = 0.01
    task: float = 0.0
    slow: float = 0.0
    engine_no: float = 0.0
    engine_hang: float = 0.0
    engine_lies: float = 0.0
    stamp_no: float = 0.0
    worker_early: float = 0.0
    worker_late: float = 0.0
    half_open: float = 0.0
    read_late: float = 0.0
    write_late: float = 0.0
    drift: float = 0.0
    cuts: set[tuple[str, bool]] = field(default_factory=set)
    wire: float = 0.0
    wire_delay: float = 0.0
    wire_cuts: set[frozenset[str]] = field(default_factory=set)
    cannot_open: float = 0.0


class Machine(Protocol):
    """What a shell knows of its machine."""

    def handle(self, event: Any, now: float) -> list[Any]: ...


class Shell:
    """One process with one machine in it. Subclasses say what the commands do.

    Each has a clock of its own, which began at some other moment and goes a little wrong. excused: until when it may
    be late, since it was stopped.
    """

    def __init__(self, world: World, faults: Faults, name: str, machine: Machine) -> None:
        self.world = world
        self.faults = faults
        self.name = name
        self.machine = machine
        self.alive = True
        self.excused = 0.0
        self._held: list[Callable[[], None]] | None = None
        self._rate = 1.0 + world.between(-1.0, 1.0) * faults.drift
        self._began = world.between(0.0, 1e6) if faults.drift else 0.0
        self._timers: dict[Key, int] = {}
        self._numbers = 0
        self._processes: list[Process] = []

    def feed(self, event: object) -> None:
        """Hands an event to the machine and performs what it says."""
        if not self.alive:
            return
        if self._held is not None:
            self._held.append(lambda: self.feed(event))
            return
        for command in self.machine.handle(event, self.world.now * self._rate + self._began):
            self.perform(command)

    @property
    def stopped(self) -> bool:
        """Whether it is stopped now, or was a moment ago and may be late."""
        return self._held is not None or self.world.now < self.excused

    def stop_for(self, seconds: float) -> None:
        """The process is stopped (SIGSTOP) and goes on later: all that happened meanwhile comes at once."""
        if self.alive and self._held is None:
            self._held = []
            self.world.after(seconds, self._go_on)

    def unless_stopped(self, later: Callable[[], None], now: Callable[[], None]) -> None:
        """Does the one when it goes on again, or the other at once."""
        if self._held is None:
            now()
        else:
            self._held.append(later)

    def _go_on(self) -> None:
        held, self._held = self._held or [], None
        self.excused = self.world.now + EXCUSED
        for action in held:
            action()

    def perform(self, command: Any) -> None:
        """Carries out one command."""
        raise NotImplementedError

    def crash(self) -> None:
        """The process is killed: nothing of it goes on."""
        self.alive = False
        for process in self._processes:
            process.kill()

    # -- timers

    def set_timer(self, key: Key, seconds: float, event: Callable[[], object]) -> None:
        """A timer that can be replaced and cancelled."""
        self._numbers += 1
        number = self._timers[key] = self._numbers

        def fire() -> None:
            if self._held is not None:
                self._held.append(fire)
            elif self._timers.get(key) == number:
                del self._timers[key]
                self.feed(event())

        self.world.after(seconds / self._rate, fire)

    def cancel_timer(self, key: Key) -> None:
        """An unknown key is fine."""
        self._timers.pop(key, None)

    # -- tasks

    def run_task(self, key: Key, seconds: float, steps: Steps, fallible: bool = True) -> Signal:
        """Runs steps that return a result or raise CkptEngineError; one Done comes, in time. Returns what is set when
        the steps have ended, which may be later."""
        if not self.alive:
            return Signal()
        assert seconds > 0, f"{self.name}: task {key} has {seconds} seconds"
        process = self.world.spawn(self._guarded(key, steps, fallible))
        self._processes.append(process)
        late = Done(key, problem=deadline(f"{key} took longer than {seconds:.3f} s").problem, answered=False)
        self.world.first_of(process.over, seconds / self._rate).then(
            lambda done: self.feed(late if done is None else done)
        )
        return process.over

    def _guarded(self, key: Key, steps: Steps, fallible: bool) -> Steps:
        yield self.world.between(0.0, 0.01)
        if fallible and self.world.chance(self.faults.task):
            return Done(key, problem=internal("the simulator made this task fail").problem)
        if fallible and self.world.chance(self.faults.slow):
            yield self.world.between(1.0, 30.0)
        try:
            return Done(key, result=(yield from steps))
        except CkptEngineError as error:
            return Done(key, problem=error.problem, answered=getattr(error, "answered", True))


class Stream:
    """One session stream between a member and the manager; each end knows it by a name of its own.

    envelopes: the message type towards the manager, and the one towards the member.
    """

    def __init__(
        self,
        member: Shell,
        manager: Shell,
        at_member: Peer,
        at_manager: Peer,
        envelopes: tuple[type[ProtobufMessage], type[ProtobufMessage]],
    ) -> None:
        self.world, self.faults = member.world, member.faults
        self._member = member.name
        self._envelopes = {True: envelopes[0], False: envelopes[1]}
        self._ends = {True: (manager, at_manager), False: (member, at_member)}
        self._open = {True: True, False: True}

    def send(self, to_manager: bool, body: ProtobufMessage) -> None:
        """Queues a message; it comes never, once or twice, and not in order."""
        if not self._open[not to_manager] or self._cut(to_manager):
            return
        copies = 0 if self.world.chance(self.faults.loss) else 1 + self.world.chance(self.faults.duplicate)
        envelope = self._envelopes[to_manager]
        data = pack(envelope, body).SerializeToString()
        for _ in range(copies):
            delay = self.world.between(0.0005, self.faults.delay)
            self.world.after(delay, lambda: self._arrive(to_manager, unpack(envelope.FromString(data))))

    def _arrive(self, to_manager: bool, body: ProtobufMessage | None) -> None:
        if self._open[to_manager] and not self._cut(to_manager):
            assert body is not None
            shell, peer = self._ends[to_manager]
            # What a stopped process has not read it does not read any more if it closes the stream when it goes on.
            shell.unless_stopped(lambda: self._arrive(to_manager, body), lambda: shell.feed(Message(peer, body)))

    def _cut(self, to_manager: bool) -> bool:
        return bool(self.faults.cuts) and (self._member, to_manager) in self.faults.cuts

    def close(self, by_manager: bool) -> None:
        """One end ended it; the other one hears of it."""
        self._open[by_manager] = False
        self.world.after(self.world.between(0.001, self.faults.delay), lambda: self.lose(not by_manager, "closed"))

    def break_off(self, reason: str) -> None:
        """The connection is lost; perhaps one end hears nothing of that."""
        deaf = self.world.chance(self.faults.half_open)
        side = self.world.chance(0.5)
        if not (deaf and side):
            self.world.after(self.world.between(0.0, 0.1), lambda: self.lose(True, reason))
        if not (deaf and not side):
            self.world.after(self.world.between(0.0, 0.1), lambda: self.lose(False, reason))
        if deaf:
            # What the deaf end still says goes nowhere.
            self._ends[not side] = (_NOWHERE, self._ends[not side][1])

    def lose(self, at_manager: bool, reason: str) -> None:
        """One end finds that the stream is over."""
        if self._open[at_manager]:
            self._open[at_manager] = False
            shell, peer = self._ends[at_manager]
            shell.feed(PeerLost(peer, reason))


class _Silent:
    def handle(self, event: Any, now: float) -> list[Any]:
        return []


_NOWHERE = Shell(World(0), Faults(), "nowhere", _Silent())
