"""One of two ranks on gloo, in TRL's environment under torchrun: what UpdateCallback does with a model that FSDP2 has
sharded, and what is published of weights that lie as Megatron has them.
`python -m tests.frameworks.ranks_run MANAGER MODEL OUTPUT URL...`. Rank 0 prints one marked JSON line.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import TrainerControl, TrainerState, TrainingArguments

from ckpt_engine import CkptEngineError, UpdateReport
from ckpt_engine.integrations.trl import UpdateCallback
from ckpt_engine.integrations.updates import RankUpdates
from tests.frameworks.grpo_run import say
from tests.tiny_model import make_tiny_qwen3, named_weights

PROMPT = [3, 5, 7]
GROUPS, HEAD = 2, 32
"""Of the tiny model: key-value heads, and the width of a head."""


def difference(urls: list[str], model: Any, version: int) -> float:
    """How far the replicas' logprobs of some tokens are from those of `model`, at most; they must serve `version`."""
    worst = 0.0
    for url in urls:
        body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "logprobs": 0, "return_token_ids": True}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
        assert answer.headers["x-ckpt-engine-admitted-version"] == str(version), answer.text
        (choice,) = answer.json()["choices"]
        tokens = choice["token_ids"]
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([PROMPT + tokens])).logits[0, len(PROMPT) - 1 : -1]
        own = torch.log_softmax(logits, -1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
        worst = max(worst, (own - torch.tensor(choice["logprobs"]["token_logprobs"])).abs().max().item())
    return worst


def sharded(updates: RankUpdates, model: Any, output: str) -> None:
    """Three steps' calls to the callback; nothing of the model is gathered."""
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    args, state = TrainingArguments(output, use_cpu=True, report_to=[]), TrainerState()
    callback = UpdateCallback(updates)
    callback.on_train_begin(args, state, TrainerControl(), model=model)
    for state.global_step in (1, 2):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.to_local().mul_(1.0 + 0.1 * state.global_step)
        callback.on_step_end(args, state, TrainerControl(), model=model)


class Megatron:
    """A rank's tensors as Megatron has them with tensor parallelism 2: queries, keys and values in one, group by group,
    and gate and up in one. As a callable: what its bridge exports, under the names of the checkpoint, on every rank."""

    def __init__(self, rank: int, whole: dict[str, torch.Tensor]) -> None:
        self._rank = rank
        self.fails = False
        self.load(whole)

    def load(self, whole: dict[str, torch.Tensor]) -> None:
        self._parts: dict[str, torch.Tensor] = {}
        for name, tensor in whole.items():
            if name.endswith("q_proj.weight"):
                rows = [whole[name.replace("q_proj", f"{part}_proj")].chunk(GROUPS)[self._rank] for part in "qkv"]
                self._parts[name.replace("q_proj", "linear_qkv")] = torch.cat(rows)
            elif name.endswith("gate_proj.weight"):
                rows = [whole[name.replace("gate", part)].chunk(2)[self._rank] for part in ("gate", "up")]
                self._parts[name.replace("gate_proj", "linear_fc1")] = torch.cat(rows)
            elif not name.endswith(("k_proj.weight", "v_proj.weight", "up_proj.weight")):
                self._parts[name] = tensor.clone()

    def __call__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for number, (name, part) in enumerate(self._parts.items()):
            if self.fails and number == 5:
                raise RuntimeError("the bridge has no mapping")
            if "linear_qkv" in name:
                queries = (part.shape[0] // HEAD - 2) * HEAD
                yield from self._gathered(name, "linear_qkv", part, (queries, HEAD, HEAD), [f"{x}_proj" for x in "qkv"])
            elif "linear_fc1" in name:
                half = part.shape[0] // 2
                yield from self._gathered(name, "linear_fc1", part, (half, half), ["gate_proj", "up_proj"])
            else:
                yield name, part

    def _gathered(
        self, name: str, fused: str, part: torch.Tensor, rows: tuple[int, ...], names: list[str]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        parts = [torch.empty_like(part) for _ in range(2)]
        dist.all_gather(parts, part)
        columns = zip(*(each.split(rows) for each in parts), strict=True)
        for wanted, column in zip(names, columns, strict=True):
            yield name.replace(fused, wanted), torch.cat(column)


def raised(call: Callable[[], Any]) -> str:
    try:
        call()
    except CkptEngineError as error:
        return str(error)
    return ""


def main(manager: str, _: str, output: str, *urls: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, reports = dist.get_rank(), list[UpdateReport]()
    models = [
        make_tiny_qwen3(Path(output) / f"rank-{rank}", seed, dtype=torch.float32, weights=False) for seed in range(3)
    ]
    found: dict[str, Any] = {}

    updates = RankUpdates(manager, replicas=len(urls), on_report=reports.append)
    live = make_tiny_qwen3(Path(output) / f"rank-{rank}", 0, dtype=torch.float32, weights=False)
    sharded(updates, live, output)
    if rank == 0:
        for parameter in models[0].parameters():
            parameter.data.mul_(1.1).mul_(1.2)
        found["sharded"] = difference(list(urls), models[0], 2)
        found["copies"] = [report.message.source_copies for report in reports]
    dist.barrier()
    updates.close()

    weights = Megatron(rank, dict(named_weights(models[1])))
    updates.open(weights, rank=rank, world_size=2)
    updates.bring(0)
    if rank == 0:
        found["exported"] = difference(list(urls), models[1], 0)
    dist.barrier()
    weights.load(dict(named_weights(models[2])))
    weights.fails = True
    found["raised"] = raised(lambda: updates.bring(1))
    if rank == 0:
        found["after"] = difference(list(urls), models[1], 0)
    dist.barrier()
    weights.fails = False
    updates.bring(1)
    if rank == 0:
        found["again"] = difference(list(urls), models[2], 1)
        lineages = list(dict.fromkeys(report.lineage for report in reports))
        say(**found, lineages=lineages, versions=[report.version for report in reports])
    dist.barrier()
    updates.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
