"""One rank of a GRPO run of TRL, in TRL's environment: `python -m tests.frameworks.grpo_run`, or under torchrun.

Prints one JSON line a rollout, marked: the version that is served, and how far its logprobs are from those that this
trainer's own forward gives the same tokens; and one at the end.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, set_seed
from trl import GRPOConfig, GRPOTrainer

from ckpt_engine.integrations.trl import Rollouts
from ckpt_engine.integrations.updates import RankUpdates
from tests.frameworks.trl_runs import MARK
from tests.frameworks.words import tokenizer


class Judged(Rollouts):
    """Rollouts that are compared with the trainer's own forward."""

    def __call__(self, prompts: Any, trainer: Any) -> dict[str, Any]:
        found = super().__call__(prompts, trainer)
        model = trainer.accelerator.unwrap_model(trainer.model)
        worst = 0.0
        for prompt, completion, logprobs in zip(*found.values(), strict=True):
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1].float()
            own = torch.log_softmax(logits, -1).gather(1, torch.tensor(completion)[:, None])[:, 0]
            worst = max(worst, (own - torch.tensor(logprobs)).abs().max().item())
        distinct = len({tuple(tokens) for tokens in found["completion_ids"]})
        say(
            rank=trainer.accelerator.process_index,
            step=trainer.state.global_step,
            version=self._updates.version,
            logprob_difference=worst,
            completions=len(found["completion_ids"]),
            distinct=distinct,
            first=found["completion_ids"][0],
        )
        return found


def say(**content: Any) -> None:
    # In one piece, since the ranks share what they write to.
    os.write(sys.stdout.fileno(), f"\n{MARK}{json.dumps(content)}\n".encode())


def many_even(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A reward: the share of even tokens."""
    return [sum(token % 2 == 0 for token in tokens) / max(len(tokens), 1) for tokens in completion_ids]


def main(manager: str, model: str, output: str, steps: str, adapters: str, *urls: str) -> None:
    set_seed(0)
    live: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    options = {}
    if adapters != "none":
        from peft import LoraConfig

        options["peft_config"] = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    reports: list[Any] = []
    alone = "policy" if adapters == "alone" else ""
    rollouts = Judged(RankUpdates(manager, replicas=len(urls), adapter=alone, on_report=reports.append), urls)
    words = tokenizer(live.config.vocab_size)
    trainer = GRPOTrainer(
        model=live,
        processing_class=words,
        reward_funcs=many_even,
        train_dataset=Dataset.from_list([{"prompt": f"{number} 17 {number + 3}"} for number in range(64)]),
        rollout_func=rollouts,
        args=GRPOConfig(
            output_dir=output,
            max_steps=int(steps),
            per_device_train_batch_size=4,
            num_generations=4,
            max_completion_length=8,
            learning_rate=1e-3,
            beta=0.0,
            use_cpu=True,
            bf16=False,
            report_to=[],
            logging_steps=1,
            save_strategy="no",
            disable_dropout=True,
            gradient_checkpointing=False,
        ),
        **options,
    )
    trainer.train()
    rollouts.close()
    rewards = [line["reward"] for line in trainer.state.log_history if "reward" in line]
    say(
        end=True,
        updates=[report.version for report in reports],
        ok=[report.ok for report in reports],
        bytes=[sum(replica.nbytes for replica in report.replicas) for report in reports],
        rewards=rewards,
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
