"""The rivals: vLLM's own weight transfer, as its documentation says to use it, with the time of a bare pause and
resume; and Moonshot's checkpoint-engine.

vLLM's development routes are open here, and its `ipc` backend unpickles what it is sent: on loopback, for a baseline
only.
"""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any, Protocol

import httpx
from torch import nn

from benchmarks.gpu.lines import LineProcess
from tests.ports import free_port

ENVIRONMENT = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}


def backend_arguments(backend: str) -> tuple[str, ...]:
    """ "ipc" or "nccl"; dummy weights until the first update."""
    return ("--load-format", "dummy", "--weight-transfer-config", json.dumps({"backend": backend}))


class Sender(Protocol):
    """The trainer's half of one backend."""

    def __call__(self) -> None:
        """Sends all weights inside an open update session."""


class NativeServer:
    """A vLLM server with one of its own backends, spoken to over HTTP from the trainer's process."""

    def __init__(self, url: str, model: nn.Module) -> None:
        self.url = url
        self._named = [(name, parameter.detach()) for name, parameter in model.named_parameters()]
        # The server closes a connection that was idle for 5 s; one that it might be closing is not used.
        self._client = httpx.Client(base_url=url, timeout=120, limits=httpx.Limits(keepalive_expiry=3.0))

    def post(self, route: str, body: Any = None) -> None:
        self._client.post(route, json=body if body is not None else {}).raise_for_status()

    def ipc(self) -> Sender:
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerSendWeightsArgs, IPCWeightTransferEngine

        self.post("/init_weight_transfer_engine", {"init_info": {}})
        where = IPCTrainerSendWeightsArgs(send_mode="http", url=self.url)
        return lambda: IPCWeightTransferEngine.trainer_send_weights(iter(self._named), where)

    def nccl(self) -> Sender:
        from vllm.distributed.weight_transfer import nccl_common
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerSendWeightsArgs, NCCLWeightTransferEngine

        port = free_port()
        where = {"master_address": "127.0.0.1", "master_port": port, "world_size": 2}
        init = {"init_info": {**where, "rank_offset": 1}}
        joining = threading.Thread(target=self.post, args=("/init_weight_transfer_engine", init), daemon=True)
        joining.start()
        group = nccl_common.trainer_init(where)
        joining.join(60)
        described = {
            "names": [name for name, _ in self._named],
            "dtype_names": ["bfloat16"] * len(self._named),
            "shapes": [list(tensor.shape) for _, tensor in self._named],
            "packed": True,
        }

        def send() -> None:
            receiving = threading.Thread(target=self.post, args=("/update_weights", {"update_info": described}))
            receiving.start()
            arguments = NCCLTrainerSendWeightsArgs(group=group, packed=True)
            NCCLWeightTransferEngine.trainer_send_weights(iter(self._named), arguments)
            receiving.join()

        return send

    def update(self, send: Sender, keeps_caches: bool = False) -> float:
        """Seconds from pause to resume. keeps_caches: requests go on over the old ones."""
        began = time.perf_counter()
        self.post(f"/pause?mode=keep&clear_cache={'false' if keeps_caches else 'true'}")
        self.post("/start_weight_update")
        send()
        self.post("/finish_weight_update")
        self.post("/resume")
        return time.perf_counter() - began

    def bare_pause(self) -> float:
        """Seconds of a pause and a resume with nothing between them."""
        began = time.perf_counter()
        self.post("/pause?mode=keep")
        self.post("/resume")
        return time.perf_counter() - began


def moonshot(path: Path, gpus: int, rounds: int) -> dict[str, Any]:
    """Moonshot's checkpoint-engine, from host memory to so many GPUs: its seconds for each update and the once-only
    ones, run by itself so that nothing else holds the links."""
    process = LineProcess(
        path / "moonshot.log",
        [
            *("torch.distributed.run", "--nproc-per-node", str(gpus), "--master-port", "29577"),
            *("-m", "benchmarks.gpu.moonshot_rank", str(rounds)),
        ],
    )
    try:
        once = process.hear(120)
        answers = [process.hear(60) for _ in range(rounds)]
    finally:
        process.close()
    assert all(each["right"] for each in answers)
    return {**once, "seconds": [each["seconds"] for each in answers]}


def read_log(path: Path, characters: int = 3000) -> str:
    return path.read_text(errors="replace")[-characters:] if path.exists() else "(no log)"
