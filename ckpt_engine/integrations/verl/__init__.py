"""verl: brings each step's weights to replicas of ours, which answer verl's requests.

Importing this registers both with verl, as "ckpt_engine". verl imports it by itself (entry point `verl.plugins`), or
because VERL_USE_EXTERNAL_MODULES names it. How verl trains and gathers is not touched.
"""

from __future__ import annotations

from verl.checkpoint_engine import CheckpointEngineRegistry
from verl.workers.rollout.base import _ROLLOUT_REGISTRY
from verl.workers.rollout.replica import RolloutReplicaRegistry

from ckpt_engine.integrations.verl.gathered import GatheredUpdates
from ckpt_engine.integrations.verl.options import NAME
from ckpt_engine.integrations.verl.rollouts import NoHybrid, ServedReplica

CheckpointEngineRegistry.register(NAME)(GatheredUpdates)
RolloutReplicaRegistry.register(NAME, lambda: ServedReplica)
# verl has no call for this. Without an entry it says "not found" where it is hybrid that is not supported.
_ROLLOUT_REGISTRY[NAME, "async"] = f"{NoHybrid.__module__}.{NoHybrid.__qualname__}"
