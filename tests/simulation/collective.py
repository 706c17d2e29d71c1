"""A collective in the simulated world: the lead's ballots, a communicator that hangs where somebody is missing, and the
parts that members take. Who decides what is the real code of core/arming.py.

Sends and receives meet: neither ends before the other is there, as in NCCL. Only a member that asks the lead learns
that another one has failed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ckpt_engine.core.arming import Ballot, BallotAnswer, Ballots, BallotStep, Participant, Word
from ckpt_engine.core.problems import aborted, unavailable
from ckpt_engine.v1 import weights_pb2
from tests.simulation.world import BrokenPromiseError, Signal, Steps, World

if TYPE_CHECKING:
    from tests.simulation.shell import Shell

SILENCE = 2.0
POLL = 0.15
UNANSWERED = 0.5
"""Seconds after which a member asks again."""

BOUND = 1.5
"""Seconds that it may take beyond SILENCE until all have stopped."""


@dataclass
class Communicator:
    """What members made together, by their names. parts: the processes that joined."""

    members: tuple[str, ...]
    joined: dict[str, object] = field(default_factory=dict)
    complete: Signal = field(default_factory=Signal)
    met: dict[tuple[int, str, str, int], tuple[Signal, Signal]] = field(default_factory=dict)

    def join(self, member: str, process: object) -> None:
        """Once for each process; a second one under a name never completes anything."""
        if self.joined.setdefault(member, process) is process and len(self.joined) == len(self.members):
            self.complete.set()

    def pair(self, epoch: int, sender: str, receiver: str, index: int) -> tuple[Signal, Signal]:
        """What has been sent, and that it was received."""
        return self.met.setdefault((epoch, sender, receiver, index), (Signal(), Signal()))


class Collectives:
    """What the simulator knows of all collectives. words: of each epoch. parts: those that have not ended."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.booths: dict[str, Booth] = {}
        self.communicators: dict[bytes, Communicator] = {}
        self.broken = b""  # what ranks say of it when they seal
        self.words: dict[int, Word] = {}
        self.parts: list[Part] = []
        self.voted: set[tuple[int, str]] = set()
        self.left: set[tuple[int, str]] = set()  # who went back although it heard the lead all the time
        self.went = self.stopped = self.back = self.ended_well = 0
        self._since: dict[Part, float] = {}

    def decided(self, booth: Booth, ballot: Ballot) -> None:
        """After everything that a ballot was told: what it has decided it never changes, and it decides *go* only if
        nobody has begun and everybody is ready."""
        if ballot.word is Word.UNDECIDED:
            return
        before = self.words.setdefault(ballot.epoch, ballot.word)
        if before is not ballot.word:
            raise BrokenPromiseError(f"epoch {ballot.epoch} is {ballot.word}, and was {before}")
        if ballot.word is not Word.GO or ballot in booth.went:
            return
        booth.went.append(ballot)
        self.went += 1
        there = {part.name: part for part in self.parts if part.epoch == ballot.epoch and part.alive()}
        for name in sorted(ballot.members):
            if (ballot.epoch, name) not in self.voted or (name in there and not there[name].ready()):
                raise BrokenPromiseError(f"epoch {ballot.epoch} begins, and {name} is not ready")
            if (ballot.epoch, name) in self.left:
                raise BrokenPromiseError(f"epoch {ballot.epoch} begins, and {name} has gone back")

    def check(self) -> None:
        """After every event: who shall stop does, and nobody is in a part for ever."""
        now = self.world.now
        for part in self.parts[:]:
            if not part.alive():
                self.parts.remove(part)
                self._since.pop(part, None)
                continue
            if part.frozen():
                part.awake_since = now
            if now > max(part.end, part.awake_since) + BOUND:
                raise BrokenPromiseError(f"{part.name} is in epoch {part.epoch} beyond its time")
            if part.running and part.doomed():
                since = self._since.setdefault(part, now)
                if now > max(since, part.awake_since) + SILENCE + BOUND:
                    raise BrokenPromiseError(f"{part.name} goes on with epoch {part.epoch}, which others have left")
            else:
                self._since.pop(part, None)


