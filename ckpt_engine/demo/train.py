"""One trainer rank of the demo: `python -m ckpt_engine.demo.train`, once a rank.

The ranks shard the model with FSDP2 over gloo, train, and call `update_weights` at each milestone. Rank 0 reports
progress as JSON lines on standard output. Before each update it takes a byte from the pipe `turns` in the directory:
the demo gives the turn when the replicas have been asked for text, and the ranks train on meanwhile. The rank ends when
the pipe's writer has ended. Everything is seeded, so every run learns the same.
"""

from __future__ import annotations

import json
import math
import sys
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import torch
import torch.distributed as dist
import typer
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ckpt_engine import CkptEngineError, Trainer
from ckpt_engine.core.message_json import as_json
from ckpt_engine.demo import task
from ckpt_engine.demo.stage import LINE_MARK, TURNS

WARM_UP_STEPS = 10
LAST_RATE = 0.1
"""The learning rate falls to this part of its peak, so that the last weights are settled ones."""


class Lesson:
    """The sharded model and its training. Every rank makes one, and the same calls on it, together."""

    def __init__(self, model: Path, rank: int, world_size: int) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        torch.manual_seed(0)
        make: Any = AutoModelForCausalLM.from_config
        self.model: Any = make(AutoConfig.from_pretrained(model), dtype=torch.float32)
        # One group of parameters: over gloo a small model is faster with one collective a direction than one a layer.
        fully_shard(self.model, mesh=init_device_mesh("cpu", (world_size,)), reshard_after_forward=False)
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=task.LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0
        )
        self._text = torch.tensor(list(task.text()))
        self._random = torch.Generator().manual_seed(1 + rank)
        self._opening = rank == 0
        self.steps = 0

    def step(self) -> float:
        """One optimizer step on this rank's windows of the text; the loss before it, nats a byte."""
        starts = torch.randint(len(self._text) - task.WINDOW_BYTES + 1, (task.BATCH,), generator=self._random)
        if self._opening:
            starts[0] = 0
        batch = torch.stack([self._text[start : start + task.WINDOW_BYTES] for start in starts.tolist()])
        logits = self.model(input_ids=batch, use_cache=False).logits
        loss: Any = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())
        self._optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for group in self._optimizer.param_groups:
            group["lr"] = task.LEARNING_RATE * self._rate()
        self._optimizer.step()
        self.steps += 1
        return float(loss.item())

    def _rate(self) -> float:
        warm = min(1.0, (self.steps + 1) / WARM_UP_STEPS)
        return warm * (LAST_RATE + (1 - LAST_RATE) * 0.5 * (1 + math.cos(math.pi * self.steps / task.STEPS)))


def train(
    manager: Annotated[str, typer.Option()],
    rank: Annotated[int, typer.Option()],
    world_size: Annotated[int, typer.Option()],
    directory: Annotated[Path, typer.Option(help="where the ranks meet, and the pipe lies")],
    model: Annotated[Path, typer.Option(help="the directory of the model's configuration")],
    updates: Annotated[int, typer.Option()],
    replicas: Annotated[int, typer.Option(help="refuse to update fewer")],
) -> None:
    """Trains and updates to the end; exits with status 1 after an update that was refused or is not whole."""
    torch.set_num_threads(1)
    meeting = f"file://{directory}/rendezvous"
    # The demo decides when to end: with --page it runs until Ctrl-C.
    dist.init_process_group("gloo", meeting, timedelta(days=7), rank=rank, world_size=world_size)
    lesson = Lesson(model, rank, world_size)
    tell = _Teller(rank, directory)
    with Trainer(manager, rank=rank, world_size=world_size) as trainer:
        trainer.publish(lesson.model)
        loss = math.nan
        for milestone in task.milestones(updates):
            while lesson.steps < milestone:
                loss = lesson.step()
                tell(step=lesson.steps, loss=loss)
            tell.wait_for_turn()
            dist.barrier()  # the others must not wait in update_weights for a turn that takes its time
            try:
                report = trainer.update_weights(version=milestone, min_replicas=replicas)
            except CkptEngineError as error:
                tell(problem=str(error))
                sys.exit(f"rank {rank}: {error}")
            tell(report=as_json(report.message), table=report.details)
            if not report.ok:
                sys.exit(1)
        tell.wait_for_turn()
        dist.barrier()  # which is when all of them leave
    dist.destroy_process_group()


class _Teller:
    """Sends rank 0's lines to the demo and waits for its turns; does nothing on other ranks."""

    def __init__(self, rank: int, directory: Path) -> None:
        self._turns: BinaryIO | None = open(directory / TURNS, "rb", buffering=0) if rank == 0 else None  # noqa: SIM115

    def __call__(self, **content: Any) -> None:
        if self._turns is not None:
            print(LINE_MARK + json.dumps(content), flush=True)

    def wait_for_turn(self) -> None:
        """Waits for the demo's turn; ends the process if the demo has ended."""
        if self._turns is not None and not self._turns.read(1):
            sys.exit(1)


if __name__ == "__main__":
    application = typer.Typer(pretty_exceptions_enable=False)
    application.command()(train)
    application()
