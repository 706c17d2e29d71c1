"""Run by an engine's Python: installs into vLLM's own layers as they stand on CUDA, where nothing repacks them.

`python -m tests.engines.resident_install DIRECTORY...`: of the model in each, vLLM's is made on the CPU and not
post-processed, so its layers have the form that they have on CUDA, and residency is told that this is CUDA. One copy is
loaded by vLLM's loader, the other by our install. Attention is processed, as at start.
Prints one JSON object a directory: what is staged and derived, and which tensors differ.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch


def vllm_model(path: Path) -> tuple[Any, Any]:
    """The model, and its ModelConfig."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model

    arguments = EngineArgs(
        model=str(path), dtype="bfloat16", enforce_eager=True, skip_tokenizer_init=True, max_model_len=64
    )
    config = arguments.create_engine_config()
    with set_current_vllm_config(config):
        if not torch.distributed.is_initialized():
            init_distributed_environment(1, 0, f"file://{path}/store", 0, "gloo")
            initialize_model_parallel()
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            return initialize_model(config), config.model_config
        finally:
            torch.set_default_dtype(before)


class Cuda:
    """Says that it is CUDA."""

    def is_cuda(self) -> bool:
        return True


def play(path: Path) -> None:
    from safetensors.torch import load_file

    from ckpt_engine_adapters.vllm import residency
    from ckpt_engine_adapters.vllm.target import VllmTarget
    from ckpt_engine_adapters.vllm.versions import is_deferred_attention_layer
    from tests.install.install_world import Checkpoint, OneWorker

    residency.current_platform = Cuda()
    weights = load_file(path / "model.safetensors")
    if json.loads((path / "config.json").read_text())["tie_word_embeddings"]:
        weights.pop("lm_head.weight", None)
    checkpoint = Checkpoint(weights, seed=3)
    model, config = vllm_model(path)
    like, _ = vllm_model(path)
    for parameter in (*model.parameters(), *like.parameters()):
        parameter.data.normal_()
    like.load_weights(weights.items())
    for layer in (*model.modules(), *like.modules()):
        if is_deferred_attention_layer(layer):
            layer.process_weights_after_loading(torch.bfloat16)
    target = VllmTarget(model, config)
    addresses = {name: tensor.data_ptr() for name, tensor in model.named_parameters()}
    installed = OneWorker(target, path).update(checkpoint)
    wanted = dict(like.named_parameters())
    print(
        json.dumps(
            {
                "staged": sorted(target.staged()),
                "problem": installed.report.problem.message,
                "tensors": len(addresses),
                "verified": installed.report.verified,
                "verified_as_loaded": installed.report.verified_as_loaded,
                "moved": [name for name, tensor in model.named_parameters() if tensor.data_ptr() != addresses[name]],
                "differ": [name for name, tensor in model.named_parameters() if not torch.equal(tensor, wanted[name])],
                "derived": sorted(target.derived()),
                "deriving": len(target._deriving),
                "by_loader": list(installed.report.by_loader),
            }
        ),
        flush=True,
    )


def main(paths: list[Path]) -> None:
    sys.path.insert(0, str(Path(__file__).parents[1] / "install"))
    for path in paths:
        play(path)
    # vLLM's process group has threads that do not end by themselves.
    os._exit(0)


if __name__ == "__main__":
    main([Path(argument) for argument in sys.argv[1:]])