class Booth:
    """Where members ask the lead: in its process, which may be stopped or dead."""

    def __init__(self, collectives: Collectives, shell: Shell, host: str, used: bool) -> None:
        """used: whether anything is published for collectives there."""
        self.collectives, self.shell, self.host = collectives, shell, host
        self.ballots = Ballots(SILENCE)
        self.connected: dict[str, Part] = {}
        self.went: list[Ballot] = []
        if used:
            shell._processes.append(shell.world.spawn(self._looks()))

    def clock(self) -> float:
        """Of its process."""
        return self.shell.world.now * self.shell._rate + self.shell._began

    def _looks(self) -> Steps:
        """Connections of dead members end, and time passes."""
        while True:
            yield POLL
            if self.shell._held is not None:
                continue
            for name, part in list(self.connected.items()):
                if not part.alive():
                    del self.connected[name]
                    self.ballots.lost(name)
            self.ballots.look(self.clock())
            for ballot in list(self.ballots._ballots.values()):
                self.collectives.decided(self, ballot)

    def take(self, part: Part, verb: str, *given: Any) -> BallotAnswer:
        """A member's message has arrived."""
        self.connected[part.name] = part
        if verb == "vote":
            self.collectives.voted.add((part.epoch, part.name))
        found = self.ballots.find(part.epoch)
        if verb == "leave":
            answer = self.ballots.leave(part.epoch, part.name, given[0], self.clock(), part.blames)
        elif isinstance(found, BallotAnswer):
            answer = found
        else:
            answer = getattr(found, verb)(part.name, *given, self.clock())
        if isinstance(found, Ballot):
            self.collectives.decided(self, found)
        return answer


