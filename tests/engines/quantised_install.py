"""Run by an engine's Python: installs into vLLM's own quantised layers, as its loader makes them, without a server.

`python -m tests.engines.quantised_install DIRECTORY...`: each holds one kind, in `1`, `2` and `3` three versions of
its files, and in `arguments.json` what vLLM is started with. Methods, loaders and reloading are vLLM's own. Only FP8
kernels, which no CPU here has, are stand-ins. They keep tensors as those of a GPU do: those of experts have some that
lie nowhere else, one of them made of weights.

A model that vLLM made with random weights is updated to 1, 2, 1 and 3 by our install, with a torn one between, and
compared with models that vLLM's own loader brought the same files, and read as a captured graph would: at the addresses
of the start. Prints one JSON object a directory.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

VERSIONS = ("1", "2", "1", "3")


class Linear:
    """In the place of a GPU's kernel of linear layers: it changes nothing."""

    __module__ = "vllm.stand_ins"

    def __init__(self, *_: Any, **__: Any) -> None:
        self.constant = torch.full((2,), 3.0)

    def input_quant_key(self) -> None:
        """It takes no input that is quantised already."""

    def process_weights_after_loading(self, layer: Any) -> None:
        """As the kernels do for which vLLM's own form is right."""


class Experts:
    """In the place of a GPU's kernel of experts, made anew whenever weights are processed."""

    __module__ = "vllm.stand_ins"

    def __init__(self, quant_config: Any) -> None:
        self.quant_config = quant_config
        self.strides = torch.arange(4)
        self.inverse = 1 / quant_config.w1_scale


class Kernel:
    """What a method keeps as `moe_kernel`."""

    __module__ = "vllm.stand_ins"

    def __init__(self, experts: Experts) -> None:
        self.fused_experts = experts


