"""On PYTHONPATH of an engine: at SIGUSR2 it flips one bit of the last norm of this process's model.

A fake of the fault, for memory of GPUs, to which no other process can write. Runs between two steps of Python.
"""

from __future__ import annotations

import contextlib
import gc
import signal

NAME = "model.norm.weight"


def flip(*_: object) -> None:
    import torch

    gc.unfreeze()  # vLLM freezes what there is when it is up, and get_objects leaves that out
    for module in [each for each in gc.get_objects() if isinstance(each, torch.nn.Module)]:
        parameter = dict(module.named_parameters()).get(NAME)
        if parameter is not None and parameter.is_cuda:
            with torch.inference_mode():
                parameter.data.view(torch.uint8)[2] ^= 1
            return
    raise LookupError(f"no module of this process has {NAME} on a GPU")


with contextlib.suppress(ValueError):  # a thread that is not the main one imports nothing here
    signal.signal(signal.SIGUSR2, flip)
