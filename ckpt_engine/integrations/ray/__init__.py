"""Ray: places our processes on a Ray cluster, keeps them there, and takes them away together.

Decides which process runs on which node, and when it is started again or taken away. What the processes do, and what
the weights are, it does not decide: each is a command of ours (`ckpt-engine manager|relay|agent|gateway`).

    RayCluster (in the program) ── Supervisor (an actor on Ray's head node) ── ProcessKeeper (an actor each) ── command

- A keeper runs one command through the agents' launcher, so that the command's whole tree ends with its actor. It
  starts it again in place. If the actor dies, Ray starts it again.
- The supervisor owns all keepers and placement groups: Ray ends them when it ends. It ends with the process that made
  the cluster, or, detached, when the cluster is closed. It looks at nodes and keepers once a second.
- Manager and gateway are on the head node, at ports that are chosen once, beside the ledger: a Ray cluster does not
  survive the loss of its head node either, so members never have to look for a manager elsewhere.
- A replica is one actor in one placement group. If its node dies, Ray finds both another place.
"""

from __future__ import annotations

from ckpt_engine.extras import require

require("ray", "ray", what="ckpt_engine.integrations.ray")

from ckpt_engine.integrations.ray.cluster import RayCluster  # noqa: E402  (after the words for Ray's absence)
from ckpt_engine.integrations.ray.plan import ProcessStatus, RayClusterStatus  # noqa: E402

__all__ = ["ProcessStatus", "RayCluster", "RayClusterStatus"]
