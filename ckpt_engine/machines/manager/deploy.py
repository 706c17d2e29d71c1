"""Decides the waves of a staged deployment, and from what its replicas do, what comes next: a wave, a wait, or the end.

It brings no replica anywhere, reads no clock and writes no ledger: `deployments.py` commits what is decided here, and
replicas follow their commits (`reconcile.py`). Pure.

A strategy is one entry of STRATEGIES: which replicas make the next wave. A condition is one entry of CONDITIONS: a
value with a name and a verdict; all conditions of a deployment must be met between two waves, and one that is broken
undoes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from functools import cached_property
from typing import TypeAlias

from ckpt_engine.core.names import some
from ckpt_engine.core.probe import excuses_engine, is_bad, why_bad
from ckpt_engine.core.problems import invalid
from ckpt_engine.core.version import Version
from ckpt_engine.v1 import manager_pb2

State = manager_pb2.Deployment.State

UNDECIDED = manager_pb2.Deployment.STATE_UNDECIDED
DEPLOYED = manager_pb2.Deployment.STATE_DEPLOYED
UNDONE = manager_pb2.Deployment.STATE_UNDONE


@dataclass(frozen=True)
class Condition:
    """What must be so between two waves."""

    name: str  # of CONDITIONS
    value: float = 0.0  # what it means, the condition says

    def describe(self) -> str:
        """As a user gives it: "time=300"."""
        return f"{self.name}={self.value:g}" if self.value else self.name


@dataclass(frozen=True)
class Wave:
    """replicas that were told to serve the target together."""

    epoch: int  # of its commit
    replicas: tuple[str, ...]


@dataclass(frozen=True)
class Deployment:
    """A staged deployment, as the ledger keeps it. Its fields are those of the message, explained there."""

    base: Version
    base_epoch: int
    target: Version
    strategy: str
    wave_replicas: int
    conditions: tuple[Condition, ...]
    newer: manager_pb2.Newer
    pause_mode: manager_pb2.PauseMode
    min_replicas: int
    wave_seconds: float
    pool: str
    selection: frozenset[str]
    participants: tuple[str, ...]
    waves: tuple[Wave, ...] = ()
    state: State = UNDECIDED
    approved: int = 0
    paused: bool = False
    reason: str = ""

    @property
    def number(self) -> int:
        """The epoch of its first commit, which names it."""
        return self.waves[0].epoch

    @cached_property
    def in_waves(self) -> frozenset[str]:
        """The replicas of all waves so far."""
        return frozenset(name for wave in self.waves for name in wave.replicas)

    def meets(self, pool: str, lineage: str) -> bool:
        """Whether it is undecided, and about the same pool or lineage."""
        return self.state == UNDECIDED and (pool == self.pool or lineage == self.target.lineage)

    def is_to(self, lineage: str, number: int) -> bool:
        """Whether this is the number of its target."""
        return (self.target.lineage, self.target.number) == (lineage, number)

    def installs_together(self, identity: Version) -> bool:
        """Whether replicas that are brought to this version wait for one another once they are ready."""
        return self.state == UNDECIDED and identity == self.target and STRATEGIES[self.strategy].needs_all

    def with_wave(self, epoch: int, replicas: Iterable[str]) -> Deployment:
        """The deployment with one more wave."""
        return replace(self, waves=(*self.waves, Wave(epoch, tuple(sorted(replicas)))))

    def message(self, waits_for: str = "", requests: int = 0, failed: int = 0) -> manager_pb2.Deployment:
        """The deployment as a protobuf message. requests, failed: as the message says."""
        return manager_pb2.Deployment(
            number=self.number,
            base=self.base.message(),
            base_epoch=self.base_epoch,
            target=self.target.message(),
            strategy=self.strategy,
            wave_replicas=self.wave_replicas,
            conditions=[manager_pb2.DeployCondition(name=each.name, value=each.value) for each in self.conditions],
            newer=self.newer,
            pause_mode=self.pause_mode,
            min_replicas=self.min_replicas,
            wave_seconds=self.wave_seconds,
            pool=self.pool,
            selection=sorted(self.selection),
            participants=self.participants,
            waves=[manager_pb2.Deployment.Wave(epoch=each.epoch, replicas=each.replicas) for each in self.waves],
            state=self.state,
            approved=self.approved,
            paused=self.paused,
            reason=self.reason,
            waits_for=waits_for,
            requests=requests,
            failed_requests=failed,
        )

    @classmethod
    def of(cls, message: manager_pb2.Deployment) -> Deployment:
        """Reads it from a message."""
        return cls(
            base=Version.of(message.base),
            base_epoch=message.base_epoch,
            target=Version.of(message.target),
            strategy=message.strategy,
            wave_replicas=message.wave_replicas,
            conditions=tuple(Condition(each.name, each.value) for each in message.conditions),
            newer=message.newer,
            pause_mode=message.pause_mode,
            min_replicas=message.min_replicas,
            wave_seconds=message.wave_seconds,
            pool=message.pool,
            selection=frozenset(message.selection),
            participants=tuple(message.participants),
            waves=tuple(Wave(each.epoch, tuple(each.replicas)) for each in message.waves),
            state=message.state,
            approved=message.approved,
            paused=message.paused,
            reason=message.reason,
        )


@dataclass(frozen=True)
class Observed:
    """One participant, as it was heard of last."""

    connected: bool = False  # its agent has a session
    serving: bool = False  # it lets requests in
    has_target: bool = False  # all its workers hold the target, and it serves
    failure: str = ""  # why it could not be brought to the target; empty: that is not known
    ready: bool = False  # it is being brought to the target, and its engine may be paused for that, or was
    was_ready: bool = False  # that was so once since its wave began


Fleet: TypeAlias = Mapping[str, Observed]
"""The participants, by name."""


class Verdict(Enum):
    """What has become of a wave or a condition."""

    MET = auto()
    OPEN = auto()  # it is not known yet
    BROKEN = auto()  # the deployment is undone


@dataclass(frozen=True)
class Judgement:
    """A verdict, with its reason."""

    verdict: Verdict
    reason: str = ""  # for people; empty if it is met
    seconds: float | None = None  # until it is to be judged again at the latest; None: with the next news


MET = Judgement(Verdict.MET)

LEAST_REQUESTS = 20
"""A share of fewer requests than these says nothing."""

COUNTED_SECONDS = 1.0
"""How often requests are counted: replicas tell of them in heartbeats, which are no news otherwise."""


@dataclass(frozen=True)
class Facts:
    """What is known between two waves, for conditions."""

    seconds: float  # since the last wave ended, or since this manager began, if that was later
    approved: bool  # a person has approved what follows this wave
    probes: Mapping[str, manager_pb2.ProbeAnswer | None] = field(default_factory=dict)
    """By replica that serves the target, what its engine has answered to the probe; None: that is not known."""
    requests: int = 0  # that replicas of all waves have answered since the last wave ended
    failed: int = 0  # of these


def _time(value: float, facts: Facts) -> Judgement:
    remaining = value - facts.seconds
    return MET if remaining <= 0 else Judgement(Verdict.OPEN, f"{value:g} s after the wave", remaining)


def _person(value: float, facts: Facts) -> Judgement:
    approve = "a person's word: `ckpt-engine deploy approve`, or `deploy undo`"
    return MET if facts.approved else Judgement(Verdict.OPEN, approve)


def _probe(value: float, facts: Facts) -> Judgement:
    """Broken by a replica that breaks a bound or gave no answer. Where no answer is known (a manager that was started
    again has no scores to ask for, an agent could not fetch them from the one before, or a person's command cut the
    questions short), a person's word stands in for it: nothing waits unseen."""
    answers = {
        name: None if answer is None or excuses_engine(answer) else answer for name, answer in facts.probes.items()
    }
    bad = {name: answer for name, answer in answers.items() if answer is not None and is_bad(answer)}
    if bad:
        name = min(bad)
        return Judgement(Verdict.BROKEN, f"replica {name}: {why_bad(bad[name])}")
    unknown = sorted(name for name, answer in answers.items() if answer is None)
    if unknown and not facts.approved:
        why = f"an answer of {some(unknown)} to the probe, or `ckpt-engine deploy approve` (or undo) without it"
        return Judgement(Verdict.OPEN, why)
    return MET


