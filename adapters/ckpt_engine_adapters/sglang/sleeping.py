"""Guards SGLang's memory calls inside a scheduler: it keeps state words right, and makes the calls repeatable.

Releasing the weights' memory discards them, unless there is no memory saver (then nothing is released, as on a CPU) or
it keeps a copy on the host (`--enable-weights-cpu-backup`). The scheduler itself marks that it holds nothing before
that happens, for calls in any order and from anywhere. A tag that is released already, or was not released, is left
out: SGLang would read released memory, or end with a KeyError.

Both functions wrap SGLang's own and run on the scheduler's main thread.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

from sglang.srt.constants import GPU_MEMORY_ALL_TYPES, GPU_MEMORY_TYPE_WEIGHTS
from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqOutput, ResumeMemoryOccupationReqOutput

from ckpt_engine_adapters.sglang.loader import discard, give_back

log = logging.getLogger(__name__)


def release(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    """Wraps SchedulerWeightUpdaterManager.release_memory_occupation."""
    tags = [tag for tag in request.tags or GPU_MEMORY_ALL_TYPES if tag not in manager.offload_tags]
    if not tags:
        return ReleaseMemoryOccupationReqOutput()
    if GPU_MEMORY_TYPE_WEIGHTS in tags and _loses_weights(manager):
        discard()
    give_back()
    return original(manager, _with(request, tags))


def resume(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    """Wraps SchedulerWeightUpdaterManager.resume_memory_occupation."""
    tags = [tag for tag in request.tags or GPU_MEMORY_ALL_TYPES if tag in manager.offload_tags]
    if not tags:
        return ResumeMemoryOccupationReqOutput()
    return original(manager, _with(request, tags))


def _with(request: Any, tags: list[str]) -> Any:
    changed = copy.copy(request)
    changed.tags = tags
    return changed


def _loses_weights(manager: Any) -> bool:
    """Whether releasing the weights discards them. Unknown counts as yes, which costs only the state words."""
    try:
        arguments = manager.tp_worker.model_runner.server_args
        return bool(arguments.enable_memory_saver) and not arguments.enable_weights_cpu_backup
    except Exception:
        log.exception("ckpt-engine: it is unknown whether the weights are kept while their memory is released")
        return True
