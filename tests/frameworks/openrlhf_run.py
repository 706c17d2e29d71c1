"""OpenRLHF's command in a Ray that counts GPUs where there are none: `python -m frameworks.openrlhf_run GPUS WORD...`.

OpenRLHF starts a Ray only where there is none, and each policy actor takes one of its GPUs.
"""

from __future__ import annotations

import runpy
import sys

import ray


def main() -> None:
    gpus = int(sys.argv.pop(1))
    ray.init(
        num_cpus=16,
        num_gpus=gpus,
        object_store_memory=100 << 20,
        include_dashboard=False,
        _node_ip_address="127.0.0.1",
    )
    runpy.run_module("openrlhf.cli.train_ppo_ray", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
