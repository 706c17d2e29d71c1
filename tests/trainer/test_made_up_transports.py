"""Two transports that ckpt-engine has never heard of, one of each shape, and updates over them: a file is all that each
takes.

*Borrowed* (tests/toys) is mapped: a reader opens the owner's memory file by its path. *Told* is fetched: the owner
answers questions for bytes over a Unix socket, as a network's other end would.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from plain_replica import PlainReplica

from ckpt_engine import CkptEngineError, Trainer
from ckpt_engine.core import transports
from ckpt_engine.core.problems import data_loss, deadline, unavailable
from ckpt_engine.core.reach import by_network
from ckpt_engine.core.topology import choose_transport
from ckpt_engine.core.transports import (
    HOST_MEMORY,
    TransportKind,
    arena_kinds,
    register_transport,
    unregister_transport,
)
from ckpt_engine.source.open import open_source
from ckpt_engine.transport import fetched
from ckpt_engine.transport.base import (
    Availability,
    ByteRun,
    HostMemory,
    Memory,
    Move,
)
from ckpt_engine.transport.fetched import FetchedRegions, FetchedTransport
from ckpt_engine.transport.on_host import worker_transports
from ckpt_engine.transport.registry import all_transports, transport_rows
from ckpt_engine.v1.weights_pb2 import Host, Problem, Region
from tests.cluster import eventually
from tests.distributions import distribution
from tests.toys.borrowed import BORROWED, BorrowedLender, near

# ------------------------------------------------------------------------------------------------ one that is fetched

QUESTION = struct.Struct("<QQ")


class ToldLender:
    """The owner's side: a thread for each reader answers (offset, length) with bytes. silent: it does not, for now."""

    silent = threading.Event()

    def __init__(self) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind("")  # an abstract name that the kernel chooses
        self._listener.listen()
        self._memory: dict[int, torch.Tensor] = {}
        threading.Thread(target=self._accept, daemon=True).start()

    def offer(self, id: int, memory: Memory) -> Region:
        if not isinstance(memory, HostMemory):
            raise unavailable(f"{memory.kind} cannot be told")
        self._memory[id] = memory.bytes
        return Region(id=id, transport="told", size=memory.bytes.numel(), locator=self._listener.getsockname())

    def unchanged(self) -> bool:
        return True

    def withdraw(self, seconds: float) -> None:
        self.close()

    def close(self) -> None:
        self._memory = {}
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                reader, _ = self._listener.accept()
                threading.Thread(target=self._answer, args=(reader,), daemon=True).start()

    def _answer(self, reader: socket.socket) -> None:
        with reader, contextlib.suppress(OSError, KeyError):
            memory = self._memory[reader.recv(1)[0]]
            while question := reader.recv(QUESTION.size, socket.MSG_WAITALL):
                offset, length = QUESTION.unpack(question)
                while self.silent.is_set():
                    time.sleep(0.001)
                reader.sendall(memory[offset : offset + length].numpy())


class ToldTicket:
    def __init__(self, link: ToldLink, runs: Sequence[ByteRun]) -> None:
        self.link, self.waiting, self.landed = link, list(runs), 0

    def poll(self) -> int:
        self.link.receive()
        return self.landed


class ToldLink:
    """Everything happens in `poll`, so nothing lands once the socket is closed."""

    def __init__(self, region: Region, landing: torch.Tensor, seconds: float) -> None:
        self.landing = memoryview(landing.numpy())
        self.tickets: list[ToldTicket] = []
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(seconds)
        try:
            self.socket.connect(region.locator)
        except TimeoutError as error:
            raise deadline("it does not answer") from error
        except OSError as error:
            raise unavailable(f"nobody is there: {error}") from error
        self.socket.send(bytes([region.id]))
        self.socket.setblocking(False)
        self.unsent = b""

    def read(self, runs: Sequence[ByteRun]) -> ToldTicket:
        self.unsent += b"".join(QUESTION.pack(run.remote, run.length) for run in runs)
        self.tickets.append(ToldTicket(self, runs))
        return self.tickets[-1]

    def receive(self) -> None:
        try:
            self.unsent = self.unsent[self.socket.send(self.unsent) :]
        except BlockingIOError:
            return
        except OSError as error:
            raise unavailable(f"it has gone: {error}") from error
        while ticket := next((each for each in self.tickets if each.waiting), None):
            remote, local, length = ticket.waiting[0]
            try:
                got = self.socket.recv_into(self.landing[local : local + length])
            except BlockingIOError:
                return
            except OSError as error:
                raise unavailable(f"it has gone: {error}") from error
            if not got:
                raise unavailable("it has hung up")
            ticket.landed += got
            ticket.waiting[:1] = [ByteRun(remote + got, local + got, length - got)] if got < length else []

    def check(self) -> None:
        try:
            if self.socket.recv(1, socket.MSG_PEEK) == b"":
                raise unavailable("it has hung up")
        except BlockingIOError:
            return
        except OSError as error:
            raise unavailable(str(error)) from error
        raise data_loss("it talks unasked")

    def sever(self) -> None:
        self.socket.close()


