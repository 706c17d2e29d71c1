"""Which transport an edge takes, and what a person is told when there is none."""

from __future__ import annotations

import pytest

from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.core.reach import Distance, by_network
from ckpt_engine.core.topology import choose_transport
from ckpt_engine.v1.weights_pb2 import Gpu, GpuReach, Host, Problem

HERE = Host(boot_id="a", pid_namespace="pid:[1]", name="h1")
CONTAINER = Host(boot_id="a", pid_namespace="pid:[2]", name="h1")
THERE = Host(boot_id="b", pid_namespace="pid:[1]", name="h2")
NOWHERE = Host()
BARE = Host(boot_id="a", pid_namespace="pid:[1]", network_namespace="net:[1]", name="h1")
OTHER_NETWORK = Host(boot_id="a", pid_namespace="pid:[1]", network_namespace="net:[2]", name="h1")
BOTH = ("shared_memory", "file")


def test_one_host_shares_memory_and_the_reason_is_a_sentence() -> None:
    choice = choose_transport(HERE, "shared_memory", HERE, BOTH)
    assert choice.transport == "shared_memory"
    assert choice.reason == "trainer and worker share host h1, so it reads the trainer's memory directly"
    assert choose_transport(HERE, "file", CONTAINER, BOTH).transport == "file"


def test_a_directory_that_two_hosts_may_have_is_proposed_last() -> None:
    for source, worker in ((HERE, THERE), (NOWHERE, NOWHERE)):
        choice = choose_transport(source, "file", worker, BOTH)
        assert choice.distance == Distance.SHARED_FILE == max(Distance)
        assert "a directory that both have" in choice.reason


@pytest.mark.parametrize(
    ("source", "transport", "worker", "available", "words"),
    [
        (HERE, "shared_memory", THERE, BOTH, ("h1", "h2")),
        (HERE, "shared_memory", CONTAINER, BOTH, ("pid:[1]", "pid:[2]", "PID namespace")),
        (NOWHERE, "shared_memory", NOWHERE, BOTH, ("host",)),  # unknown is never "the same"
        (HERE, "shared_memory", HERE, ("file",), ("shared_memory", "doctor")),
        (HERE, "file", HERE, (), ("none", "doctor")),
        (HERE, "pigeon", HERE, ("pigeon",), ("pigeon", "version")),
    ],
)
def test_no_transport_says_why(
    source: Host, transport: str, worker: Host, available: tuple[str, ...], words: tuple[str, ...]
) -> None:
    with pytest.raises(CkptEngineError) as caught:
        choose_transport(source, transport, worker, available)
    assert caught.value.problem.code == Problem.CODE_FAILED_PRECONDITION
    for word in words:
        assert word in caught.value.problem.message


def gpu(number: int, **reach: int) -> Gpu:
    """reach: by "gpu<number>"."""
    listed = [GpuReach(uuid=bytes([int(name[3:])]) * 16, link=link) for name, link in reach.items()]
    return Gpu(uuid=bytes([number]) * 16, name="NVIDIA H200", pci=f"0000:{number:02x}:00.0", reach=listed)


def on(*gpus: Gpu) -> Host:
    host = Host(gpus=gpus)
    host.MergeFrom(BARE)
    return host


@pytest.mark.parametrize(
    ("source", "worker", "distance", "words"),
    [
        (on(gpu(1)), on(gpu(1)), Distance.SAME_GPU, ("share GPU", "0000:01:00.0")),
        (on(gpu(1)), on(gpu(2, gpu1=GpuReach.LINK_NVLINK)), Distance.NVLINK, ("NVLink", "0000:01:00.0")),
        (on(gpu(1, gpu2=GpuReach.LINK_PCIE)), on(gpu(2)), Distance.PCIE, ("PCIe",)),  # only the source knows
        (on(gpu(1)), on(gpu(2, gpu1=GpuReach.LINK_PEER)), Distance.PEER, ("peer access",)),
        (on(gpu(1)), on(gpu(2)), Distance.UNKNOWN_PEER, ("nothing tells", "0000:01:00.0")),
        (on(), on(gpu(2)), Distance.UNKNOWN_PEER, ("nothing tells",)),
        (on(gpu(1), gpu(2)), on(gpu(2, gpu1=GpuReach.LINK_NVLINK)), Distance.NVLINK, ("0000:01:00.0",)),  # the worst
        (on(gpu(1)), on(gpu(2, gpu1=GpuReach.LINK_NONE), gpu(1)), Distance.SAME_GPU, ("share GPU",)),  # the best reader
    ],
)
def test_gpus_are_matched_by_uuid_and_the_way_is_told(
    source: Host, worker: Host, distance: Distance, words: tuple[str, ...]
) -> None:
    choice = choose_transport(source, "cuda_ipc", worker, ("cuda_ipc",))
    assert (choice.transport, choice.distance) == ("cuda_ipc", distance)
    for word in words:
        assert word in choice.reason


