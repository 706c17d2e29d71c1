"""Which workers can be members of one collective with the ranks that they read, and in which order. Pure.

A communicator is between CPUs (Gloo) or between GPUs (NCCL), never both, and takes each GPU once. All members meet at
the lead, the first rank. So a replica is left out, by name, if its workers compute on another kind of device than the
weights lie on, if they share a GPU with another member, or if with its ranks some member could not reach the lead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ckpt_engine.core.collective import CollectiveMember, arrange
from ckpt_engine.core.problems import CkptEngineError, precondition
from ckpt_engine.core.reach import by_collective
from ckpt_engine.core.relay_remedy import name_of
from ckpt_engine.v1.weights_pb2 import Host, Problem


class Rank(NamedTuple):
    """A trainer rank as a source of a collective."""

    name: str  # its id
    host: Host
    gpus: frozenset[bytes]  # on which the weights lie that it offers for collectives; b"": on a CPU


class CollectiveReader(NamedTuple):
    """A worker that a collective writes to."""

    replica: str
    name: str  # as messages name it
    host: Host
    reads: frozenset[str]  # ids of the sources that its plan reads


class CollectiveMembers(NamedTuple):
    """The members of one collective."""

    members: tuple[CollectiveMember, ...]  # in the order of their ranks in the communicator, the lead first
    refused: Mapping[str, Problem]  # replicas that take no part, and why


def choose_members(ranks: Sequence[Rank], readers: Sequence[CollectiveReader]) -> CollectiveMembers:
    """Chooses the replicas that can take part, in the order of their names, and the ranks that these read. A rank that
    no such replica reads is not a member, and excludes none."""
    rank_by_name = {rank.name: rank for rank in ranks}
    refused: dict[str, Problem] = {}
    members: dict[str, list[CollectiveMember]] = {}
    sources_read: set[str] = set()  # by the replicas that take part
    for replica in sorted({reader.replica for reader in readers}):
        own_readers = [reader for reader in readers if reader.replica == replica]
        needed_sources = sources_read.union(*(reader.reads for reader in own_readers))
        sources = [rank_by_name[name] for name in sorted(needed_sources)]
        others = [*map(_rank, sources), *(each for some in members.values() for each in some)]
        try:
            if not any(reader.reads for reader in own_readers):
                raise precondition("none of its workers reads anything")
            _check_ranks(sources)
            with_them = [reader for reader in readers if reader.replica in members or reader.replica == replica]
            lead = rank_by_name[arrange(map(_rank, sources))[0].name]
            _check_lead(lead, [*(each for each in sources if each is not lead), *with_them])
            found = [_member(reader, rank_by_name[min(reader.reads or needed_sources)]) for reader in own_readers]
            arrange([*others, *found])
        except CkptEngineError as problem:
            refused[replica] = precondition(f"no collective for it: {problem.problem.message}", replica=replica).problem
        else:
            members[replica] = found
            sources_read = needed_sources
    ranks_read = [_rank(rank_by_name[name]) for name in sorted(sources_read)]
    return CollectiveMembers(arrange([*ranks_read, *(each for some in members.values() for each in some)]), refused)


def _check_ranks(ranks: Sequence[Rank]) -> None:
    """Raises FAILED_PRECONDITION unless each has one device, and all are of one kind."""
    for rank in ranks:
        if len(rank.gpus) > 1:
            raise precondition(
                f"{rank.name} publishes weights on {len(rank.gpus)} devices; a member of a collective has one"
            )
    on_cpu = [rank.name for rank in ranks if rank.gpus == {b""}]
    on_gpu = [rank.name for rank in ranks if rank.gpus != {b""}]
    if on_cpu and on_gpu:
        raise precondition(
            f"weights of {on_cpu[0]} lie on a CPU and those of {on_gpu[0]} on a GPU, and a collective is between CPUs "
            "or between GPUs: publish all from GPUs, or all from CPUs"
        )


def _check_lead(lead: Rank, others: Sequence[Rank | CollectiveReader]) -> None:
    """Raises FAILED_PRECONDITION unless all others reach the lead, which may be a rank that they do not read."""
    for other in others:
        verdict = by_collective(lead.host, other.host)
        if not verdict.ok:
            raise precondition(f"{lead.name} leads it, and {other.name} does not find it: {verdict.reason}")


def _rank(rank: Rank) -> CollectiveMember:
    return CollectiveMember(rank.name, _place(rank.host), True, min(rank.gpus, default=b""))


def _member(reader: CollectiveReader, rank: Rank) -> CollectiveMember:
    """A worker as a member. rank: one that the weights come from. Raises FAILED_PRECONDITION unless it has one device,
    of the same kind as the rank's."""
    gpus = [gpu.uuid for gpu in reader.host.gpus]
    if len(gpus) > 1:
        raise precondition(f"{reader.name} uses {len(gpus)} GPUs, and a member of a collective has one")
    if bool(gpus) != (rank.gpus != {b""}):
        reader_device, weights_device = ("a GPU", "a CPU") if gpus else ("a CPU", "a GPU")
        raise precondition(
            f"{reader.name} computes on {reader_device} (host {name_of(reader.host)}), and the weights of {rank.name} "
            f"lie on {weights_device}: publish them over another transport, or from where replicas compute"
        )
    return CollectiveMember(reader.name, _place(reader.host), False, gpus[0] if gpus else b"")


def _place(host: Host) -> str:
    """The key of a host: members with the same key are near each other."""
    return host.boot_id or name_of(host)
