"""Run by SGLang's Python: installs into SGLang's own model classes, made by its own loader, without a server.

`python -m tests.engines.sglang_install RANK WORKERS FOLDER...`: one of so many tensor and expert parallel ranks, each
in its own process; they meet in the file `group` beside the first folder. Each folder holds one kind of model as it
comes from a checkpoint, in `1` and `2`, two versions of it. A model with random weights is updated to both by our
install, and compared with models that SGLang itself has loaded. Before the second update, checkpoints that lack
something are offered, and a torn one.
Prints one JSON object a folder.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.engines import sglang_scheduler

ARGUMENTS = (
    *("--device", "cpu", "--attention-backend", "torch_native", "--dtype", "bfloat16", "--sampling-backend", "pytorch"),
    *("--max-total-tokens", "512", "--mem-fraction-static", "0.3", "--grammar-backend", "none"),
    *("--disable-overlap-schedule", "--disable-cuda-graph", "--skip-tokenizer-init"),
)


class Engine:
    """SGLang as far as it is needed to load models in this process."""

    def __init__(self, rank: int, workers: int, group: Path) -> None:
        """group: the file in which the processes of the group meet."""
        self.rank, self._workers = rank, workers
        self._group = group
        self._up = False

    def model(self, path: Path, load_format: str, *more: str) -> tuple[nn.Module, Any]:
        """A model of SGLang's and its ModelConfig. load_format: "auto" or "dummy". more: of the command line."""
        from sglang.srt.configs.device_config import DeviceConfig
        from sglang.srt.configs.load_config import LoadConfig
        from sglang.srt.configs.model_config import ModelConfig
        from sglang.srt.configs.update_config import adjust_config_with_unaligned_cpu_tp
        from sglang.srt.model_loader.loader import get_model_loader
        from sglang.srt.server_args import prepare_server_args

        sizes = ("--tp-size", str(self._workers), "--ep-size", str(self._workers))
        arguments = prepare_server_args(["--model-path", str(path), *ARGUMENTS, *sizes, *more])
        load_config = LoadConfig(load_format=load_format)
        config = self._configure(arguments, ModelConfig)
        config = adjust_config_with_unaligned_cpu_tp(config, load_config, self._workers)
        loader = get_model_loader(load_config, config)
        return loader.load_model(model_config=config, device_config=DeviceConfig("cpu")), config

    def _configure(self, arguments: Any, kind: Any) -> Any:
        from sglang.srt import distributed
        from sglang.srt.distributed import bootstrap
        from sglang.srt.runtime_context import SpawnRanks, publish

        publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=self.rank, gpu_id=self.rank))
        config = kind.from_server_args(arguments)
        if not self._up:
            distributed.bootstrap._resolve_dist_init_method = lambda **_: f"file://{self._group}"
            bootstrap.init_parallel_runtime(server_args=arguments, device="cpu", dist_port=0)
            self._up = True
        bootstrap.init_layer_runtime(model_config=config)
        return config


def tensors(model: nn.Module) -> dict[str, Tensor]:
    """Everything that the model computes with, also what lies beside its parameters and buffers."""
    found = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for prefix, module in model.named_modules():
        found |= {f"{prefix}!{name}": value for name, value in vars(module).items() if isinstance(value, Tensor)}
    return found


def differing(model: nn.Module, like: nn.Module) -> list[str]:
    have, want = tensors(model), tensors(like)
    return sorted(
        name
        for name in have.keys() | want.keys()
        if name not in have or name not in want or not torch.equal(have[name].float(), want[name].float())
    )


