"""The part of an update in which replicas get their weights by a collective: the members, and what each is told.

The manager chooses the members before the intent and tells them after it. It decides nothing else: members vote in the
lead's ballot (`core/arming.py`), and from then on the manager is not needed. A replica that was blamed for several
failed collectives in a row is left out of the next one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from ckpt_engine.core.problems import unavailable
from ckpt_engine.core.transports import collective_transport
from ckpt_engine.core.version import Fence
from ckpt_engine.machines.events import CollectivePlan, Compiled, WorkerKey
from ckpt_engine.machines.manager.course import Course
from ckpt_engine.machines.manager.members import TrainerRank
from ckpt_engine.machines.manager.recipients import Recipients, with_words
from ckpt_engine.machines.manager.relay_or_collective import CollectiveCandidate, collective_decision
from ckpt_engine.v1 import manager_pb2, weights_pb2

NEW = manager_pb2.OUTCOME_NEW_SERVING

BLAMES = 2
"""Failed collectives in a row for which a replica is blamed before it is left out. The next update mends what one
failure has left dirty; a replica that is broken for good must not keep all others from their weights."""


def name_of(member: str | WorkerKey) -> str:
    """A member's name for messages: a source's id says what it is already."""
    return member if isinstance(member, str) else f"{member[0]}, worker {member[1]}"


class UpdateCollective:
    """The collective of one update."""

    def __init__(self, course: Course, recipients: Recipients) -> None:
        self._course = course
        self._state = course.state
        self._recipients = recipients
        self._compiled: Compiled | None = None
        self._part = manager_pb2.Collective()
        self._ranks: dict[int, int] = {}  # trainer ranks: their index
        self._workers: dict[WorkerKey, int] = {}
        self._took: dict[int, manager_pb2.TookPart] = {}
        self._absent_ranks: set[int] = set()
        self._candidates: dict[str, CollectiveCandidate] = {}
        self._collective_only = self._published = False
        self.replicas: frozenset[str] = frozenset()  # that take part; empty: there is no collective
        self.why = ""  # there is one or none, a sentence for people

    # -- the members

    def choose(self, compiled: Compiled, near_relays: Collection[str]) -> bool:
        """Chooses the members. Returns whether plans are to be compiled again, now with a collective. near_relays:
        replicas that reach a relay."""
        goal, first = self._course.goal, self._compiled is None
        self._compiled = compiled
        if not first:
            self._drop_unplanned(compiled.unfit)
            return False
        sources = goal.published.sources
        transport = collective_transport()
        ways = [way for source in sources for way in source.ways]
        offered = bool(ways) and all(transport in way for way in ways)
        candidates = {}
        for worker in self._recipients.workers():
            name = worker.key[0]
            unable = ""
            if not offered:
                unable = f"cannot take part in one: the trainer does not publish for {transport}"
            elif transport not in worker.transports:
                unable = f"cannot use {transport}"
            candidates[name] = CollectiveCandidate(name not in compiled.unfit, name in near_relays, unable)
        self._published = any(transport in way for way in ways)
        self._collective_only = offered and all(way == {transport} for way in ways)
        if goal.sealed is None:
            self._leave_out(candidates)
        self._candidates = candidates
        self._decide()
        return bool(self.replicas)

    def _decide(self) -> None:
        until_held, is_late = self._course.goal.until == manager_pb2.UNTIL_HELD, self._course.goal.sealed is not None
        decision = collective_decision(self._collective_only, until_held, is_late, self._candidates)
        self.replicas, self.why = frozenset(decision.replicas), decision.why

    def _drop_unplanned(self, unfit: Mapping[str, weights_pb2.Problem]) -> None:
        """Leaves out the chosen replicas that cannot be planned for."""
        unplanned = self.replicas & unfit.keys()
        for name in unplanned:
            why = f"takes no part: {unfit[name].message}"
            self._candidates[name] = self._candidates[name]._replace(unable=why)
        if unplanned:
            self._decide()

    def explained(self, unfit: Mapping[str, weights_pb2.Problem]) -> Mapping[str, weights_pb2.Problem]:
        """Adds to why no plans can be made for these replicas why no collective brings them the weights."""
        if not self._published:
            return unfit
        return {name: with_words(problem, self._reason_apart(name, problem)) for name, problem in unfit.items()}

    def _reason_apart(self, name: str, problem: weights_pb2.Problem) -> str:
        own = self._candidates[name].unable if name in self._candidates else ""
        reason = f"{name} {own}" if own else ("" if self.replicas else self.why)
        return "" if problem.message in reason else reason

    def _leave_out(self, candidates: dict[str, CollectiveCandidate]) -> None:
        """Leaves out replicas that were blamed for several failures in a row, unless no others are left. The next
        collective tries them again."""
        blames = self._state.blames
        able = {name for name, each in candidates.items() if not each.unable}
        bad = {name for name in able if blames.get(name, 0) >= BLAMES}
        for name in bad if bad < able else ():
            blames[name] -= 1
            why = f"is left out, since the last {BLAMES} ended because of it"
            candidates[name] = candidates[name]._replace(unable=why)

    def begin(self, fence: Fence) -> None:
        """Forms the collective, once the intent is on the disk: from now on `install` and `send` tell the members."""
        plan = None if self._compiled is None else self._compiled.collective
        if plan is None:
            return
        replicas = {member[0] for member in plan.members if not isinstance(member, str)}
        present = replicas & set(self._recipients.waiting_for())
        if present != replicas:
            for name in present:  # before anything is paused for a vote that cannot be complete
                message = f"its collective needs {', '.join(sorted(replicas - present))}, which is not in this update"
                self._recipients.leave_out(name, unavailable(message, replica=name).problem)
            return
        ranks = {source.source: source.rank for source in self._course.goal.published.sources}
        for index, member in enumerate(plan.members):
            if not isinstance(member, str):
                self._workers[member] = index
            elif (rank := ranks[member]) is not None:
                self._ranks[rank] = index
        self._part = manager_pb2.Collective(
            members=[name_of(member) for member in plan.members],
            plan=plan.plan,
            meeting=plan.meeting,
            communicator=self._communicator(fence, plan),
            arm_seconds=self._state.deadlines.arm,
        )

    def _communicator(self, fence: Fence, plan: CollectivePlan) -> bytes:
        """The communicator of the update before, if its plan and its members' processes are the same and all ended
        well; else a new one."""
        lineage = self._course.goal.lineage
        processes = [trainer.session_id.encode() for trainer in self._trainers().values()]
        for name in sorted(self.replicas):
            replica = self._state.members.replicas.get(name)
            processes += [] if replica is None else replica.boot_ids()
        makeup = (plan, tuple(processes))
        last = self._state.communicators.pop(lineage, None)
        communicator = last[1] if last is not None and last[0] == makeup else str(fence).encode()
        self._communicator_entry = lineage, makeup, communicator
        return communicator

    # -- telling them

    def install(self, name: str, command: manager_pb2.Install) -> None:
        """Adds the collective to a replica's command, if the replica takes part."""
        if name in self.replicas and self._part.members:
            command.collective.CopyFrom(self._part)
            for worker in command.workers:
                worker.member = self._workers[name, worker.rank]

    def send(self, fence: Fence, seconds: float) -> None:
        """Sends the command, again, to every rank that has not answered."""
        trainers = self._trainers()
        for rank in self.waiting_for():
            if rank in trainers and trainers[rank].session_id != self._course.sessions.get(rank):
                self._absent_ranks.add(rank)  # another process, which has sealed nothing of this
            elif rank in trainers:
                part = manager_pb2.TakePart(
                    fence=fence.message(),
                    collective=self._part,
                    member=self._ranks[rank],
                    deadline_seconds=seconds,
                    sealed=self._course.fence.message(),
                )
                self._state.send(trainers[rank], part)

    def waiting_for(self) -> list[int]:
        """Ranks that take part and are not known to have ended."""
        return sorted(self._ranks.keys() - self._took.keys() - self._absent_ranks)

    def answered(self, trainer: TrainerRank, body: manager_pb2.TookPart) -> None:
        """Takes a rank's answer: its part has ended."""
        self._took.setdefault(trainer.rank, body)

    def drop(self, trainer: TrainerRank) -> None:
        """Waits no more for a rank that will not come back."""
        self._absent_ranks.add(trainer.rank)

    def out_of_time(self) -> None:
        """Stops waiting for ranks."""
        self._absent_ranks.update(self.waiting_for())

    def blobs(self) -> list[manager_pb2.BlobRef]:
        """Blobs that members fetch."""
        plan = None if self._compiled is None else self._compiled.collective
        return [] if plan is None else [plan.plan]

    def _trainers(self) -> dict[int, TrainerRank]:
        return self._state.members.ranks(self._course.goal.lineage)

    # -- the end

    def conclude(self) -> None:
        """Ends it, once every replica has an outcome: keeps the communicator if all went well, and counts blames."""
        if not self._ranks:
            return
        all_well = not self._absent_ranks and not self.waiting_for()
        all_well = all_well and not any(body.HasField("problem") for body in self._took.values())
        if all_well and all(self._ended(name) == NEW for name in self.replicas):
            lineage, makeup, communicator = self._communicator_entry
            self._state.communicators[lineage] = makeup, communicator
        members = {name for body in self._took.values() for name in body.blamed}
        blamed = {key[0] for key, index in self._workers.items() if self._part.members[index] in members}
        for name in self.replicas:
            count = self._state.blames.pop(name, 0)
            if name in blamed:
                self._state.blames[name] = count + 1

    def _ended(self, name: str) -> manager_pb2.Outcome:
        outcome = self._recipients.outcome(name)
        return manager_pb2.OUTCOME_UNSPECIFIED if outcome is None else outcome.outcome

    def describe(self) -> str:
        """The report's sentence about the collective."""
        dirty = [name for name in sorted(self.replicas) if self._ended(name) == manager_pb2.OUTCOME_QUARANTINED]
        problems = [body.problem.message for _, body in sorted(self._took.items()) if body.HasField("problem")]
        text = self.why
        if problems:
            text += f"; it did not end well: {problems[0]}"
        if dirty:
            text += (
                f"; replicas that had begun and did not end, or were lost meanwhile, are closed ({', '.join(dirty)}): "
                "the next update mends them"
            )
        return text
