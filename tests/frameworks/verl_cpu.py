"""A processor as a platform of verl, and verl's FSDP engine on it: what lets verl's own trainer run without a GPU.

Decides nothing of how verl trains. Both are told to verl by registries of its own (`PlatformRegistry`,
`EngineRegistry`), by VERL_USE_EXTERNAL_MODULES and VERL_PLATFORM: verl has platforms for CUDA, ROCm and Ascend only.
What is not true in them: a rank takes one of Ray's GPUs, which are only counted; memory of the device is 0.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any

import torch
from verl.plugin.platform import PlatformRegistry
from verl.plugin.platform.platform_base import PlatformBase


class Device(types.ModuleType):
    """`torch.cpu`, and what verl also asks of `torch.cuda`."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def get_device_name(self) -> str:
        return "CPU"

    def max_memory_allocated(self) -> int:
        return 0

    max_memory_reserved = memory_allocated = memory_reserved = max_memory_allocated

    def mem_get_info(self) -> tuple[int, int]:
        return 0, 0

    def empty_cache(self) -> None: ...

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_rng_state(self) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor) -> None:
        torch.set_rng_state(state)


@PlatformRegistry.register(platform="cpu")
class Processor(PlatformBase):  # type: ignore[misc, unused-ignore]
    """A processor, as one device of its rank."""

    device_name = "cpu"
    vendor_name = "any"
    device_module = Device("cpu")

    def is_available(self) -> bool:
        return True

    def current_device(self) -> str:
        return "cpu"

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None: ...

    def synchronize(self, device_index: int | None = None) -> None: ...

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def set_allocator_settings(self, settings: str) -> None: ...

    def empty_cache(self) -> None: ...

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextlib.contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None: ...

    def profiler_stop(self) -> None: ...

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None: ...


_init_process_group = torch.distributed.init_process_group


def init_process_group(backend: str | None = None, **arguments: Any) -> None:
    """torch's own; verl asks for one backend of the processor and one of the device, which are the same here."""
    _init_process_group("gloo" if backend == "cpu:gloo,cpu:gloo" else backend, **arguments)


torch.distributed.init_process_group = init_process_group
