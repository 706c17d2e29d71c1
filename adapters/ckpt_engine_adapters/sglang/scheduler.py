"""The entry point of SGLang's scheduler processes: it adds our hooks and calls SGLang's own.

The launch wrapper passes it to `launch_server`. It registers our hooks in SGLang's own registry before a model exists:
they note forms when a model has been made, make the worker when it has been loaded, and guard memory calls. It must be
importable without SGLang, and by name, since SGLang spawns processes.
"""

from __future__ import annotations

from typing import Any


def run_scheduler_process(*arguments: Any, **options: Any) -> Any:
    """Runs a scheduler in a new process until it ends. Arguments are SGLang's."""
    from sglang.srt.managers.scheduler import run_scheduler_process as run

    hook()
    return run(*arguments, **options)


def hook() -> None:
    """Registers our hooks in this process. May be called more than once."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from ckpt_engine_adapters.sglang import sleeping
    from ckpt_engine_adapters.sglang.versions import let_paused_scheduler_flush

    let_paused_scheduler_flush()
    memory = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
    hooks = (
        ("sglang.srt.model_loader.loader._initialize_model", _note_model, HookType.AFTER),
        ("sglang.srt.model_executor.model_runner.ModelRunner.load_model", _attach_worker, HookType.AFTER),
        (f"{memory}.release_memory_occupation", sleeping.release, HookType.AROUND),
        (f"{memory}.resume_memory_occupation", sleeping.resume, HookType.AROUND),
    )
    for target, function, kind in hooks:
        if target not in HookRegistry._patched:
            HookRegistry.register(target, function, kind)
    HookRegistry.apply_hooks()
    missing = [target for target, *_ in hooks if target not in HookRegistry._patched]
    if missing:
        raise RuntimeError(f"this SGLang has no {', '.join(missing)}: use a version that ckpt-engine supports")


def _note_model(model: Any, *_: Any, **__: Any) -> None:
    from ckpt_engine_adapters.sglang.forms import note_forms

    note_forms(model)


def _attach_worker(_: Any, runner: Any, *__: Any, **___: Any) -> None:
    from ckpt_engine_adapters.sglang.loader import attach

    attach(runner)
