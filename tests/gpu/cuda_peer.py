"""A real process with a GPU at either end of CUDA IPC, driven by one JSON line at a time.

Run as a script it is a trainer (publish, fill, replace, seal, withdraw, delete) or a worker (open, read, close), or
both; every answer is {"ok": value, "seconds": taken} or {"problem": [code, message]}. It ends when its input does.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from ckpt_engine.copy.prepared import PreparedCopy
from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.source.memory import MemorySource
from ckpt_engine.source.open import open_source
from ckpt_engine.torch_dtypes import torch_dtype
from ckpt_engine.transport.base import Move
from ckpt_engine.transport.cuda_ipc.reader import CudaIpcTransport, CudaRegions
from ckpt_engine.transport.shared_memory.memory import SharedMemoryTransport
from ckpt_engine.v1.weights_pb2 import Atom, Atoms, SourceTable
from tests.line_process import LineProcess
from tests.source.reading import readable

SHAPES = {
    "contiguous": ([129, 4096], "bfloat16"),
    "transposed": ([512, 384], "float32"),
    "narrow": ([64, 1000], "float16"),
    "vector": ([4099], "float32"),
    "scalar": ([], "float32"),
    "bytes": ([33, 7], "uint8"),
    "long": ([5, 3], "int64"),
    "empty": ([0, 4], "bfloat16"),
}


def many_shapes(layers: int = 36, hidden: int = 1024) -> dict[str, tuple[list[int], str]]:
    """399 tensors with the proportions of Qwen3-8B."""
    found: dict[str, list[int]] = {"embed": [37984, hidden], "head": [37984, hidden], "norm": [hidden]}
    for layer in range(layers):
        for name, shape in {
            "q": [hidden, hidden],
            "k": [hidden // 4, hidden],
            "v": [hidden // 4, hidden],
            "o": [hidden, hidden],
            "gate": [3 * hidden, hidden],
            "up": [3 * hidden, hidden],
            "down": [hidden, 3 * hidden],
            "qn": [128],
            "kn": [128],
            "n1": [hidden],
            "n2": [hidden],
        }.items():
            found[f"{layer}.{name}"] = shape
    return {name: (shape, "bfloat16") for name, shape in found.items()}


class PeerError(Exception):
    """What the process refused. code: the name of the problem's."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code


class Peer(LineProcess):
    """Starts a process. waiting: it was asked and has not answered. seconds: what its last answer took."""

    def __init__(self, **environment: str) -> None:
        super().__init__("tests.gpu.cuda_peer", fresh=True, **environment)
        self.waiting = False
        self.seconds = 0.0

    def ask(self, what: str, **details: Any) -> Any:
        self.send(what=what, **details)
        return self.receive()

    def send(self, **question: Any) -> None:
        self.waiting = True
        super().send(**question)

    def receive(self) -> Any:
        """Raises PeerError for what the process refused."""
        answer = self.answer()
        self.waiting = False
        if "problem" in answer:
            raise PeerError(*answer["problem"])
        self.seconds = answer["seconds"]
        return answer["ok"]


def _hash(tensor: torch.Tensor) -> str:
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu()
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()


