"""Options of the checkpoint engine and the rollouts in verl's configuration. Imports nothing of verl."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ckpt_engine.core.problems import invalid
from ckpt_engine.options import PauseMode

NAME = "ckpt_engine"
"""Name of the backend (`rollout.checkpoint_engine.backend`) and of the rollout (`rollout.name`)."""

REMEDY = (
    f"set rollout.name and rollout.checkpoint_engine.backend to {NAME!r}, with trainer and rollouts apart (for verl's "
    "v1 trainers trainer.v1.trainer_mode=separate_async and actor_rollout_ref.hybrid_engine=False)"
)


@dataclass(frozen=True)
class Options:
    """`rollout.checkpoint_engine.engine_kwargs.ckpt_engine` of verl's configuration. Fields without a comment are
    those of `RankUpdates`."""

    manager: str  # host:port
    replicas: Sequence[str]  # names at the manager, one for each of verl's rollout replicas
    pool: str = ""
    lineage: str | None = None
    dtype: str | None = None
    pause_mode: PauseMode | None = None
    min_replicas: int | None = None
    wait: float = 600.0
    timeout: float | None = None
    model: str | None = None  # its name at the servers; None: the first one that they list
    answer_seconds: float = 600.0  # of silence, after which an answer counts as broken off
    held_seconds: float = 1800.0  # that a request waits for verl to resume generation, or for its replica to serve

    def __post_init__(self) -> None:
        if isinstance(self.replicas, str) or not self.replicas or len({*self.replicas}) < len(self.replicas):
            raise invalid(f"replicas={self.replicas!r}: give the names of the replicas, each once, as a list")
        object.__setattr__(self, "replicas", tuple(self.replicas))


def options_of(config: Any) -> Options:
    """The options of a RolloutConfig. Raises INVALID_ARGUMENT for another backend, or if the options are missing."""
    engine = config.checkpoint_engine
    if engine.backend != NAME:
        raise invalid(f"the backend is {engine.backend!r}: {REMEDY}")
    if NAME not in engine.engine_kwargs:
        raise invalid(f"checkpoint_engine.engine_kwargs.{NAME} is missing: give at least manager and replicas")
    return Options(**engine.engine_kwargs[NAME])
