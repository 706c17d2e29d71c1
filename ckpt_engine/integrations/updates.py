"""The updates of a training framework's rank: when its session opens, what it publishes, and which reports are errors.

Decides nothing about a framework: each has a module of its own beside this one, which calls `bring` once a step.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from ckpt_engine import CkptEngineError, Trainer, UpdateReport
from ckpt_engine.core.problems import error, precondition
from ckpt_engine.integrations.adapters import adapter as adapter_of
from ckpt_engine.integrations.peft import base_weights
from ckpt_engine.options import PauseMode
from ckpt_engine.trainer.lineage import fresh_lineage
from ckpt_engine.v1.weights_pb2 import Problem


class RankUpdates:
    """The updates of one trainer rank. Nothing is dialled before the first `bring`.

    manager: host:port. replicas: how many must be up before the first update, which waits `wait` seconds for them.
    dtype: served, if not the weights' own (a trainer in mixed precision has float32 weights, engines serve bfloat16).
    lineage: None: a new one at each start of the trainer, so that a run that goes back to a checkpoint may use its
    numbers again. A named lineage goes on where it ended, and refuses lower numbers. pool, pause_mode, timeout: as for
    `Trainer`. min_replicas: so many suffice; None: all that are registered. on_report: called with each report, on the
    thread that trains.

    adapter: bring a PeftModel's adapter (LoRA) by itself, under this name (docs/adapters.md). The model below it is
    brought once, by `open`; `lineage`, `dtype`, `pool` and `pause_mode` are of that one. The adapter's lineage has its
    name and goes on from run to run, so its versions are numbers of their own, and not what `bring` is called with.
    """

    def __init__(
        self,
        manager: str,
        *,
        replicas: int = 1,
        wait: float = 600.0,
        dtype: str | None = None,
        lineage: str | None = None,
        pool: str = "",
        pause_mode: PauseMode | None = None,
        min_replicas: int | None = None,
        timeout: float | None = None,
        adapter: str = "",
        on_report: Callable[[UpdateReport], None] | None = None,
    ) -> None:
        self._manager, self._lineage, self._dtype = manager, lineage, dtype
        self._pool = pool
        self._replicas, self._wait = replicas, wait
        self._pause_mode, self._min_replicas, self._timeout = pause_mode, min_replicas, timeout
        self._on_report = on_report
        self.adapter = adapter
        self._base: Trainer | None = None  # of the model below an adapter
        self._trainer: Trainer | None = None
        self._step: int | None = None
        self.served: UpdateReport | None = None
        """The last report of a version that is served; None: there was none."""

    @property
    def version(self) -> int | None:
        """What `bring` was last called with: the replicas serve that."""
        return self._step

    @property
    def opened(self) -> bool:
        """Whether weights are published."""
        return self._trainer is not None

    def open(self, weights: Any, rank: int = 0, world_size: int = 1) -> None:
        """Publishes, once; every rank calls it. weights: whatever `Trainer.publish` takes; with an adapter the
        PeftModel.

        Raises CkptEngineError if they cannot be published, if there are too few replicas in time, or on a second call.
        """
        if self._trainer is not None:
            raise precondition("these updates have been opened already")
        lineage = fresh_lineage(rank, world_size, os.environ) if self._lineage is None else self._lineage
        if not self.adapter:
            self._trainer = self._opened(weights, rank, world_size, lineage, self._pool, self._dtype)
            return
        root = ""
        tensors = adapter_of(weights, lambda: root)
        self._base = self._opened(base_weights(weights), rank, world_size, lineage, self._pool, self._dtype)
        try:
            report = self._base.update_weights(
                pause_mode=self._pause_mode, timeout=self._timeout, min_replicas=self._min_replicas
            )
            if not report.ok:
                raise _not_served(report)
            root = report.root
            self._trainer = self._opened(tensors, rank, world_size, self.adapter, self.adapter, None)
        except BaseException:
            self.close()
            raise

    def _opened(
        self, weights: Any, rank: int, world_size: int, lineage: str | None, pool: str, dtype: str | None
    ) -> Trainer:
        trainer = Trainer(self._manager, rank=rank, world_size=world_size, lineage=lineage, pool=pool)
        try:
            trainer.publish(weights, dtype=dtype)
            trainer.wait_for_replicas(self._replicas, timeout=self._wait)
        except BaseException:
            trainer.close()
            raise
        return trainer

    def bring(self, version: int) -> UpdateReport:
        """Brings the replicas to the weights as they are now; every rank calls it with the same version.

        Raises CkptEngineError if the update was refused, or if too few replicas serve the version: otherwise training
        would go on unnoticed with tokens of older weights. The error then has the code of the first replica that does
        not serve it, and names that replica.
        """
        if self._trainer is None:
            raise precondition("call open, with the weights, before bring")
        number = None if self.adapter else version
        report = self._trainer.update_weights(
            number, pause_mode=self._pause_mode, timeout=self._timeout, min_replicas=self._min_replicas
        )
        if self._on_report is not None:
            self._on_report(report)
        if not report.ok:
            raise _not_served(report)
        self.served, self._step = report, version
        return report

    def close(self) -> None:
        """Says goodbye to the manager. May be repeated; `open` may follow."""
        trainers = [self._trainer, self._base]
        self._trainer = self._base = None
        for trainer in trainers:
            if trainer is not None:
                trainer.close()


def _not_served(report: UpdateReport) -> CkptEngineError:
    first = next((replica for replica in report.replicas if not replica.ok), None)
    problem = Problem() if first is None else first.message.problem
    return error(
        problem.code or Problem.CODE_UNAVAILABLE,
        f"version {report.version} is not served by all replicas that must serve it (min_replicas says how many "
        f"suffice):\n{report}",
        problem.tensors,
        problem.ranks,
        "" if first is None else first.name,
    )