class _Trainer:
    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.whole: dict[str, torch.Tensor] = {}
        self.model: Any = None
        self.source: MemorySource | None = None
        self.atoms = Atoms()

    def make(self, shapes: dict[str, Any], seed: int = 0, device: int = 0) -> None:
        """New tensors; those whose name says so are views with strides of their own."""
        self.tensors = {}
        for name, (shape, dtype) in shapes.items():
            kind, where = torch_dtype(dtype), torch.device("cuda", device)
            if name == "transposed":
                made = torch.empty(shape[::-1], dtype=kind, device=where).t()
            elif name == "narrow":
                made = torch.empty([shape[0], shape[1] + 24], dtype=kind, device=where)[:, 8 : 8 + shape[1]]
            else:
                made = torch.empty(shape, dtype=kind, device=where)
            self.tensors[name] = made
        self.fill(seed)

    def shard(self, rank: int, world: int, port: int, seed: int = 0) -> None:
        """An FSDP2 model of float32 parameters, some of which do not divide evenly. All ranks call it at once."""
        from torch.distributed.fsdp import fully_shard

        torch.cuda.set_device(rank % torch.cuda.device_count())
        if not torch.distributed.is_initialized():
            torch.distributed.init_process_group(
                "cpu:gloo,cuda:nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world
            )
        torch.manual_seed(seed)
        whole = torch.nn.Sequential(torch.nn.Linear(1024, 513), torch.nn.Linear(7, 3), torch.nn.LayerNorm(2048))
        self.whole = {name: tensor.detach().cuda() for name, tensor in whole.named_parameters()}
        self.model = fully_shard(whole.cuda())

    def step(self, by: float) -> None:
        """What an optimizer does: changes every parameter where it lies."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.to_local().add_(by)
            for tensor in self.whole.values():
                tensor.add_(by)

    def whole_hashes(self, served: str) -> dict[str, str]:
        """Of the parameters as they were before they were sharded, changed alike."""
        return {name: _hash(tensor.to(torch_dtype(served))) for name, tensor in self.whole.items()}

    def hog(self, leave: int) -> None:
        """Takes all memory of the GPU but `leave` bytes; 0: gives it back."""
        self.hogged = torch.empty(
            torch.cuda.mem_get_info()[0] - leave if leave else 0, dtype=torch.uint8, device="cuda"
        )
        torch.cuda.empty_cache()

    def fill(self, seed: int) -> None:
        torch.manual_seed(seed)
        for tensor in self.tensors.values():
            tensor.normal_() if tensor.is_floating_point() else tensor.random_(0, 127)

    def publish(self, **wishes: Any) -> dict[str, Any]:
        source = open_source(self.tensors if self.model is None else self.model, **wishes)
        if self.source is not None:
            self.source.close()
        assert isinstance(source, MemorySource)
        self.source = source
        table = source.table()
        self.atoms = Atoms(
            atoms=[Atom(shard=index, start=each.start, stop=each.stop) for index, each in enumerate(table.shards)]
        )
        return {
            "table": table.SerializeToString().hex(),
            "description": table.description,
            "regions": [region.transport for region in readable(table)],
            "stays_sealed": table.stays_sealed,
            "copies": table.source_copies,
        }

    def check(self) -> None:
        assert self.source is not None
        self.source.check()

    def seal(self) -> list[int]:
        assert self.source is not None
        self.source.check()
        self.source.seal()
        return self.source.digest(self.atoms)

    def flip(self, name: str, byte: int) -> None:
        """One bit of a tensor changes."""
        self.tensors[name].view(-1).view(torch.uint8)[byte] ^= 4
        torch.cuda.synchronize()

    def seal_atoms(self, atoms: str) -> list[int]:
        """Sealed along these, which a plan names."""
        self.atoms = Atoms.FromString(bytes.fromhex(atoms))
        return self.seal()

    def hashes(self, served: str = "") -> dict[str, str]:
        """Of what readers should get."""
        kind = torch_dtype(served) if served else None
        return {
            name: _hash(tensor.to(kind) if kind is not None and tensor.is_floating_point() else tensor)
            for name, tensor in self.tensors.items()
        }

    def replace(self, name: str) -> None:
        """As an offloading trainer does: the same values in other memory."""
        self.tensors[name].data = self.tensors[name].data.clone()

    def withdraw(self, seconds: float = 60.0) -> None:
        if self.source is not None:
            self.source.withdraw(seconds)
        self.source = None

    def delete(self) -> None:
        self.tensors = {}
        gc.collect()
        torch.cuda.empty_cache()

    def segments(self) -> int:
        """Allocations that torch has of the driver (or runs of them, under expandable_segments)."""
        return len(torch.cuda.memory_snapshot())


class _Worker:
    def __init__(self) -> None:
        self.transport = CudaIpcTransport()
        self.memory = SharedMemoryTransport()
        self.opened: list[Any] = []
        self.copies: list[PreparedCopy] = []
        self.found: dict[str, torch.Tensor] = {}

    def open(self, table: str | list[str]) -> dict[str, float]:
        """Opens everything beside what is open, then closes the former, as an installer does. What both steps took.

        table: one, or those of all ranks that hold parts of the same tensors.
        """
        tables = [
            SourceTable.FromString(bytes.fromhex(each)) for each in ([table] if isinstance(table, str) else table)
        ]
        fresh: dict[str, Any] = {}
        moves: dict[str, list[Move]] = {}
        found: dict[str, torch.Tensor] = {}
        began = time.perf_counter()
        for name, transport in (("cuda_ipc", self.transport), ("shared_memory", self.memory)):
            mine = [region for each in tables for region in readable(each) if region.transport == name]
            if mine:
                fresh[name] = transport.open(mine)
        opened = time.perf_counter()
        for each in tables:
            self._bind(each, found, moves)
        bound = time.perf_counter()
        copies = [fresh[name].prepare(each) for name, each in moves.items()]
        prepared = time.perf_counter()
        self.close()
        self.opened, self.copies, self.found = list(fresh.values()), copies, found
        return {"open_seconds": opened - began, "prepare_seconds": prepared - bound}

    def _bind(self, table: SourceTable, found: dict[str, torch.Tensor], moves: dict[str, list[Move]]) -> None:
        """A move for each shard of a table, into whole tensors that are kept from one call to the next."""
        regions = {region.id: region for region in readable(table)}
        for shard in table.shards:
            spec = table.tensors[shard.tensor]
            kind, shape = torch_dtype(spec.dtype), tuple(spec.shape)
            whole = found.get(spec.name, self.found.get(spec.name))
            if whole is None or whole.shape != shape or whole.dtype != kind:
                whole = torch.zeros(shape, dtype=kind, device="cuda")
            found[spec.name] = whole
            part = whole[tuple(slice(first, last) for first, last in zip(shard.start, shard.stop, strict=True))]
            region = regions[shard.region]
            move = Move(
                region, shard.offset, tuple(part.shape), tuple(shard.stride), spec.dtype, part, shard.stored_dtype
            )
            moves.setdefault(region.transport, []).append(move)

    def check(self) -> None:
        for opened in self.opened:
            opened.check()

    def read(self, check: bool = True) -> int:
        if check:
            self.check()
        return sum(copy.run() for copy in self.copies)

    def hashes(self) -> dict[str, str]:
        return {name: _hash(tensor) for name, tensor in self.found.items()}

    def digests(self) -> list[int]:
        from ckpt_engine.digest.boxes import digest_boxes

        return digest_boxes([(tensor, [0] * tensor.dim()) for _, tensor in sorted(self.found.items())])

    def close(self) -> None:
        self.copies = []
        for opened in self.opened:
            opened.close()
        self.opened = []

    def forget(self) -> None:
        self.close()
        self.found = {}

    def mappings(self) -> int:
        return self.transport.mappings

    def regions(self) -> int:
        return sum(len(opened._mapped) for opened in self.opened if isinstance(opened, CudaRegions))


def state() -> dict[str, int]:
    """What must not grow."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return {
        "free": torch.cuda.mem_get_info()[0],
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
    }


def computes() -> float:
    """Whether the GPU still answers this process."""
    return float((torch.ones(1000, device="cuda") * 2).sum())


def _main() -> None:
    torch.cuda.init()
    trainer, worker = _Trainer(), _Worker()
    for line in sys.stdin:
        question = json.loads(line)
        what = question.pop("what")
        side, _, name = what.partition(".")
        subject: Any = {"trainer": trainer, "worker": worker}.get(side, sys.modules[__name__])
        call: Callable[..., Any] = getattr(subject, name or what)
        began = time.perf_counter()
        try:
            answer = {"ok": call(**question), "seconds": time.perf_counter() - began}
        except CkptEngineError as error:
            answer = {"problem": [error.code, error.problem.message]}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    _main()
