"""Places trainer ranks and workers on made-up hosts, which report the same facts as real ones would. Pure.

So the rules of reach (core/reach.py) find the same transports as on a real cluster. Each process has a GPU of its own;
all processes of a host share its PID and network namespaces and its directory of relays; each host has an address.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ckpt_engine.core.problems import invalid
from ckpt_engine.v1.weights_pb2 import Gpu, GpuReach, Host

LINKS = {"nvlink": GpuReach.LINK_NVLINK, "pcie": GpuReach.LINK_PCIE, "none": GpuReach.LINK_NONE}
"""How GPUs of one host reach each other."""


class Spot(NamedTuple):
    """Where one process runs."""

    host: int  # its number
    gpu: int | None  # on that host; None: the process uses none


@dataclass(frozen=True)
class Cluster:
    """Which process runs on which host."""

    hosts: tuple[str, ...]  # names
    gpus: int  # of each host
    link: str  # between GPUs of a host: one of LINKS
    ranks: tuple[Spot, ...]  # of the trainer
    workers: tuple[tuple[Spot, ...], ...]  # of each replica

    def host(self, place: Spot) -> Host:
        """The facts that a process there reports of where it runs."""
        found = self.relay_host(place.host)
        if place.gpu is not None:
            found.gpus.append(self._gpu(place.host, place.gpu))
        return found

    def relay_host(self, host: int) -> Host:
        """The facts that a host's relay reports."""
        name = self.hosts[host]
        return Host(
            boot_id=name,
            pid_namespace=name,
            name=name,
            address=name,
            network_namespace=name,
            relay_directory="/run/ckpt-engine",
        )

    def _gpu(self, host: int, gpu: int) -> Gpu:
        reach = [
            GpuReach(uuid=_uuid(self.hosts[host], other), link=LINKS[self.link])
            for other in range(self.gpus)
            if other != gpu
        ]
        return Gpu(uuid=_uuid(self.hosts[host], gpu), name=f"number {gpu}", reach=reach)


def _uuid(host: str, gpu: int) -> bytes:
    return hashlib.sha256(f"{host} {gpu}".encode()).digest()[:16]


def place(
    ranks: int,
    replicas: int,
    workers: int,
    *,
    gpus: int,
    link: str,
    trainer_hosts: int | None,
    replica_hosts: int | None,
    shared_gpus: bool,
    rank_gpus: bool,
    worker_gpus: bool,
) -> Cluster:
    """Deals processes to hosts.

    workers: of each replica. gpus: of a host. trainer_hosts, replica_hosts: how many; None: as few as possible, with
    replicas on the trainer's hosts if these have GPUs left. shared_gpus: workers are on the ranks' GPUs. rank_gpus,
    worker_gpus: whether each rank or worker has a GPU.

    Raises INVALID_ARGUMENT if they do not fit.
    """
    trainer_count = trainer_hosts if trainer_hosts is not None else (-(-ranks // gpus) if rank_gpus else 1)
    if trainer_count > ranks:
        raise invalid(
            f"--trainer-hosts {trainer_count}: the trainer has {ranks} rank{'s' * (ranks > 1)}, fewer than hosts"
        )
    per_host = -(-ranks // trainer_count)
    if rank_gpus and per_host > gpus:
        raise invalid(
            f"--trainer-hosts {trainer_count}: {ranks} ranks are {per_host} a host, and a host has {gpus} GPUs "
            "(--gpus-per-host): name more hosts"
        )
    rank_seats = [divmod(rank, per_host) for rank in range(ranks)]
    trainer = tuple(Spot(host, gpu if rank_gpus else None) for host, gpu in rank_seats)
    total = replicas * workers
    names = [f"trainer-{host}" for host in range(trainer_count)]
    if shared_gpus:
        found = _on_ranks(rank_seats, total)
    elif replica_hosts is None and (
        near_trainer := _on_trainer_hosts(
            rank_seats, trainer_count, gpus if worker_gpus else max(total, gpus), replicas, workers, rank_gpus
        )
    ):
        found = near_trainer
    else:
        found = _apart(trainer_count, replicas, workers, gpus, replica_hosts, worker_gpus)
        names += [f"rollout-{host}" for host in range(1 + max(host for host, _ in found) - trainer_count)]
    seats = [Spot(host, gpu if worker_gpus else None) for host, gpu in found]
    workers_by_replica = tuple(tuple(seats[first : first + workers]) for first in range(0, total, workers))
    return Cluster(tuple(names), gpus, link, trainer, workers_by_replica)


def _on_ranks(rank_seats: Sequence[tuple[int, int]], total: int) -> list[tuple[int, int]]:
    if total > len(rank_seats):
        raise invalid(
            f"--same-gpus: {total} workers in all, and the trainer is on {len(rank_seats)}: name fewer replicas, or "
            "leave --same-gpus out"
        )
    return list(rank_seats[:total])


def _on_trainer_hosts(
    rank_seats: Sequence[tuple[int, int]], hosts: int, gpus: int, replicas: int, workers: int, rank_gpus: bool
) -> list[tuple[int, int]] | None:
    """Places each replica on the free GPUs of one of the trainer's hosts; None: there are too few."""
    used_gpus = [sum(host == each for host, _ in rank_seats) if rank_gpus else 0 for each in range(hosts)]
    found: list[tuple[int, int]] = []
    for host in range(hosts):
        while used_gpus[host] + workers <= gpus and len(found) < replicas * workers:
            found += [(host, used_gpus[host] + gpu) for gpu in range(workers)]
            used_gpus[host] += workers
    return found if len(found) == replicas * workers else None


def _apart(
    first: int, replicas: int, workers: int, gpus: int, hosts: int | None, worker_gpus: bool
) -> list[tuple[int, int]]:
    """Places replicas on hosts of their own, numbered from `first`: as many on a host as fit, or each over several
    hosts."""
    room = gpus if worker_gpus else max(gpus, workers)
    hosts_per_replica = -(-workers // room)
    least = replicas * hosts_per_replica if hosts_per_replica > 1 else -(-replicas // (room // workers))
    count = least if hosts is None else hosts
    if count < least:
        raise invalid(
            f"--hosts {count}: {replicas} replicas of {workers} worker{'s' * (workers > 1)} take {least} hosts of "
            f"{gpus} GPUs (--gpus-per-host)"
        )
    if hosts_per_replica == 1 and count > replicas:
        if workers == 1 or count % replicas or workers % (count // replicas):
            raise invalid(
                f"--hosts {count}: {replicas} replica{'s' * (replicas > 1)} of {workers} worker{'s' * (workers > 1)} "
                f"cannot be spread evenly over so many hosts; name {least}, or leave it out"
            )
        hosts_per_replica = count // replicas
    if hosts_per_replica > 1:
        each = -(-workers // hosts_per_replica)
        return [
            (first + replica * hosts_per_replica + worker // each, worker % each)
            for replica in range(replicas)
            for worker in range(workers)
        ]
    found = []
    seats = [0] * count
    for replica in range(replicas):
        host = replica * count // replicas
        found += [(first + host, seats[host] + worker) for worker in range(workers)]
        seats[host] += workers
    if max(seats) > room:
        raise invalid(f"--hosts {count}: {replicas} replicas cannot be dealt evenly to so many hosts; name more")
    return found
