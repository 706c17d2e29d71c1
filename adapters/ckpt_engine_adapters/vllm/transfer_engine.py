"""Our end inside a vLLM worker: the weight transfer engine that vLLM drives through its HTTP routes.

It turns vLLM's four calls into `EngineWorker.prepare()` and `EngineWorker.install()`. It decides nothing about weights
and never raises after its construction: an exception would leave other ranks of the engine waiting
(`gpu_worker.update_weights` clears its flag on the raising rank only), so failures go to the agent instead.

    /init_weight_transfer_engine  -> prepare: record the loader against the agent's manifest; changes no weight
                                     with {"discard": true}: mark that this worker holds nothing, before /sleep?level=2
                                     with {"adapter": NAME}: the same for that adapter, or install it (epoch)
    /start_weight_update          -> nothing; vLLM only notes that a session is open
    /update_weights               -> install: pull, verify, stamp the state word
    /finish_weight_update         -> nothing; the install has already put the layers back together
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from ckpt_engine.core.adapters import adapter_versions
from ckpt_engine.core.parts import DRAFT
from ckpt_engine.engine.attributes import Attributes
from ckpt_engine.engine.parts import PartsTarget, PartTarget
from ckpt_engine.engine.target import LoadTarget
from ckpt_engine.gate.directory import ENVIRONMENT, EngineDirectory
from ckpt_engine.gate.shelf import ENVIRONMENT as ADAPTERS_VARIABLE
from ckpt_engine.install.worker import EngineWorker
from ckpt_engine_adapters.vllm.command import WORKERS_VARIABLE, check_adapter_workers
from ckpt_engine_adapters.vllm.drafts import DraftModel, describe_draft, draft_of_caller
from ckpt_engine_adapters.vllm.input_norms import reset_input_norms
from ckpt_engine_adapters.vllm.quantised import reset_made_up_scales
from ckpt_engine_adapters.vllm.sleeping import guard_sleep
from ckpt_engine_adapters.vllm.target import VllmTarget

if TYPE_CHECKING:
    from ckpt_engine_adapters.vllm.adapter_shelf import AdapterShelf


def _shared(vllm_config: VllmConfig) -> str:
    """How several workers share a layer's weights; empty: none do."""
    parallel = vllm_config.parallel_config
    if parallel.tensor_parallel_size > 1:
        return f"tensor parallelism of {parallel.tensor_parallel_size}"
    # vLLM tells each core of a dense model that it is alone. Experts are split over the cores.
    size = parallel.data_parallel_size
    return f"data parallelism of {size} with experts" if size > 1 else ""


def _facts(vllm_config: VllmConfig, model: torch.nn.Module, device: torch.device, workers: int) -> str:
    parallel, settings = vllm_config.parallel_config, vllm_config.model_config
    layout = (
        f"TP {parallel.tensor_parallel_size}, PP {parallel.pipeline_parallel_size}, {workers} workers"
        f"{', experts apart' if parallel.enable_expert_parallel else ''}"
    )
    graphs = "eager" if settings.enforce_eager else "graphs"
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    guesses = f", draft {draft}" if (draft := describe_draft(vllm_config)) else ""
    return (
        f"{type(model).__name__}{guesses}, quantisation {settings.quantization or 'none'}, {layout}, {graphs}, {where}"
    )


@dataclass
class InitInfo(WeightTransferInitInfo):
    """The body of `/init_weight_transfer_engine`."""

    discard: bool = False  # hold nothing from now on; else ask the agent
    adapter: str = ""  # ask the agent of this adapter's shelf instead
    epoch: int = 0  # of the update of that adapter to install; 0: prepare only


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """The body of `/update_weights`."""

    epoch: int = 0  # of the update that the agent has an order for


