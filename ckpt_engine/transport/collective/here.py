"""Whether this process could be a member of a collective: over Gloo on a CPU, over NCCL on a GPU."""

from __future__ import annotations

import torch

from ckpt_engine.core.transports import Availability
from ckpt_engine.transport.collective.gloo import gloo_availability


def availability() -> Availability:
    """What this process has. Never raises; loads NCCL if this torch has CUDA."""
    gloo = gloo_availability()
    cpus = f"between CPUs over Gloo ({gloo.reason})" if gloo.ok else f"not between CPUs: {gloo.reason}"
    if torch.version.cuda is None:
        return Availability(gloo.ok, f"{cpus}; not between GPUs: torch {torch.__version__} is built without CUDA")
    # Loaded here only: a torch without CUDA would be asked in vain.
    from ckpt_engine.transport.collective.nccl import nccl_availability

    nccl = nccl_availability()
    gpus = f"between GPUs over {nccl.reason}" if nccl.ok else f"not between GPUs: {nccl.reason}"
    return Availability(gloo.ok or nccl.ok, f"{cpus}; {gpus}")
