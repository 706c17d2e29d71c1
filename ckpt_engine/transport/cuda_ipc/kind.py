"""What planners, workers and commands need to know about reading GPU memory of another process on the same host. Loads
neither the reader nor the lender."""

from __future__ import annotations

from ckpt_engine.core.prediction import SAME_GPU
from ckpt_engine.core.reach import by_gpu
from ckpt_engine.core.transports import GPU_MEMORY, Availability, TransportKind
from ckpt_engine.cuda.driver import library_problem

NAME = "cuda_ipc"


def on_host() -> Availability:
    """Whether there is a driver. Whether a worker uses a GPU, it tells itself; this process's torch says nothing."""
    problem = library_problem()
    return Availability(not problem, problem or "an NVIDIA driver is installed")


KIND = TransportKind(
    name=NAME,
    order=10,
    reach=by_gpu,
    reader="ckpt_engine.transport.cuda_ipc.reader:CudaIpcTransport",
    lender="ckpt_engine.transport.cuda_ipc.lender:CudaIpcLender",
    lends=frozenset({GPU_MEMORY}),
    on_host=on_host,
    rates={"host": 48.1e9, "gpu": 380e9, SAME_GPU: 1755e9},
)
