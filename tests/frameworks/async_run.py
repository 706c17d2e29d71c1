"""An AsyncGRPOTrainer of TRL with its own rollout worker, in TRL's environment:
`python -m tests.frameworks.async_run MANAGER MODEL OUTPUT STEPS VLLM URL [agents]`. Prints one marked JSON line.

agents: conversations of several turns with a tool, by our TurnWorker. It prints the versions of each one's turns too.
VLLM: the folder of packages of an environment with vLLM: TRL's worker wants it to be there, and asks it for nothing.
Two things are stand-ins, since TRL's trainer cannot be without an NVIDIA GPU: what CUDA calls the device, and the
kernel of its attention, which is computed here under the name that TRL looks up.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from datasets import Dataset

# vLLM's packages have a torchvision of their own torch, and transformers takes the one that it finds. A process that
# TRL starts has these packages on its path from the beginning.
sys.modules["torchvision"] = None  # type: ignore[assignment]

from transformers import AttentionInterface, PreTrainedTokenizerFast  # noqa: E402

from ckpt_engine.integrations.trl import WeightTransfer  # noqa: E402
from ckpt_engine.integrations.updates import RankUpdates  # noqa: E402
from tests.frameworks.grpo_run import many_even, say  # noqa: E402
from tests.frameworks.words import ToolWords, add, tokenizer  # noqa: E402


def attention(module: Any, query: Any, key: Any, value: Any, _mask: Any, **options: Any) -> tuple[Any, None]:
    """What TRL asks its kernel for: each segment of queries sees the keys of its path that are not after it."""
    query, key, value = (part[0] for part in (query, key, value))  # heads, tokens, width
    grouped = query.shape[0] // key.shape[0]
    found = torch.empty_like(query)
    queries, paths = options["tree_cu_seqlens_q"].tolist(), options["tree_cu_seqlens_k"].tolist()
    for first, last, start, end in zip(queries, queries[1:], paths, paths[1:], strict=False):
        index = options["tree_kv_index"][start:end]
        keys, values = (part[:, index].repeat_interleave(grouped, 0) for part in (key, value))
        after = torch.ones(last - first, end - start).triu(end - start - (last - first) + 1).bool()
        scores = (query[:, first:last] @ keys.transpose(1, 2)) * options["scaling"]
        found[:, first:last] = scores.masked_fill(after, float("-inf")).softmax(-1) @ values
    return found.transpose(0, 1)[None], None


def versions_of_turns(completions: list[list[dict[str, Any]]], **options: Any) -> list[float]:
    """A reward, which prints of each conversation the lowest and the highest version of each turn."""
    for completion in completions:
        turns = [message["ckpt_engine"] for message in completion if message["role"] == "assistant"]
        say(turns=[[each["min_version"], each["max_version"]] for each in turns])
    return many_even(**options)


def main(manager: str, model: str, output: str, steps: str, vllm: str, url: str, agents: str = "") -> None:
    # Last, so that what both environments have is TRL's.
    sys.path.append(vllm)
    from trl.chat_template_utils import qwen3_template
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer
    from trl.experimental.async_grpo.packing import TREE_ATTENTION

    words = tokenizer(512, ToolWords if agents else PreTrainedTokenizerFast)
    words.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    words.response_template = qwen3_template
    dataset = Dataset.from_list(
        [{"prompt": [{"role": "user", "content": f"{number} 17 {number + 3}"}]} for number in range(64)]
    )
    worker = None
    if agents:
        from ckpt_engine.integrations.trl_turns import TurnWorker

        worker = TurnWorker(
            model_name=model,
            dataset=dataset,
            reward_funcs=[versions_of_turns],
            processing_class=words,
            eos_token_ids=[words.eos_token_id],
            tools=[add],
            num_generations=4,
            max_inflight_tasks=8,
            vllm_server_url=url,
            max_tokens=8,
            max_tool_calling_iterations=5,
        )
    reports: list[Any] = []
    with patch("torch.cuda.get_device_name", return_value="none"):
        trainer = AsyncGRPOTrainer(
            model=model,
            processing_class=words,
            reward_funcs=many_even,
            train_dataset=dataset,
            rollout_worker=worker,
            weight_transfer=WeightTransfer(RankUpdates(manager, replicas=2, on_report=reports.append)),
            args=AsyncGRPOConfig(
                output_dir=str(Path(output)),
                max_steps=int(steps),
                per_device_train_batch_size=8,
                num_generations=4,
                max_completion_length=8,
                learning_rate=1e-3,
                vllm_server_base_url=url,
                max_inflight_tasks=8,
                heartbeat_stale_after_s=60,
                use_cpu=True,
                bf16=False,
                report_to=[],
                save_strategy="no",
            ),
        )
    AttentionInterface.register(TREE_ATTENTION, attention)
    trainer.train()
    logs = [line for line in trainer.state.log_history if "ratio" in line]
    say(
        updates=[report.version for report in reports],
        ok=[report.ok for report in reports],
        model_version=trainer.model_version,
        ratios=[line["ratio"] for line in logs],
        divergences=[line["kl"] for line in logs],
        staleness=[line["sample/staleness_max"] for line in logs],
        rewards=[line["reward"] for line in logs if "reward" in line],
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
