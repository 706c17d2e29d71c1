"""Which steps lead to sleep, out of it, and through an update, for every mode and state."""

from __future__ import annotations

import pytest

from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.core.sleeping import (
    AWAKE,
    KV_CACHE,
    TAGS,
    WEIGHTS,
    Sleeping,
    SleepStep,
    sleep_steps,
    update_steps,
    wake_steps,
)
from ckpt_engine.v1 import manager_pb2

HYBRID, STANDALONE, COLOCATED = manager_pb2.MODE_HYBRID, manager_pb2.MODE_STANDALONE, manager_pb2.MODE_COLOCATED
ALL = frozenset(TAGS)
LIGHT, DEEP = Sleeping(1, ALL), Sleeping(2, ALL)
HALF = Sleeping(2, frozenset({KV_CACHE}), rousing=True)


def refusal(call: object, *arguments: object) -> str:
    with pytest.raises(CkptEngineError) as refused:
        call(*arguments)  # type: ignore[operator]
    return refused.value.problem.message


def test_an_update_wakes_weights_before_and_caches_after_the_install() -> None:
    for mode in (HYBRID, STANDALONE):
        assert update_steps(mode, AWAKE) == (SleepStep.PAUSE, SleepStep.INSTALL, SleepStep.RESUME)
        assert update_steps(mode, HALF) == (
            SleepStep.PAUSE,
            SleepStep.INSTALL,
            SleepStep.WAKE_KV_CACHE,
            SleepStep.RESUME,
        )
    for sleeping in (LIGHT, DEEP):
        assert update_steps(HYBRID, sleeping) == (
            SleepStep.WAKE_WEIGHTS,
            SleepStep.PAUSE,
            SleepStep.INSTALL,
            SleepStep.WAKE_KV_CACHE,
            SleepStep.RESUME,
        )
        assert "--mode hybrid" in refusal(update_steps, STANDALONE, sleeping)


def test_no_update_touches_a_colocated_replica() -> None:
    for sleeping in (AWAKE, LIGHT, HALF):
        assert "colocated" in refusal(update_steps, COLOCATED, sleeping)


def test_the_gate_closes_before_words_change_and_words_before_memory_goes() -> None:
    assert sleep_steps(HYBRID, AWAKE, 1, {1, 2}) == ((SleepStep.CLOSE, SleepStep.SLEEP), LIGHT)
    assert sleep_steps(STANDALONE, AWAKE, 0, {1, 2}) == ((SleepStep.CLOSE, SleepStep.SLEEP), LIGHT)
    assert sleep_steps(HYBRID, AWAKE, 2, {1, 2}) == ((SleepStep.CLOSE, SleepStep.DISCARD, SleepStep.SLEEP), DEEP)
    steps, after = sleep_steps(HYBRID, HALF, 2, {1, 2})
    assert steps == (SleepStep.CLOSE, SleepStep.DISCARD, SleepStep.ABORT, SleepStep.WAKE_KV_CACHE, SleepStep.SLEEP)
    assert after == DEEP
    assert sleep_steps(COLOCATED, AWAKE, 1, {1, 2}) == ((SleepStep.CLOSE, SleepStep.SLEEP), LIGHT)


def test_sleep_that_cannot_be_is_refused_before_anything_is_done() -> None:
    assert "level 3" in refusal(sleep_steps, HYBRID, AWAKE, 3, {1, 2})
    assert "cannot sleep at level 1, nor at another one" in refusal(sleep_steps, HYBRID, AWAKE, 1, set())
    assert "colocated" in refusal(sleep_steps, COLOCATED, AWAKE, 2, {1, 2})
    assert "wake it" in refusal(sleep_steps, HYBRID, LIGHT, 2, {1, 2})
    assert sleep_steps(HYBRID, DEEP, 2, {1, 2}) == ((), DEEP)


def test_waking_goes_from_weights_to_caches() -> None:
    both = (SleepStep.WAKE_WEIGHTS, SleepStep.WAKE_KV_CACHE)
    assert wake_steps(LIGHT, (), True) == (both, AWAKE)
    assert wake_steps(LIGHT, (KV_CACHE, WEIGHTS), True) == (both, AWAKE)
    assert wake_steps(LIGHT, (WEIGHTS,), True) == ((SleepStep.WAKE_WEIGHTS,), Sleeping(1, frozenset({KV_CACHE})))
    assert "before kv_cache" in refusal(wake_steps, LIGHT, (KV_CACHE,), True)
    assert "no memory tag 'weight'" in refusal(wake_steps, LIGHT, ("weight",), True)
    assert wake_steps(AWAKE, (), True) == ((), AWAKE)


def test_discarded_weights_are_not_computed_with() -> None:
    """Caches wait for whole weights; who asked for both gets them then."""
    assert wake_steps(DEEP, (), False) == ((SleepStep.WAKE_WEIGHTS,), HALF)
    assert wake_steps(HALF, (), False) == ((), HALF)
    assert wake_steps(HALF, (), True) == ((SleepStep.WAKE_KV_CACHE,), AWAKE)
    assert "no whole weights" in refusal(wake_steps, Sleeping(2, frozenset({KV_CACHE})), (KV_CACHE,), False)


def test_torn_weights_are_not_computed_with() -> None:
    """An install that broke off left them; sleep level 1 keeps what is torn."""
    torn = Sleeping(1, frozenset({KV_CACHE}), rousing=True)
    assert wake_steps(LIGHT, (), False) == ((SleepStep.WAKE_WEIGHTS,), torn)
    steps, _ = sleep_steps(HYBRID, torn, 1, {1, 2}, whole=False)
    assert steps == (SleepStep.CLOSE, SleepStep.DISCARD, SleepStep.ABORT, SleepStep.WAKE_KV_CACHE, SleepStep.SLEEP)


def test_only_who_rests_is_left_alone() -> None:
    assert LIGHT.resting
    assert DEEP.resting
    assert Sleeping(2, frozenset({KV_CACHE})).resting
    assert not HALF.resting
    assert not AWAKE.resting
