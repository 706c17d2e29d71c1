"""Everything else that reads what another process wrote, as functions of bytes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from ckpt_engine.addresses import split_address
from ckpt_engine.core.deadlines import Deadlines
from ckpt_engine.core.manifest import canonical
from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.core.sealed_record import read_record
from ckpt_engine.engine.target import ModuleTarget
from ckpt_engine.gate.directory import ENVIRONMENT, EngineDirectory
from ckpt_engine.gate.page import EnginePage, verdict
from ckpt_engine.gate.routes import route_of
from ckpt_engine.install.installer import Installer
from ckpt_engine.install.stage_memory import StageMemory
from ckpt_engine.machines import events
from ckpt_engine.manager.blobs import BlobStore, receive
from ckpt_engine.manager.compiler import Compiler
from ckpt_engine.planning.model import read_model
from ckpt_engine.security.grants import Tokens
from ckpt_engine.source.digests import digest_atoms
from ckpt_engine.source.safetensors import INDEX, read_directory, read_header
from ckpt_engine.transport.base import LentChunks
from ckpt_engine.transport.cuda_ipc.reader import CudaIpcTransport
from ckpt_engine.transport.file.files import FileTransport
from ckpt_engine.transport.shared_memory.memory import SharedMemoryTransport
from ckpt_engine.transport.tcp import wire
from ckpt_engine.transport.tcp.asker import read_locator as read_tcp_locator
from ckpt_engine.transport.tcp.lending import Asker, ChunkSend, Lendings
from ckpt_engine.transport.ucx import channel
from ckpt_engine.transport.ucx.helpers import Helper
from ckpt_engine.transport.ucx.link import read_locator as read_ucx_locator
from ckpt_engine.v1 import manager_pb2, weights_pb2, worker_pb2
from ckpt_engine_adapters.reference.gate import ReferenceGate
from tests.fuzz.seeds import HOST, TwoTensors, needs_seed, prepare_order, safetensors_file, sealed_record, table
from tests.sealing import root


@contextlib.contextmanager
def tables() -> Iterator[Callable[[bytes], None]]:
    """Merges a table, compiles plans for whoever needs all of it, adds up digests: what the manager does with blobs."""

    def take(data: bytes) -> None:
        blobs = BlobStore(1 << 20, 1 << 22)
        compiler = Compiler(blobs)
        published = compiler.merge(events.MergeTables("run", (blobs.put(data),), 9.0))
        worker = events.PlanWorker(("one", 0), blobs.put(canonical(needs_seed())), HOST, ("shared_memory",))
        compiled = compiler.compile(events.CompilePlans(published, (worker,), 9.0))
        sums = blobs.put(canonical(weights_pb2.Digests(values=[1, 2])))
        compiler.combine(events.CombineSeals(published, compiled, {table().id: sums}, 9.0))

    yield take


@contextlib.contextmanager
def records() -> Iterator[Callable[[bytes], None]]:
    """A sealed record that a holder brings of a version whose root is known."""
    honest = sealed_record()
    sealed = root(honest.manifest, [3, 3])  # its digests, added up by tensor

    def take(data: bytes) -> None:
        read_record(weights_pb2.SealedRecord.FromString(data), sealed)

    yield take


@contextlib.contextmanager
def worker_needs() -> Iterator[Callable[[bytes], None]]:
    """What a worker says that it needs, compiled against an honest table."""

    def take(data: bytes) -> None:
        blobs = BlobStore(1 << 20, 1 << 22)
        compiler = Compiler(blobs)
        published = compiler.merge(events.MergeTables("run", (blobs.put(canonical(table())),), 9.0))
        worker = events.PlanWorker(("one", 0), blobs.put(data), HOST, ("shared_memory",))
        compiler.compile(events.CompilePlans(published, (worker,), 9.0))

    yield take


@contextlib.contextmanager
def atoms() -> Iterator[Callable[[bytes], None]]:
    """What a source is asked to digest."""
    sealed = [torch.ones(4, 3), torch.ones(8, dtype=torch.bfloat16)]
    yield lambda data: (digest_atoms(table(), sealed, weights_pb2.Atoms.FromString(data)), None)[1]


@contextlib.contextmanager
def orders(kind: type[Any]) -> Iterator[Callable[[bytes], None]]:
    """What an agent orders a worker inside an engine to do. Nothing may come out but an answer."""
    with tempfile.TemporaryDirectory() as folder:
        page = EnginePage(Path(folder) / "page")
        target, slot = ModuleTarget(TwoTensors()), page.claim(0, 1)
        transports = {"shared_memory": SharedMemoryTransport(), "file": FileTransport()}
        installer = Installer(target, slot, transports, StageMemory("1MB", torch.device("cpu")))
        installer.prepare(worker_pb2.PrepareOrder.FromString(prepare_order()))

        carry_out: dict[type[Any], Callable[[Any], Any]] = {
            worker_pb2.PrepareOrder: installer.prepare,
            worker_pb2.ReadyOrder: installer.ready,
            worker_pb2.InstallOrder: installer.install,
        }

        def take(data: bytes) -> None:
            order = kind.FromString(data)
            order.deadline_seconds = min(order.deadline_seconds, 1.0)
            answer = carry_out[kind](order)
            answer.SerializeToString()
            problem = answer.report.problem if kind is worker_pb2.InstallOrder else answer.problem
            assert problem.code != weights_pb2.Problem.CODE_INTERNAL, problem.message

        yield take
        page.close()


@contextlib.contextmanager
def regions() -> Iterator[Callable[[bytes], None]]:
    """What a plan says where memory lies."""
    transports = (SharedMemoryTransport(), FileTransport(), CudaIpcTransport())

    def take(data: bytes) -> None:
        region = weights_pb2.Region.FromString(data)
        for transport in transports:
            with contextlib.suppress(CkptEngineError):
                opened = transport.open([region])
                with contextlib.suppress(CkptEngineError):
                    opened.view(region, 0, (1,), (1,), "uint8")
                opened.close()

    yield take


@contextlib.contextmanager
def relay_askers() -> Iterator[Callable[[bytes], None]]:
    """What another relay says that asks for chunks over TCP: a greeting, a name, then questions."""
    lendings = Lendings(bytes(16), 0.0)
    lendings.lend(LentChunks(1, bytes(16), lambda chunk: [(64 * chunk, 64)], range(2))).verified(1)

    def take(data: bytes) -> None:
        said = wire.read_hello(data[: wire.HELLO.size])
        with contextlib.suppress(CkptEngineError):
            lendings.admit(said)
        at = wire.HELLO.size + said.name
        asker = Asker(wire.read_name(data[wire.HELLO.size : at]))
        places: list[ChunkSend] = []
        while at < len(data):
            asked = wire.read_question(data[at : at + wire.QUESTION.size])
            at += wire.QUESTION.size
            if asked.kind == wire.LEAVE:
                lendings.leave(asker, asked.key)
            elif asked.kind == wire.RELEASE and places:
                lendings.release(places.pop().lending, asker, asked.chunk, served=True)
            elif asked.kind == wire.CHUNK:
                found = lendings.answer(asked.key, asked.chunk, asked.how, asker, 0.0)
                if isinstance(found, ChunkSend):
                    assert (asked.key, asked.chunk) == (bytes(16), 1), "not verified"
                    places.append(found)
        lendings.leave(asker)
        assert not lendings.retire(0)

    yield take


@contextlib.contextmanager
def relay_answers() -> Iterator[Callable[[bytes], None]]:
    """What an owner answers over TCP."""

    def take(data: bytes) -> None:
        while data:
            found = wire.read_frame(data[: wire.FRAME.size])
            content, data = data[wire.FRAME.size :][: found.size], data[wire.FRAME.size + found.size :]
            assert found.size <= wire.FRAME_BYTES
            assert found.kind != wire.WAIT or found.size == wire.PULSE.size
            if found.kind == wire.TO:
                assert len(wire.read_name(content)) <= wire.NAME_BYTES
            elif found.kind == wire.PLACE:
                place = wire.read_place(content)
                assert len(place.runs) <= wire.MOST_RUNS
                assert all(length > 0 and offset + length < 1 << 63 for offset, length in place.runs)

    yield take


@contextlib.contextmanager
def tcp_locators() -> Iterator[Callable[[bytes], None]]:
    """Where a table says that a relay is reached over TCP."""

    def take(data: bytes) -> None:
        read_tcp_locator(weights_pb2.Region.FromString(data))

    yield take


@contextlib.contextmanager
def ucx_locators() -> Iterator[Callable[[bytes], None]]:
    """Where a table says that a relay is reached over UCX."""

    def take(data: bytes) -> None:
        region = weights_pb2.Region.FromString(data)
        for lane in read_ucx_locator(region).lanes:
            channel.pack_runs([(lane.memory + region.size, 0, 1)])

    yield take


@contextlib.contextmanager
def ucx_helpers() -> Iterator[Callable[[bytes], None]]:
    """What a helper says to its relay: it is ours, and has read what a peer sent."""

    def take(data: bytes) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, theirs:
            helper = Helper(ours, 0, -1, "fuzz")
            numbers = [helper.ask(channel.READ), helper.ask(channel.LEND)]
            for at in range(0, len(data), 40):
                theirs.send(data[at : at + 40])
            for number in numbers:
                helper.answer(number)

    yield take


@contextlib.contextmanager
def state_page() -> Iterator[Callable[[bytes], None]]:
    """A state page that something else has written over."""
    with tempfile.TemporaryDirectory() as folder:
        page = EnginePage(Path(folder) / "page")
        page.claim(0, 2)

        def take(data: bytes) -> None:
            page.write_slot(1, data[:256].ljust(256, b"\0")[:SLOT])
            assert not verdict(page.read()).open, "one worker of two holds nothing"

        yield take
        page.close()


SLOT = 256


@contextlib.contextmanager
def gate_requests() -> Iterator[Callable[[bytes], None]]:
    """A request: path, root path, headers. An engine without weights is reached by what says nothing of them only."""
    with tempfile.TemporaryDirectory() as folder:
        directory = EngineDirectory.create(Path(folder))
        before = os.environ.get(ENVIRONMENT)
        os.environ[ENVIRONMENT] = str(directory.path)
        reached: list[str] = []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            reached.append(route_of(scope))

        gate = ReferenceGate(app)
        loop = asyncio.new_event_loop()

        async def send(message: Any) -> None:
            return None

        def take(data: bytes) -> None:
            path, root, *headers = (data + b"\n").split(b"\n")
            scope = {
                "type": "http",
                "path": "/" + path.decode("latin-1").lstrip("/"),
                "root_path": root.decode("latin-1"),
                "headers": [(header[:24].lower(), header[24:]) for header in headers],
                "client": ("127.0.0.1", 1),
            }
            reached.clear()
            loop.run_until_complete(gate(scope, None, send))  # type: ignore[arg-type]
            for route in reached:
                assert (route.rstrip("/") or "/") in ReferenceGate.open_routes, (
                    f"{route} reached an engine without weights"
                )

        try:
            yield take
        finally:
            loop.close()
            os.environ.pop(ENVIRONMENT)
            if before is not None:
                os.environ[ENVIRONMENT] = before


@contextlib.contextmanager
def uploads() -> Iterator[Callable[[bytes], None]]:
    """Chunks of a blob."""
    loop, store = asyncio.new_event_loop(), BlobStore(1 << 16, 1 << 18)

    def take(data: bytes) -> None:
        chunk = manager_pb2.BlobChunk.FromString(data)

        async def chunks() -> Any:
            yield chunk
            if chunk.ref.size > len(chunk.data):
                yield chunk

        loop.run_until_complete(receive(store, chunks()))

    yield take
    loop.close()


@contextlib.contextmanager
def safetensors() -> Iterator[Callable[[bytes], None]]:
    """A checkpoint's file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"

        def take(data: bytes) -> None:
            path.write_bytes(data)
            read_header(path)

        yield take


@contextlib.contextmanager
def configs() -> Iterator[Callable[[bytes], None]]:
    """A model's config.json, from which shapes follow."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        yield lambda data: (path.write_bytes(data), read_model(path), None)[2]


@contextlib.contextmanager
def indexes() -> Iterator[Callable[[bytes], None]]:
    """An index of a checkpoint's files, beside one of them."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / INDEX
        (path.parent / "a.safetensors").write_bytes(safetensors_file())
        yield lambda data: (path.write_bytes(data), read_directory(path.parent), None)[2]


@contextlib.contextmanager
def texts() -> Iterator[Callable[[bytes], None]]:
    """Addresses, deadlines, tokens files."""

    def take(data: bytes) -> None:
        text = data.decode(errors="replace")
        for parse in (split_address, Tokens.parse):
            with contextlib.suppress(CkptEngineError):
                parse(text)
        with contextlib.suppress(ValueError):
            Deadlines().changed(text)

    yield take
