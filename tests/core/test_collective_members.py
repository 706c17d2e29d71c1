"""Who can be a member of one collective: all on CPUs or all on GPUs, and each GPU once."""

from __future__ import annotations

import pytest

from ckpt_engine.core.collective_members import CollectiveReader, Rank, choose_members
from ckpt_engine.core.collective_plan import meeting_of
from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.v1.weights_pb2 import CollectiveMeeting, Gpu, Host, NcclLocator

CPU = frozenset({b""})


def gpu(number: int) -> bytes:
    return bytes([number]) * 16


def host(name: str, *gpus: int) -> Host:
    return Host(boot_id=name, name=name, address=name, gpus=[Gpu(uuid=gpu(number)) for number in gpus])


def rank(number: int, gpus: frozenset[bytes] = CPU) -> Rank:
    return Rank(f"rank {number}", host("trainer"), gpus)


def reader(replica: str, *gpus: int, number: int = 0, ranks: tuple[int, ...] = (0,)) -> CollectiveReader:
    reads = frozenset(f"rank {each}" for each in ranks)
    return CollectiveReader(replica, f"{replica}, worker {number}", host(f"host of {replica}", *gpus), reads)


def test_members_are_those_who_read_and_those_who_are_read() -> None:
    found = choose_members([rank(0), rank(1), rank(2)], [reader("b", ranks=(1,)), reader("a", ranks=(1, 2))])
    names = [member.name for member in found.members]
    assert names == ["rank 1", "rank 2", "a, worker 0", "b, worker 0"]
    assert [member.is_source for member in found.members] == [True, True, False, False]
    assert not found.refused


def test_all_have_to_find_the_lead_also_who_does_not_read_it() -> None:
    near, far = host("h0"), host("h1")
    near.address = ""
    near.network_namespace = "net:[1]"
    ranks = [Rank("rank 0", near, CPU), Rank("rank 1", far, CPU)]
    one = CollectiveReader("one", "one, worker 0", near, frozenset({"rank 0"}))
    both = CollectiveReader("both", "both, worker 0", near, frozenset({"rank 0", "rank 1"}))
    assert not choose_members(ranks, [one]).refused
    found = choose_members(ranks, [one, both])
    assert "rank 0 leads it, and rank 1 does not find it: the trainer on host h0" in found.refused["both"].message
    assert [member.name for member in found.members] == ["rank 0", "one, worker 0"]
    away = CollectiveReader("away", "away, worker 0", far, frozenset({"rank 1"}))
    assert [member.name for member in choose_members(ranks, [away]).members] == ["rank 1", "away, worker 0"]
    found = choose_members(ranks, [away, both])
    assert sorted(found.refused) == ["both"], "a rank that leads for those before it stays out"


@pytest.mark.parametrize("found", ["rank 0", "rank 1"])
def test_the_lead_that_all_have_to_find_is_the_one_they_meet_at(found: str) -> None:
    """Members are arranged by host, so the lead is not the rank of the lowest name."""
    hosts = {"rank 0": host("z"), "rank 1": host("a")}
    for name, each in hosts.items():
        each.network_namespace = f"net:[{each.name}]"
        each.address = each.name if name == found else ""
    ranks = [Rank(name, each, CPU) for name, each in hosts.items()]
    taken = choose_members(ranks, [reader("one", ranks=(0, 1))])
    if found == "rank 1":
        assert [member.name for member in taken.members] == ["rank 1", "rank 0", "one, worker 0"]
    else:
        assert "rank 1 leads it, and rank 0 does not find it" in taken.refused["one"].message


def test_who_computes_elsewhere_than_the_weights_lie_is_left_out_by_name() -> None:
    found = choose_members([rank(0, frozenset({gpu(0)}))], [reader("a", 1), reader("b"), reader("c", 2, 3)])
    assert [(member.name, member.gpu) for member in found.members] == [("rank 0", gpu(0)), ("a, worker 0", gpu(1))]
    for words in (
        "b, worker 0 computes on a CPU",
        "weights of rank 0 lie on a GPU",
        "publish them over another transport",
    ):
        assert words in found.refused["b"].message
    assert "c, worker 0 uses 2 GPUs" in found.refused["c"].message
    assert found.refused["c"].replica == "c"


