"""Decides whether a call's version can be staged: what its replicas go back to, and that something near each holds it.
Takes the first wave once it is on the disk.

It does not decide waves (`deploy.py`), and what comes after the first one is not its own (`deployments.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from ckpt_engine.core.names import some
from ckpt_engine.core.problems import invalid, precondition
from ckpt_engine.core.reach import by_directory
from ckpt_engine.core.version import Fence, Version
from ckpt_engine.machines.manager import deploy
from ckpt_engine.machines.manager.course import Course
from ckpt_engine.machines.manager.deploy import Condition, Deployment, Observed, Staging
from ckpt_engine.machines.manager.goal import Goal
from ckpt_engine.machines.manager.jobs import SealedVersion, Started
from ckpt_engine.machines.manager.members import Replica
from ckpt_engine.machines.manager.report import build_report, tell_not_finite
from ckpt_engine.machines.manager.state import ManagerState
from ckpt_engine.machines.manager.update_relays import UpdateRelays
from ckpt_engine.machines.manager.versions import Commit
from ckpt_engine.v1 import manager_pb2


def stage(state: ManagerState, goal: Goal, options: manager_pb2.UpdateOptions) -> Goal:
    """The goal, staged as its call wishes. options: complete.

    Relays bring the version everywhere first, and a trainer's live memory is not read, since it changes before the last
    wave. A first version is brought to all replicas at once: there is nothing that could serve meanwhile.

    Raises FAILED_PRECONDITION if the replicas are to serve different versions, or if nothing could bring them back.
    """
    if not goal.dry_run and any(row.meets(goal.pool, goal.lineage) for row in state.deployments.values()):
        return goal  # it joins that deployment, or begins once that is decided, and is staged then
    if goal.until == manager_pb2.UNTIL_FIRST_WAVE:
        goal.until = manager_pb2.UNTIL_INSTALLED
    if options.strategy == "all" or goal.resumes is not None:
        return goal
    strategy = deploy.strategy_of(options.strategy)
    if goal.probe is None and any(each.name == "probe" for each in options.conditions):
        raise invalid("condition 'probe' needs a probe: give `Trainer(probe=...)` one, or leave the condition out")
    if goal.prefetch == manager_pb2.PREFETCH_AUTO and not all(each.outlives for each in goal.published.sources):
        goal.prefetch = manager_pb2.PREFETCH_ALWAYS
    if strategy.needs_all:
        goal.min_replicas = len(goal.replicas)
    commits = {name: state.versions.commit_of(name) for name in goal.replicas}
    known = [commit for commit in commits.values() if commit is not None]
    if not known or goal.dry_run:
        return goal
    if len({None if commit is None else commit.identity for commit in commits.values()}) > 1:
        named = ((name, "nothing" if commit is None else commit.identity) for name, commit in sorted(commits.items()))
        raise precondition(
            "a staged deployment goes back to one version, and its replicas are to serve different ones ("
            f"{'; '.join(f'{name}: {what}' for name, what in named)}): bring them to one first, with strategy 'all' or "
            "a rollback"
        )
    base = max(known, key=lambda commit: commit.epoch)
    check_way_back(state, options.strategy, base.identity, goal.replicas)
    goal.staging = Staging(
        base=base.identity,
        base_epoch=base.epoch,
        strategy=options.strategy,
        wave_replicas=options.wave_replicas,
        wave_share=options.wave_share,
        conditions=tuple(Condition(each.name, each.value) for each in options.conditions) or strategy.conditions,
        newer=options.newer or manager_pb2.NEWER_SUPERSEDE,
        pause_mode=goal.pause_mode,
        min_replicas=goal.min_replicas,
        wave_seconds=options.timeout_seconds or state.deadlines.update,
        pool=goal.pool,
        selection=goal.selection,
        until=options.until,
    )
    if not all(source.stays_sealed for source in goal.published.sources):
        goal.until = manager_pb2.UNTIL_HELD
    return goal


def check_way_back(state: ManagerState, strategy: str, base: Version, replicas: Collection[str]) -> None:
    """Raises FAILED_PRECONDITION if something near one of these replicas does not go on holding the base: before
    anything is sealed, and again before the first wave is committed."""
    if lacking := _cannot_go_back(state, base, replicas):
        raise precondition(
            f"strategy {strategy!r} must be able to bring replicas back to {base}, and nothing that {some(lacking)} "
            "could read it from goes on holding it: with a relay on each of their hosts, update once with "
            "prefetch='always', so that relays hold what is served; or use strategy 'all'",
            replica=lacking[0],
        )


def observed(replica: Replica | None, target: Version, failure: str = "") -> Observed:
    """What was heard last of a participant. failure: why it could not be brought to the target."""
    if replica is None:
        return Observed(failure=failure)
    has_target = replica.serving and replica.holds(target)
    return Observed(replica.peer is not None, replica.serving, has_target, failure)


def check_staged(course: Course, target: Version, prepared: Sequence[str]) -> None:
    """Raises FAILED_PRECONDITION if there is no way back for these replicas any more."""
    staging = course.goal.staging
    if staging is not None and staging.base != target:
        check_way_back(course.state, staging.strategy, staging.base, prepared)


def first_wave(course: Course, target: Version, prepared: Sequence[str], fence: Fence) -> Deployment | None:
    """The deployment that begins with the commit of this fence; None: the version is for all replicas at once, since
    that was asked for, or since they are to serve it already. prepared: the replicas that can take part."""
    staging, replicas = course.goal.staging, course.state.members.replicas
    if staging is None or staging.base == target:
        return None
    fleet = {name: observed(replicas.get(name), target) for name in prepared}
    return staging.deployment(target, fleet, fence.epoch)


def take_first_wave(
    course: Course,
    row: Deployment,
    version: SealedVersion,
    outcomes: Mapping[str, manager_pb2.ReplicaOutcome],
    relays: UpdateRelays | None,
    now: float,
) -> Started:
    """Takes the first wave, which is on the disk: replicas follow their commits from now on. outcomes: of replicas that
    cannot take part."""
    state, goal, fence = course.state, course.goal, course.state.fence(row.number)
    state.intent_ended(fence)
    state.versions.take_number(row.target)
    state.versions.begin_staged(row.target, goal, version.seal)
    state.versions.select(Commit(row.number, row.target), row.waves[0].replicas, is_last=False)
    state.deployments[row.number] = row
    seconds = now - course.started
    report = build_report(fence, row.target, goal, outcomes, seconds=seconds, planning=seconds, held=True)
    report.held = False
    if relays is not None:
        relays.add_to(report)
    tell_not_finite(report, course.not_finite)
    report.timeline.CopyFrom(course.timeline)
    calls = dict(goal.calls)
    goal.calls.clear()
    assert goal.staging is not None
    return Started(row, report, calls, goal.staging.until, course.started, now, goal.end)


def _cannot_go_back(state: ManagerState, base: Version, replicas: Collection[str]) -> list[str]:
    """The replicas that nothing near goes on holding the base for: neither files nor a holder of their host."""
    content = state.versions.contents.get(base)
    published = None if content is None else content.published
    if published is not None and all(source.outlives for source in published.sources):
        return []
    holders = [each for each in state.members.connected_holders() if any(held.identity == base for held in each.held)]

    def reads(replica: Replica | None) -> bool:
        hosts = [] if replica is None else [each.host for each in replica.prepared.values()] or [replica.host]
        return bool(hosts) and all(any(by_directory(holder.host, host).ok for holder in holders) for host in hosts)

    known: Mapping[str, Replica] = state.members.replicas
    return [name for name in replicas if not reads(known.get(name))]