def lacking(weights: Mapping[str, Tensor], leaves_out: Mapping[str, str]) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Checkpoints that must be refused, by what is wrong with them."""
    for what, name in leaves_out.items():
        yield what, {each: tensor for each, tensor in weights.items() if each != name}
    name = next(name for name, tensor in weights.items() if tensor.dim() == 2 and name.endswith("weight"))
    yield "wrong shape", {**weights, name: weights[name][:-2].clone()}
    yield "unknown", {**weights, "model.layers.0.nobody.weight": torch.zeros(4, dtype=torch.bfloat16)}


def play(engine: Engine, folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    from ckpt_engine.v1 import weights_pb2
    from ckpt_engine_adapters.sglang.target import SglangTarget
    from tests.install.install_world import Checkpoint, OneWorker

    story = json.loads((folder / "story.json").read_text())
    if story["quantised"]:
        as_on_cuda()
    model, config = engine.model(folder / "1", "dummy", *story["arguments"])
    target = SglangTarget(model, config.hf_text_config)
    addresses = {name: tensor.data_ptr() for name, tensor in tensors(model).items()}
    found: dict[str, Any] = {
        "staged": sorted(target.staged()),
        "quantised": {},
        "differ": {},
        "refused": {},
        "beside": [],
    }
    found["quantised"] = {how.method: how.published for how in target.quantised().values()}
    page = folder / f"page-{engine.rank}"
    page.mkdir()
    one = OneWorker(target, page)
    for version in ("1", "2"):
        weights = load_file(folder / version / "model.safetensors")
        if version == "2":
            before = {name: tensor.clone() for name, tensor in tensors(model).items()}
            for what, wrong in lacking(weights, story["leaves_out"]):
                with torch.inference_mode():
                    found["refused"][what] = one.prepare(Checkpoint(wrong)).problem.message
            found["touched"] = [name for name, each in tensors(model).items() if not torch.equal(each, before[name])]
            found["torn"] = torn(one, weights, story["flipped"])
        with torch.inference_mode():  # as SGLang's event loop does
            installed = one.update(Checkpoint(weights, seed=int(version)))
        like, _ = engine.model(folder / version, "auto", *story["arguments"])
        found["differ"][version] = differing(model, like)
        report = installed.report
        found["problem"] = report.problem.message
        found["verified"], found["as_loaded"] = report.verified, report.verified_as_loaded
        found["by_loader"] = list(report.by_loader)
        recording = one.recording(Checkpoint(weights))
        needs = weights_pb2.WorkerNeeds.FromString(recording.needs_bytes)
        found["elsewhere"] = [recording.manifest.tensors[index].name for index in needs.elsewhere]
    found["moved"] = [name for name, tensor in tensors(model).items() if tensor.data_ptr() != addresses[name]]
    if story["scheduler"]:
        found["scheduler"] = sglang_scheduler.play(model, config, page)
    found["session"] = {selector: touched_by_a_session(model, selector) for selector in ("draft", "all")}
    found["beside"] = sorted(name for name in tensors(model) if "!" in name)
    found["tensors"] = len(tensors(model))
    return found


def torn(one: Any, weights: dict[str, Tensor], flipped: str) -> dict[str, Any]:
    """An update of which one element of `flipped` is another than was sealed."""
    from ckpt_engine.core.enums import enum_word
    from ckpt_engine.v1 import manager_pb2
    from tests.install.install_world import Checkpoint

    checkpoint = Checkpoint(weights, seed=5)
    with torch.inference_mode():
        assert not one.prepare(checkpoint).HasField("problem")
        order = one.order(checkpoint)
        checkpoint.flip(flipped, (0,) * weights[flipped].dim())
        report = one.installer.install(order).report
    return {"problem": report.problem.message, "state": enum_word(manager_pb2.WorkerState, one.slot.state)}


def touched_by_a_session(model: nn.Module, selector: str) -> list[str]:
    """What SGLang's own begin and end of an update do to a loaded model, when nothing is loaded between."""
    from types import SimpleNamespace

    from sglang.srt.managers.io_struct import BeginWeightUpdateReqInput, EndWeightUpdateReqInput
    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

    updater = WeightUpdater(
        tp_rank=0,
        device="cpu",
        gpu_id=0,
        model_config=None,
        custom_weight_loaders={},
        get_model=lambda: model,
        update_model_fields=lambda *_: None,
        recapture_cuda_graph=lambda: None,
        get_model_runner=lambda: None,
    )
    worker = SimpleNamespace(weight_update_runners=lambda: [("target", SimpleNamespace(weight_updater=updater))])
    manager = SchedulerWeightUpdaterManager(
        tp_worker=worker,
        draft_worker=None,
        memory_saver_adapter=None,
        flush_cache=lambda **_: True,
        is_fully_idle=lambda **_: True,
    )
    before = {name: tensor.clone() for name, tensor in tensors(model).items()}
    with torch.inference_mode():
        assert manager.begin_weight_update(BeginWeightUpdateReqInput(selector=selector)).success
        assert manager.end_weight_update(EndWeightUpdateReqInput()).success
    return [name for name, tensor in tensors(model).items() if not torch.equal(tensor, before[name])]


def as_on_cuda() -> None:
    """Has SGLang's quantised layers process weights as they do on CUDA; on this CPU they refuse. That is torch alone
    but for two kernels of FP8, in whose place torch computes the same."""
    from sglang.srt.layers.quantization import fp8, w8a8_int8

    def by_tensor(weight: Tensor) -> tuple[Tensor, Tensor]:
        scale = weight.float().abs().max() / 448
        return (weight.float() / scale).to(torch.float8_e4m3fn), scale

    def by_row(weight: Tensor, size: int) -> tuple[Tensor, Tensor]:
        assert size == weight.shape[1]
        scale = weight.float().abs().amax(dim=1, keepdim=True) / 448
        return (weight.float() / scale).to(torch.float8_e4m3fn), scale

    w8a8_int8._is_cpu = fp8._is_cpu = False
    fp8.scaled_fp8_quant, fp8.per_token_group_quant_fp8 = by_tensor, by_row
    fp8.cutlass_fp8_supported = lambda: True


def main(rank: int, workers: int, folders: list[Path]) -> None:
    from ckpt_engine_adapters.sglang.scheduler import hook

    hook()
    engine = Engine(rank, workers, folders[0].parent / "group")
    for folder in folders:
        print(json.dumps({"kind": folder.name, **play(engine, folder)}), flush=True)
    # A process group's threads do not end by themselves.
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), [Path(argument) for argument in sys.argv[3:]])
