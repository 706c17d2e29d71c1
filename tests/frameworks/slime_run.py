"""slime's own rollouts, external engines and train group, with replicas of ours, where there are SGLang, Ray and slime:
`python -m frameworks.slime_run DIRECTORY UPDATES HOST PORT`. Prints marked JSON lines.

Decides nothing of how slime asks. `Rank` stands in for its Megatron actor, which needs a GPU: it writes the checkpoints
that one writes. slime's parser needs Megatron too, so what is not set here is None.
"""

from __future__ import annotations

import json
import os
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import ray
from slime.backends.sglang_utils.external import apply_external_engine_info_to_args, start_external_rollout_servers
from slime.ray.actor_group import RayTrainGroup
from slime.ray.rollout import _start_router
from slime.rollout.sglang_rollout import generate_rollout
from slime.utils.http_utils import init_http_client
from slime.utils.types import Sample
from tiny_model import make_tiny_qwen3

MARK = "ckpt-engine: "
GROUPS, SAMPLES, TOKENS = 2, 2, 24


class Arguments(Namespace):
    """slime's arguments; what is not set is None."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


async def reward(args: Namespace, sample: Sample, **_: Any) -> float:
    """Of slime's `--custom-rm-path`."""
    return float(len(sample.response))


@ray.remote
class Rank:
    """Of Megatron: writes each version's checkpoint where UpdateWeightFromDisk does."""

    def __init__(self, directory: str) -> None:
        self._directory, self._version = Path(directory), 0

    def update_weights(self) -> None:
        self._version += 1
        make_tiny_qwen3(self._directory / f"weight_v{self._version:06d}", seed=100 + self._version)


class Prompts:
    """A data source of slime: more groups than a rollout takes, so that the rest is aborted."""

    def get_samples(self, count: int) -> list[list[Sample]]:
        return [
            [Sample(index=SAMPLES * group + number, prompt=f"{5 + group} 6 7 8") for number in range(SAMPLES)]
            for group in range(count)
        ]

    def add_samples(self, samples: list[list[Sample]]) -> None: ...


def arguments(directory: Path, host: str, port: int) -> Arguments:
    """What docs/frameworks/slime.md says to set comes first; then that it is small."""
    return Arguments(
        rollout_external=True,
        rollout_external_engine_addrs=[f"{host}:{port}"],
        sglang_router_ip=host,
        sglang_router_port=port,
        update_weight_mode="full",
        update_weight_transport="disk",
        update_weight_disk_dir=str(directory / "updates"),
        update_weight_start_version=0,
        hf_checkpoint=str(directory / "model"),
        seed=0,
        num_gpus_per_node=8,
        sglang_pp_size=1,
        sglang_dp_size=1,
        sglang_ep_size=1,
        sglang_server_concurrency=8,
        rollout_global_dataset=True,
        rollout_temperature=0.0,
        rollout_top_p=1.0,
        rollout_top_k=-1,
        rollout_max_response_len=TOKENS,
        rollout_skip_special_tokens=True,
        rollout_batch_size=GROUPS,
        over_sampling_batch_size=2 * GROUPS,
        n_samples_per_prompt=SAMPLES,
        custom_rm_path="frameworks.slime_run.reward",
    )


def main(directory: str, updates: str, host: str, port: str) -> None:
    args = arguments(Path(directory), host, int(port))
    apply_external_engine_info_to_args(args)
    ray.init(
        num_cpus=4,
        object_store_memory=80 << 20,
        include_dashboard=False,
        _node_ip_address="127.0.0.1",
        _temp_dir=os.environ["RAY_TMPDIR"],
    )
    try:
        servers, starting = start_external_rollout_servers(args, start_router=_start_router)
        ray.get(starting)
        init_http_client(args)
        group = RayTrainGroup(args, num_nodes=1, num_gpus_per_node=1, pg=None, role="actor")
        group._actor_handlers = [Rank.remote(args.update_weight_disk_dir)]
        for number in range(1, int(updates) + 1):
            group.update_weights()
            answer = generate_rollout(args, number, Prompts())
            for each in [sample for group in answer.samples for sample in group]:
                told = {"update": number, "tokens": each.tokens, "count": each.response_length, "reward": each.reward}
                versions = {"versions": each.weight_versions, "logprobs": len(each.rollout_log_probs or ())}
                print(MARK + json.dumps({**told, **versions, "engines": len(servers["default"].engines)}), flush=True)
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
