"""`ckpt-engine relay` as a user runs it: a process, its directory, its manager, and what it says."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import urllib.request
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import torch

from ckpt_engine.core.manifest import blob_digest, canonical
from ckpt_engine.core.offers import holder_id
from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.core.sealed_record import ProvenRecord, read_record
from ckpt_engine.machines.events import TrainerEvent
from ckpt_engine.machines.relay.member import RelayMachine
from ckpt_engine.relay.process import run_relay
from ckpt_engine.relay.settings import RelaySettings
from ckpt_engine.transport.relay_memory.reader import RelayMemoryTransport
from ckpt_engine.v1.manager_pb2 import (
    FillRelay,
    Goodbye,
    Heartbeat,
    HolderHello,
    PublicationAccepted,
    RelayFilled,
    Seal,
    Sealed,
)
from ckpt_engine.v1.weights_pb2 import Atom, Atoms, Digests, Fence, Identity, Problem, SealedRecord, SourceTable
from tests.agent.plain_manager import CLUSTER, PlainManager
from tests.install.install_models import TensorParallel
from tests.install.install_world import Checkpoint
from tests.relay.relay_reader import regions_of
from tests.relay.relay_world import seal, tables

SECONDS = 60.0


class Relay:
    """One `ckpt-engine relay` process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.lines: list[str] = []
        self._changed = asyncio.Event()
        self._reading = asyncio.ensure_future(self._read())

    async def _read(self) -> None:
        assert self.process.stderr is not None
        while line := await self.process.stderr.readline():
            self.lines.append(line.decode().rstrip())
            self._changed.set()

    @property
    def log(self) -> str:
        return "\n".join(self.lines)

    async def says(self, words: str) -> None:
        try:
            async with asyncio.timeout(SECONDS):
                while words not in self.log:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise AssertionError(f"{words!r} was not said:\n{self.log}") from None

    async def ends(self, status: int) -> str:
        """Its log."""
        async with asyncio.timeout(SECONDS):
            assert await self.process.wait() == status, self.log
            await self._reading
        return self.log


Start = Callable[..., "asyncio.Future[Relay]"]


@pytest.fixture
async def start(manager: PlainManager) -> AsyncIterator[Start]:
    """Starts relays of `manager`, and kills them whatever happens."""
    started: list[Relay] = []

    async def start(*options: str, memory: str = "32MiB") -> Relay:
        command = [sys.executable, "-m", "ckpt_engine", "relay", "--manager", manager.address, *options]
        process = await asyncio.create_subprocess_exec(
            *command, *(["--memory", memory] if memory else []), stderr=asyncio.subprocess.PIPE
        )
        started.append(Relay(process))
        return started[-1]

    yield start  # type: ignore[misc]
    for relay in started:
        if relay.process.returncode is None:
            relay.process.kill()
        await relay.ends(relay.process.returncode or await relay.process.wait())


def scraped(log: str) -> str:
    """The metrics at the address that the log names."""
    (address,) = re.findall(r"metrics at (http://\S+)", log)
    with urllib.request.urlopen(address, timeout=SECONDS) as answer:
        page: str = answer.read().decode()
    return page


def left_in(folder: Path) -> int:
    return len(os.listdir(folder))


def order(manager: PlainManager, epoch: int, recorded: ProvenRecord, sources: list[SourceTable]) -> FillRelay:
    return FillRelay(
        fence=Fence(cluster=CLUSTER, epoch=epoch),
        identity=Identity(lineage="run", version=epoch, root=recorded.root),
        record=manager.put(canonical(recorded.record)),
        tables=[manager.put(canonical(table)) for table in sources],
        everything=True,
        deadline_seconds=SECONDS,
    )


