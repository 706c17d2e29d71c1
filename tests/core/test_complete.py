"""What each worker of an engine leaves to the others must be loaded by one of them."""

from __future__ import annotations

import pytest

from ckpt_engine.core.complete import check_complete
from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.v1.weights_pb2 import Manifest, Need, Problem, TensorSpec, WorkerNeeds

MANIFEST = Manifest(tensors=[TensorSpec(name=name, dtype="bfloat16", shape=[2]) for name in "abcd"])


def worker(needs: str, elsewhere: str) -> WorkerNeeds:
    boxes = [Need(tensor="abcd".index(name), start=[0], stop=[2]) for name in needs]
    return WorkerNeeds(needs=boxes, elsewhere=["abcd".index(name) for name in elsewhere])


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
    assert (problem.code, list(problem.tensors), problem.replica) == (Problem.INVALID_ARGUMENT, ["c", "d"], "pp")
    assert "each of the 2 workers of replica 'pp' leaves c, d to another" in problem.message
