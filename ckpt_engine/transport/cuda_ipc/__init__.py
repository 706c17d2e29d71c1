"""GPU memory between processes of one host: the owner's side (lender.py) and the reader's (reader.py)."""

from ckpt_engine.transport.cuda_ipc.lender import CudaIpcLender as CudaIpcLender
from ckpt_engine.transport.cuda_ipc.reader import CudaIpcTransport as CudaIpcTransport
from ckpt_engine.transport.cuda_ipc.reader import CudaRegions as CudaRegions
