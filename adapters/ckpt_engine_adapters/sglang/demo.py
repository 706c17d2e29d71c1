"""SGLang in `ckpt-engine demo`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from ckpt_engine.demo import task
from ckpt_engine.demo.servers import GenerateServer
from ckpt_engine.host.gpus import has_nvidia_driver

_ON_CPU = ("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch")


class SglangServer(GenerateServer):
    """Starts SGLang for the demo, and asks it for tokens."""

    package: ClassVar[str] = "sglang"
    python: ClassVar[str] = "CKPT_ENGINE_SGLANG_PYTHON"
    module: ClassVar[str] = "sglang.launch_server"
    address_variables: ClassVar[tuple[str, ...]] = ("SGLANG_HOST_IP",)

    def arguments(self, tensor_parallel: int) -> Sequence[str]:
        model = ("--served-model-name", task.MODEL_NAME, "--tensor-parallel-size", str(tensor_parallel))
        positions = str(task.MODEL["max_position_embeddings"])
        small = ("--context-length", positions, "--max-total-tokens", "4096", "--mem-fraction-static", "0.3")
        plain = ("--grammar-backend", "none", "--disable-cuda-graph", *(() if has_nvidia_driver() else _ON_CPU))
        weights = ("--dtype", "float32", "--load-format", "dummy", "--skip-tokenizer-init")
        return (*model, *small, *plain, *weights)

    def environment(self, directory: str, tensor_parallel: int) -> Mapping[str, str]:
        return {
            "SGLANG_USE_CPU_ENGINE": "0" if has_nvidia_driver() else "1",
            **({"SGLANG_CPU_OMP_THREADS_BIND": "0|1"} if tensor_parallel > 1 else {}),
        }


SERVER = SglangServer()
