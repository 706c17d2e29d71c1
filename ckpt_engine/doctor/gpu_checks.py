"""Checks what the GPUs of this host can do for an update, by doing it. For `ckpt-engine doctor`; it starts CUDA."""

from __future__ import annotations

from collections.abc import Iterator
from uuid import UUID

import torch

from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.core.sizes import in_words
from ckpt_engine.core.stage_memory import AUTO, OPTION
from ckpt_engine.digest import cuda as digest_cuda
from ckpt_engine.digest.boxes import digest_box
from ckpt_engine.digest.prepared import prepare_digests
from ckpt_engine.host import nvml
from ckpt_engine.host.gpus import used_gpus
from ckpt_engine.source.device import DeviceOffer
from ckpt_engine.source.lending import Lending
from ckpt_engine.v1.weights_pb2 import GpuReach

Row = tuple[str, bool | None, str]
"""Name; whether it works (None: a note); what was found, or why not and what to do."""

_LINKS = {
    GpuReach.LINK_NVLINK: "over NVLink",
    GpuReach.LINK_PCIE: "over PCIe",
    GpuReach.LINK_PEER: "by peer access",
    GpuReach.LINK_NONE: "not at all (weights go through shared memory)",
}


def gpu_rows() -> Iterator[Row]:
    """One row for each GPU and check. A GPU that fails gets a row and raises nothing."""
    if not torch.cuda.is_available():
        built = torch.version.cuda
        reason = f"torch is built for CUDA {built} but finds no GPU" if built else "torch is built without CUDA"
        yield "CUDA", False, f"{reason}; everything that needs none works"
        return
    for ordinal in range(torch.cuda.device_count()):
        yield from _one(ordinal)
    gpus = {gpu.uuid: gpu for gpu in used_gpus()}
    names = {uuid: f"cuda:{torch_ordinal(uuid)}" for uuid in gpus}
    for uuid, gpu in gpus.items():
        for reach in gpu.reach:
            other = names.get(reach.uuid, f"GPU {UUID(bytes=reach.uuid)}, which this process does not see,")
            detail = f"reads the memory of {other} {_LINKS.get(reach.link, 'in a way that is not known')}"
            yield f"{names[uuid]} to another", reach.link != GpuReach.LINK_NONE, detail
    yield from _invisible_rows(frozenset(gpus))


def torch_ordinal(uuid: bytes) -> int | None:
    """This process's number of a GPU; None: it does not see it."""
    from ckpt_engine.cuda.driver import driver

    return driver().device_of_uuid(uuid)


def _invisible_rows(visible: frozenset[bytes]) -> Iterator[Row]:
    try:
        devices = nvml.devices()
    except nvml.NvmlError as error:
        yield "links", None, f"{error}; reach between GPUs is only known where one process sees both"
        return
    for device in devices:
        if device.uuid not in visible:
            memory = f"{device.memory / 2**30:.0f} GiB"
            yield f"GPU {device.pci}", None, f"{device.name}, {memory}, not visible to this process"


def _one(ordinal: int) -> Iterator[Row]:
    name = f"cuda:{ordinal}"
    properties = torch.cuda.get_device_properties(ordinal)
    try:
        tensor = torch.arange(4096, device=name, dtype=torch.float32).bfloat16().view(64, 64)
        torch.cuda.synchronize(ordinal)
    except RuntimeError as error:
        yield name, False, f"{properties.name}: {str(error).splitlines()[0]}"
        return
    yield name, True, f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
    free, _ = torch.cuda.mem_get_info(ordinal)
    room = f"{in_words(free)} are free now: {OPTION} {AUTO} takes at most half of what is free once an engine is up"
    yield f"{name}, {OPTION}", None, room
    for what, copied in (("live parameters", False), ("copies", True)):
        why = _why_not_lent(tensor, copied)
        advice = "; weights go through shared memory" if copied else "; they are copied on the GPU at each update"
        yield (
            f"{name}, {what} lent",
            not why,
            f"{why}{advice}" if why else "another process mapped this one's memory (CUDA IPC)",
        )
    why = digest_cuda.missing()
    if not why:
        equal = prepare_digests([(tensor, (0, 0))]).run() == [digest_box(tensor.cpu(), (0, 0))]
        why = "" if equal else "the kernel's digest is wrong: report this"
    yield f"{name}, digests", not why, f"{why}; they are worked out on the host, slowly" if why else "on the GPU, exact"


def _why_not_lent(tensor: torch.Tensor, copied: bool) -> str:
    """Lends memory as a trainer does; why that fails, empty if it works."""
    lending = Lending()
    try:
        offer = DeviceOffer([tensor], [tensor.dtype], [copied], 0, lending)
    except CkptEngineError as error:
        lending.close()
        return error.problem.message
    try:
        found = offer.places[0]
        if found is not None and found.live is not copied:
            return ""
        return "; ".join(lending.reasons) or "it has to be copied first"
    finally:
        lending.close()
        offer.close()