@pytest.mark.parametrize(
    ("worker", "words"),
    [
        (THERE, ("h1", "h2")),
        (CONTAINER, ("process ids", "pid:[2]")),
        (OTHER_NETWORK, ("network namespace", "net:[2]")),
        (Host(boot_id="a", pid_namespace="pid:[1]", name="h1"), ("network namespace", "unknown")),
        (BARE, ("uses no GPU", "transport='shared_memory'")),
        (on(gpu(2, gpu1=GpuReach.LINK_NONE)), ("no peer access", "0000:01:00.0", "0000:02:00.0", "shared_memory")),
    ],
)
def test_gpu_memory_out_of_reach_says_what_to_do(worker: Host, words: tuple[str, ...]) -> None:
    with pytest.raises(CkptEngineError) as caught:
        choose_transport(on(gpu(1)), "cuda_ipc", worker, ("cuda_ipc", "shared_memory"))
    assert caught.value.problem.code == Problem.CODE_FAILED_PRECONDITION
    for word in words:
        assert word in caught.value.problem.message


def test_a_namespace_that_neither_knows_is_not_shared() -> None:
    unknown = Host(boot_id="a", pid_namespace="pid:[1]", name="h1", gpus=[gpu(1)])
    with pytest.raises(CkptEngineError, match="network namespace"):
        choose_transport(unknown, "cuda_ipc", unknown, ("cuda_ipc",))


def test_the_gpu_comes_before_the_host_and_that_before_files() -> None:
    trainer, worker = on(gpu(1)), on(gpu(1))
    transports = ("file", "shared_memory", "cuda_ipc")
    distances = {name: choose_transport(trainer, name, worker, transports).distance for name in transports}
    assert sorted(transports, key=distances.__getitem__) == ["cuda_ipc", "shared_memory", "file"]


def test_a_relay_reaches_whoever_sees_its_directory_in_whatever_namespace() -> None:
    relay = Host(boot_id="a", pid_namespace="pid:[1]", name="h1", relay_directory="8:42")
    pod = Host(boot_id="a", pid_namespace="pid:[2]", network_namespace="net:[2]", name="pod", relay_directory="8:42")
    assert choose_transport(relay, "relay_memory", pod, ("relay_memory",)).distance == Distance.HOST_MEMORY
    for worker, words in (
        (Host(boot_id="b", name="h2", relay_directory="8:42"), "start a relay"),
        (Host(boot_id="a", name="pod", relay_directory="8:43"), "8:42 and 8:43.*CKPT_ENGINE_RELAY_DIRECTORY"),
        (Host(boot_id="a", name="pod"), "8:42 and unknown"),
    ):
        with pytest.raises(CkptEngineError, match=words):
            choose_transport(relay, "relay_memory", worker, ("relay_memory",))
    unknown = Host(boot_id="a", name="h1")
    with pytest.raises(CkptEngineError, match="unknown and unknown"):
        choose_transport(unknown, "relay_memory", unknown, ("relay_memory",))


NETWORKED = Host(boot_id="b", network_namespace="net:[3]", name="h2", address="10.0.0.2")
ALONE = Host(boot_id="b", network_namespace="net:[3]", name="h2", address="127.0.0.1")
BESIDE = Host(boot_id="b", network_namespace="net:[3]", name="h2b")


@pytest.mark.parametrize(
    ("source", "reader", "ok", "words"),
    [
        (NETWORKED, HERE, True, ("h2", "10.0.0.2")),
        (HERE, NETWORKED, False, ("h1", "no address", "--listen")),
        (ALONE, HERE, False, ("h2", "127.0.0.1", "h1", "--listen")),
        (ALONE, BESIDE, True, ("127.0.0.1",)),
        (ALONE, Host(boot_id="b", name="pod"), False, ("127.0.0.1", "pod")),  # the same host, another network
    ],
)
def test_a_network_reaches_who_told_an_address_that_leads_there(
    source: Host, reader: Host, ok: bool, words: tuple[str, ...]
) -> None:
    verdict = by_network(source, reader)
    assert verdict.ok is ok
    assert not ok or verdict.distance == Distance.NETWORK
    for word in words:
        assert word in verdict.reason


@pytest.mark.parametrize("transport", ["shared_memory", "cuda_ipc", "relay_memory"])
def test_containers_without_common_namespaces_are_hosts_of_their_own(transport: str) -> None:
    """One machine, so one boot id; and nothing else in common."""
    card = [gpu(1)]
    one = Host(
        boot_id="a", pid_namespace="pid:[1]", network_namespace="net:[1]", relay_directory="8:1", name="one", gpus=card
    )
    other = Host(
        boot_id="a", pid_namespace="pid:[2]", network_namespace="net:[2]", relay_directory="8:2", name="two", gpus=card
    )
    assert choose_transport(one, transport, one, (transport,)).transport == transport
    with pytest.raises(CkptEngineError, match="but not"):
        choose_transport(one, transport, other, (transport,))
    one.address = "10.0.0.1"
    assert by_network(one, other).ok
