"""From a report to what Perfetto shows, with members that tell everything, little, or nothing."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from trace_format import File, read

from ckpt_engine.core.prediction import Rates, measured
from ckpt_engine.timeline.clocks import ANSWERED, GUESSED
from ckpt_engine.timeline.drawing import HOLDS, KEPT, draw
from ckpt_engine.timeline.perfetto import trace_events
from ckpt_engine.timeline.predicted import PROCESS, Whereabouts, add_prediction, compare_stages
from ckpt_engine.v1 import manager_pb2 as pb
from ckpt_engine.v1 import weights_pb2

BEGAN = 5000.0
"""The update, by the manager's clock."""

PHASES = (("gathering", -0.5), ("planning", 0.0), ("sealing", 1.0), ("filling", 2.0), ("installing", 4.0))
PHASES += (("reporting", 9.0),)
SECONDS = 9.1
MB = 10**6


def clocked(begin: float, seconds: float, ahead: float = 0.0) -> pb.Span:
    """Of a member whose clock is so far ahead, of the update's second `begin`."""
    return pb.Span(begin=BEGAN + ahead + begin, seconds=seconds, ahead=ahead, error=0.001)


def worker(rank: int, begin: float, ahead: float = 0.0, told: bool = True) -> pb.WorkerReport:
    report = pb.WorkerReport(rank=rank, bytes=50 * MB, tensors=7, verified=7, copies=1)
    report.transfer_seconds, report.install_seconds, report.verify_seconds = 1.0, 0.25, 0.5
    if told:
        report.span.CopyFrom(pb.Span(begin=BEGAN + ahead + begin, seconds=2.0, error=0.0005))
    return report


def replica(name: str, ahead: float, source: str, ranks: int = 1, told: bool = True) -> pb.ReplicaOutcome:
    """Installed from second 4.2 to 8.7 of the update; its workers from 5.5 to 7.5. told: it is of this version."""
    outcome = pb.ReplicaOutcome(replica=name, outcome=pb.OUTCOME_NEW_SERVING, pause_seconds=3.5, sync_seconds=4.5)
    stages = (
        (pb.STAGE_PLAN, 0.3),
        (pb.STAGE_QUIESCE, 0.7),
        (pb.STAGE_TRANSFER, 1.0),
        (pb.STAGE_INSTALL, 0.25),
        (pb.STAGE_VERIFY, 0.5),
    )
    outcome.stages.extend(pb.StageSeconds(stage=stage, seconds=seconds) for stage, seconds in stages)
    outcome.workers.extend(worker(rank, 5.5, ahead, told) for rank in range(ranks))
    outcome.edges.extend(
        pb.EdgeReport(worker_rank=rank, source=source, transport="shared_memory", reason="near", bytes=50 * MB)
        for rank in range(ranks)
    )
    outcome.bytes = 50 * MB * ranks
    if told:
        outcome.span.CopyFrom(clocked(4.2, 4.5, ahead))
        entered = (
            (pb.STAGE_PLAN, 0.0),
            (pb.STAGE_QUIESCE, 0.3),
            (pb.STAGE_TRANSFER, 1.0),
            (pb.STAGE_VERIFY, 3.5),
            (pb.STAGE_RESUME, 3.6),
        )
        outcome.entered.extend(pb.StageEntered(stage=stage, after=after) for stage, after in entered)
        outcome.pause_after = 0.4
    return outcome


def relay(name: str, ahead: float, source: str, wave: int = 0, begin: float = 2.1) -> pb.RelayReport:
    filled = pb.RelayFilled(bytes=100 * MB, wait_seconds=0.1, fill_seconds=0.5)
    filled.brought.add(source=source, bytes=100 * MB)
    filled.span.CopyFrom(clocked(begin, 0.7, ahead))
    return pb.RelayReport(relay=name, filled=filled, stage=wave)


def report(replicas: Sequence[pb.ReplicaOutcome], relays: Sequence[pb.RelayReport] = ()) -> pb.UpdateReport:
    made = pb.UpdateReport(seconds=SECONDS, ok=True, replicas=replicas, relays=relays, source_copies=0)
    made.identity.CopyFrom(weights_pb2.Identity(lineage="run", version=3, root=b"r" * 32))
    made.bytes = sum(outcome.bytes for outcome in replicas)
    made.timeline.began = BEGAN
    made.timeline.phases.extend(pb.Timeline.Phase(name=name, after=after) for name, after in PHASES)
    made.timeline.sources.add(
        source="rank 0",
        copy_seconds=0.2,
        digest_seconds=0.3,
        span=clocked(1.1, 0.8, -300.0),
        digested=BEGAN - 300.0 + 1.8,
        host="a",
    )
    return made


