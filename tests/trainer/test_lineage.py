"""Which lineage a run has: what is given wins, and ranks that cannot agree are told what to do.

That ranks of a process group agree is shown in test_trainer_life.py.
"""

import pytest

from ckpt_engine import CkptEngineError
from ckpt_engine.trainer.lineage import fresh_lineage, resolve_lineage, resolve_rank


def test_what_is_given_wins_over_the_environment() -> None:
    environment = {"CKPT_ENGINE_LINEAGE": "from-environment", "TORCHELASTIC_RUN_ID": "elastic"}
    assert resolve_lineage("given", 0, 1, environment) == "given"
    assert resolve_lineage(None, 3, 4, environment) == "from-environment"
    assert resolve_lineage(None, 3, 4, {"TORCHELASTIC_RUN_ID": "elastic"}) == "elastic"


def test_a_restarted_elastic_run_is_another_one() -> None:
    restarted = {"TORCHELASTIC_RUN_ID": "elastic", "TORCHELASTIC_RESTART_COUNT": "2"}
    assert resolve_lineage(None, 0, 4, restarted) == "elastic-restart-2"


def test_one_rank_gets_a_fresh_one_each_time() -> None:
    # torchrun without a rendezvous id says "none" to every run.
    environment = {"TORCHELASTIC_RUN_ID": "none"}
    first, second = (resolve_lineage(None, 0, 1, environment) for _ in range(2))
    assert first.startswith("run-")
    assert first != second


def test_each_start_has_its_own_unless_one_is_named() -> None:
    environment = {"TORCHELASTIC_RUN_ID": "elastic", "TORCHELASTIC_RESTART_COUNT": "1"}
    first, second = (fresh_lineage(0, 1, environment) or "" for _ in range(2))
    assert first.startswith("elastic-restart-1-")
    assert first != second
    assert (fresh_lineage(0, 1, {}) or "").startswith("run-")
    assert fresh_lineage(0, 1, {"CKPT_ENGINE_LINEAGE": "named"}) is None
    assert fresh_lineage(0, 2, environment) is None, "two ranks that have no group to agree in"


def test_ranks_that_cannot_agree_are_told_what_to_do() -> None:
    with pytest.raises(CkptEngineError, match="CKPT_ENGINE_LINEAGE") as caught:
        resolve_lineage(None, 1, 2, {})
    assert list(caught.value.problem.ranks) == [1]


@pytest.mark.parametrize("name", ["", "x" * 121, "ü" * 61])
def test_names_have_a_length(name: str) -> None:
    with pytest.raises(CkptEngineError, match="bytes"):
        resolve_lineage(name, 0, 1, {})


@pytest.mark.parametrize(
    ("given", "environment", "found"),
    [
        ((None, None), {}, (0, 1)),
        ((None, None), {"RANK": "2", "WORLD_SIZE": "4"}, (2, 4)),
        ((0, 1), {"RANK": "2", "WORLD_SIZE": "4"}, (0, 1)),
        ((1, 2), {}, (1, 2)),
        ((None, None), {"RANK": "nonsense", "WORLD_SIZE": "nonsense"}, (0, 1)),
        ((None, None), {"RANK": "0"}, (0, 1)),
        ((None, None), {"WORLD_SIZE": "1"}, (0, 1)),
        ((None, None), {"WORLD_SIZE": "4", "SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "4"}, (2, 4)),
        ((None, None), {"SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "4"}, (2, 4)),
        ((0, 1), {"SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "4"}, (0, 1)),
        # torchrun once a node, or Ray, each started by srun; and a batch script for four tasks, which is one process.
        ((None, None), {"RANK": "9", "WORLD_SIZE": "16", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}, (9, 16)),
        ((None, None), {"RAY_RAYLET_PID": "7", "SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "4"}, (0, 1)),
        ((None, None), {"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, (0, 1)),
    ],
)
def test_a_rank_is_as_given_or_that_of_what_started_it(
    given: tuple[int | None, int | None], environment: dict[str, str], found: tuple[int, int]
) -> None:
    assert resolve_rank(*given, environment) == found


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"RANK": "1"}, "RANK is 1 and WORLD_SIZE is not set"),
        ({"WORLD_SIZE": "2"}, "RANK is not set and WORLD_SIZE is 2"),
        ({"RANK": "a", "WORLD_SIZE": "2"}, "RANK is a and WORLD_SIZE is 2: set both to numbers"),
    ],
)
def test_one_of_several_is_not_silently_the_only_one(environment: dict[str, str], words: str) -> None:
    with pytest.raises(CkptEngineError, match=words):
        resolve_rank(None, None, environment)
    assert resolve_rank(0, 1, environment) == (0, 1)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ((1, None), "rank 1 of world_size None: give both, or neither under torchrun"),
        ((None, 2), "rank None of world_size 2: give both"),
        ((2, 2), "rank 2 is not in a world of 2"),
        (("0", "1"), "convert environment variables with int()"),
        ((True, 2), "must be ints, got True and 2"),
    ],
)
def test_what_is_no_rank_is_refused(given: tuple[object, object], words: str) -> None:
    with pytest.raises(CkptEngineError, match=words):
        resolve_rank(*given, {"RANK": "0", "WORLD_SIZE": "1"})
