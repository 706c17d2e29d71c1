"""verl's rollout replicas: those of ours that are registered at our manager.

verl starts no engine for them, and gives them no GPUs and no weights.
"""

from __future__ import annotations

from typing import Any

import ray
from verl.workers.rollout.replica import RolloutMode, RolloutReplica

from ckpt_engine.core.problems import invalid
from ckpt_engine.integrations.verl.asking import ReplicaActor
from ckpt_engine.integrations.verl.options import NAME, REMEDY, options_of


class ServedReplica(RolloutReplica):  # type: ignore[misc, unused-ignore]
    """One of verl's rollout replicas: the replica that `Options.replicas` names at the same index.

    Its `workers` and `servers` are one actor without a GPU, which asks the replica over HTTP.
    """

    async def init_standalone(self) -> None:
        """Attaches to the replica; takes no resources."""
        self.rollout_mode = RolloutMode.STANDALONE
        await self.launch_servers()

    async def init_hybrid(self, worker_group: Any) -> None:
        """Refuses: raises INVALID_ARGUMENT, since our replicas run outside of verl's processes."""
        raise invalid(f"a rollout inside the trainer's process (hybrid) is not supported: {REMEDY}")

    async def init_hybrid_colocated(self, worker_group: Any, resource_pool: Any) -> None:
        """Refuses: raises INVALID_ARGUMENT, since our replicas run outside of verl's processes."""
        raise invalid(f"a rollout inside the trainer's process (hybrid) is not supported: {REMEDY}")

    async def init_colocated(self, resource_pool: Any) -> None:
        """Refuses: raises INVALID_ARGUMENT, since our replicas run outside of verl's processes."""
        raise invalid(f"a rollout on the trainer's GPUs (colocated) is not supported: {REMEDY}")

    async def launch_servers(self) -> None:
        """Starts the actor. Raises INVALID_ARGUMENT if there are fewer names than rollout replicas."""
        options = options_of(self.config)
        if self.replica_rank >= len(options.replicas):
            raise invalid(
                f"verl wants rollout replica {self.replica_rank}, and checkpoint_engine.engine_kwargs.{NAME}.replicas "
                f"has {len(options.replicas)} names: give one for each (rollout.nnodes x rollout.n_gpus_per_node / "
                "(tensor_model_parallel_size x data_parallel_size) of them)"
            )
        name = options.replicas[self.replica_rank]
        lengths = (self.config.prompt_length, self.config.response_length)
        always = {"ignore_eos": True} if self.config.ignore_eos else {}
        actor = ray.remote(ReplicaActor).options(num_cpus=0, max_concurrency=self.max_concurrency)
        self._server_handle = actor.remote(options, name, *lengths, always)
        self.servers = self.workers = [self._server_handle]
        self._server_address = name

    async def sleep(self) -> None:
        """Does nothing: `Trainer.sleep` is for replicas that share GPUs with a trainer."""

    async def wake_up(self) -> None:
        """Does nothing, see `sleep`."""

    async def clear_kv_cache(self) -> None:
        """Does nothing: each update's pause mode decides about caches."""

    async def release_kv_cache(self) -> None:
        """Does nothing: an install needs none of the cache's memory."""

    async def resume_kv_cache(self) -> None:
        """Does nothing, see `release_kv_cache`."""

    async def start_profile(self, **kwargs: Any) -> None:
        """Refuses: raises INVALID_ARGUMENT."""
        raise invalid(f"the engines of rollout.name={NAME} are not verl's to profile")

    async def stop_profile(self) -> None:
        """Does nothing: no profile was started."""


class NoHybrid:
    """Refuses to be made, where verl would make a rollout inside a trainer's process."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise invalid(f"a rollout inside the trainer's process (hybrid) is not supported: {REMEDY}")