def _errors(value: float, facts: Facts) -> Judgement:
    """Judged as long as it is between two waves, so with another condition that says how long."""
    counted = f"{facts.failed} of {facts.requests} requests failed"
    if facts.requests < LEAST_REQUESTS:
        return Judgement(Verdict.OPEN, f"{LEAST_REQUESTS} requests to its replicas ({counted})", COUNTED_SECONDS)
    if facts.failed > value * facts.requests:
        return Judgement(Verdict.BROKEN, f"{counted} since the wave's end, more than {value:g} of them")
    return Judgement(Verdict.MET, seconds=COUNTED_SECONDS)


CONDITIONS: Mapping[str, Callable[[float, Facts], Judgement]] = {
    "time": _time,
    "person": _person,
    "probe": _probe,
    "errors": _errors,
}
"""By name, what judges a condition from its value. A condition that needs to know more gets it in Facts."""


@dataclass(frozen=True)
class WaveRule:
    """How a version is deployed."""

    next_wave: Callable[[Deployment, Fleet], list[str]]  # empty: none can begin now
    conditions: tuple[Condition, ...] = ()  # if the caller names none
    one_wave: bool = False  # so it has neither a size of waves nor conditions between them
    # It is refused unless every replica of the call can take part, and none of them is paused before all are ready.
    needs_all: bool = False


