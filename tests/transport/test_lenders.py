"""The owner's side of the transports that are built: what each lends, what it refuses, and how it takes it back."""

from __future__ import annotations

import gc
import logging
import os
import socket
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.core.transports import FILES, GPU_MEMORY, HOST_MEMORY, lending, make, transport_kinds
from ckpt_engine.cuda.driver import Allocation
from ckpt_engine.source.lending import Lending
from ckpt_engine.transport.base import FileMemory, GpuMemory, Lender, Memory
from ckpt_engine.transport.cuda_ipc.memory import LEGACY, AllocationRun
from ckpt_engine.transport.file.files import FileLender, FileTransport
from ckpt_engine.transport.shared_memory.memory import SharedArena, SharedMemoryLender, SharedMemoryTransport
from ckpt_engine.v1.weights_pb2 import Problem, Region


def test_a_memory_file_is_lent_until_it_is_withdrawn_and_read_for_longer() -> None:
    arena, lender = SharedArena(4096), SharedMemoryLender()
    arena.tensor(0, (4096,), torch.uint8).fill_(7)
    region = lender.offer(5, arena.lendable())
    assert (region.id, region.size, region.transport) == (5, 4096, "shared_memory")
    opened = SharedMemoryTransport().open([region])
    assert opened.offered()
    lender.withdraw(0.0)
    lender.close()
    assert not opened.offered()
    assert int(opened.view(region, 0, (1,), (1,), "uint8")[0]) == 7, "who has it mapped keeps it"
    with pytest.raises(CkptEngineError, match="publish again"):
        SharedMemoryTransport().open([region])
    arena.close()
    with pytest.raises(CkptEngineError, match="was closed"):
        arena.lendable()


def test_lending_takes_a_descriptor_and_gives_it_back() -> None:
    arena, lender = SharedArena(4096), SharedMemoryLender()
    gc.collect()  # what earlier tests of this process left is closed now, not while we count
    before = len(os.listdir("/proc/self/fd"))
    lender.offer(0, arena.lendable())
    assert len(os.listdir("/proc/self/fd")) == before + 1
    lender.close()
    assert len(os.listdir("/proc/self/fd")) == before
    arena.close()


def test_a_file_that_changes_is_not_what_was_lent(tmp_path: Path) -> None:
    path, lender = tmp_path / "file", FileLender()
    path.write_bytes(bytes(100))
    region = lender.offer(1, FileMemory(str(path), 10, 50))
    opened = FileTransport().open([region])
    assert lender.unchanged()
    path.write_bytes(bytes(101))
    assert not lender.unchanged()
    with pytest.raises(CkptEngineError, match="changed since it was published"):
        opened.check()
    lender.withdraw(0.0)
    with pytest.raises(CkptEngineError, match="cannot look at"):
        lender.offer(1, FileMemory(str(tmp_path / "none"), 0, 1))


def test_each_refuses_memory_that_is_not_of_its_kind(tmp_path: Path) -> None:
    arena = SharedArena(64)
    for lender, memory in ((SharedMemoryLender(), FileMemory("/x", 0, 1)), (FileLender(), arena.lendable())):
        with pytest.raises(CkptEngineError) as caught:
            lender.offer(0, memory)
        assert caught.value.problem.code == Problem.CODE_UNAVAILABLE
    arena.close()


@pytest.mark.parametrize(
    ("memory", "asked", "names"),
    [
        (HOST_MEMORY, None, ["shared_memory"]),
        (GPU_MEMORY, None, ["cuda_ipc"]),
        (FILES, None, ["file"]),
        (HOST_MEMORY, "shared_memory", ["shared_memory"]),
        (GPU_MEMORY, "shared_memory", []),
        (HOST_MEMORY, "cuda_ipc", []),
    ],
)
def test_what_is_lent_over_what(memory: str, asked: str | None, names: list[str]) -> None:
    assert [kind.name for kind in lending(memory, asked)] == names


def test_every_lender_has_all_of_its_side() -> None:
    for kind in transport_kinds().values():
        if kind.lender is None:
            assert kind.name in ("relay_memory", "archive") or kind.chunks or kind.carrier, (
                "what relays lend and keep is lent on no source's side"
            )
            continue
        lender: Lender = make(kind.lender)
        assert lender.unchanged()
        lender.withdraw(1.0)
        lender.close()
        lender.close()


def test_memory_that_nothing_takes_is_named_with_the_reasons() -> None:
    with pytest.raises(CkptEngineError, match=r"files cannot be lent over transport='cuda_ipc': none takes it"):
        Lending("cuda_ipc").must_offer(0, FileMemory("/x", 0, 1))
    with pytest.raises(CkptEngineError, match="files cannot be lent over any transport: cannot look at /none"):
        Lending().must_offer(0, FileMemory("/none", 0, 1))


class Lent:
    """Not a real lender, which needs a GPU."""

    def __init__(self, name: str) -> None:
        self.name = name

    def offer(self, id: int, memory: Memory) -> Region:
        return Region(id=id, transport=self.name, size=1)


GPU = GpuMemory(0, AllocationRun(LEGACY, (Allocation(0, 1),)))


@pytest.mark.parametrize(
    ("asked", "advertise", "authority", "wish", "offered"),
    [
        (None, "127.0.0.1", "", "1", {"cuda_ipc", "nccl"}),
        (None, "127.0.0.1", "", "", {"cuda_ipc"}),
        (None, "127.0.0.1", "", "0", {"cuda_ipc"}),
        (None, "127.0.0.1", "authority.pem", "1", {"cuda_ipc"}),
        (None, "", "", "1", {"cuda_ipc"}),
        ("cuda_ipc", "127.0.0.1", "", "1", {"cuda_ipc"}),
        ("nccl", "", "authority.pem", "", {"nccl"}),
    ],
)
def test_memory_of_a_gpu_is_offered_for_collectives_besides_where_the_environment_says_so(
    asked: str | None, advertise: str, authority: str, wish: str, offered: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPT_ENGINE_AUTHORITY", authority)
    monkeypatch.setenv("CKPT_ENGINE_COLLECTIVE", wish)
    lending = Lending(asked, advertise)
    monkeypatch.setattr(lending, "_lender", lambda kind: Lent(kind.name))
    assert lending.offer(0, GPU)
    assert {offer.transport for offer in lending.regions[0].offers} == offered


def test_a_wish_for_collectives_that_is_neither_yes_nor_no_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPT_ENGINE_COLLECTIVE", "true")
    with pytest.raises(CkptEngineError, match="CKPT_ENGINE_COLLECTIVE is 'true': set it to 1"):
        Lending(None, "127.0.0.1")


def test_an_address_that_nobody_finds_is_looked_up_once_and_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """However many regions are lent."""
    monkeypatch.delenv("CKPT_ENGINE_AUTHORITY", raising=False)
    monkeypatch.setenv("CKPT_ENGINE_COLLECTIVE", "1")
    looked_up: list[object] = []
    original = socket.getaddrinfo

    def getaddrinfo(host: Any, *rest: Any, **named: Any) -> Any:
        looked_up.append(host)
        return original(host, *rest, **named)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    caplog.set_level(logging.INFO, "ckpt_engine.source.lending")
    lending = Lending(None, "no-such-host.invalid")
    lending._lenders["cuda_ipc"] = cast(Lender, Lent("cuda_ipc"))
    for id in range(3):
        assert lending.offer(id, GPU)
    assert looked_up == ["no-such-host.invalid"]
    assert [record.getMessage().count("no-such-host.invalid") for record in caplog.records] == [1]
    assert {offer.transport for region in lending.regions for offer in region.offers} == {"cuda_ipc"}
