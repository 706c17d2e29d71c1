"""What is predicted of an update's stages, from bytes and rates alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ckpt_engine.core.prediction import (
    STAGES,
    PredictedEdge,
    ProcessWork,
    Rates,
    before_the_pause,
    measured,
    of_work,
    over_lanes,
    pause,
    predict,
)
from ckpt_engine.core.problems import CkptEngineError

GB = 10**9
RATES = Rates(
    links={
        "shared_memory": {"host": 10e9, "gpu": 50e9},
        "tcp": {"host": 2e9},
        "cuda_ipc": {"gpu": 400e9, "same gpu": 2000e9},
    },
    copy={"host": 5e9},
    digest={"host": 20e9, "gpu": 4000e9},
)


def test_readers_of_one_host_share_its_memory() -> None:
    one = over_lanes([PredictedEdge("rank 0", "a", "shared_memory", 10 * GB, "h", "h")], RATES)
    two = over_lanes([PredictedEdge("rank 0", name, "shared_memory", 10 * GB, "h", "h") for name in "ab"], RATES)
    apart = over_lanes([PredictedEdge("rank 0", name, "shared_memory", 10 * GB, name, name) for name in "ab"], RATES)
    assert one == (1.0, "memory of host h")
    assert two == (2.0, "memory of host h")
    assert apart == (1.0, "memory of host a")


def test_readers_with_gpus_share_nothing_of_the_host() -> None:
    found = over_lanes(
        [PredictedEdge("rank 0", name, "shared_memory", 50 * GB, "h", "h", "gpu") for name in "ab"], RATES
    )
    assert found is not None
    assert found.seconds == 1.0


def test_a_gpu_that_several_read_sends_to_one_after_the_other() -> None:
    found = over_lanes([PredictedEdge("rank 0", name, "cuda_ipc", 400 * GB, "h", "h", "gpu") for name in "abc"], RATES)
    assert found is not None
    assert found.seconds == pytest.approx(3.0)
    assert found.because == "cuda_ipc out of the GPU of rank 0"


def test_what_stays_on_its_gpu_has_a_rate_of_its_own() -> None:
    found = over_lanes([PredictedEdge("rank 0", "a", "cuda_ipc", 2000 * GB, "h", "h", "gpu", same_gpu=True)], RATES)
    assert found is not None
    assert found.seconds == pytest.approx(1.0)


def test_a_network_is_counted_at_both_ends() -> None:
    """Two senders to one host: its card is the busiest lane, not either of theirs."""
    found = over_lanes([PredictedEdge(name, "c", "tcp", 2 * GB, name, "c") for name in "ab"], RATES)
    assert found is not None
    assert found == (2.0, "tcp into host c")


def test_what_nobody_measured_is_not_predicted() -> None:
    edges = [PredictedEdge("rank 0", "a", "shared_memory", GB), PredictedEdge("rank 0", "a", "smoke", GB)]
    assert over_lanes(edges, RATES) is None
    assert of_work([ProcessWork("rank 0", GB, memory="gpu")], RATES.copy, "copies on") is None
    assert over_lanes([], RATES) is None
    assert over_lanes([PredictedEdge("rank 0", "a", "smoke", 0)], RATES) is None, "nothing to carry needs no rate"


def test_stages_follow_their_order_and_waves_each_other() -> None:
    rates = Rates(RATES.links, RATES.copy, RATES.digest, {"plan": 0.5, "quiesce": 0.25, "verify": 0.125})
    wave = [PredictedEdge("rank 0", "relay a", "tcp", 2 * GB, "t", "a")]
    stages = predict(
        rates,
        sealed=[ProcessWork("rank 0", 20 * GB, "t")],
        copied=[ProcessWork("rank 0", 10 * GB, "t")],
        fills=[wave, wave],
        installs=[PredictedEdge("relay a", "w", "shared_memory", 10 * GB, "a", "a")],
        verified=[ProcessWork("w", 20 * GB, "a")],
    )
    assert {stage: expected.seconds for stage, expected in stages.items()} == {
        "plan": 0.5,
        "seal": 3.0,
        "fill": 2.0,
        "quiesce": 0.25,
        "transfer": 1.0,
        "verify": 1.125,
    }
    assert list(stages) == [stage for stage in STAGES if stage in stages]
    assert stages["seal"].because == "copies on host t"
    assert pause(stages) == 0.25 + 1.0 + 1.125


def test_workers_may_digest_at_a_rate_of_their_own() -> None:
    work = [ProcessWork("w", 20 * GB, "h")]
    slow = Rates.of({"verify": {"host": 10}}, RATES)
    assert predict(RATES, verified=work)["verify"].seconds == 1.0
    assert predict(slow, verified=work, sealed=work)["verify"].seconds == 2.0
    assert predict(slow, verified=work, sealed=work)["seal"].seconds == 1.0


def test_rates_are_read_over_those_that_were_measured() -> None:
    rates = Rates.of({"links": {"tcp": {"host": 12}}, "seconds": {"resume": 0}}, measured())
    assert rates.links["tcp"] == {"host": 12e9}
    assert rates.links["shared_memory"] == measured().links["shared_memory"]
    assert (rates.digest, rates.verify) == (measured().digest, measured().verify)
    assert rates.seconds == {"resume": 0.0}


@pytest.mark.parametrize(
    ("told", "says"),
    [
        ([], "is not a JSON object"),
        ({"link": {}}, "'link' is none of links, copy, digest, verify, seconds"),
        ({"links": {"tcp": 12}}, "links, tcp: 12 is not a JSON object"),
        ({"links": {"tcp": {"hots": 12}}}, "'hots' is none of host, gpu, same gpu"),
        ({"digest": {"host": "fast"}}, "digest, host: 'fast' is not a number above 0"),
        ({"digest": {"host": 0}}, "digest, host: 0 is not a number above 0"),
        ({"digest": {"host": float("nan")}}, "is not a number above 0"),
        ({"digest": {"host": True}}, "True is not a number above 0"),
        ({"seconds": {"resume": -1}}, "seconds, resume: -1 is not a number of seconds"),
        ({"seconds": {"nap": 1}}, "'nap' is none of plan, seal, fill"),
    ],
)
def test_rates_that_are_none_are_refused(told: object, says: str) -> None:
    with pytest.raises(CkptEngineError) as refused:
        Rates.of(told)
    assert says in refused.value.problem.message


def test_what_stage_memory_holds_is_copied_on_the_device() -> None:
    """What is slowest first; what lies on the worker's own GPU is read in the pause all the same."""
    edges = [
        PredictedEdge("rank 0", "a", "cuda_ipc", 4 * GB, memory="gpu", same_gpu=True),
        PredictedEdge("rank 1", "a", "cuda_ipc", 4 * GB, memory="gpu"),
        PredictedEdge("relay", "a", "shared_memory", 10 * GB, memory="gpu"),
    ]
    early, rest = before_the_pause(edges, {"a": 12 * GB})
    assert [(edge.source, edge.bytes) for edge in early] == [("relay", 10 * GB), ("rank 1", 2 * GB)]
    assert [(edge.source, edge.bytes) for edge in rest] == [("rank 0", 4 * GB), ("rank 1", 2 * GB)]
    assert before_the_pause(edges, None)[1] == edges[:1]
    assert before_the_pause(edges, {}) == ([], [edges[2], *edges[:2]])
    rates = replace(RATES, copy={"gpu": 2000e9})
    whole = [edges[2]]
    stages = predict(rates, early=whole, verified=[ProcessWork("a", 10 * GB, memory="gpu")])
    assert stages["ready"].seconds == pytest.approx(0.2)
    assert stages["transfer"].seconds == pytest.approx(0.005)
    assert pause(stages) == pytest.approx(0.0075)
    assert pause(predict(rates, installs=whole)) == pytest.approx(0.2)