def _some_at_a_time(deployment: Deployment, fleet: Fleet) -> list[str]:
    """As many as leave at most a wave of all participants out of service; those that do not serve come first."""
    closed = [name for name, each in fleet.items() if not (each.serving or each.failure)]  # failures are counted apart
    room = deployment.wave_replicas - sum(name in deployment.in_waves or not fleet[name].connected for name in closed)
    waiting = _waiting(deployment, fleet)
    return sorted(waiting, key=lambda name: (fleet[name].serving, name))[: max(0, room)]


def _few_then_rest(deployment: Deployment, fleet: Fleet) -> list[str]:
    """First some that serve, if there are such; then all others."""
    waiting = sorted(_waiting(deployment, fleet), key=lambda name: (not fleet[name].serving, name))
    return waiting if deployment.waves else waiting[: deployment.wave_replicas]


STRATEGIES: Mapping[str, WaveRule] = {
    "rolling": WaveRule(_some_at_a_time),
    "canary": WaveRule(_few_then_rest, conditions=(Condition("person"),)),
    "all_or_none": WaveRule(lambda deployment, fleet: _waiting(deployment, fleet), one_wave=True, needs_all=True),
}
"""By name. "all" is none of them: that is an update without waves."""


def _waiting(deployment: Deployment, fleet: Fleet) -> list[str]:
    """The participants that are there and in no wave yet. Those that are lost hold nothing up: they follow the decision
    when they are back."""
    return [name for name, each in fleet.items() if name not in deployment.in_waves and each.connected]


def strategy_of(name: str) -> WaveRule:
    """The strategy of this name. Raises INVALID_ARGUMENT, naming the known ones."""
    strategy = STRATEGIES.get(name)
    if strategy is None:
        raise invalid(f"strategy {name!r} is none of all, {', '.join(STRATEGIES)}, which this manager knows")
    return strategy


def not_ready(fleet: Fleet) -> list[str]:
    """The replicas that neither serve the target nor are ready for it."""
    return sorted(name for name, each in fleet.items() if not (each.ready or each.has_target))


def judge_wave(deployment: Deployment, fleet: Fleet, seconds: float) -> Judgement:
    """Whether the last wave has ended, `seconds` after its commit. It is met when all its replicas serve the target,
    but for as many as may fail, if any replica serves it; one that is not there by `wave_seconds` has failed."""
    if not deployment.participants:
        return Judgement(Verdict.BROKEN, "all of its replicas said goodbye or were evicted")
    wave = [name for name in deployment.waves[-1].replicas if name in fleet]
    overdue = f"it does not serve the version {deployment.wave_seconds:g} s after it was to"
    failed, lacking = {}, []
    for name in deployment.in_waves & fleet.keys():
        if fleet[name].has_target:
            continue
        timeout = overdue if name in wave and seconds >= deployment.wave_seconds else ""
        if why := fleet[name].failure or timeout:
            failed[name] = why
        elif name in wave:
            lacking.append(name)
    some_have = not wave or any(fleet[name].has_target for name in deployment.in_waves & fleet.keys())
    if len(failed) > len(deployment.participants) - deployment.min_replicas or (
        failed and not lacking and not some_have
    ):
        name = min(failed, key=lambda name: (fleet[name].was_ready, name))
        return Judgement(Verdict.BROKEN, f"replica {name}: {failed[name]}")
    if not lacking:
        return MET
    remaining = deployment.wave_seconds - seconds
    if STRATEGIES[deployment.strategy].needs_all and (unready := not_ready(fleet)):
        return Judgement(Verdict.OPEN, f"{some(unready)} to be ready: no engine is paused before all are", remaining)
    return Judgement(Verdict.OPEN, f"{some(sorted(lacking))} to serve version {deployment.target.number}", remaining)


@dataclass(frozen=True)
class Decide:
    """Commits the target, or the base again, for the whole selection."""

    state: State  # DEPLOYED or UNDONE
    reason: str = ""  # of an undo, for people


@dataclass(frozen=True)
class NextWave:
    """Commits the target for the next wave."""

    replicas: tuple[str, ...]


Step: TypeAlias = Decide | NextWave | Judgement
"""What comes next. A judgement is an open one: to wait."""


