"""An error as a framework moves it to another process."""

from __future__ import annotations

import pickle

from ckpt_engine.core.problems import CkptEngineError, precondition


def test_an_error_is_raised_again_in_another_process() -> None:
    """With all that it says: Ray and multiprocessing pickle what a worker raises."""
    raised = precondition("no", tensors=["a"], ranks=[1], replica="one")
    again = pickle.loads(pickle.dumps(raised))
    assert type(again) is CkptEngineError
    assert again.problem == raised.problem
    assert str(again) == str(raised)
