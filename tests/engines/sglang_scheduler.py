"""Run by SGLang's Python, from sglang_install.py: our half of a scheduler around a real model, without the scheduler.

SGLang's own manager of memory is the real one; the memory saver is a fake that tells what the worker said of itself
when its memory went, since there is none on a CPU.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from ckpt_engine.core.enums import enum_word
from ckpt_engine.v1 import manager_pb2, weights_pb2


class MemorySaver:
    """Notes each call, with the state word at that moment."""

    def __init__(self, state: Any) -> None:
        self._state = state
        self.calls: list[list[str]] = []

    def pause(self, tag: str) -> None:
        self.calls.append(["pause", tag, self._state()])

    def resume(self, tag: str) -> None:
        self.calls.append(["resume", tag, self._state()])


def play(model: nn.Module, config: Any, folder: Path) -> dict[str, Any]:
    """What a scheduler's worker does, told as JSON."""
    from ckpt_engine.gate.directory import ENVIRONMENT, EngineDirectory
    from ckpt_engine.gate.page import EnginePage, admission
    from ckpt_engine_adapters.sglang import loader

    directory = EngineDirectory.create(folder)
    os.environ[ENVIRONMENT] = str(directory.path)
    arguments = SimpleNamespace(enable_memory_saver=False, enable_weights_cpu_backup=False, enable_dp_attention=False)
    runner = SimpleNamespace(
        is_draft_worker=True, model=model, model_config=config, server_args=arguments, device="cpu"
    )
    page = EnginePage(directory.page)
    loader.attach(runner)
    found: dict[str, Any] = {"workers of a draft model": page.world_size()}
    runner.is_draft_worker = False
    loader.attach(runner)
    found["workers"] = page.world_size()
    found["open"] = admission(page.read(), page.marked()).open
    assert loader._attached is not None
    slot = loader._attached.worker.slot
    found["nonsense"] = nonsense(model)

    def state() -> str:
        return str(enum_word(manager_pb2.WorkerState, page.read()[0].state))

    identity = weights_pb2.Identity(lineage="run", version=1, root=bytes(32))
    for saver, backup in ((False, False), (True, True), (True, False)):
        arguments.enable_memory_saver, arguments.enable_weights_cpu_backup = saver, backup
        slot.clean(1, identity)
        found[f"saver {saver}, backup {backup}"] = released_and_resumed(runner, state)
    found["pictures"] = pictures(model, loader._attached.worker)
    slot.clean(1, identity)
    loader.load(nn.Linear(1, 1), order("discard"))
    found["after an order for another model"] = state()
    loader.load(model, order("discard"))
    found["after an order to discard"] = state()
    loader._attached.worker.close()
    page.close()
    directory.remove()
    del os.environ[ENVIRONMENT]
    return found


def order(action: str) -> Any:
    from ckpt_engine_adapters.sglang.instruction import Action, Instruction, encode

    return encode(Instruction(Action(action)))


def pictures(model: nn.Module, worker: Any) -> dict[str, list[int]]:
    """How many pictures SGLang's own cache of them holds, before an order to install and when the worker gets it."""
    from sglang.srt.managers import mm_schedule
    from sglang.srt.mem_cache.multimodal_cache import EmbeddingResult

    from ckpt_engine_adapters.sglang.loader import load

    mm_schedule.init_mm_embedding_cache(1 << 20)
    cache = mm_schedule.embedding_cache
    assert cache is not None
    for number in range(3):
        cache.set(number, EmbeddingResult(embedding=torch.zeros(4, 8)))
    held, install = [len(cache)], worker.install
    worker.install = lambda epoch: held.append(len(cache))
    load(model, order("install"))
    worker.install = install
    return {"held": held, "bytes": [cache.current_size]}


def nonsense(model: nn.Module) -> str:
    """What the loader raises when it is called with what is no order; nothing."""
    from ckpt_engine_adapters.sglang.loader import load

    raised = []
    text = torch.frombuffer(bytearray(b'{"action": "explode"}'), dtype=torch.uint8)
    weights = [("model.embed_tokens.weight", torch.zeros(2, 2))]
    for tensors in (weights, [], [("ckpt_engine.order", text)]):
        try:
            load(model, tensors)
        except BaseException as error:
            raised.append(repr(error))
    return "; ".join(raised)


def released_and_resumed(runner: Any, state: Any) -> list[list[str]]:
    """The memory saver's calls, when each tag is released and resumed twice."""
    from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput, ResumeMemoryOccupationReqInput
    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager

    saver = MemorySaver(state)
    manager = SchedulerWeightUpdaterManager(
        tp_worker=SimpleNamespace(model_runner=runner),
        draft_worker=None,
        memory_saver_adapter=saver,
        flush_cache=lambda **_: True,
        is_fully_idle=lambda **_: True,
    )
    with torch.inference_mode():
        manager.resume_memory_occupation(ResumeMemoryOccupationReqInput())
        manager.release_memory_occupation(ReleaseMemoryOccupationReqInput(tags=["weights"]))
        manager.release_memory_occupation(ReleaseMemoryOccupationReqInput(tags=["weights"]))
        manager.release_memory_occupation(ReleaseMemoryOccupationReqInput())
        for tags in (["weights"], ["weights"], None, None):
            manager.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=tags))
    return saver.calls
