"""Shared memory between real processes: what arrives, what is refused, and that nothing is left behind."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest
import torch

from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.host.room import memory_room
from ckpt_engine.transport.base import Move
from ckpt_engine.transport.shared_memory.memory import SharedArena, SharedMemoryTransport
from ckpt_engine.v1.weights_pb2 import Problem, Region, SharedMemoryLocator
from tests.transport.peer import Peer, holders


def filled(size: int) -> SharedArena:
    arena = SharedArena(size)
    arena.tensor(0, (size,), torch.uint8).copy_(torch.arange(size) % 251)
    return arena


def maps() -> int:
    return len(Path("/proc/self/maps").read_text().splitlines())


@pytest.mark.parametrize(
    "dtype", ["bfloat16", "float16", "float32", "float64", "int64", "uint8", "bool", "float8_e4m3fn"]
)
def test_every_bit_pattern_arrives(dtype: str) -> None:
    kind = getattr(torch, dtype)
    arena = SharedArena(1 << 18)
    pattern = torch.arange(1 << 16, dtype=torch.int64).view(torch.uint8)[: 1 << 18]
    arena.tensor(0, (1 << 18,), torch.uint8).copy_(pattern % 2 if dtype == "bool" else pattern)
    region = arena.region(0)
    count = (1 << 18) // kind.itemsize
    destination = torch.zeros(count, dtype=kind)
    move = Move(region, 0, (count,), (1,), dtype, destination)
    copied = SharedMemoryTransport().open([region]).prepare([move])
    assert copied.run() == copied.bytes == 1 << 18
    assert torch.equal(destination.view(torch.uint8), arena.tensor(0, (1 << 18,), torch.uint8))


def test_strided_pieces_arrive_where_they_belong() -> None:
    arena = SharedArena(4096 * 4)
    whole = arena.tensor(0, (32, 4, 32), torch.float32)
    whole.copy_(torch.arange(4096).reshape(32, 4, 32))
    region = arena.region(0)
    parameter = torch.nn.Parameter(torch.full((64, 40), -1.0))
    fused = parameter.detach()[8:40, 4:36].t()
    scalar = torch.zeros(())
    moves = [
        Move(region, (2 * 32 + 1) * 4, (32, 31), (128, 1), "float32", fused[1:].t()),
        Move(region, 4095 * 4, (), (), "float32", scalar),
        Move(region, 0, (0, 7), (7, 1), "float32", torch.zeros(0, 7)),
    ]
    SharedMemoryTransport().open([region]).prepare(moves).run()
    expected = torch.full((64, 40), -1.0)
    expected[8:40, 5:36] = whole[:, 2, 1:]
    assert torch.equal(parameter.detach(), expected)
    assert scalar.item() == 4095.0


def test_a_region_of_no_natural_alignment_can_be_read() -> None:
    arena = filled(1000)
    region = arena.region(0)
    destination = torch.zeros(3, 5, dtype=torch.float32)
    SharedMemoryTransport().open([region]).prepare([Move(region, 3, (3, 5), (10, 2), "float32", destination)]).run()
    raw = bytes(arena.tensor(0, (1000,), torch.uint8).tolist())
    at = [3 + 4 * (10 * row + 2 * column) for row in range(3) for column in range(5)]
    assert destination.view(torch.uint8).flatten().tolist() == [byte for start in at for byte in raw[start : start + 4]]


def test_progress_adds_up_and_can_stop_the_copy() -> None:
    size = 200 << 20
    arena = SharedArena(size + 3)
    region = arena.region(0)
    destination = torch.ones(size, dtype=torch.uint8).view(200, 1 << 20)
    small = [torch.ones(1, dtype=torch.uint8) for _ in range(3)]
    moves = [Move(region, 0, (200, 1 << 20), (1 << 20, 1), "uint8", destination)]
    moves += [Move(region, size + index, (1,), (1,), "uint8", one) for index, one in enumerate(small)]
    prepared = SharedMemoryTransport().open([region]).prepare(moves)
    steps: list[int] = []
    assert prepared.run(steps.append) == size + 3 == sum(steps)
    assert len(steps) > 2
    assert not destination.any()
    assert not any(one.any() for one in small)

    destination.fill_(1)

    def stop(_: int) -> None:
        raise TimeoutError

    with pytest.raises(TimeoutError):
        prepared.run(stop)
    assert not destination[0].any()
    assert destination[-1].all()


def test_inference_tensors_are_written() -> None:
    arena = filled(64)
    region = arena.region(0)
    with torch.inference_mode():
        destination = torch.zeros(64, dtype=torch.uint8)
    SharedMemoryTransport().open([region]).prepare([Move(region, 0, (64,), (1,), "uint8", destination)]).run()
    assert destination[63] == 63


@pytest.mark.parametrize(
    ("offset", "shape", "stride", "dtype", "destination"),
    [
        (0, (65,), (1,), "uint8", torch.zeros(65, dtype=torch.uint8)),
        (1, (16,), (1,), "float32", torch.zeros(16)),
        (0, (2, 2), (64, 1), "uint8", torch.zeros(2, 2, dtype=torch.uint8)),
        (-1, (1,), (1,), "uint8", torch.zeros(1, dtype=torch.uint8)),
        (63, (2,), (-1,), "uint8", torch.zeros(2, dtype=torch.uint8)),
        (0, (2, 2), (2,), "uint8", torch.zeros(2, 2, dtype=torch.uint8)),
        (0, (4,), (1,), "uint8", torch.zeros(2, 2, dtype=torch.uint8)),
        (0, (4,), (1,), "bfloat16", torch.zeros(4, dtype=torch.float16)),
    ],
)
def test_a_move_that_does_not_fit_is_refused_before_anything_is_written(
    offset: int, shape: tuple[int, ...], stride: tuple[int, ...], dtype: str, destination: torch.Tensor
) -> None:
    arena = filled(64)
    region = arena.region(0)
    opened = SharedMemoryTransport().open([region])
    with pytest.raises(CkptEngineError) as refused:
        opened.prepare([Move(region, offset, shape, stride, dtype, destination)])
    assert refused.value.problem.code == Problem.CODE_INVALID_ARGUMENT
    assert not destination.any()


def test_a_region_that_was_not_opened_is_refused() -> None:
    first, second = filled(64), filled(64)
    opened = SharedMemoryTransport().open([first.region(0)])
    with pytest.raises(CkptEngineError, match="was not opened"):
        opened.view(second.region(0), 0, (1,), (1,), "uint8")
    opened.close()
    with pytest.raises(CkptEngineError, match="was not opened"):
        opened.view(first.region(0), 0, (1,), (1,), "uint8")


def test_another_process_reads_and_cannot_write() -> None:
    arena = SharedArena(1 << 16)
    arena.tensor(0, (1 << 16,), torch.uint8).fill_(3)
    with Peer() as peer:
        assert peer.read(arena.region(0)) == 3 << 16
        arena.tensor(0, (1 << 16,), torch.uint8).fill_(4)
        assert peer.read(arena.region(0)) == 4 << 16
        with pytest.raises(EOFError):
            peer.ask(write=arena.region(0).SerializeToString().hex())
        assert peer.process.wait(timeout=60) == -signal.SIGSEGV
    assert int(arena.tensor(0, (1,), torch.uint8)) == 4


def test_its_size_cannot_be_changed() -> None:
    region = (arena := filled(4096)).region(0)
    descriptor = SharedMemoryLocator.FromString(region.locator).descriptor
    for size in (1, 8192):
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, size)
    assert arena.size == 4096


def test_who_is_gone_or_not_the_owner_is_told_apart_from_damage() -> None:
    transport = SharedMemoryTransport()

    def problem_of(region: Region) -> Problem:
        with pytest.raises(CkptEngineError) as refused:
            transport.open([region])
        return refused.value.problem

    closed = filled(64)
    region = closed.region(0)
    closed.close()
    assert problem_of(region).code == Problem.CODE_UNAVAILABLE
    assert "publish again" in problem_of(region).message

    arena, other = filled(64), filled(64)
    region = arena.region(0)
    locator = SharedMemoryLocator.FromString(region.locator)
    locator.descriptor = SharedMemoryLocator.FromString(other.region(0).locator).descriptor
    stranger = Region(id=0, transport="shared_memory", size=64, locator=locator.SerializeToString())
    assert problem_of(stranger).code == Problem.CODE_UNAVAILABLE
    assert "inode" in problem_of(stranger).message

    longer = Region(id=0, transport="shared_memory", size=65, locator=region.locator)
    assert problem_of(longer).code == Problem.CODE_DATA_LOSS
    foreign = Region(id=0, transport="file", size=64, locator=region.locator)
    assert problem_of(foreign).code == Problem.CODE_INVALID_ARGUMENT


def test_a_pipe_under_a_reused_descriptor_is_not_opened() -> None:
    arena = filled(64)
    reader, writer = os.pipe()
    locator = SharedMemoryLocator.FromString(arena.region(0).locator)
    locator.descriptor = reader
    try:
        with pytest.raises(CkptEngineError, match="is gone"):
            SharedMemoryTransport().open(
                [Region(transport="shared_memory", size=64, locator=locator.SerializeToString())]
            )
    finally:
        os.close(reader)
        os.close(writer)


def test_nothing_is_left_when_the_owner_is_killed() -> None:
    with Peer() as owner:
        region = owner.own(1 << 20)
        assert holders(region) == [owner.process.pid]
        transport = SharedMemoryTransport()
        opened = transport.open([region])
        destination = torch.zeros(1 << 20, dtype=torch.uint8)
        prepared = opened.prepare([Move(region, 0, (1 << 20,), (1,), "uint8", destination)])
        owner.kill()
        assert holders(region) == [os.getpid()]
        # What is mapped can still be read: the update that is under way comes to its end.
        prepared.run()
        assert destination.all()
        with pytest.raises(CkptEngineError) as refused:
            SharedMemoryTransport().open([region])
        assert refused.value.problem.code == Problem.CODE_UNAVAILABLE
        opened.close()
        del prepared
        assert holders(region) == []


def test_nothing_is_left_when_the_reader_is_killed() -> None:
    arena = SharedArena(1 << 20)
    region = arena.region(0)
    with Peer() as reader:
        assert reader.read(region) == 0
        assert set(holders(region)) == {os.getpid(), reader.process.pid}
        reader.kill()
        assert holders(region) == [os.getpid()]
    arena.close()
    del arena
    assert holders(region) == []


def test_nothing_is_left_when_both_are_killed() -> None:
    with Peer() as owner, Peer() as reader:
        region = owner.own(1 << 20)
        assert reader.read(region) == 1 << 20
        owner.kill()
        assert holders(region) == [reader.process.pid]
        reader.kill()
        assert holders(region) == []


def test_tensors_outlive_the_arena() -> None:
    arena = filled(4096)
    region = arena.region(0)
    tensor = arena.tensor(0, (4096,), torch.uint8)
    arena.close()
    arena.close()
    with pytest.raises(CkptEngineError, match="was closed"):
        arena.tensor(0, (1,), torch.uint8)
    with pytest.raises(CkptEngineError, match="was closed"):
        arena.region(0)
    del arena
    assert tensor[100] == 100
    del tensor
    assert holders(region) == []


def test_mappings_are_shared_between_plans_and_dropped_with_the_last() -> None:
    arenas = [filled(1 << 16) for _ in range(3)]
    first, second, third = (arena.region(index) for index, arena in enumerate(arenas))
    before = maps()
    transport = SharedMemoryTransport()
    old = transport.open([first, second])
    view = old.view(first, 0, (10,), (1,), "uint8")
    new = transport.open([second, third])
    assert new.view(second, 0, (1,), (1,), "uint8").data_ptr() == old.view(second, 0, (1,), (1,), "uint8").data_ptr()
    old.close()
    assert view[9] == 9
    del view
    assert maps() <= before + 2
    new.close()
    assert maps() <= before


def test_five_hundred_cycles_leave_descriptors_mappings_and_memory_where_they_were() -> None:
    process = psutil.Process()
    source = torch.ones(1 << 20, dtype=torch.uint8)

    def cycle() -> None:
        arena = SharedArena(1 << 20)
        arena.tensor(0, (1 << 20,), torch.uint8).copy_(source)
        region = arena.region(0)
        opened = SharedMemoryTransport().open([region])
        destination = torch.empty(1 << 20, dtype=torch.uint8)
        opened.prepare([Move(region, 0, (1 << 20,), (1,), "uint8", destination)]).run()
        opened.close()
        arena.close()

    for _ in range(20):
        cycle()
    descriptors, mappings, resident = process.num_fds(), maps(), process.memory_info().rss
    for _ in range(500):
        cycle()
    assert process.num_fds() == descriptors
    assert maps() <= mappings + 2
    assert process.memory_info().rss < resident + (32 << 20)


def test_no_room_is_an_error_before_anything_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    # Never let this reach the kernel: it would take all the memory there is and then kill a process of the host.
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: pytest.fail("memory was reserved"))
    with pytest.raises(CkptEngineError, match="no room") as refused:
        SharedArena(memory_room() + (8 << 30))
    assert refused.value.problem.code == Problem.CODE_UNAVAILABLE
    with pytest.raises(CkptEngineError):
        SharedArena(0)


def test_room_is_that_of_the_tightest_limit(tmp_path: Path) -> None:
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (groups / "pod" / "box").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:   5000 kB\n")
    (proc / "self" / "cgroup").write_text("0::/pod/box\n")
    assert memory_room(proc, groups) == 5000 * 1024
    (groups / "pod" / "memory.max").write_text("4000000\n")
    (groups / "pod" / "memory.current").write_text("3000000\n")
    (groups / "pod" / "memory.stat").write_text("anon 5\nactive_file 100\ninactive_file 20\n")
    (groups / "pod" / "box" / "memory.max").write_text("max\n")
    assert memory_room(proc, groups) == 1000120
    (groups / "pod" / "memory.current").write_text("5000000\n")
    assert memory_room(proc, groups) == 0
    assert memory_room(tmp_path, tmp_path) > 1 << 60
