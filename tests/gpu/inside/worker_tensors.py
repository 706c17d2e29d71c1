"""Run by a vLLM worker, as `--worker-extension-cls worker_tensors.WorkerTensors`: digests of what its kernels read.

It reads tensors and judges nothing; tests compare the digests of two servers (tests/gpu/tensors_of.py).
"""

from __future__ import annotations

import hashlib
from typing import Any


class WorkerTensors:
    """What vLLM adds to its worker's class."""

    def tensor_digests(self: Any) -> dict[str, str]:
        """Of parameters, buffers, and tensors that kernels hold in objects, by name: form, and a digest of values."""
        from ckpt_engine.engine.kernel_tensors import KernelTensors
        from ckpt_engine_adapters.vllm.quantised import may_hold_tensors

        found: dict[str, str] = {}
        for prefix, layer in self.get_model().named_modules():
            tensors = {name: each for name, each in {**layer._parameters, **layer._buffers}.items() if each is not None}
            tensors |= KernelTensors(layer, may_hold_tensors).tensors
            found |= {f"{prefix}.{name}": _text(tensor) for name, tensor in tensors.items()}
        return found


def _text(tensor: Any) -> str:
    import torch

    form = f"{tensor.dtype} {list(tensor.shape)} strides {list(tensor.stride())}"
    values = tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu()
    return f"{form} {hashlib.sha256(values.numpy().tobytes()).hexdigest()[:16]}"
