"""What planners, workers and commands need to know about collectives. Loads neither the reader nor the lender."""

from __future__ import annotations

from ckpt_engine.core.reach import by_collective
from ckpt_engine.core.transports import GPU_MEMORY, HOST_MEMORY, Availability, TransportKind
from ckpt_engine.cuda.driver import library_problem

NAME = "nccl"


def on_host() -> Availability:
    """True: a worker without Gloo, or with an NCCL that is too old, reports it when it prepares to join."""
    driver = library_problem()
    gpus = f"not between GPUs: {driver}" if driver else "between GPUs over NCCL"
    return Availability(True, f"between CPUs over Gloo; {gpus}")


KIND = TransportKind(
    name=NAME,
    order=70,
    reach=by_collective,
    reader="ckpt_engine.transport.collective.here:availability",
    lender="ckpt_engine.transport.collective.lender:CollectiveLender",
    lends=frozenset({HOST_MEMORY, GPU_MEMORY}),
    unasked=False,
    on_host=on_host,
    collective=True,
    rates={"gpu": 299e9},
)
