"""What a relay can be told, and what is said of what it cannot."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.core.sizes import bytes_of, in_words
from ckpt_engine.host.room import memory_room, memory_total
from ckpt_engine.relay.settings import RelaySettings, half_of_the_room

MANAGER = "127.0.0.1:50051"


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("200GiB", 200 << 30),
        ("200gib", 200 << 30),
        (" 1.5 TiB ", 3 << 39),
        ("200GB", 200 * 10**9),
        ("8MiB", 8 << 20),
        ("8388608B", 8 << 20),
    ],
)
def test_memory_is_written_with_a_unit(text: str, size: int) -> None:
    assert bytes_of(text) == size


@pytest.mark.parametrize(
    "text", ["", "0", "200", "50%", "lots", "-1GiB", "1e3GiB", "nanGiB", "200Gi", "9" * 400 + "GiB"]
)
def test_what_is_no_memory_says_what_is(text: str) -> None:
    with pytest.raises(CkptEngineError, match=r"is not an amount of memory: write a number and a unit, such as 200GiB"):
        bytes_of(text)


def test_too_little_and_too_much_are_refused_with_both_numbers() -> None:
    with pytest.raises(CkptEngineError, match=r"a relay needs at least 4 MiB, got 1 MiB"):
        RelaySettings(MANAGER, 1 << 20)
    with pytest.raises(CkptEngineError, match=r"has (\S+ \SiB) in all") as caught:
        RelaySettings(MANAGER, memory_total() + (1 << 40))
    assert in_words(memory_total() + (1 << 40)) in caught.value.problem.message


def test_a_relay_that_is_told_nothing_takes_half_of_what_is_left() -> None:
    assert 0 < half_of_the_room() < memory_room() < memory_total()


def test_a_cgroups_limit_is_all_that_there_is(tmp_path: Path) -> None:
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "meminfo").write_text("MemTotal: 1000 kB\nMemAvailable: 900 kB\n")
    (tmp_path / "proc" / "self" / "cgroup").write_text("0::/outer/inner\n")
    inner = tmp_path / "cgroups" / "outer" / "inner"
    inner.mkdir(parents=True)
    (inner / "memory.max").write_text("max\n")
    (inner.parent / "memory.max").write_text("5000\n")
    assert memory_total(tmp_path / "proc", tmp_path / "cgroups") == 5000


def test_an_address_that_is_none_is_refused() -> None:
    with pytest.raises(CkptEngineError, match="nowhere"):
        RelaySettings("nowhere", 8 << 20)


def test_a_grace_that_is_no_time_is_refused() -> None:
    with pytest.raises(CkptEngineError, match="not nan"):
        RelaySettings(MANAGER, 8 << 20, slot_grace=float("nan"))


@pytest.mark.parametrize(
    ("listen", "advertise", "address"),
    [
        ("127.0.0.1:0", "10.0.0.7", "127.0.0.1"),  # nobody else reaches it, whatever is said of this host
        ("10.0.0.7:7010", "", "10.0.0.7"),
        ("0.0.0.0:7010", "node-7", "node-7"),
        ("[::]:7010", "10.0.0.7", "10.0.0.7"),
    ],
)
def test_other_hosts_are_told_where_they_reach_it(listen: str, advertise: str, address: str) -> None:
    network = RelaySettings(MANAGER, 8 << 20, listen=listen, advertise=advertise).network()
    assert (network.listen, network.address) == (listen, address)


def test_an_address_that_leads_to_nobody_else_is_not_told_to_others() -> None:
    with pytest.raises(CkptEngineError, match="say with --advertise"):
        RelaySettings("127.0.0.1:50051", 8 << 20, listen="0.0.0.0:0").network()
    with pytest.raises(CkptEngineError, match="--listen 'here' is not an address"):
        RelaySettings(MANAGER, 8 << 20, listen="here")
    with pytest.raises(CkptEngineError, match="--metrics 'there' is not an address"):
        RelaySettings(MANAGER, 8 << 20, metrics="there")