class Told:
    """The reader's side."""

    name = "told"

    def availability(self) -> Availability:
        return Availability(True, "there are sockets")

    def connect(self, region: Region, landing: torch.Tensor, seconds: float) -> ToldLink:
        return ToldLink(region, landing, seconds)


TOLD = TransportKind("told", near, Told, ToldLender, frozenset({HOST_MEMORY}), unasked=False)

# ------------------------------------------------------------------------------------------------------------ updates


@pytest.fixture(autouse=True)
def kinds() -> Iterator[None]:
    for kind in (BORROWED, TOLD):
        register_transport(kind)
    yield
    for kind in (BORROWED, TOLD):
        unregister_transport(kind.name)


def weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {"a.weight": torch.randn(64, 48).to(torch.bfloat16), "b.bias": torch.randn(5), "c": torch.randn(7, 3, 2)}


@pytest.mark.parametrize("name", ["borrowed", "told"])
def test_an_update_over_a_transport_that_only_this_file_knows(
    manager: str, replica: Callable[..., PlainReplica], name: str
) -> None:
    reader = replica()
    held = weights()
    with Trainer(manager, lineage="made up") as trainer:
        trainer.publish(held, transport=name)
        there = trainer._background.status
        eventually("the replica is there", 60, lambda: any(each.connected for each in there().replicas))
        for _ in range(2):
            for tensor in held.values():
                tensor.mul_(2)
            report = trainer.update_weights()
            assert report.ok
            assert [edge.transport for edge in report.replicas[0].message.edges] == [name]
            assert "both are made up" in report.replicas[0].message.edges[0].reason
            assert all(torch.equal(reader.weights[key], tensor) for key, tensor in held.items())


def test_what_lends_unasked_is_offered_beside_the_others_and_the_nearest_is_taken(
    manager: str, replica: Callable[..., PlainReplica]
) -> None:
    unregister_transport("told")
    register_transport(TransportKind("told", near, Told, ToldLender, frozenset({HOST_MEMORY})))
    replica()
    with Trainer(manager, lineage="made up") as trainer:
        trainer.publish(weights())
        source = trainer._sealer._source
        assert source is not None
        (region,) = source.table().regions
        assert [offer.transport for offer in region.offers] == ["shared_memory", "told"]
        report = trainer.update_weights()
        assert [edge.transport for edge in report.replicas[0].message.edges] == ["told"]


def test_a_model_whose_memory_cannot_be_lent_stays_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: BorrowedLender, id: int, memory: Memory) -> Region:
        raise unavailable("nobody borrows today")

    monkeypatch.setattr(BorrowedLender, "offer", refuse)
    model = torch.nn.Linear(3, 3)
    before = [parameter.data_ptr() for parameter in model.parameters()]
    with pytest.raises(CkptEngineError, match=r"host memory cannot be lent over transport='borrowed': nobody borrows"):
        open_source(model, transport="borrowed", move=True)
    assert [parameter.data_ptr() for parameter in model.parameters()] == before


def test_everybody_who_lists_transports_lists_them() -> None:
    assert {"borrowed", "told"} <= {row.name for row in transport_rows() if row.ok}
    assert {"borrowed", "told"} <= set(worker_transports())
    assert worker_transports(["told"]) == ("told",)
    assert isinstance(all_transports()["told"], FetchedTransport)
    with pytest.raises(ValueError, match="already"):
        register_transport(TOLD)


