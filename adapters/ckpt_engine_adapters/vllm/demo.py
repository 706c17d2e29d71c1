"""vLLM in `ckpt-engine demo`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from ckpt_engine.demo import task
from ckpt_engine.demo.servers import DemoServer
from ckpt_engine_adapters.vllm.driver import MODULE


class VllmServer(DemoServer):
    """Starts vLLM for the demo, and asks it for tokens."""

    package: ClassVar[str] = "vllm"
    python: ClassVar[str] = "CKPT_ENGINE_VLLM_PYTHON"
    module: ClassVar[str] = MODULE
    address_variables: ClassVar[tuple[str, ...]] = ("VLLM_HOST_IP",)

    def arguments(self, tensor_parallel: int) -> Sequence[str]:
        model = ("--served-model-name", task.MODEL_NAME, "--tensor-parallel-size", str(tensor_parallel))
        positions = str(task.MODEL["max_position_embeddings"])
        small = ("--enforce-eager", "--max-model-len", positions, "--gpu-memory-utilization", "0.3")
        return (*model, *small, "--dtype", "float32", "--load-format", "dummy", "--skip-tokenizer-init")

    def environment(self, directory: str, tensor_parallel: int) -> Mapping[str, str]:
        return {
            "VLLM_CACHE_ROOT": directory,
            "VLLM_CONFIG_ROOT": directory,
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            **({"VLLM_CPU_OMP_THREADS_BIND": "0|1"} if tensor_parallel > 1 else {}),
        }

    def question(self, prompt: Sequence[int]) -> tuple[str, Mapping[str, Any]]:
        wish = {"model": task.MODEL_NAME, "prompt": list(prompt), "max_tokens": task.CONTINUATION_BYTES}
        raw = {"temperature": 0, "ignore_eos": True, "return_token_ids": True, "detokenize": False}
        return "/v1/completions", {**wish, **raw}

    def answer(self, content: Any) -> tuple[Sequence[int], Mapping[str, Any]]:
        choice = content["choices"][0]
        return choice["token_ids"], choice["ckpt_engine"]


SERVER = VllmServer()
