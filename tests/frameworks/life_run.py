"""A GRPO run of TRL that is killed, or that goes on from its last checkpoint, in TRL's environment:
`python -m tests.frameworks.life_run MANAGER MODEL OUTPUT killed|resumed GATEWAY URL`.

Prints marked JSON lines as grpo_run does; a run that goes on says at its end what it makes of the answer of URL, a
replica that the dead run updated and this one could not reach.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, set_seed
from trl import GRPOConfig, GRPOTrainer

from ckpt_engine.integrations.trl import Rollouts
from ckpt_engine.integrations.updates import RankUpdates
from tests.frameworks.grpo_run import Judged, many_even, say
from tests.frameworks.trl_runs import KILLED_AT, LIFE_STEPS, SAVED_EVERY
from tests.frameworks.words import tokenizer


class Killed(Judged):
    """Judged rollouts; with those of one step the trainer dies as machines do."""

    def __call__(self, prompts: Any, trainer: Any) -> dict[str, Any]:
        found = super().__call__(prompts, trainer)
        if trainer.state.global_step == KILLED_AT:
            os.kill(os.getpid(), signal.SIGKILL)
        return found


def main(manager: str, model: str, output: str, course: str, gateway: str, url: str) -> None:
    set_seed(0)
    live: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    resumed = course == "resumed"
    updates = RankUpdates(
        manager,
        replicas=1,
        min_replicas=1,
        on_report=lambda report: say(version=report.version, root=report.root, lineage=report.lineage),
    )
    rollouts = (Judged if resumed else Killed)(updates, gateway)
    trainer = GRPOTrainer(
        model=live,
        processing_class=tokenizer(live.config.vocab_size),
        reward_funcs=many_even,
        train_dataset=Dataset.from_list([{"prompt": f"{number} 17 {number + 3}"} for number in range(64)]),
        rollout_func=rollouts,
        args=GRPOConfig(
            output_dir=output,
            max_steps=LIFE_STEPS,
            per_device_train_batch_size=4,
            num_generations=4,
            max_completion_length=8,
            learning_rate=1e-3,
            lr_scheduler_type="constant",
            beta=0.0,
            use_cpu=True,
            bf16=False,
            report_to=[],
            save_steps=SAVED_EVERY,
            disable_dropout=True,
            gradient_checkpointing=False,
        ),
    )
    trainer.train(resume_from_checkpoint=resumed)
    try:
        Rollouts(updates, url)(["1 2 3"], trainer)
    except RuntimeError as error:
        say(refused=str(error))
    rollouts.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