def shown(made: pb.UpdateReport, rates: Rates | None = None) -> File:
    timeline = draw(made)
    add_prediction(timeline, compare_stages(made, rates or measured(), Whereabouts()))
    return read(json.dumps(trace_events(timeline)))


def seconds(file: File, name: str, process: str, place: int = 0) -> tuple[float, float]:
    """Of the update: its begin is half a second after the first slice."""
    found = file.named(name, process)[place]
    return found.begin / 1e9 - 0.5, found.end / 1e9 - 0.5


def test_clocks_that_are_minutes_apart_are_one() -> None:
    """The order of what happened holds across processes, each with a clock of its own. The clocks are faked: nobody can
    set the monotonic clock of a process that runs."""
    relays = [relay("relay a", 7200.0, "rank 0"), relay("relay b", -50.0, "relay a", 1, 2.9)]
    file = shown(report([replica("one", 600.0, "relay b", 2)], relays))
    assert seconds(file, "gathering", "manager") == pytest.approx((-0.5, 0.0))
    assert seconds(file, "seal", "trainer rank 0") == pytest.approx((1.1, 1.9), abs=2e-6)
    assert seconds(file, "copy", "trainer rank 0") == pytest.approx((1.3, 1.5), abs=2e-6)
    assert seconds(file, "digest", "trainer rank 0") == pytest.approx((1.5, 1.8), abs=2e-6)
    assert seconds(file, "fill", "relay a") == pytest.approx((2.1, 2.8), abs=2e-6)
    assert seconds(file, "read and digest", "relay b") == pytest.approx((3.1, 3.6), abs=2e-6)
    assert seconds(file, "install", "replica one") == pytest.approx((4.2, 8.7), abs=2e-6)
    assert seconds(file, "paused", "replica one") == pytest.approx((4.6, 8.1), abs=2e-6)
    assert seconds(file, "workers install", "replica one") == pytest.approx((5.2, 7.7), abs=2e-6)
    assert seconds(file, "transfer", "replica one", 1) == pytest.approx((5.75, 6.75), abs=2e-6)
    assert seconds(file, "verify", "replica one") == pytest.approx((7.0, 7.5), abs=2e-6)
    order = ["planning", "seal", "fill", "workers install", "transfer", "verify", "resume"]
    begins = [min(each.begin for each in file.named(name) if each.process != PROCESS) for name in order]
    assert begins == sorted(begins)
    assert file.labels["relay a"] == "± 1.000 ms by its session's round trips"
    assert set(file.labels) == {"trainer rank 0", "relay a", "relay b", "replica one"}


def test_every_byte_has_its_arrow() -> None:
    relays = [relay("relay a", 0.0, "rank 0"), relay("relay b", 0.0, "relay a", 1, 2.9)]
    file = shown(report([replica("one", 0.0, "relay b", 2), replica("two", 0.0, "rank 0")], relays))
    ways = [(left.process, left.name, to.process, to.thread, said["bytes"]) for left, to, said in file.flows]
    assert sorted(ways) == [
        ("relay a", HOLDS, "relay b", "memory", 100 * MB),
        ("relay b", HOLDS, "replica one", "worker 0", 50 * MB),
        ("relay b", HOLDS, "replica one", "worker 1", 50 * MB),
        ("trainer rank 0", KEPT, "relay a", "memory", 100 * MB),
        ("trainer rank 0", KEPT, "replica two", "worker 0", 50 * MB),
    ]
    assert {to.name for _, to, said in file.flows if "transport" in said} == {"transfer"}


def test_members_of_an_older_version_are_drawn_from_durations() -> None:
    file = shown(report([replica("old", 0.0, "rank 0", told=False), replica("new", 0.0, "rank 0")]))
    old = file.named("install", "replica old")[0]
    assert (old.end - old.begin) / 1e9 == pytest.approx(4.5)
    assert old.args["clock_by"] == GUESSED
    assert old.args["clock_error_seconds"] == pytest.approx(0.25), "it lies somewhere between command and answer"
    agents, workers = (seconds(file, "transfer", "replica old", place) for place in range(2))
    assert workers == pytest.approx(agents)
    assert workers[1] - workers[0] == pytest.approx(1.0)
    assert file.labels["replica old"].endswith(GUESSED)
    assert not file.labels["replica new"].endswith(GUESSED)


