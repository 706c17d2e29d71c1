"""GPU memory between processes of one host: the owner's side (lender.py) and the reader's (reader.py)."""

from ckpt_engine.cuda.driver import library_problem
from ckpt_engine.transport.base import Availability
from ckpt_engine.transport.cuda_ipc.lender import CudaIpcLender as CudaIpcLender
from ckpt_engine.transport.cuda_ipc.reader import CudaIpcTransport as CudaIpcTransport
from ckpt_engine.transport.cuda_ipc.reader import CudaRegions as CudaRegions


def on_host() -> Availability:
    """Whether workers of this host could use it. Whether one uses a GPU it tells itself, so the driver decides here,
    not this process's own torch."""
    problem = library_problem()
    return Availability(not problem, problem or "an NVIDIA driver is installed")
