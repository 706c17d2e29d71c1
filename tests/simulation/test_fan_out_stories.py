"""Updates of several hosts whose relays are filled together and send each other what they have verified."""

from __future__ import annotations

import pytest

from ckpt_engine.core.chunk_order import ChunkOrder
from ckpt_engine.v1 import manager_pb2
from tests.simulation.hosts import host_of
from tests.simulation.mistakes import Mistake, Patch, must_be_noticed, name_of
from tests.simulation.passing import Passing
from tests.simulation.scenario import Slant
from tests.simulation.story import NEW, OLD, Story, outcomes
from tests.simulation.test_relay_hosts import begun, holds, relays_on, trained

HOSTS = [host_of(name) for name in "ABCDE"]
A, *FAR = HOSTS


@pytest.fixture
def story() -> Story:
    made = Story(far=True, fill=16.0, update=40.0)
    made.hosts = HOSTS
    return made


def test_several_hosts_are_filled_together_and_report_it(story: Story) -> None:
    relays = relays_on(story, *HOSTS)
    agents = [story.replica(host=host) for host in FAR]
    group = story.ranks()
    for _ in range(3):
        report = trained(story, group)
        assert outcomes(report) == {agent.name: NEW for agent in agents}
        assert "relay b" in report.prefetch
        assert "it is filled along with 3 others" in report.prefetch
        brought = [one for each in report.relays for one in each.filled.brought]
        assert sum(one.bytes for one in brought if one.source == "relay a") == 4, "each slice leaves the host once"
    assert all(relay.fills == 3 for relay in relays)


def test_who_was_slow_twice_passes_nothing_on_until_another_process_takes_its_place(story: Story) -> None:
    relays = relays_on(story, *HOSTS)
    for relay in relays:
        relay.sends = manager_pb2.Rate(bytes_per_second=1e9 if relay.name != "b" else 1e8, seconds=1.0)
    agents = [story.replica(host=host) for host in FAR]
    group = story.ranks()
    for expected in (False, False, True, True):
        report = trained(story, group)
        assert outcomes(report) == {agent.name: NEW for agent in agents}
        assert ("but passes nothing on: it sent 100 MB/s" in report.prefetch) == expected
        brought = {one.source for each in report.relays for one in each.filled.brought}
        assert ("relay b" in brought) != expected
        assert story.cluster.manager is not None
        told = {each.name: bool(each.slow) for each in story.cluster.manager.machine.status().holders}
    assert told == {relay.name: relay.name == "b" for relay in relays}
    slow = next(relay for relay in relays if relay.name == "b")
    slow.crash()
    story.join_relay(slow.name, slow.host)
    story.wait(8.0)
    report = trained(story, group)
    assert "but passes nothing on" not in report.prefetch
    assert "relay b" in {one.source for each in report.relays for one in each.filled.brought}


def test_one_host_is_filled_as_ever(story: Story) -> None:
    relays_on(story, A, FAR[0])
    story.replica(host=FAR[0])
    report = trained(story, story.ranks())
    assert "along with" not in report.prefetch


def test_a_relay_that_cannot_be_asked_passes_nothing_on(story: Story) -> None:
    _, b, c = relays_on(story, A, *FAR[:2])
    b.filling.ClearField("chunks")
    b.break_streams()
    story.wait(3.0)
    agents = [story.replica(host=host) for host in FAR[:2]]
    report = trained(story, story.ranks())
    assert outcomes(report) == {agent.name: NEW for agent in agents}
    assert "relay b" not in {one.source for each in report.relays for one in each.filled.brought}
    assert (b.fills, c.fills) == (1, 1)


def test_where_a_relay_is_asked_is_not_shown(story: Story) -> None:
    relays_on(story, A)
    assert story.cluster.manager is not None
    (holder,) = story.cluster.manager.machine.status().holders
    assert not holder.filling.HasField("chunks")


@pytest.mark.parametrize(
    "when",
    [
        pytest.param("before it has anything", marks=pytest.mark.slow),
        "in the middle",
        pytest.param("once it has all of it", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("how", ["killed", "stopped", "cut off", "killed and started again"])
def test_whoever_loses_one_that_passes_on_reads_another(story: Story, when: str, how: str) -> None:
    relays_on(story, *HOSTS)
    agents = [story.replica(host=host) for host in FAR]
    group = story.ranks()
    assert set(outcomes(trained(story, group)).values()) == {NEW}
    lost = next(relay for relay in story.relays if relay.name == "b")

    def reached() -> bool:
        if lost.passing is None or lost.fills < 2:
            return False
        has = len(lost.passing.verified)
        return {"before it has anything": True, "in the middle": has >= 2, "once it has all of it": has == 4}[when]

    result = begun(story, group, reached)
    if "killed" in how:
        lost.crash()
        if "again" in how:
            story.join_relay(lost.name, lost.host)
    elif how == "stopped":
        lost.stop_for(30.0)
    else:
        story.faults.wire_cuts |= {frozenset("B" + other) for other in "ACDE"}
        story.world.after(1.0, story.faults.wire_cuts.clear)
    story.wait(41.0)
    (report,) = result
    found = outcomes(report)
    first, *others = (agent.name for agent in agents)
    assert {name: found[name] for name in others} == dict.fromkeys(others, NEW), report
    assert found[first] in (NEW, OLD), report
    assert all(holds(agent) == report.identity for agent in agents[1:])


def test_late_hosts_are_filled_together_from_whoever_holds_the_version(story: Story) -> None:
    relays_on(story, A, FAR[0])
    story.replica(host=FAR[0])
    group = story.ranks()
    report = trained(story, group)
    story.end_group(group, in_good_order=True)
    late = relays_on(story, *FAR[1:])
    agents = [story.replica(host=host) for host in FAR[1:]]
    story.wait(8.0)
    assert all(holds(agent) == report.identity for agent in agents)
    assert all(relay.fills == 1 for relay in late)


# -- rules, taken out one by one


def a_relay_passes_on_what_it_has_verified_only(patch: Patch) -> None:
    """It passes on whatever lies in its slot."""
    original = Passing.passed

    def passed(self: Passing, index: int, wanted: str) -> str | None:
        self.verified |= self.slot.memory.keys()
        return original(self, index, wanted)

    patch.setattr(Passing, "passed", passed)


def a_relay_asks_only_relays_before_it(patch: Patch) -> None:
    """Each asks all others."""

    def before(self: ChunkOrder, name: str, chunk: int) -> tuple[str, ...]:
        return tuple(other for other in self._names if other != name)

    patch.setattr(ChunkOrder, "before", before)


RULES: list[Mistake] = [
    a_relay_passes_on_what_it_has_verified_only,
    a_relay_asks_only_relays_before_it,
]


@pytest.mark.parametrize("rule", RULES, ids=name_of)
def test_some_seed_notices_without(rule: Mistake, monkeypatch: pytest.MonkeyPatch) -> None:
    must_be_noticed(rule, monkeypatch, Slant(relays=True, far=True, held=0.5))