async def test_a_version_is_brought_held_and_cut_finer(
    manager: PlainManager, start: Start, relay_directory: Path
) -> None:
    relay = await start("--name", "a", "--hold", "everything", "--metrics", "127.0.0.1:0")
    hello = await manager.next(HolderHello)
    assert (hello.kind, hello.name, hello.filling.memory_bytes, hello.filling.everything) == (
        "relay",
        "a",
        32 << 20,
        True,
    )
    assert hello.host.relay_directory
    await manager.next(Heartbeat)
    checkpoint = Checkpoint(TensorParallel(0, 1).checkpoint(), 1)
    recorded = seal(checkpoint, [])
    manager.send(order(manager, 1, recorded, tables(checkpoint)))
    filled = await manager.next(RelayFilled)
    assert not filled.HasField("problem"), filled.problem.message
    assert filled.bytes == sum(weight.nbytes for weight in checkpoint.weights.values())
    assert sum(each.bytes for each in filled.brought) == filled.bytes
    hello = manager.all(HolderHello)[-1]
    assert manager.received.index(hello) < manager.received.index(filled), "who hears the answer can plan with it"
    (held,) = hello.held
    assert held.identity == Identity(lineage="run", version=1, root=recorded.root)
    record = SealedRecord.FromString(manager.blobs[held.record.digest])
    assert read_record(record, recorded.root).root == recorded.root
    table = SourceTable.FromString(manager.blobs[held.table.digest])
    assert table.id == holder_id("relay", "a")
    assert regions_of(table)
    manager.send(PublicationAccepted(table=held.table))
    await relay.says("version 1 of run is held: ")
    page = await asyncio.to_thread(scraped, relay.log)
    for sample in ('session{relay="a"} 1.0', 'filling{relay="a"} 0.0', 'fillings_total{outcome="held",relay="a"} 1.0'):
        assert f"\nckpt_engine_relay_{sample}\n" in page
    assert f'\nckpt_engine_relay_brought_bytes_total{{relay="a"}} {float(filled.bytes)}\n' in page

    shard = table.shards[0]
    atoms = Atoms(
        table_digest=blob_digest(canonical(table)), atoms=[Atom(shard=0, start=shard.start, stop=shard.stop)] * 2
    )
    ref = manager.put(canonical(atoms))
    manager.send(Seal(fence=Fence(cluster=CLUSTER, epoch=2), version=1, atoms=ref, keep=True, deadline_seconds=SECONDS))
    sealed = await manager.next(Sealed)
    assert not sealed.HasField("problem"), sealed.problem.message
    first, second = Digests.FromString(manager.blobs[sealed.digests.digest]).values
    assert first == second != 0

    manager.send(Seal(fence=Fence(cluster=CLUSTER, epoch=4), version=3, atoms=ref, keep=True, deadline_seconds=SECONDS))
    assert "does not hold version 3 any more" in (await manager.next(Sealed)).problem.message

    relay.process.send_signal(signal.SIGTERM)
    await relay.ends(0)
    assert manager.all(Goodbye)[0].reason == "it was asked to stop"
    assert not left_in(relay_directory)


async def test_what_cannot_be_brought_says_why(manager: PlainManager, caplog: pytest.LogCaptureFixture) -> None:
    stop = asyncio.Event()
    caplog.set_level("INFO")
    settings = RelaySettings(manager.address, 4 << 20, name="a", metrics="127.0.0.1:0")
    running = asyncio.ensure_future(run_relay(settings, stop))
    await manager.next(HolderHello)
    checkpoint = Checkpoint({"weight": torch.ones(3 << 20, dtype=torch.uint8)})
    recorded = seal(checkpoint, [])
    manager.send(order(manager, 1, recorded, tables(checkpoint)))
    filled = await manager.next(RelayFilled)
    assert "version 1 of run takes 4194304 bytes" in filled.problem.message
    assert "2097152" in filled.problem.message
    assert f"version 1 of run is not brought: {filled.problem.message}" in caplog.text
    page = await asyncio.to_thread(scraped, caplog.text)
    assert '\nckpt_engine_relay_fillings_total{outcome="failed",relay="a"} 1.0\n' in page
    assert not running.done()
    stop.set()
    await asyncio.wait_for(running, SECONDS)


