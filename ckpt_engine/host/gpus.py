"""Which GPUs hold the weights of this process, and which others they reach: facts for the choice of a transport.

Does not start CUDA in a process that does not use it. Never raises: unknown facts are left out, and so is the link to a
GPU of which nothing is known.
"""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

from ckpt_engine.cuda.driver import CudaDriverError, driver
from ckpt_engine.host import nvml
from ckpt_engine.v1.weights_pb2 import Gpu, GpuReach

NVIDIA_DRIVER = Path("/dev/nvidiactl")


def has_nvidia_driver() -> bool:
    """Whether engines that are started on this host will find NVIDIA's driver."""
    return NVIDIA_DRIVER.exists()


def used_gpus() -> list[Gpu]:
    """The GPUs that torch has memory on in this process, and its current one; none where CUDA is not in use."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return []
    current = torch.cuda.current_device()
    ordinals = [
        ordinal
        for ordinal in range(torch.cuda.device_count())
        if ordinal == current or torch.cuda.memory_reserved(ordinal)
    ]
    try:
        return [_gpu(driver().uuid(ordinal), torch.cuda.get_device_name(ordinal)) for ordinal in ordinals]
    except CudaDriverError:
        return []


@cache
def _gpu(uuid: bytes, name: str) -> Gpu:
    found = Gpu(uuid=uuid, name=name)
    try:
        for other in nvml.devices():
            if other.uuid == uuid:
                found.pci = other.pci
            else:
                found.reach.append(GpuReach(uuid=other.uuid, link=nvml.link(uuid, other.uuid)))
    except nvml.NvmlError:
        del found.reach[:]
        found.reach.extend(_visible(uuid))
    return found


def _visible(uuid: bytes) -> list[GpuReach]:
    """The links to the GPUs that this process sees, as the driver has them."""
    reach = []
    own = driver().device_of_uuid(uuid)
    for other in range(driver().device_count()):
        if own is not None and other != own:
            link = GpuReach.LINK_PEER if driver().can_access_peer(own, other) else GpuReach.LINK_NONE
            reach.append(GpuReach(uuid=driver().uuid(other), link=link))
    return reach