def test_an_older_manager_is_drawn_from_durations() -> None:
    made = report([replica("one", 0.0, "rank 0", told=False)])
    made.ClearField("timeline")
    made.stages.add(stage=pb.STAGE_PLAN, seconds=4.0)
    file = shown(made)
    assert [each.name for each in file.slices if each.process == "manager"] == [
        "update to version 3",
        "planning",
        "installing",
    ]
    assert file.named("installing")[0].begin == pytest.approx(4.0e9)
    assert file.flows[0][0].process == "rank 0"


def test_a_session_that_measured_nothing_says_so() -> None:
    made = report([replica("one", 0.0, "rank 0")])
    made.replicas[0].span.ClearField("ahead")
    file = shown(made)
    assert file.named("install", "replica one")[0].args["clock_by"] == ANSWERED
    assert file.labels["replica one"] == f"± 250.000 ms by {ANSWERED}"


def test_replicas_and_relays_that_took_no_part_are_shown_with_their_reasons() -> None:
    gone = pb.ReplicaOutcome(replica="gone", outcome=pb.OUTCOME_NOT_REACHED)
    gone.problem.message = "its agent is not connected"
    failed = pb.RelayReport(relay="relay a", filled=pb.RelayFilled())
    failed.filled.problem.message = "no memory"
    silent = pb.RelayReport(relay="relay b")
    file = shown(report([gone, replica("one", 0.0, "rank 0")], [failed, silent]))
    assert file.named("is not reached")[0].args["problem"] == "its agent is not connected"
    assert [each.args["problem"] for each in file.named("is not filled")] == ["no memory", "it did not answer"]


def test_a_version_that_was_sealed_before_has_no_sealing() -> None:
    """A rollback reads relays that hold it; nobody seals, and nobody is filled."""
    made = report([replica("one", 0.0, "relay a")])
    del made.timeline.sources[:]
    file = shown(made)
    assert [(left.process, left.name) for left, _, _ in file.flows] == [("relay a", KEPT)]


def test_an_answer_given_again_is_longer_than_its_span() -> None:
    """A relay that holds the version already tells what its filling took then."""
    again = relay("relay a", 0.0, "rank 0")
    again.filled.span.seconds = 0.01
    file = shown(report([replica("one", 0.0, "relay a")], [again]))
    assert file.named("was filled before")[0].args["seconds"] == pytest.approx(0.6)


def test_parts_that_are_longer_than_the_whole_stay_inside() -> None:
    """Seconds are measured by several clocks of one process, and rounded."""
    made = report([replica("one", 0.0, "rank 0")])
    made.replicas[0].workers[0].span.seconds = 1.0  # for 1.75 of parts
    made.replicas[0].entered[-1].after = 60.0
    made.replicas[0].pause_seconds = 60.0
    file = shown(made)
    worker = file.named("install", "replica one")[1]
    assert (worker.thread, worker.end - worker.begin) == ("worker 0", 10**9)
    assert file.named("verify", "replica one")[0].end == worker.end


