"""What each worker of an engine leaves to the others must be loaded by one of them."""

from __future__ import annotations

import pytest

from ckpt_engine.core.absent import absent_in_all, absent_rows
from ckpt_engine.core.complete import check_complete, check_unfilled
from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.v1.manager_pb2 import AbsentTensors
from ckpt_engine.v1.weights_pb2 import Manifest, Need, Problem, TensorSpec, WorkerNeeds

MANIFEST = Manifest(tensors=[TensorSpec(name=name, dtype="bfloat16", shape=[2]) for name in "abcd"])


def worker(needs: str, elsewhere: str, absent: str = "") -> WorkerNeeds:
    boxes = [Need(tensor="abcd".index(name), start=[0], stop=[2]) for name in needs]
    return WorkerNeeds(needs=boxes, elsewhere=map("abcd".index, elsewhere), absent=map("abcd".index, absent))


STAGES = [[("abcd", "")], [("ab", "cd"), ("cd", "ab")], [("a", "bcd"), ("bcd", ""), ("", "a")]]


@pytest.mark.parametrize("stages", STAGES)
def test_stages_that_load_everything_together(stages: list[tuple[str, str]]) -> None:
    check_complete(MANIFEST, [worker(*stage) for stage in stages], "pp")


def test_what_nobody_is_asked_to_load_may_be_left_out() -> None:
    """A tied head is needed by no worker and left to no other one."""
    check_complete(MANIFEST, [worker("ab", "c"), worker("c", "ab")], "pp")


def test_what_everybody_leaves_to_others_is_named() -> None:
    with pytest.raises(CkptEngineError) as caught:
        check_complete(MANIFEST, [worker("a", "bcd"), worker("b", "acd")], "pp")
    problem = caught.value.problem
    assert (problem.code, list(problem.tensors), problem.replica) == (Problem.CODE_INVALID_ARGUMENT, ["c", "d"], "pp")
    assert "each of the 2 workers of replica 'pp' leaves c, d to another" in problem.message


ABSENCES = [[("ab", "", "cd")], [("a", "b", "cd"), ("b", "a", "cd")], [("abcd", ""), ("a", "", "bcd")]]


@pytest.mark.parametrize("stages", ABSENCES)
def test_what_is_absent_in_all_workers_may_stay_where_it_is(stages: list[tuple[str, ...]]) -> None:
    """The last one: a first pipeline stage with a tower, and a second one without."""
    check_complete(MANIFEST, [worker(*stage) for stage in stages], "text only")


@pytest.mark.parametrize("stages", [[("ab", "cd"), ("ab", "", "cd")], [("ab", "", "cd"), ("ab", "", "c")]])
def test_what_one_worker_does_not_call_absent_must_be_taken(stages: list[tuple[str, ...]]) -> None:
    with pytest.raises(CkptEngineError, match=r"have models made without some of them") as caught:
        check_complete(MANIFEST, [worker(*stage) for stage in stages], "pp")
    assert caught.value.problem.tensors[-1] == "d"


def test_absent_tensors_are_counted_by_the_outermost_prefix_that_is_theirs() -> None:
    names = ["model.visual.merger.w", "model.visual.blocks.0.w", "model.layers.0.w", "model.visuals", "audio", "lm.w"]
    manifest = Manifest(tensors=[TensorSpec(name=name, dtype="bfloat16", shape=[2, 3]) for name in names])
    rows = absent_rows(manifest, {0: "a", 1: "a", 3: "b", 4: "c"})
    found = [(row.prefix, row.tensors, row.bytes, row.reason) for row in rows]
    assert found == [("model.visual.", 2, 24, "a"), ("model.visuals", 1, 12, "b"), ("audio", 1, 12, "c")]
    assert absent_rows(manifest, {}) == ()


def test_what_another_worker_takes_a_part_of_is_not_absent() -> None:
    rows = [AbsentTensors(prefix=prefix, tensors=2, bytes=8) for prefix in ("a.", "b.")]
    assert absent_in_all([rows, rows[:1]]) == tuple(rows[:1])
    assert absent_in_all([rows, [AbsentTensors(prefix="a.", tensors=1, bytes=4)]]) == ()
    assert absent_in_all([]) == ()


def test_a_model_that_would_keep_its_old_weights_is_named() -> None:
    """One pipeline stage has the draft, the other knows of none."""
    check_unfilled([worker("ab", ""), WorkerNeeds(absent_parts=["draft"])], "pp")
    with pytest.raises(CkptEngineError) as caught:
        check_unfilled([worker("ab", ""), WorkerNeeds(unfilled_parts=["draft"])], "pp")
    assert caught.value.problem.code == Problem.CODE_INVALID_ARGUMENT
    assert "the server of replica 'pp' has a draft model, and the version has no weights for it" in str(caught.value)
