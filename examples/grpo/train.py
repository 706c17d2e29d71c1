"""A GRPO run of TRL whose tokens come from replicas: `python train.py --manager HOST:PORT --gateway URL`.

The task: "name animals" is to be answered with four words for animals, each another one; likewise fruits, colours, ...
The model begins with random weights and has seen no text. What is ckpt-engine's here: `RankUpdates` and `Rollouts`.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import GRPOConfig, GRPOTrainer

from ckpt_engine import UpdateReport
from ckpt_engine.integrations.trl import Rollouts
from ckpt_engine.integrations.updates import RankUpdates

KINDS = {
    "animals": "horse cow dog cat lion goat bear fox",
    "fruits": "apple pear plum cherry grape lemon fig melon",
    "colours": "red green blue black white yellow pink brown",
    "rivers": "nile rhine volga danube loire indus niger seine",
    "tools": "hammer saw drill axe file plane clamp chisel",
}
WORDS = ["[PAD]", "[UNK]", "name", *KINDS, *(word for kind in KINDS.values() for word in kind.split())]
MODEL = Path(__file__).parent / "model"
"""Its config.json says how small it is, and how many words it knows; the replicas are started with it, too."""

ANSWER = 4
"""Words."""


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a word."""
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="[UNK]", pad_token="[PAD]", eos_token="[PAD]")


def right_words(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """The reward: the share of words that are of the kind that was asked for; one that is repeated counts once."""
    asked = [set(KINDS[prompt.split()[1]].split()) for prompt in prompts]
    return [len(kind & set(text.split())) / ANSWER for kind, text in zip(asked, completions, strict=True)]


class Outcome:
    """What there is to be told of the run, a row a step."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def updated(self, report: UpdateReport) -> None:
        self.rows.append(
            {
                "version": report.version,
                "root": report.root,
                "replicas": {replica.name: replica.outcome for replica in report.replicas},
                "sync_seconds": max(replica.sync_seconds for replica in report.replicas),
                "pause_seconds": max(replica.pause_seconds for replica in report.replicas),
                "verified": report.verified,
            }
        )

    def written(self, path: Path, trainer: GRPOTrainer, seconds: float) -> None:
        logs = [line for line in trainer.state.log_history if "reward" in line]
        for row, line in zip(self.rows, logs, strict=True):
            row["reward"] = line["reward"]
        path.write_text(json.dumps({"steps": self.rows, "seconds": seconds}, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--manager", required=True, help="host:port")
    parser.add_argument("--gateway", required=True, help="URL")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--output", type=Path, required=True, help="directory")
    options = parser.parse_args()
    set_seed(0)
    torch.set_num_threads(1)
    outcome, began = Outcome(), time.monotonic()
    updates = RankUpdates(options.manager, replicas=options.replicas, on_report=outcome.updated)
    rollouts = Rollouts(updates, options.gateway)
    auto: Any = AutoModelForCausalLM
    trainer = GRPOTrainer(
        model=auto.from_config(AutoConfig.from_pretrained(MODEL), dtype=torch.float32),
        processing_class=tokenizer(),
        reward_funcs=right_words,
        train_dataset=Dataset.from_list([{"prompt": f"name {kind}"} for kind in KINDS] * 200),
        rollout_func=rollouts,
        args=GRPOConfig(
            output_dir=str(options.output / "trl"),
            max_steps=options.steps,
            per_device_train_batch_size=40,
            num_generations=8,
            max_completion_length=ANSWER,
            learning_rate=3e-3,
            lr_scheduler_type="constant",
            beta=0.0,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to=[],
            logging_steps=1,
            save_strategy="no",
        ),
    )
    try:
        trainer.train()
    finally:
        rollouts.close()
    outcome.written(options.output / "outcome.json", trainer, time.monotonic() - began)


if __name__ == "__main__":
    main()
