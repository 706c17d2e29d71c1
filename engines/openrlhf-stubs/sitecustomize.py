"""Lets OpenRLHF train where there is no GPU: imported at the start of each Python of its environment.

OpenRLHF asks `torch.cuda` by name, and makes a mesh of "cuda". Both are given the processor instead; DeepSpeed has a
processor as an accelerator of its own (DS_ACCELERATOR=cpu), whose optimizer and collective operations it would compile
for minutes: its setting `torch_adam` takes torch's AdamW instead, and gloo does the rest. OpenRLHF imports helpers of
flash-attention for packed samples, whose package needs CUDA: here they are names that raise.
Only for tests and demonstrations; no part of the package.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any


class Processor(str):
    """The current device, which OpenRLHF also writes behind "cuda:"."""

    def __format__(self, spec: str) -> str:
        return "0"


class Nothing:
    """In the place of one function of `torch.cuda`: each is an object of its own, as torch's compiler wants it."""

    def __call__(self, *_: Any) -> None:
        """There is no device to set, to empty or to wait for."""


def _without_cuda(load: Callable[[ModuleType], None], module: ModuleType) -> None:
    load(module)
    for name in ("set_device", "empty_cache", "synchronize"):
        module.__dict__[name] = Nothing()
    module.__dict__["current_device"] = lambda: Processor("cpu")


def _on_the_processor(load: Callable[[ModuleType], None], module: ModuleType) -> None:
    load(module)
    make = module.init_device_mesh
    module.__dict__["init_device_mesh"] = lambda device, *sizes, **names: make("cpu", *sizes, **names)


def _without_collectives(load: Callable[[ModuleType], None], module: ModuleType) -> None:
    load(module)
    module.__dict__["__compatible_ops__"] = {}


def _with_torchs_adam(load: Callable[[ModuleType], None], module: ModuleType) -> None:
    load(module)
    make = module.get_train_ds_config

    def made(*values: Any, **names: Any) -> dict[str, Any]:
        settings: dict[str, Any] = make(*values, **names)
        if "optimizer" in settings:
            settings["optimizer"]["params"]["torch_adam"] = True
        return settings

    module.__dict__["get_train_ds_config"] = made


CHANGED = {
    "torch.cuda": _without_cuda,
    "torch.distributed.device_mesh": _on_the_processor,
    "deepspeed.ops": _without_collectives,
    "openrlhf.utils.deepspeed.deepspeed_utils": _with_torchs_adam,
}

ABSENT = {
    "flash_attn": (),
    "flash_attn.bert_padding": ("index_first_axis", "pad_input", "rearrange", "unpad_input"),
    "flash_attn.utils": (),
    "flash_attn.utils.distributed": ("all_gather",),
}


def _absent(*_: Any, **__: Any) -> None:
    raise NotImplementedError("flash-attention is not here: leave --ds.packing_samples and --ds.ring_attn_size alone")


class Changing(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Loads the modules of CHANGED as these say, and makes those of ABSENT."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name in ABSENT:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        if name not in CHANGED:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module
            spec.loader.exec_module = lambda module: CHANGED[name](load, module)  # type: ignore[method-assign]
        return spec

    def exec_module(self, module: ModuleType) -> None:
        """Gives an absent module its names."""
        module.__dict__.update(dict.fromkeys(ABSENT[module.__name__], _absent))


sys.meta_path.insert(0, Changing())
