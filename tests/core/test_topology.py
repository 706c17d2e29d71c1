"""Which transport an edge takes, and what a person is told when there is none."""

from __future__ import annotations

import pytest

from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.core.topology import choose_transport
from ckpt_engine.v1.weights_pb2 import Host, Problem

HERE = Host(boot_id="a", pid_namespace="pid:[1]", name="h1")
CONTAINER = Host(boot_id="a", pid_namespace="pid:[2]", name="h1")
THERE = Host(boot_id="b", pid_namespace="pid:[1]", name="h2")
NOWHERE = Host()
BOTH = ("shared_memory", "file")


def test_one_host_shares_memory_and_the_reason_is_a_sentence() -> None:
    choice = choose_transport(HERE, "shared_memory", HERE, BOTH)
    assert choice.transport == "shared_memory"
    assert choice.reason == "trainer and worker share host h1, so it reads the trainer's memory directly"
    assert choose_transport(HERE, "file", CONTAINER, BOTH).transport == "file"


@pytest.mark.parametrize(
    ("source", "transport", "worker", "available", "code", "words"),
    [
        (HERE, "shared_memory", THERE, BOTH, Problem.UNAVAILABLE, ("h1", "h2")),
        (HERE, "shared_memory", CONTAINER, BOTH, Problem.UNAVAILABLE, ("pid:[1]", "pid:[2]", "PID namespace")),
        (HERE, "file", THERE, BOTH, Problem.UNAVAILABLE, ("h1", "h2")),
        (NOWHERE, "shared_memory", NOWHERE, BOTH, Problem.UNAVAILABLE, ("host",)),  # unknown is never "the same"
        (NOWHERE, "file", NOWHERE, BOTH, Problem.UNAVAILABLE, ("host",)),
        (HERE, "shared_memory", HERE, ("file",), Problem.FAILED_PRECONDITION, ("shared_memory", "doctor")),
        (HERE, "file", HERE, (), Problem.FAILED_PRECONDITION, ("none", "doctor")),
        (HERE, "pigeon", HERE, ("pigeon",), Problem.FAILED_PRECONDITION, ("pigeon", "version")),
    ],
)
def test_no_transport_says_why(
    source: Host, transport: str, worker: Host, available: tuple[str, ...], code: int, words: tuple[str, ...]
) -> None:
    with pytest.raises(CkptEngineError) as caught:
        choose_transport(source, transport, worker, available)
    assert caught.value.problem.code == code
    for word in words:
        assert word in caught.value.problem.message