class Part:
    """One member's part in one epoch. host: where it is. frozen: whether its process is stopped. alive: whether it is
    there. ready: whether its engine is paused, and it has begun nothing. end: by the world's clock."""

    def __init__(
        self,
        collectives: Collectives,
        name: str,
        epoch: int,
        meeting: bytes,
        host: str,
        end: float,
        alive: Callable[[], bool],
        frozen: Callable[[], bool] = lambda: False,
        ready: Callable[[], bool] = lambda: True,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.collectives, self.world = collectives, collectives.world
        self.name, self.epoch, self.host, self.end = name, epoch, host, end
        self.booth = collectives.booths.get(meeting.decode())
        self.alive, self.frozen, self.ready = alive, frozen, ready
        self.clock = clock or (lambda: self.world.now)
        self.running = self.troubled = False
        self.awake_since = self.world.now
        self.stop = Signal()
        self.blames: list[str] = []  # members because of which it cannot begin
        self.participant: Participant | None = None
        collectives.parts.append(self)

    def doomed(self) -> bool:
        """Whether it shall stop, since another member failed or the lead is gone."""
        booth = self.booth
        if booth is None or not booth.shell.alive:
            return True
        ballot = booth.ballots.find(self.epoch)
        if not isinstance(ballot, Ballot) or ballot.aborted:
            return True
        here = {part.name for part in self.collectives.parts if part.epoch == self.epoch and part.alive()}
        return booth.shell._held is None and not ballot.members - ballot._done <= here

    def over(self) -> None:
        """Nothing of it goes on."""
        self.running = False
        if self in self.collectives.parts:
            self.collectives.parts.remove(self)

    # -- talking to the lead

    def tell(self, verb: str, *given: Any) -> Steps:
        """The lead's answer, or None: it is not heard."""
        yield self.world.between(0.0005, 0.02)
        booth = self.booth
        if booth is None or not booth.shell.alive:
            yield 0.05
            return None
        if frozenset((self.host, booth.host)) in booth.shell.faults.wire_cuts:
            yield UNANSWERED
            return None
        answered = Signal()

        def arrive() -> None:
            answered.set(booth.take(self, verb, *given))

        booth.shell.unless_stopped(arrive, arrive)
        return (yield self.world.first_of(answered, UNANSWERED))

    def _awake(self) -> Steps:
        while self.frozen():
            yield 0.05

    def arm(self, patience: float) -> Steps:
        """Votes; whether to go."""
        self.participant = part = Participant(patience, SILENCE, self.clock() + self.end - self.world.now, self.clock())
        while True:
            yield from self._awake()
            step = part.step(self.clock())
            if step is BallotStep.BACK or step is BallotStep.STOP:  # before it has begun: nothing was written
                self._goes_back(step)
                return False
            if step is BallotStep.GO:
                self.running = True
                self.world.spawn(self._watch(part))
                return True
            verb = {BallotStep.ASK: "ask", BallotStep.VOTE: "vote", BallotStep.GIVE_UP: "give_up"}[step]
            answer = yield from self.tell(verb, *([part.until] if step is BallotStep.VOTE else []))
            yield from self._awake()
            self.troubled |= answer is None
            part.took(answer, self.clock(), step)
            if part.step(self.clock()) in (BallotStep.ASK, BallotStep.GIVE_UP):
                yield self.world.between(0.0, POLL)

    def _goes_back(self, step: BallotStep) -> None:
        self.collectives.back += 1
        if self.troubled or step is BallotStep.STOP:
            return
        self.collectives.left.add((self.epoch, self.name))
        if self.collectives.words.get(self.epoch) is Word.GO:
            raise BrokenPromiseError(f"{self.name} goes back from epoch {self.epoch}, of which go is written")

    def _watch(self, part: Participant) -> Steps:
        """Asks as long as it runs."""
        while self.running and self.alive():
            yield self.world.between(0.0, POLL)
            yield from self._awake()
            answer = yield from self.tell("ask")
            yield from self._awake()
            if answer is not None:
                part.took(answer, self.clock())
            if part.step(self.clock()) is BallotStep.STOP:
                self.collectives.stopped += 1
                self.stop.set(part.why)
                return

    def ended(self, problem: weights_pb2.Problem | None) -> Steps:
        """Tells the lead, and stops asking. Who is done needs the lead no longer: it tries until it is to stop."""
        try:
            if problem is not None:
                yield from self.tell("leave", f"failed: {problem.message}")
                return
            while self.world.now < self.end and self.alive() and not self.stop.ready:
                if (yield from self.tell("done")) is not None:
                    self.collectives.ended_well += 1
                    return
                yield POLL
        finally:
            self.over()

    # -- moving what moves

    def joins(self, named: bytes, members: list[str], process: object, seconds: float) -> Steps:
        """The communicator, made with all the others; raises UNAVAILABLE if they are not there in time."""
        made = self.collectives.communicators.setdefault(named, Communicator(tuple(members)))
        made.join(self.name, process)
        yield self.world.first_of(made.complete, seconds)
        if not made.complete.ready:
            self.blames = missing = sorted(set(members) - made.joined.keys())
            raise unavailable(f"{missing} did not join the communicator in {seconds:.1f} s")
        return made

    def sends(self, made: Communicator, receiver: str, index: int, read: Callable[[], str]) -> Steps:
        """One slice; raises ABORTED when it is to stop."""
        sent, received = made.pair(self.epoch, self.name, receiver, index)
        yield self.world.between(0.001, 0.03)
        yield from self._awake()
        sent.set(read())
        yield from self._meets(received)

    def receives(self, made: Communicator, sender: str, index: int) -> Steps:
        """One slice; raises ABORTED when it is to stop."""
        sent, received = made.pair(self.epoch, sender, self.name, index)
        tag = yield from self._meets(sent)
        received.set()
        return tag

    def _meets(self, signal: Signal) -> Steps:
        either = Signal()
        signal.then(lambda value: either.set((True, value)))
        self.stop.then(lambda why: either.set((False, why)))
        well, value = yield either
        if not well:
            raise aborted(f"the collective was aborted: {value}")
        return value
