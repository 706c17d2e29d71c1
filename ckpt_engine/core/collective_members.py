"""Which workers can be members of one collective with the ranks that they read, and in which order all are. Pure.

A communicator is between CPUs (Gloo) or between GPUs (NCCL), never both, and takes each GPU once. So a replica is left
out, by name, whose workers compute elsewhere than the weights lie, share a GPU with another member, or with whose ranks
somebody would not find the lead: the first rank, where all meet.
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
    """A source. name: its id. gpus: on which its weights lie; b"": on a CPU; only those that it offers for
    collectives."""

    name: str
    host: Host
    gpus: frozenset[bytes]


class CollectiveReader(NamedTuple):
    """A worker. name: as messages name it. reads: the sources that its plan reads, by their ids."""

    replica: str
    name: str
    host: Host
    reads: frozenset[str]


class CollectiveMembers(NamedTuple):
    """The members of one collective.

    members: in the order of their ranks in the communicator, the lead first. refused: replicas that take no part,
    and why.
    """

    members: tuple[CollectiveMember, ...]
    refused: Mapping[str, Problem]


def choose_members(ranks: Sequence[Rank], readers: Sequence[CollectiveReader]) -> CollectiveMembers:
    """All who can take part, of these, by their replicas' names. A rank that nobody of them reads takes none, and is in
    nobody's way."""
    rank_by_name = {rank.name: rank for rank in ranks}
    refused: dict[str, Problem] = {}
    members: dict[str, list[CollectiveMember]] = {}
    sources_read: set[str] = set()  # by those who take part
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
    """Raises FAILED_PRECONDITION unless all have one device, of one kind."""
    for rank in ranks:
        if len(rank.gpus) > 1:
            raise precondition(f"{rank.name} publishes weights on {len(rank.gpus)} devices, and is one member with one")
    on_cpu = [rank.name for rank in ranks if rank.gpus == {b""}]
    on_gpu = [rank.name for rank in ranks if rank.gpus != {b""}]
    if on_cpu and on_gpu:
        raise precondition(
            f"weights of {on_cpu[0]} lie on a CPU and those of {on_gpu[0]} on a GPU, and a collective is between CPUs "
            "or between GPUs: publish all from GPUs, or all from CPUs"
        )


def _check_lead(lead: Rank, others: Sequence[Rank | CollectiveReader]) -> None:
    """Raises FAILED_PRECONDITION unless all others find the lead, which may be a rank that they do not read."""
    for other in others:
        verdict = by_collective(lead.host, other.host)
        if not verdict.ok:
            raise precondition(f"{lead.name} leads it, and {other.name} does not find it: {verdict.reason}")


def _rank(rank: Rank) -> CollectiveMember:
    return CollectiveMember(rank.name, _place(rank.host), True, min(rank.gpus, default=b""))


def _member(reader: CollectiveReader, rank: Rank) -> CollectiveMember:
    """rank: one of those that the weights come from. Raises FAILED_PRECONDITION."""
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
    """Members of one are near each other."""
    return host.boot_id or name_of(host)
