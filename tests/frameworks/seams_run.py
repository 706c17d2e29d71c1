"""What TRL's AsyncGRPOTrainer and a transformers.Trainer call of ours, in TRL's environment, one after the other:
`python -m tests.frameworks.seams_run MANAGER MODEL OUTPUT`. Prints one marked JSON line.

AsyncGRPOTrainer itself wants a vLLM in its own environment, so its calls are made here, in its order, with its types.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments
from trl import GRPOConfig, GRPOTrainer
from trl.experimental.async_grpo.async_grpo_trainer import WeightTransferProtocol
from trl.trainer.grpo_trainer import RolloutFunc

from ckpt_engine.integrations.trl import UpdateCallback, WeightTransfer
from ckpt_engine.integrations.updates import RankUpdates
from tests.frameworks.grpo_run import say


def transfer(manager: str, model: Any) -> list[int]:
    """Three synchronisations, as AsyncGRPOTrainer makes them; the versions."""
    versions: list[int] = []
    seam = WeightTransfer(RankUpdates(manager, on_report=lambda report: versions.append(report.version)))
    seam.init_weight_transfer()
    for _ in range(3):
        seam.pause()
        seam.send_weights((name, parameter.detach().clone()) for name, parameter in model.named_parameters())
        seam.resume()
        with torch.no_grad():
            model.lm_head.weight.mul_(1.5)
    seam.destroy()
    return versions


def callback(manager: str, model: Any, output: str) -> list[int]:
    """A transformers.Trainer with the callback, five steps, an update after every second; the versions."""
    versions: list[int] = []
    updates = RankUpdates(manager, on_report=lambda report: versions.append(report.version))
    rows = [{"input_ids": [1, 2, 3, number], "labels": [1, 2, 3, number]} for number in range(20)]
    Trainer(
        model=model,
        args=TrainingArguments(
            output, max_steps=5, per_device_train_batch_size=2, use_cpu=True, report_to=[], save_strategy="no"
        ),
        train_dataset=Dataset.from_list(rows),
        callbacks=[UpdateCallback(updates, every=2)],
    ).train()
    return versions


def missing() -> list[str]:
    """What Rollouts and UpdateCallback use of TRL and transformers, and is not there under its name."""
    config = {field.name for field in dataclasses.fields(GRPOConfig)}
    sampling = ("max_completion_length", "temperature", "top_p", "top_k", "repetition_penalty", "min_p")
    found = [f"GRPOConfig.{name}" for name in sampling if name not in config]
    if "rollout_func" not in inspect.signature(GRPOTrainer).parameters:
        found.append("GRPOTrainer(rollout_func=)")
    for name in ("on_train_begin", "on_step_end", "on_train_end"):
        wanted = list(inspect.signature(getattr(TrainerCallback, name, int)).parameters)[:4]
        if wanted != list(inspect.signature(getattr(UpdateCallback, name)).parameters)[:4]:
            found.append(f"TrainerCallback.{name}{tuple(wanted)}")
    if Callable[[list[str], "GRPOTrainer"], dict[str, Any]] != RolloutFunc:
        found.append(f"RolloutFunc is {RolloutFunc}")
    return found


def main(manager: str, model: str, output: str) -> None:
    live: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    wanted = {
        name: list(inspect.signature(getattr(WeightTransferProtocol, name)).parameters)
        for name in dir(WeightTransferProtocol)
        if not name.startswith("_")
    }
    have = {name: list(inspect.signature(getattr(WeightTransfer, name)).parameters) for name in wanted}
    said = {"wanted": wanted, "have": have, "missing": missing()}
    say(**said, transfer=transfer(manager, live), callback=callback(manager, live, output))


if __name__ == "__main__":
    main(*sys.argv[1:])
