"""To start a relay is advised only where none runs."""

import pytest

from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.core.relay_remedy import relay_remedy
from ckpt_engine.core.topology import choose_transport
from ckpt_engine.v1.weights_pb2 import Host

A = Host(boot_id="a", name="h1", pid_namespace="1")
B = Host(boot_id="b", name="h2", pid_namespace="2")


def test_a_relay_is_to_be_started_on_each_host_without_one() -> None:
    assert relay_remedy([A, B], set()) == "start a relay on host h1 and on host h2 (`ckpt-engine relay`)"
    assert relay_remedy([A, B], {"a"}) == "start a relay on host h2 (`ckpt-engine relay`)"
    assert relay_remedy([A, A], set()) == "start a relay on host h1 (`ckpt-engine relay`)"


def test_none_is_to_be_started_where_relays_run() -> None:
    said = relay_remedy([A, B], {"a", "b"})
    assert "start" not in said
    assert "h1" in said
    assert "h2" in said
    assert "`report.prefetch` says why" in said


def test_where_it_is_not_known_which_run_the_advice_has_a_condition() -> None:
    assert relay_remedy([B], None) == "start a relay on host h2 (`ckpt-engine relay`) unless one runs there"


@pytest.mark.parametrize("transport", ["shared_memory", "relay_memory", "cuda_ipc", "tcp"])
def test_a_worker_on_another_host_is_told_so_by_each_transport(transport: str) -> None:
    reads = [] if transport == "tcp" else [transport]
    for running, starts in ((frozenset[str](), True), (frozenset({"a", "b"}), False)):
        with pytest.raises(CkptEngineError) as caught:
            choose_transport(A, transport, B, reads, running)
        assert ("start a relay on host" in caught.value.problem.message) is starts
        assert ("a relay runs on host" in caught.value.problem.message) is not starts
