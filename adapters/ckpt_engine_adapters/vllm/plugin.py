"""Our vLLM plugin (entry point group `vllm.general_plugins`), which vLLM loads in each of its processes.

It registers our weight transfer backend under the name "ckpt_engine". It does not choose the backend: that is the
user's `--weight-transfer-config '{"backend":"ckpt_engine"}'`.
"""

from __future__ import annotations

import os
import sys

from ckpt_engine.gate.directory import ENVIRONMENT, EngineDirectory
from ckpt_engine_adapters.vllm.command import WORKERS_VARIABLE, options_of, worker_count

BACKEND = "ckpt_engine"


def register() -> None:
    """Registers the backend. May run more than once in a process, and before torch is ready to be used."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            BACKEND, "ckpt_engine_adapters.vllm.transfer_engine", "CkptEngineWeightTransfer"
        )
    # A server that was started by hand has no directory yet. The first process that loads plugins is the API server's;
    # all others inherit its environment.
    if ENVIRONMENT not in os.environ and any(BACKEND in argument for argument in sys.argv):
        os.environ[ENVIRONMENT] = str(EngineDirectory.create().path)
        os.environ[WORKERS_VARIABLE] = str(worker_count(options_of(sys.argv)))
