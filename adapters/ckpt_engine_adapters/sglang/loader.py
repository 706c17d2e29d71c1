"""Our end inside an SGLang scheduler: the custom weight loader that SGLang calls, and the worker that it leads to.

`attach` makes the worker when the scheduler has loaded its model, before the server answers requests. SGLang then calls
`load` through its weight route, on each rank, on the scheduler's main thread between steps, with an `Instruction`:

    prepare  -> record the loader against the agent's manifest; changes no weight
    install  -> pull, verify, stamp the state word
    discard  -> say that this worker holds nothing, before its memory is released

`load` never raises: SGLang would end the scheduler, and with it the server. Failures go to the agent instead.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.layers.quantization.kv_cache import BaseKVCacheMethod
from torch import Tensor, nn

from ckpt_engine.engine.attributes import Attributes
from ckpt_engine.gate.directory import ENVIRONMENT, EngineDirectory
from ckpt_engine.install.worker import EngineWorker
from ckpt_engine_adapters.sglang.command import WORKERS_VARIABLE
from ckpt_engine_adapters.sglang.instruction import Action, decode
from ckpt_engine_adapters.sglang.ranks import worker_rank
from ckpt_engine_adapters.sglang.refusals import refusals
from ckpt_engine_adapters.sglang.target import SglangTarget
from ckpt_engine_adapters.sglang.versions import forget_pictures

log = logging.getLogger(__name__)


class _Attached:
    """The worker of this scheduler, and the model that it installs into."""

    def __init__(self, runner: Any, directory: EngineDirectory) -> None:
        rank, alone = worker_rank(runner)
        self.model: nn.Module = runner.model
        session = getattr(runner, "weight_updater", None)
        if str(getattr(runner.server_args, "load_format", "")) == "dummy":
            _reset_made_up_scales(self.model)
        gpus = getattr(runner.server_args, "tp_size", 1) if runner.device == "cuda" else 0
        refused = refusals(runner.server_args)
        target = SglangTarget(self.model, runner.model_config.hf_text_config, refused, session, gpus)
        workers = int(os.environ.get(WORKERS_VARIABLE, alone))
        self.worker = EngineWorker(directory, rank, workers, target, model=_facts(runner, workers))
        given_up = runner.device if runner.device != "cpu" else "none"
        self._attributes = Attributes(self.model, given_up, target.kernel_tensors())
        self._cuda = runner.device == "cuda"

    def install(self, epoch: int) -> None:
        if self._cuda:
            torch.cuda.synchronize()  # a scheduler that is paused in place may have a step in flight
        self._attributes.put_back()
        forget_pictures()
        self.worker.install(epoch)

    def discard(self) -> None:
        """Prepares for the discarding of the weights: updates the state word, and saves what SGLang does not save."""
        self.worker.discard()
        self._attributes.keep()


def _reset_made_up_scales(model: nn.Module) -> None:
    """Gives attention layers the scales of caches that a checkpoint without such scales has: of a quantised one
    `--load-format dummy` makes them up like weights."""
    for layer in model.modules():
        if isinstance(getattr(layer, "quant_method", None), BaseKVCacheMethod):
            attention: Any = layer
            with torch.no_grad():
                attention.k_scale.fill_(1)
                attention.v_scale.fill_(1)
            attention.k_scale_float = attention.v_scale_float = 1.0


def _facts(runner: Any, workers: int) -> str:
    arguments = runner.server_args
    graphs = "eager" if getattr(arguments, "disable_cuda_graph", False) else "graphs"
    device = torch.cuda.get_device_name() if runner.device == "cuda" else str(runner.device)
    quantised = f"quantisation {getattr(arguments, 'quantization', None) or 'none'}"
    return f"{type(runner.model).__name__}, {quantised}, {workers} workers, {graphs}, {device}"


_attached: _Attached | None = None


def attach(runner: Any) -> None:
    """Claims the worker's state word, so that the gate stays closed until it has weights.

    runner: SGLang's ModelRunner, with its model loaded; a draft model's runner is ignored. Does nothing in a server
    without a directory.
    Raises OSError, ValueError: the directory or the slot cannot be used; the server does not start then.
    """
    global _attached
    directory = EngineDirectory.from_environment()
    if runner.is_draft_worker:
        return
    if directory is None:
        log.warning("ckpt-engine: %s is not set; this server takes no updates", ENVIRONMENT)
        return
    _attached = _Attached(runner, directory)


def load(model: nn.Module, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Carries out an instruction. `--custom-weight-loader` names this function. Never raises."""
    try:
        order = decode(named_tensors)
        if _attached is None or _attached.model is not model:
            log.warning("ckpt-engine: no worker was made for this %s; %s is not done", type(model).__name__, order)
            return
        match order.action:
            case Action.PREPARE:
                _attached.worker.prepare()
            case Action.INSTALL:
                _attached.install(order.epoch)
            case Action.DISCARD:
                _attached.discard()
    except Exception:
        log.exception("ckpt-engine: an order of the agent was not carried out")


def discard() -> None:
    """Prepares for the release of the weights' memory. Never raises."""
    try:
        if _attached is not None:
            _attached.discard()
    except Exception:
        log.exception("ckpt-engine: the worker cannot say that its weights are gone")


def give_back() -> None:
    """Frees stage memory, before SGLang releases memory of its own. Never raises."""
    if _attached is not None:
        _attached.worker.give_back()