async def test_a_manager_that_is_away_is_waited_for_and_what_is_held_outlives_it(
    manager: PlainManager, start: Start
) -> None:
    await manager.stop()
    relay = await start("--name", "a")
    await relay.says(f"no session with the manager at {manager.address}")
    assert "trying again until it is there" in relay.log
    await manager.start()
    await relay.says("connected to the manager")
    checkpoint = Checkpoint(TensorParallel(0, 1).checkpoint(), 1)
    recorded = seal(checkpoint, [])
    manager.send(order(manager, 1, recorded, tables(checkpoint)))
    await manager.next(RelayFilled)
    await manager.stop()
    manager.blobs.clear()
    hellos = len(manager.all(HolderHello))
    await manager.start()
    await manager.until(lambda: len(manager.all(HolderHello)) > hellos)
    (held,) = manager.all(HolderHello)[-1].held
    assert manager.blobs[held.record.digest]
    assert manager.all(HolderHello)[-1].epoch == 1


@pytest.mark.slow
async def test_of_two_relays_in_one_directory_the_second_names_the_first_and_a_killed_one_leaves_nothing(
    manager: PlainManager, start: Start, relay_directory: Path
) -> None:
    first = await start("--name", "a")
    await manager.next(HolderHello)
    said = await (await start("--name", "b")).ends(4)
    assert f"{relay_directory} has a relay already (process {first.process.pid})" in said
    assert "--directory" in said
    first.process.kill()
    await first.ends(-signal.SIGKILL)
    assert left_in(relay_directory) == 1, "a socket that nobody listens at"
    second = await start("--name", "b")
    await manager.next(HolderHello)
    assert left_in(relay_directory) == 1
    second.process.send_signal(signal.SIGINT)
    await second.ends(0)
    assert not left_in(relay_directory)


async def test_stopping_waits_for_no_reader(manager: PlainManager, start: Start, relay_directory: Path) -> None:
    """One that hangs in the middle of reading keeps a slot for --slot-grace, and a filling waits for it."""
    relay = await start("--slot-grace", "600")
    await manager.next(HolderHello)
    checkpoint = Checkpoint(TensorParallel(0, 1).checkpoint(), 1)
    transport, opened = RelayMemoryTransport(), []
    for version in (1, 2):
        checkpoint.weights = {name: weight + version for name, weight in checkpoint.weights.items()}
        manager.send(order(manager, version, seal(checkpoint, []), tables(checkpoint)))
        await manager.next(RelayFilled)
        table = SourceTable.FromString(manager.blobs[manager.all(HolderHello)[-1].held[0].table.digest])
        opened.append(transport.open(regions_of(table)))
    manager.send(order(manager, 3, seal(checkpoint, []), tables(checkpoint)))
    await manager.until(lambda: [each.identity.version for each in manager.all(HolderHello)[-1].held] == [2])
    await manager.next(Heartbeat)
    await manager.next(Heartbeat)
    relay.process.send_signal(signal.SIGTERM)
    await relay.ends(0)
    assert len(manager.all(RelayFilled)) == 2
    assert not left_in(relay_directory)
    for each in opened:
        each.close()


async def said_of(settings: RelaySettings) -> str:
    """Why a relay does not go on."""
    with pytest.raises(CkptEngineError) as caught:
        await asyncio.wait_for(run_relay(settings, asyncio.Event()), SECONDS)
    return caught.value.problem.message


async def test_a_relay_that_the_manager_refuses_for_good_ends(manager: PlainManager, relay_directory: Path) -> None:
    words = "relay a is connected from host 'x' as another process"
    manager.refuse = Problem(code=Problem.CODE_INVALID_ARGUMENT, message=words)
    assert await said_of(RelaySettings(manager.address, 4 << 20)) == words
    assert not left_in(relay_directory)


async def test_a_directory_that_others_can_write_is_refused(manager: PlainManager, relay_directory: Path) -> None:
    os.mkdir(relay_directory)
    os.chmod(relay_directory, 0o777)
    said = await said_of(RelaySettings(manager.address, 4 << 20))
    assert f"{relay_directory} belongs to user {os.geteuid()} with mode 777" in said


async def test_a_machine_that_raises_ends_the_relay(
    manager: PlainManager, relay_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fake: no message is known that makes a machine raise."""

    def take(self: RelayMachine, event: TrainerEvent, now: float) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr(RelayMachine, "_take", take)
    assert "the relay failed on Start" in await said_of(RelaySettings(manager.address, 8 << 20))
    assert not left_in(relay_directory)