def test_what_is_between_relays_is_loaded_by_relays_only() -> None:
    lends = frozenset({HOST_MEMORY})
    register_transport(TransportKind("between", by_network, Told, ToldLender, lends, relays_only=True, arena=Told))
    try:
        assert "between" not in all_transports()
        assert "between" in all_transports(relay=True)
        assert "between" not in worker_transports()
        with pytest.raises(ValueError, match="between relays; workers of a host read its relay"):
            worker_transports(["between"])
        assert "between" in [kind.name for kind in arena_kinds()]
        (row,) = [row for row in transport_rows() if row.name == "between"]
        assert (row.ok, row.reason) == (True, "between relays: there are sockets")
        with pytest.raises(CkptEngineError, match="none that tensors can be published over"):
            open_source(weights(), transport="between")
        source = open_source(weights())
        (region,) = source.table().regions
        assert "between" not in [offer.transport for offer in region.offers]
        source.close()
        near, far = Host(name="h1", address="10.0.0.1"), Host(name="h2")
        with pytest.raises(CkptEngineError, match="over between, which no worker reads; start a relay on host h2"):
            choose_transport(near, "between", far, worker_transports())
    finally:
        unregister_transport("between")


def test_a_transport_that_cannot_be_loaded_stops_nobody() -> None:
    register_transport(TransportKind("broken", near, "ckpt_engine.no_such_module:Nothing"))
    try:
        assert "broken" not in all_transports()
        (row,) = [row for row in transport_rows() if row.name == "broken"]
        assert not row.ok
        assert "no_such_module" in row.reason
    finally:
        unregister_transport("broken")


# ------------------------------------------------------------------------------------ what fetched transports rest on


@pytest.fixture
def lent() -> Iterator[tuple[torch.Tensor, Region]]:
    """Memory that is told, and its region."""
    lender = ToldLender()
    memory = torch.randint(0, 256, (1 << 16,), dtype=torch.uint8)
    region = lender.offer(3, HostMemory(memory, -1))
    region.source = "rank 7"
    yield memory, region
    ToldLender.silent.clear()
    lender.close()


def opened(region: Region) -> FetchedRegions:
    return FetchedTransport(Told()).open([region])


