"""Whether memory of one process can be reached from another, judged by what both know of where they run. Pure.

There is one rule for each kind of reach; a transport names its own (transports.py). Nothing is tried out here: that is
the job of the doctor and of the transport.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import NamedTuple

from ckpt_engine.core.loopback import is_loopback
from ckpt_engine.core.relay_remedy import name_of
from ckpt_engine.v1.weights_pb2 import Gpu, GpuReach, Host


class Reach(NamedTuple):
    """Whether a transport reaches from a source to a worker; if not, `reason` says why not and what to do."""

    ok: bool
    reason: str
    distance: int = 0
    relays: tuple[Host, ...] = ()  # hosts that each need a relay, so that weights can be read by way of these


class Distance(IntEnum):
    """Distances, from what reads fastest to what reads slowest."""

    SAME_GPU = 0
    NVLINK = 1
    PEER = 2
    PCIE = 3
    UNKNOWN_PEER = 4
    HOST_MEMORY = 5
    FILE = 6
    NETWORK = 7
    SHARED_FILE = 8


Rule = Callable[[Host, Host], Reach]
"""(source, worker) to verdict."""


def same_host(a: Host, b: Host) -> bool:
    """Whether two processes run on one machine. An unknown fact never counts as shared."""
    return bool(a.boot_id) and a.boot_id == b.boot_id


def by_process(source: Host, worker: Host) -> Reach:
    """Judges memory that a process of the same host, in the same PID namespace, can open."""
    if not same_host(source, worker):
        return Reach(
            False,
            f"the source's memory is on host {name_of(source)}, and the worker runs on host {name_of(worker)}; only "
            "relays read over a network",
            relays=(source, worker),
        )
    if not source.pid_namespace or source.pid_namespace != worker.pid_namespace:
        return Reach(
            False,
            f"source and reader share host {name_of(source)} but not its process ids ({_namespace(source)} and "
            f"{_namespace(worker)}), so the reader cannot open the source's memory; run both in one container, or "
            "their containers with a common PID namespace (docker run --pid=host, Kubernetes shareProcessNamespace), "
            "or run a relay beside the source and mount its directory (CKPT_ENGINE_RELAY_DIRECTORY) into both",
        )
    return Reach(
        True,
        f"trainer and worker share host {name_of(source)}, so it reads the trainer's memory directly",
        Distance.HOST_MEMORY,
    )


def by_directory(source: Host, worker: Host) -> Reach:
    """Judges memory that a process of the same host hands out over a socket in a directory that both see."""
    where = name_of(source)
    if not same_host(source, worker):
        return Reach(
            False,
            f"the relay's memory is on host {where}, and the worker runs on host {name_of(worker)}",
            relays=(worker,),
        )
    if not source.relay_directory or source.relay_directory != worker.relay_directory:
        return Reach(
            False,
            f"relay and worker share host {where} but not the directory of relays' sockets "
            f"({source.relay_directory or 'unknown'} and {worker.relay_directory or 'unknown'}); mount one directory "
            "into both (Kubernetes: a hostPath) and name it in CKPT_ENGINE_RELAY_DIRECTORY",
        )
    return Reach(True, f"the relay of host {where} lends its memory to the worker", Distance.HOST_MEMORY)


def by_file(source: Host, worker: Host) -> Reach:
    """Judges files that every process of the host can open, and processes of other hosts that share the directory.
    Whether they share it shows when the files are opened, before anything is paused."""
    if not same_host(source, worker):
        return Reach(
            True,
            f"the worker on host {name_of(worker)} opens the checkpoint's files where host {name_of(source)} has them, "
            "in a directory that both have",
            Distance.SHARED_FILE,
        )
    return Reach(
        True, f"source and worker share host {name_of(source)}, so it maps the checkpoint's files", Distance.FILE
    )


def by_gpu(source: Host, worker: Host) -> Reach:
    """Judges memory of a GPU, for processes of the same host with GPUs that reach it."""
    where = name_of(source)
    if not same_host(source, worker):
        return Reach(
            False,
            f"the source's GPU memory is on host {where}, and the worker runs on host {name_of(worker)}; only relays "
            "read over a network",
            relays=(source, worker),
        )
    for what, one, other in (
        ("process ids", source.pid_namespace, worker.pid_namespace),
        ("network namespace", source.network_namespace, worker.network_namespace),
    ):
        if not one or one != other:
            return Reach(
                False,
                f"source and worker share host {where} but not its {what} ({one or 'unknown'} and "
                f"{other or 'unknown'}), so GPU memory cannot be lent safely; run both in one container, or their "
                "containers with common PID and network namespaces (docker run --pid=host --network=host; one pod "
                "with shareProcessNamespace), or publish with transport='shared_memory'",
            )
    if not worker.gpus:
        return Reach(
            False,
            f"the worker on host {where} uses no GPU, so it cannot map the source's GPU memory; publish with "
            "transport='shared_memory'",
        )
    return _across_gpus(source, worker)


def by_network(source: Host, worker: Host) -> Reach:
    """Judges memory that a relay sends over a network, to readers that reach its address."""
    where = name_of(source)
    if not source.address:
        return Reach(
            False,
            f"host {where} gave no address at which others reach it; start its relay with --listen HOST:PORT and "
            "--advertise",
        )
    if is_loopback(source.address) and not (
        same_host(source, worker) and source.network_namespace and source.network_namespace == worker.network_namespace
    ):
        return Reach(
            False,
            f"the relay of host {where} is reached at {source.address} only, which leads to no other host than its "
            f"own, and not from host {name_of(worker)}; start it with --listen HOST:PORT, or --advertise another "
            "address",
        )
    return Reach(
        True,
        f"the relay of host {where} sends its memory over the network, from {source.address}",
        Distance.NETWORK,
    )


def by_collective(source: Host, worker: Host) -> Reach:
    """Judges memory that its owner sends to all members of a collective; they meet where one of the owners listens."""
    where = name_of(source)
    near = same_host(source, worker) and source.network_namespace == worker.network_namespace
    if not (near and source.network_namespace) and (not source.address or is_loopback(source.address)):
        at = f"at {source.address} only" if source.address else "at no address of its network"
        return Reach(
            False,
            f"the trainer on host {where} is reached {at}, so no worker on host {name_of(worker)} finds the "
            "members of its collective; tell the trainer the address at which other hosts reach it (advertise, or "
            "CKPT_ENGINE_ADVERTISE)",
        )
    return Reach(True, f"it takes part in a collective with the trainer on host {where}", Distance.NETWORK)


def _across_gpus(source: Host, worker: Host) -> Reach:
    """Judges by the worst of the ways from the worker's GPUs to each of the source's."""
    worst, gpu_name = Distance.SAME_GPU, ""
    for gpu in source.gpus:
        ways = [_way(gpu, reader) for reader in worker.gpus]
        best = min((way for way in ways if way is not None), default=None)
        if best is None:
            readers = ", ".join(_gpu(reader) for reader in worker.gpus)
            return Reach(
                False,
                f"no peer access leads from the worker's GPU ({readers}) to the trainer's ({_gpu(gpu)}) on host "
                f"{name_of(source)}; publish with transport='shared_memory', or put the replica on a GPU that reaches "
                "it",
            )
        if best >= worst:
            worst, gpu_name = best, _gpu(gpu)
    if not source.gpus:
        worst = Distance.UNKNOWN_PEER
    sentence = {
        Distance.SAME_GPU: f"trainer and worker share GPU {gpu_name}, so it reads live parameters where they lie",
        Distance.NVLINK: f"the worker's GPU reads the trainer's ({gpu_name}) over NVLink",
        Distance.PCIE: f"the worker's GPU reads the trainer's ({gpu_name}) over PCIe",
        Distance.PEER: f"the worker's GPU has peer access to the trainer's ({gpu_name})",
        Distance.UNKNOWN_PEER: f"trainer and worker share host {name_of(source)}; nothing tells whether its GPU "
        f"reaches the trainer's ({gpu_name or 'unknown'}), which mapping it will show",
    }
    return Reach(True, sentence[worst], worst)


def _way(gpu: Gpu, reader: Gpu) -> Distance | None:
    """How `reader` reaches the memory of `gpu`; None: it does not. Either GPU may know of their link."""
    if gpu.uuid == reader.uuid:
        return Distance.SAME_GPU
    links = [each.link for each in reader.reach if each.uuid == gpu.uuid]
    links += [each.link for each in gpu.reach if each.uuid == reader.uuid]
    distances = [_DISTANCE_OF_LINK[link] for link in links if link in _DISTANCE_OF_LINK]
    if distances:
        return min(distances)
    return None if GpuReach.LINK_NONE in links else Distance.UNKNOWN_PEER


_DISTANCE_OF_LINK = {
    GpuReach.LINK_NVLINK: Distance.NVLINK,
    GpuReach.LINK_PCIE: Distance.PCIE,
    GpuReach.LINK_PEER: Distance.PEER,
}


def _namespace(host: Host) -> str:
    return host.pid_namespace or "unknown"


def _gpu(gpu: Gpu) -> str:
    return " ".join(part for part in (gpu.name, gpu.pci) if part) or gpu.uuid.hex()[:8] or "unknown"
