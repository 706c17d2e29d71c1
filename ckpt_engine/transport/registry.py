"""Which transports there are, and which of them this process can use.

A transport is a module of its own and one line in `_BUILT`. Those that the design foresees and nobody has built are
told as such, with what this host has for them: a person who wonders why an edge took shared memory gets an answer.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ckpt_engine.transport.base import Availability, Transport
from ckpt_engine.transport.cuda_driver import library_problem
from ckpt_engine.transport.cuda_ipc import CudaIpcTransport
from ckpt_engine.transport.file import FileTransport
from ckpt_engine.transport.relay_memory import RelayMemoryTransport
from ckpt_engine.transport.shared_memory import SharedMemoryTransport

_BUILT: tuple[
    type[CudaIpcTransport] | type[RelayMemoryTransport] | type[SharedMemoryTransport] | type[FileTransport], ...
] = (
    CudaIpcTransport,
    RelayMemoryTransport,
    SharedMemoryTransport,
    FileTransport,
)


@dataclass(frozen=True, slots=True)
class TransportRow:
    """What `ckpt-engine doctor` shows of one transport. built: whether this version of ckpt-engine has it at all."""

    name: str
    built: bool
    ok: bool
    reason: str


def all_transports() -> dict[str, Transport]:
    """A new instance of every transport that this process can use, by name. Call it once a worker."""
    transports: list[Transport] = [kind() for kind in _BUILT]
    return {transport.name: transport for transport in transports if transport.availability().ok}


def worker_transports(only: Sequence[str] = ()) -> tuple[str, ...]:
    """What workers of an engine on this host may use, as its agent tells the manager. Starts CUDA nowhere.

    only: the names that a user allows; none: all that work. Whether a worker uses a GPU it tells itself, so here the
    driver decides, not the agent's own torch. Raises ValueError for a name that is unknown or does not work here.
    """
    found = {}
    for kind in _BUILT:
        found[kind.name] = kind().availability()
        if kind is CudaIpcTransport:
            problem = library_problem()
            found[kind.name] = Availability(not problem, problem or "an NVIDIA driver is installed")
    for name in only:
        if name not in found:
            raise ValueError(f"there is no transport {name!r}; there are {', '.join(found)}")
        if not found[name].ok:
            raise ValueError(f"transport {name} does not work on this host: {found[name].reason}")
    return tuple(name for name, each in found.items() if each.ok and (not only or name in only))


def transport_rows() -> list[TransportRow]:
    """Every transport, built or not, and why it is on or off in this process. Never raises."""
    rows = []
    for kind in _BUILT:
        found = kind().availability()
        rows.append(TransportRow(kind.name, True, found.ok, found.reason))
    for name, found in unbuilt().items():
        rows.append(TransportRow(name, False, False, found.reason))
    return rows


def unbuilt() -> Mapping[str, Availability]:
    """Transports of the design that this version does not have, with what they would find on this host."""
    return {
        "nccl": Availability(False, f"not built yet; {_cuda()}; {_nccl()}"),
        "ucx": Availability(False, f"not built yet; {_nixl()}"),
    }


def _cuda() -> str:
    if torch.version.cuda is None:
        return f"this torch ({torch.__version__}) is built without CUDA"
    if not Path("/proc/driver/nvidia/version").exists():
        return "no NVIDIA driver is loaded"
    return f"{torch.cuda.device_count()} CUDA devices visible"


def _nccl() -> str:
    if torch.distributed.is_available() and torch.distributed.is_nccl_available():
        return "this torch has NCCL"
    return "this torch has no NCCL"


def _nixl() -> str:
    if (
        importlib.util.find_spec("nixl")
        or importlib.util.find_spec("nixl_cu13")
        or importlib.util.find_spec("nixl_cu12")
    ):
        return "NIXL is installed"
    return "NIXL is not installed (pip install 'ckpt-engine[nixl-cu13]' or 'ckpt-engine[nixl-cu12]')"