@pytest.mark.parametrize("seed", range(20))
def test_boxes_of_any_strides_arrive_as_they_lie(
    lent: tuple[torch.Tensor, Region], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    monkeypatch.setattr(fetched, "SLOT_BYTES", rng.choice([256, 4096, 1 << 20]))
    monkeypatch.setattr(fetched, "RUN_BYTES", rng.choice([1, 64, 1 << 16]))
    memory, region = lent
    moves, expected = [], []
    for _ in range(rng.randrange(1, 6)):
        shape = tuple(rng.randrange(0 if seed == 1 else 1, 9) for _ in range(rng.randrange(0, 4)))
        order = rng.sample(range(len(shape)), len(shape))
        stride, step = [0] * len(shape), rng.choice([1, 1, 3])
        for axis in order:
            stride[axis] = step
            step *= shape[axis] + rng.randrange(0, 3)
        dtype, stored = rng.choice([("bfloat16", ""), ("float32", ""), ("bfloat16", "float32"), ("uint8", "")])
        lies = getattr(torch, stored or dtype)
        offset = lies.itemsize * rng.randrange(0, 100)
        there = memory[offset : offset + 4 * (1 << 13)].view(lies).as_strided(shape, stride)
        if stored:
            there.copy_(torch.randn(shape))
        destination = torch.zeros(shape, dtype=getattr(torch, dtype))
        moves.append(Move(region, offset, shape, tuple(stride), dtype, destination, stored))
        expected.append(there)
    wanted = [there.to(move.destination.dtype) for there, move in zip(expected, moves, strict=True)]
    regions = opened(region)
    copy = regions.prepare(moves)
    told: list[int] = []
    assert copy.run(told.append) == copy.bytes == sum(told) == sum(move.destination.nbytes for move in moves)
    for move, value in zip(moves, wanted, strict=True):
        if move.stored:  # of a NaN, any that is a NaN
            assert torch.equal(torch.nan_to_num(move.destination), torch.nan_to_num(value))
        else:
            found, right = (torch.cat([each.reshape(-1)]).view(torch.uint8) for each in (move.destination, value))
            assert torch.equal(found, right)
    regions.close()


def whole(region: Region) -> Move:
    return Move(region, 0, (region.size,), (1,), "uint8", torch.zeros(region.size, dtype=torch.uint8))


def test_who_gives_up_waiting_severs_first_and_connects_anew_at_the_next_check(
    lent: tuple[torch.Tensor, Region],
) -> None:
    memory, region = lent
    regions = opened(region)
    move = whole(region)
    copy = regions.prepare([move])
    ToldLender.silent.set()

    def late(arrived: int) -> None:
        assert arrived == 0
        raise deadline("the update's deadline has passed")

    with pytest.raises(CkptEngineError, match="deadline has passed"):
        copy.run(late)
    assert not regions.offered()
    ToldLender.silent.clear()
    with pytest.raises(CkptEngineError, match=r"no connection to rank 7 \(region 3 over told\) any more"):
        copy.run()
    assert not regions.landing.any(), "nothing lands once it was severed"
    assert not move.destination.any()
    regions.check()
    copy.run()
    assert torch.equal(move.destination, memory)
    regions.close()


def test_nothing_is_waited_for_in_silence_for_ever(
    lent: tuple[torch.Tensor, Region], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetched, "STALL_SECONDS", 0.01)
    ToldLender.silent.set()
    regions = opened(lent[1])
    with pytest.raises(CkptEngineError, match="nothing came of rank 7") as caught:
        regions.prepare([whole(lent[1])]).run()
    assert caught.value.problem.code == Problem.DEADLINE_EXCEEDED


def test_what_fails_names_the_source(lent: tuple[torch.Tensor, Region]) -> None:
    _, region = lent
    regions = opened(region)
    copy = regions.prepare([whole(region)])
    link = regions.link(region)
    assert isinstance(link, ToldLink)
    link.socket.shutdown(socket.SHUT_RDWR)
    for asked in (copy.run, regions.prepare([whole(region)]).run, partial(opened, Region(source="rank 8"))):
        with pytest.raises(CkptEngineError, match=r"rank [78] \(region") as caught:
            asked()
        assert caught.value.problem.code == Problem.UNAVAILABLE
    with pytest.raises(CkptEngineError, match="reaches beyond the region"):
        regions.prepare([Move(region, 8, (region.size,), (1,), "uint8", torch.zeros(region.size, dtype=torch.uint8))])
    regions.close()


# --------------------------------------------------------------------------------------------- as a package brings it

HERE = Path(__file__)


def installed(path: Path) -> dict[str, str]:
    """These two as a distribution below `path`; the environment in which processes find it."""
    points = {"borrowed": "borrowed:BORROWED", "nonsense": f"{HERE.stem}:QUESTION", "told": f"{HERE.stem}:TOLD"}
    distribution(path, "made-up", {transports.ENTRY_POINTS: points})
    folders = (path, HERE.parent, HERE.parents[1] / "toys", os.environ.get("PYTHONPATH", ""))
    return {"PYTHONPATH": os.pathsep.join(map(str, folders))}


def test_entry_points_are_found_by_every_process_and_nonsense_is_left_out(tmp_path: Path) -> None:
    command = "from ckpt_engine.core.transports import transport_kinds; print(*transport_kinds())"
    found = subprocess.run(
        [sys.executable, "-c", command],
        env={**os.environ, **installed(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    ours = ["cuda_ipc", "relay_memory", "shared_memory", "file", "ucx", "tcp", "nccl"]
    assert found.stdout.split() == [*ours, "borrowed", "told"]
    assert "nonsense" in found.stderr


@pytest.mark.slow
def test_real_processes_update_over_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.cluster import outcomes, running_cluster
    from tests.tiny_model import make_tiny_qwen3

    for name, value in installed(tmp_path / "installed").items():
        monkeypatch.setenv(name, value)
    bare = make_model(make_tiny_qwen3, tmp_path)
    model = make_tiny_qwen3(tmp_path / "model", 3, weights=False)
    with running_cluster(tmp_path / "cluster") as cluster:
        cluster.replica("two", "reference", bare, "--tensor-parallel", "2").registered()
        for name in ("borrowed", "told"):
            with Trainer(cluster.address, lineage=name) as trainer:
                trainer.publish(model, transport=name)
                for _ in range(2):
                    report = trainer.update_weights()
                    assert outcomes(report) == {"two": "new_serving"}
                    assert report.verified
                    assert {use.transport for use in report.replicas[0].transports} == {name}


def make_model(make: Any, path: Path) -> Path:
    """A model's directory without weights."""
    make(path / "bare", weights=False)
    return path / "bare"
