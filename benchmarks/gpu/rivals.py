"""The rivals: vLLM's own weight transfer (its trainer's side as 0.32 and 0.33 have it), as its documentation says to
use it, with the time of a bare pause and resume; SGLang's `update_weights_from_tensor`; Moonshot's checkpoint-engine.

vLLM's development routes are open here, and its `ipc` backend unpickles what it is sent: on loopback, for a baseline
only.
"""

from __future__ import annotations

import json
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
    """The trainer's half of one backend: sends all weights, opens and closes the update session itself."""

    def __call__(self) -> None: ...


class NativeServer:
    """A vLLM server with one of its own backends, spoken to over HTTP from the trainer's process."""

    def __init__(self, url: str, model: nn.Module) -> None:
        self.url = url
        self._model = model
        # The server closes a connection that was idle for 5 s; one that it might be closing is not used.
        self._client = httpx.Client(base_url=url, timeout=120, limits=httpx.Limits(keepalive_expiry=3.0))

    def post(self, route: str, body: Any = None) -> None:
        self._client.post(route, json=body if body is not None else {}).raise_for_status()

    def ipc(self) -> Sender:
        """All tensors' handles in one call."""
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

        return self._sender(IPCTrainerInitInfo(rank=0))

    def nccl(self) -> Sender:
        """One server's worker beside the trainer, in packed buffers."""
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        return self._sender(NCCLTrainerInitInfo("127.0.0.1", free_port(), 2, rank=0))

    def _sender(self, how: Any) -> Sender:
        """vLLM's trainer engine for this init info, over its HTTP client; connections are kept, so that what is
        measured is the backend."""
        from vllm.distributed.weight_transfer import HTTPVLLMWeightSyncClient, ModuleSource
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

        client = HTTPVLLMWeightSyncClient(self.url)
        client._post = lambda path, json=None: self.post(f"/{path}", json)
        source = ModuleSource(self._model)
        engine = WeightTransferTrainerFactory.trainer_init(how, client=client, source=source)
        send: Sender = engine.send_weights
        return send

    def update(self, send: Sender, keeps_caches: bool = False) -> float:
        """Seconds from pause to resume. keeps_caches: requests go on over the old ones."""
        began = time.perf_counter()
        self.post(f"/pause?mode=keep&clear_cache={'false' if keeps_caches else 'true'}")
        send()
        self.post("/resume")
        return time.perf_counter() - began

    def bare_pause(self) -> float:
        """Seconds of a pause and a resume with nothing between them."""
        began = time.perf_counter()
        self.post("/pause?mode=keep")
        self.post("/resume")
        return time.perf_counter() - began


SGLANG_SIZES = (
    *("--mem-fraction-static", "0.5", "--max-total-tokens", "8192", "--context-length", "1024"),
    *("--cuda-graph-max-bs-decode", "32"),
)
"""Of SGLang servers of Qwen3-8B's shapes, two of which share a GPU with a trainer."""


class NativeSglang:
    """SGLang's own update as 0.5.23 has it: the tensors' CUDA IPC handles in one request, within a session. The server
    unpickles it: on loopback, for a baseline only."""

    def __init__(self, url: str, model: nn.Module) -> None:
        from sglang.srt.utils import MultiprocessingSerializer

        # One connection a request: the server closes one that was idle for 5 s, just when it is used again.
        self._client = httpx.Client(base_url=url, timeout=120, limits=httpx.Limits(max_keepalive_connections=0))
        self._serialize = MultiprocessingSerializer.serialize
        self._named = [(name, parameter.detach()) for name, parameter in model.named_parameters()]

    def post(self, route: str, **body: Any) -> None:
        answer = self._client.post(route, json=body)
        assert answer.status_code == 200, f"{route}: {answer.text}"

    def update(self, keeps_caches: bool = False) -> float:
        """Seconds from pause to resume. keeps_caches: requests go on over the old ones."""
        began = time.perf_counter()
        self.post("/pause_generation", mode="in_place" if keeps_caches else "retract")
        self.post("/begin_weight_update")
        self.post(
            "/update_weights_from_tensor",
            serialized_named_tensors=[self._serialize(self._named, output_str=True)],
            flush_cache=not keeps_caches,
        )
        self.post("/end_weight_update")
        self.post("/continue_generation")
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