class CkptEngineWeightTransfer(WeightTransferEngine[InitInfo, UpdateInfo]):
    """One worker's weight transfer engine. vLLM makes it after the model has been loaded, on the worker's main thread,
    and calls it there between steps."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(
        self, config: WeightTransferConfig, vllm_config: VllmConfig, device: torch.device, model: torch.nn.Module
    ) -> None:
        """Claims the worker's state word, so that the gate stays closed until it has weights.

        Raises:
            RuntimeError: the engine has no directory: it was started without an agent and without our middleware.
            ValueError, CkptEngineError: this server cannot serve adapters, and is to.
        """
        super().__init__(config, vllm_config, device, model)
        directory = EngineDirectory.from_environment()
        if directory is None:
            raise RuntimeError(
                f"the backend ckpt_engine needs {ENVIRONMENT}; start this server with `ckpt-engine agent --engine "
                "vllm`, or name the backend on the command line so that our plugin can make a directory"
            )
        parallel = vllm_config.parallel_config
        rank = parallel.data_parallel_index * parallel.world_size + parallel.rank
        self._vllm_config = vllm_config
        workers = int(os.environ.get(WORKERS_VARIABLE, parallel.world_size_across_dp))
        draft = draft_of_caller(vllm_config)
        models = [model, draft.model] if isinstance(draft, DraftModel) else [model]
        if vllm_config.load_config.load_format == "dummy":
            for each in models:
                reset_made_up_scales(each)
            with set_current_vllm_config(vllm_config):
                reset_input_norms(model, vllm_config.model_config)
        shared, refused = _shared(vllm_config), draft if isinstance(draft, str) else ""
        target = VllmTarget(model, vllm_config.model_config, shared, refused)
        targets, whole = [target], cast(LoadTarget, target)
        if isinstance(draft, DraftModel):
            targets.append(VllmTarget(draft.model, draft.config, shared, apart=[*model.modules()]))
            whole = PartsTarget(target, {DRAFT: PartTarget(targets[1], draft.description, draft.of_target_checkpoint)})
        self._worker = EngineWorker(directory, rank, workers, whole, model=_facts(vllm_config, model, device, workers))
        given_up = device.type if device.type != "cpu" else "none"
        self._attributes = [
            Attributes(each, given_up, own.kernel_tensors()) for each, own in zip(models, targets, strict=True)
        ]
        adapters = adapter_versions(os.environ.get(ADAPTERS_VARIABLE, ""))
        self._shelves = self._make_shelves(model, adapters, directory, rank, workers) if adapters else {}
        guard_sleep(_discard, _give_back)

    def _make_shelves(
        self, model: torch.nn.Module, adapters: Mapping[str, int], directory: EngineDirectory, rank: int, workers: int
    ) -> dict[str, AdapterShelf]:
        """The shelf of each adapter. Loads vLLM's LoRA classes, which other servers do without. Raises ValueError,
        CkptEngineError: this server cannot have any."""
        from ckpt_engine_adapters.vllm.adapter_shelf import AdapterShelf
        from ckpt_engine_adapters.vllm.adapter_slots import AdapterSlots

        check_adapter_workers(self._vllm_config.parallel_config, os.environ)
        slots = AdapterSlots(model, max(adapters.values()))
        return {
            name: AdapterShelf(directory.path, name, versions, rank, workers, self._worker.slot, slots)
            for name, versions in adapters.items()
        }

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Records the loader against the manifest of the agent's order, or marks that the worker holds nothing."""
        if init_info.discard:
            self.discard()
            return
        with set_current_vllm_config(self._vllm_config):
            if not init_info.adapter:
                self._worker.prepare()
            elif init_info.epoch:
                self._shelves[init_info.adapter].install(init_info.epoch)
            else:
                self._shelves[init_info.adapter].prepare()

    def start_weight_update(self) -> None:
        """Does nothing: an install starts what it needs itself, after its checks."""

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Installs the version of the agent's order, in vLLM's config context, which 0.26 leaves to us."""
        for attributes in self._attributes:
            attributes.put_back()
        with set_current_vllm_config(self._vllm_config):
            self._worker.install(update_info.epoch)
        self._follow_base()

    def finish_weight_update(self) -> None:
        """Does nothing: see start_weight_update."""

    def discard(self) -> None:
        """Prepares for the discarding of the weights: updates the state word, and saves what vLLM does not save."""
        self._worker.discard()
        for attributes in self._attributes:
            attributes.keep()
        self._follow_base()

    def _follow_base(self) -> None:
        """Has adapters of another base say that they are not held. vLLM drops all adapters from its slots when an
        update of the base is finished; a request brings its own back, from our memory."""
        for shelf in self._shelves.values():
            shelf.follow_base()

    def give_back(self) -> None:
        """Frees stage memory."""
        self._worker.give_back()

    def shutdown(self) -> None:
        """Closes the channels to the agents."""
        for shelf in self._shelves.values():
            shelf.close()
        self._worker.close()

    @staticmethod
    def trainer_send_weights(iterator: Iterator[tuple[str, torch.Tensor]], trainer_args: Any) -> None:
        """Raises: not used with ckpt-engine. vLLM's base class has declared it abstract in some versions."""
        raise NotImplementedError("trainers publish through ckpt_engine.Trainer")


def _discard(worker: Any) -> None:
    """Prepares a vLLM worker for the discarding of its memory."""
    engine = getattr(worker, "weight_transfer_engine", None)
    if isinstance(engine, CkptEngineWeightTransfer):
        engine.discard()


def _give_back(worker: Any) -> None:
    """Frees a vLLM worker's stage memory."""
    engine = getattr(worker, "weight_transfer_engine", None)
    if isinstance(engine, CkptEngineWeightTransfer):
        engine.give_back()