def test_a_gpu_that_is_taken_is_named_with_both_who_want_it() -> None:
    ranks = [rank(0, frozenset({gpu(0)}))]
    found = choose_members(ranks, [reader("a", 0), reader("b", 1), reader("c", 1), reader("d", 2, number=1)])
    assert [member.name for member in found.members] == ["rank 0", "b, worker 0", "d, worker 1"]
    assert "rank 0 and a, worker 0 are on one GPU" in found.refused["a"].message
    assert "b, worker 0 and c, worker 0 are on one GPU" in found.refused["c"].message


def test_ranks_on_cpus_and_on_gpus_are_in_no_collective_together() -> None:
    found = choose_members(
        [rank(0), rank(1, frozenset({gpu(0)}))], [reader("a", ranks=(0, 1)), reader("b", ranks=(0, 1))]
    )
    assert not found.members
    for name in "ab":
        assert "weights of rank 0 lie on a CPU and those of rank 1 on a GPU" in found.refused[name].message
    some = choose_members([rank(0, frozenset({b"", gpu(0)}))], [reader("a", 1)])
    assert "rank 0 publishes weights on 2 devices" in some.refused["a"].message


def test_a_rank_that_can_be_no_member_is_in_the_way_of_its_readers_only() -> None:
    two_devices = rank(1, frozenset({gpu(0), gpu(1)}))
    ranks = [rank(0, frozenset({gpu(2)})), two_devices, rank(2), rank(3, frozenset({gpu(4)}))]
    a, b, c = reader("a", 3), reader("b", 5, ranks=(0, 1)), reader("c", 6, ranks=(0, 2))
    d = reader("d", 4)  # on the GPU of a rank that only e reads, which is left out: e comes later
    e = reader("e", 2, ranks=(3,))
    found = choose_members(ranks, [a, b, c, d, e])
    assert [member.name for member in found.members] == ["rank 0", "a, worker 0", "d, worker 0"]
    assert sorted(found.refused) == ["b", "c", "e"]
    assert "rank 1 publishes weights on 2 devices" in found.refused["b"].message
    assert "weights of rank 2 lie on a CPU" in found.refused["c"].message


def test_a_replica_that_reads_nothing_takes_no_part() -> None:
    found = choose_members([rank(0)], [reader("a", ranks=()), reader("b"), reader("b", number=1, ranks=())])
    assert [member.name for member in found.members] == ["rank 0", "b, worker 0", "b, worker 1"]
    assert "none of its workers reads anything" in found.refused["a"].message


def test_a_replica_is_not_let_in_whose_ranks_do_not_go_with_those_that_are() -> None:
    """Each reads ranks that go together: both read ranks on CPUs and on GPUs."""
    found = choose_members([rank(0), rank(1, frozenset({gpu(0)}))], [reader("a"), reader("b", 2, ranks=(1,))])
    assert [member.name for member in found.members] == ["rank 0", "a, worker 0"]
    assert "weights of rank 0 lie on a CPU and those of rank 1 on a GPU" in found.refused["b"].message


def test_a_meeting_is_where_its_lead_is() -> None:
    locator = NcclLocator(host="10.0.0.7", port=4000, gpu=gpu(1))
    told = CollectiveMeeting.FromString(meeting_of(locator.SerializeToString(), bytes(32)))
    assert (told.host, told.port, told.key) == ("10.0.0.7", 4000, bytes(32))


@pytest.mark.parametrize(
    ("locator", "message"),
    [
        (b"\xff", "cannot be read"),
        (NcclLocator(port=1).SerializeToString(), "found at '', which is not an address"),
        (NcclLocator(host="a\nb", port=1).SerializeToString(), "which is not an address"),
        (NcclLocator(host="a", port=1 << 16).SerializeToString(), "port 65536"),
        (NcclLocator(host="a", port=1, gpu=b"short").SerializeToString(), "5 bytes of a GPU's UUID"),
    ],
)
def test_a_locator_that_leads_nowhere_is_refused(locator: bytes, message: str) -> None:
    with pytest.raises(CkptEngineError, match=message):
        meeting_of(locator, bytes(32))