def next_step(deployment: Deployment, fleet: Fleet, facts: Facts) -> Step:
    """What comes after a wave that has ended, or at the beginning. A participant that is not in the fleet, since an
    operator holds it, is still to come: conditions are judged before the others are decided about. After the last wave
    the probe alone is judged."""
    strategy = STRATEGIES[deployment.strategy]
    if not deployment.participants:
        return Decide(UNDONE, "all of its replicas said goodbye or were evicted")
    is_last = deployment.in_waves.issuperset(deployment.participants)
    conditions = [each for each in deployment.conditions if each.name == "probe" or not is_last]
    judgements = [CONDITIONS[each.name](each.value, facts) for each in conditions]
    for each in judgements:
        if each.verdict is Verdict.BROKEN:
            return Decide(UNDONE, each.reason)
    seconds = min((each.seconds for each in judgements if each.seconds is not None), default=None)
    if deployment.waves:
        if deployment.paused and not is_last:
            return Judgement(Verdict.OPEN, "a person has paused it: `ckpt-engine deploy resume`", seconds)
        waits = [each.reason for each in judgements if each.verdict is Verdict.OPEN]
        if waits:
            return Judgement(Verdict.OPEN, "; ".join(waits), seconds)
    if not _waiting(deployment, fleet):
        return Decide(DEPLOYED)
    wave = strategy.next_wave(deployment, fleet)
    if wave:
        return NextWave(tuple(wave))
    closed = sorted(name for name, each in fleet.items() if not each.serving)
    why = f"{some(closed)} to serve: no more than {deployment.wave_replicas} of {len(fleet)} may not serve at a time"
    return Judgement(Verdict.OPEN, why, seconds)


@dataclass(frozen=True)
class Staging:
    """How a call wants its version deployed in waves, once it is known that there is a way back."""

    base: Version  # what its replicas are to serve now
    base_epoch: int  # of the commit of that
    strategy: str
    wave_replicas: int
    wave_share: float
    conditions: tuple[Condition, ...]
    newer: manager_pb2.Newer
    pause_mode: manager_pb2.PauseMode
    min_replicas: int | None
    wave_seconds: float
    pool: str
    selection: frozenset[str]
    until: manager_pb2.Until  # what the callers wait for

    def deployment(self, target: Version, fleet: Fleet, epoch: int) -> Deployment:
        """The deployment with its first wave. fleet: the replicas that can take part. epoch: of the commit."""
        names = tuple(sorted(fleet))
        size = self.wave_replicas or int(self.wave_share * len(names)) or 1
        least = len(names) if self.min_replicas is None else self.min_replicas
        row = Deployment(
            base=self.base,
            base_epoch=self.base_epoch,
            target=target,
            strategy=self.strategy,
            wave_replicas=size,
            conditions=self.conditions,
            newer=self.newer,
            pause_mode=self.pause_mode,
            min_replicas=max(1, min(least, len(names))),
            wave_seconds=self.wave_seconds,
            pool=self.pool,
            selection=self.selection,
            participants=names,
        )
        wave = STRATEGIES[self.strategy].next_wave(row, fleet)
        return row.with_wave(epoch, wave or names[:1])


def check_options(options: manager_pb2.UpdateOptions) -> None:
    """Raises INVALID_ARGUMENT for options of a staged deployment that contradict each other."""
    values = {
        "wave": options.wave_replicas or options.wave_share,
        "condition": len(options.conditions),
        "newer": options.newer,
        "until='first_wave'": options.until == manager_pb2.UNTIL_FIRST_WAVE,
    }
    named = [name for name, value in values.items() if value]
    if options.strategy == "all":
        if named:
            raise invalid(f"{' and '.join(named)}: only a staged deployment has that, so give a strategy too")
        return
    strategy = strategy_of(options.strategy)
    unfit = ["wave"] if values["wave"] else []
    # The condition "probe" judges the last wave, too.
    unfit += [f"condition {each.name!r}" for each in options.conditions if each.name != "probe"]
    if strategy.one_wave and unfit:
        raise invalid(f"strategy {options.strategy!r} has one wave, so it has no {' and no '.join(unfit)}")
    if not 0 <= options.wave_share < 1:
        raise invalid(f"a wave is a number of replicas, or a share of them between 0 and 1, not {options.wave_share}")
    for each in options.conditions:
        if each.name not in CONDITIONS:
            raise invalid(f"condition {each.name!r} is none of {', '.join(CONDITIONS)}, which this manager knows")
        if not 0 <= each.value < float("inf"):
            raise invalid(f"condition {each.name!r} has the value {each.value}: give a number from 0 on")
        if each.value and each.name not in ("time", "errors"):
            hint = ": bounds are given to `Probe(...)`" if each.name == "probe" else ""
            raise invalid(f"condition {each.name!r} has no value, and {each.value:g} was given{hint}")
    if {each.name for each in options.conditions} == {"errors"}:
        raise invalid(
            "condition 'errors' says how many requests may fail until another condition is met: give that one too, as "
            "'time=300' or 'person'"
        )