def test_what_a_prediction_says_stands_beside_what_happened() -> None:
    rates = Rates.of({"links": {"shared_memory": {"host": 0.1}}, "digest": {"host": 0.5}, "copy": {"host": 1}}, Rates())
    made = report([replica("one", 0.0, "rank 0", 2)])
    made.stages.extend(made.replicas[0].stages)
    made.copied.add(reason="is cast", tensors=1, bytes=100 * MB, ranks=1)
    stages = {each.stage: each for each in compare_stages(made, rates, Whereabouts({"one": "a"}))}
    assert {name: each.fact for name, each in stages.items() if each.expected} == {
        "seal": 0.5,
        "transfer": 1.0,
        "verify": 0.5,
    }
    said = {name: each.expected.seconds for name, each in stages.items() if each.expected}
    assert said == pytest.approx({"seal": 0.1 + 0.2, "transfer": 1.0, "verify": 0.2})
    assert stages["plan"].expected is None
    assert stages["plan"].fact == pytest.approx(1.0)
    file = shown(made, rates)
    transfer = {each.thread: each for each in file.slices if (each.process, each.name) == (PROCESS, "transfer")}
    took, predicted = transfer["transfer: took"], transfer["transfer: predicted"]
    assert took.begin == predicted.begin == file.named("transfer", "replica one")[0].begin
    assert (predicted.end - predicted.begin, predicted.args["because"]) == (10**9, "memory of host one")


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        ({"dur": 4}, "sticks out"),
        ({"ts": -1}, "'ts': -1"),
        ({"ph": "B"}, "no such phase"),
        ({"dur": 1.001}, "added with an error"),
        ({"tid": "1"}, "'tid': '1'"),
    ],
)
def test_the_reader_of_the_format_bites(spoil: dict[str, object], why: str) -> None:
    where = {"pid": 1, "cat": "c"}
    whole = {"ph": "X", "name": "a", "tid": 1, "ts": 0, "dur": 3, **where}
    part = {"ph": "X", "name": "b", "tid": 1, "ts": 0, "dur": 2, **where}
    names = [
        {"ph": "M", "name": f"{kind}_name", "pid": 1, "tid": tid, "ts": 0, "args": {"name": kind}}
        for kind, tid in (("process", 0), ("thread", 1))
    ]
    file = {"displayTimeUnit": "ms", "otherData": {}, "traceEvents": [*names, whole, part]}
    assert len(read(json.dumps(file)).slices) == 2
    file["traceEvents"] = [*names, whole, {**part, **spoil}]
    with pytest.raises((AssertionError, KeyError), match=why):
        read(json.dumps(file))


def test_the_reader_of_the_format_asks_for_both_ends_of_an_arrow() -> None:
    whole = trace_events(draw(report([replica("one", 0.0, "rank 0")])))
    assert read(json.dumps(whole)).flows
    for phase in ("s", "f"):
        less = {**whole, "traceEvents": [event for event in whole["traceEvents"] if event["ph"] != phase]}
        with pytest.raises(AssertionError, match="has one end"):
            read(json.dumps(less))
    for event in whole["traceEvents"]:
        if event["ph"] == "f":
            event["ts"] += 60_000_000
    with pytest.raises(AssertionError, match="bound to nothing"):
        read(json.dumps(whole))


ODD = {
    "replica": lambda made: made.replicas[0].span,
    "worker": lambda made: made.replicas[0].workers[0].span,
    "source": lambda made: made.timeline.sources[0].span,
    "relay": lambda made: made.relays[0].filled.span,
}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e30, -1e30])
@pytest.mark.parametrize("field", ["begin", "seconds", "ahead", "error"])
@pytest.mark.parametrize("who", ODD)
def test_an_odd_number_of_one_member_does_not_spoil_the_trace(who: str, field: str, value: float) -> None:
    made = report([replica("one", 0.0, "relay a")], [relay("relay a", 0.0, "rank 0")])
    setattr(ODD[who](made), field, value)
    timeline = draw(made)
    assert len(timeline.odd) == 1
    assert f"span.{field} {value:g}, which cannot be" in timeline.odd[0]
    assert max(each.end for each in shown(made).slices) < 60e9


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
def test_odd_durations_are_not_told(value: float) -> None:
    made = report([replica("one", 0.0, "rank 0")])
    one, source = made.replicas[0], made.timeline.sources[0]
    one.sync_seconds = one.pause_seconds = one.pause_after = one.entered[1].after = value
    one.workers[0].transfer_seconds = source.copy_seconds = source.digested = value
    assert len(draw(made).odd) == 7
    assert max(each.end for each in shown(made).slices) < 60e9


def test_a_worker_of_another_hour_is_drawn_from_its_durations() -> None:
    made = report([replica("one", 0.0, "rank 0")])
    made.replicas[0].workers[0].span.begin += 86400.0
    assert draw(made).odd[0].startswith("one worker 0 tells span.begin")
    assert max(each.end for each in shown(made).slices) < 60e9


def test_what_only_a_newer_member_knows_is_named_by_its_number() -> None:
    made = report([replica("one", 0.0, "rank 0")])
    made.replicas[0].entered.add(stage=99, after=4.0)
    made.replicas[0].outcome = 77  # type: ignore[assignment]
    file = shown(made)
    assert file.named("unknown_99", "replica one")
    assert file.named("install", "replica one")[0].args["outcome"] == "unknown_77"