def stand_in() -> None:
    """Puts the stand-ins into vLLM's modules."""
    from vllm.model_executor.layers.fused_moe.oracle import fp8 as oracle
    from vllm.model_executor.layers.quantization import fp8
    from vllm.model_executor.layers.quantization.online import fp8 as online

    def select(**_: Any) -> tuple[Any, Any]:
        return oracle.Fp8MoeBackend.TRITON, Experts

    def make(*, moe_quant_config: Any, **_: Any) -> Kernel:
        return Kernel(Experts(moe_quant_config))

    def quantised(weight: Tensor, scale: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
        return (weight / scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale

    module: Any
    for module in (fp8, online, oracle):
        module.init_fp8_linear_kernel = Linear
        module.select_fp8_moe_backend = select
        module.make_fp8_moe_kernel = make
        module.convert_to_fp8_moe_kernel_format = lambda w13, w2, w13_scale, w2_scale, **_: (
            w13,
            w2,
            w13_scale,
            w2_scale,
        )
    online.ops.scaled_fp8_quant = quantised
    torch.accelerator.empty_cache = lambda: None  # as vLLM's own worker for CPUs does


class Engine:
    """vLLM as far as it is needed to load models in this process."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self._arguments = arguments

    def model(self, path: Path, load_format: str) -> tuple[nn.Module, Any]:
        """A model and vLLM's configuration of it."""
        from vllm.config import set_current_vllm_config
        from vllm.distributed import init_distributed_environment, initialize_model_parallel
        from vllm.engine.arg_utils import EngineArgs
        from vllm.model_executor.model_loader import get_model_loader

        given = {"dtype": "bfloat16", "enforce_eager": True, "skip_tokenizer_init": True, "max_model_len": 64}
        config = EngineArgs(model=str(path), load_format=load_format, **given, **self._arguments).create_engine_config()
        with set_current_vllm_config(config):
            if not torch.distributed.is_initialized():
                init_distributed_environment(1, 0, f"file://{path}/store", 0, "gloo")
                initialize_model_parallel()
            loader = get_model_loader(config.load_config)
            return loader.load_model(vllm_config=config, model_config=config.model_config), config


def read(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """All tensors that kernels read: parameters and buffers, and what only a kernel has."""
    yield from model.named_parameters()
    yield from model.named_buffers()
    for prefix, layer in model.named_modules():
        kernel: Any = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
        if isinstance(kernel, Kernel):
            experts = kernel.fused_experts
            yield f"{prefix}!inverse", experts.inverse
            yield f"{prefix}!strides", experts.strides
            yield f"{prefix}!scale", experts.quant_config.w1_scale


def differing(have: dict[str, Tensor], want: dict[str, Tensor]) -> list[str]:
    return sorted(
        name
        for name in have.keys() | want.keys()
        if name not in have or name not in want or not torch.equal(have[name].float(), want[name].float())
    )


def refusal(model: nn.Module, config: Any, path: Path, weights: dict[str, Tensor]) -> str:
    """What is said against an update of this model on one of two GPUs that share its layers."""
    from ckpt_engine_adapters.vllm import target
    from tests.engines.resident_install import Cuda
    from tests.install.install_world import Checkpoint, OneWorker

    module: Any = target
    platform, module.current_platform = module.current_platform, Cuda()
    try:
        split = target.VllmTarget(model, config.model_config, shared="tensor parallelism of 2")
    finally:
        module.current_platform = platform
    (path / "split").mkdir()
    message: str = OneWorker(split, path / "split").prepare(Checkpoint(weights)).problem.message
    return message


def play(path: Path) -> dict[str, Any]:
    from safetensors.torch import load_file
    from vllm.config import set_current_vllm_config

    from ckpt_engine.core.enums import enum_word
    from ckpt_engine.v1 import manager_pb2
    from ckpt_engine_adapters.vllm.quantised import reset_made_up_scales
    from ckpt_engine_adapters.vllm.target import VllmTarget
    from tests.install.install_world import Checkpoint, OneWorker

    engine = Engine(json.loads((path / "arguments.json").read_text()))
    model, config = engine.model(path / "1", "dummy")
    found: dict[str, Any] = {"kind": path.name, "differ": [], "torn": []}
    with set_current_vllm_config(config):
        reset_made_up_scales(model)
        target = VllmTarget(model, config.model_config)
        found["quantised"] = {name: [how.published, how.method] for name, how in target.quantised().items()}
        captured = dict(read(model))
        addresses = {name: tensor.data_ptr() for name, tensor in captured.items()}
        one = OneWorker(target, path)
        for version in VERSIONS:
            weights = load_file(path / version / "model.safetensors")
            name = sorted(name for name in weights if name.endswith("proj.weight"))[-1]
            checkpoint = Checkpoint(weights, seed=5)
            prepared = one.prepare(checkpoint)
            if prepared.HasField("problem"):
                return {**found, "problem": prepared.problem.message}
            order = one.order(checkpoint)
            checkpoint.flip(name, (0, 0))
            report = one.installer.install(order).report
            found["torn"].append([enum_word(manager_pb2.WorkerState, one.slot.state), name in report.problem.message])
            report = one.update(Checkpoint(weights, seed=3)).report
            found["problem"] = report.problem.message
            like, _ = engine.model(path / version, "auto")
            found["differ"].append(
                differing(captured, dict(read(like))) + differing(dict(read(model)), dict(read(like)))
            )
        found["verified"], found["as_loaded"] = report.verified, report.verified_as_loaded
        found["split over GPUs"] = refusal(model, config, path, weights)
    found["moved"] = [name for name, tensor in read(model) if tensor.data_ptr() != addresses[name]]
    found["tensors"] = len(captured)
    return found


def main(paths: list[Path]) -> None:
    stand_in()
    for path in paths:
        print(json.dumps(play(path)), flush=True)
    # vLLM's process group has threads that do not end by themselves.
    os._exit(0)


if __name__ == "__main__":
    main([Path(argument) for argument in sys.argv[1:]])
