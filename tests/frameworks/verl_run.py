"""verl's own manager, balancer and client on Ray, with replicas of ours, in verl's environment:
`python -m frameworks.verl_run MANAGER MODEL UPDATES REPLICA...`. Prints marked JSON lines.

A seam test: verl's worker for actors wants a GPU, so `Rank` stands in for it, and for its FSDP engine. It makes their
calls in their order; its parameters are FSDP2's, and gathered as theirs are. `engine_calls` reads in verl's source that
these are the calls.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import ray
import torch
import verl
from omegaconf import OmegaConf
from tiny_model import make_tiny_qwen3, reference_tokens, regrets
from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineManager, CheckpointEngineRegistry
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.rollout.base import get_rollout_class
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient, LLMServerManager
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry

from ckpt_engine import CkptEngineError

MARK = "ckpt-engine: "
NAME = "ckpt_engine"
RANKS = 2
PROMPT = [5, 6, 7, 8]
TOKENS = 12
LONG = 200
ATTEMPTS = 10


def say(**content: Any) -> None:
    print(MARK + json.dumps(content), flush=True)


def weights_of(step: int, path: Path) -> Any:
    """The model as it is after `step`."""
    return make_tiny_qwen3(path / f"{os.getpid()}", seed=100 + step, dtype=torch.float32, weights=False)


class Rank(Worker):  # type: ignore[misc, unused-ignore]
    """Of the trainer; stands in for ActorRolloutRefWorker."""

    def __init__(self, config: Any, path: str) -> None:
        super().__init__()
        torch.set_num_threads(1)
        torch.distributed.init_process_group("gloo")
        self._path = Path(path)
        self.module = weights_of(0, self._path)
        torch.distributed.fsdp.fully_shard(
            self.module, mesh=torch.distributed.device_mesh.init_device_mesh("cpu", (RANKS,))
        )
        engine = omega_conf_to_dataclass(config)
        self.checkpoint_engine = CheckpointEngineRegistry.new(
            engine.backend,
            is_master=(torch.distributed.get_rank() == 0),
            bucket_size=engine.update_weights_bucket_megabytes << 20,
            **engine.engine_kwargs.get(engine.backend, {}),
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def train(self, step: int) -> None:
        """What an optimizer would do: every weight changes, each rank's shard of it."""
        plain = dict(weights_of(step, self._path).named_parameters())
        for name, shard in self.module.named_parameters():
            full = torch.distributed.tensor.distribute_tensor(plain[name].detach(), shard.device_mesh, shard.placements)
            with torch.no_grad():
                shard.to_local().copy_(full.to_local())

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps: int | None = None, mode: str = "auto") -> Any:
        metrics = await self.checkpoint_engine.send_weights(self._gathered(), global_steps=global_steps)
        return metrics or {}

    @register(dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)
    def execute_checkpoint_engine(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.checkpoint_engine, method)(*args, **kwargs)

    def _gathered(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self.module.state_dict().items():
            yield name, parameter.full_tensor()


def engine_calls() -> dict[str, list[str]]:
    """How verl's worker calls a checkpoint engine, from its source: it cannot be imported without more packages."""
    tree = ast.parse((Path(verl.__file__).parent / "workers" / "engine_workers.py").read_text())
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    names = {"new": "CheckpointEngineRegistry.new", "send": "self.checkpoint_engine.send_weights"}
    return {
        key: sorted(ast.unparse(call) for call in calls if ast.unparse(call.func) == name)
        for key, name in names.items()
    }


def signatures() -> dict[str, dict[str, list[str]]]:
    """Parameters of the methods that verl calls: as it declares them, and ours."""
    ours = CheckpointEngineRegistry.get(NAME)
    replica = RolloutReplicaRegistry.get(NAME)
    wanted, have = {}, {}
    for base, made in ((CheckpointEngine, ours), (RolloutReplica, replica)):
        for name, method in inspect.getmembers(base, callable):
            if not name.startswith("_") and name != "init_process_group":
                wanted[f"{base.__name__}.{name}"] = list(inspect.signature(method).parameters)
                have[f"{base.__name__}.{name}"] = list(inspect.signature(getattr(made, name)).parameters)
    return {"wanted": wanted, "have": have}


def refusals(config: Any) -> dict[str, str]:
    """What is said of what is not supported; nothing of it is started."""
    replica = RolloutReplicaRegistry.get(NAME)
    engine = CheckpointEngineRegistry.new(NAME, bucket_size=0, manager="none:1", replicas=["one"])
    rollout = config.actor_rollout_ref.rollout
    other = OmegaConf.merge(rollout, {"checkpoint_engine": {"backend": "nccl"}})

    def made(number: int, settings: Any) -> Any:
        return replica(replica_rank=number, config=settings, model_config=None, gpus_per_node=1)

    attempts = {
        "a rollout in the trainer's process": lambda: get_rollout_class(NAME)(config=None, model_config=None),
        "a hybrid replica": lambda: asyncio.run(made(0, rollout).init_hybrid(None)),
        "a colocated replica": lambda: asyncio.run(made(0, rollout).init_colocated(None)),
        "another backend": lambda: asyncio.run(made(0, other).init_standalone()),
        "a replica too many": lambda: asyncio.run(made(9, rollout).init_standalone()),
        "verl's own rollouts": lambda: engine.build_topology(1, 1, [{"lineage": "run"}, engine.prepare()]),
        "weights through verl": lambda: engine.receive_weights(),
        "no replicas": lambda: CheckpointEngineRegistry.new(NAME, manager="none:1", replicas=[]),
    }
    said = {}
    for name, attempt in attempts.items():
        try:
            attempt()
            said[name] = "not refused"
        except CkptEngineError as error:
            said[name] = str(error)
    return said


def configuration(manager: str, model: str, names: Sequence[str]) -> Any:
    """verl's own defaults, and what docs/frameworks.md says to set."""
    rollout: Any = {
        "name": NAME,
        "nnodes": 1,
        "n_gpus_per_node": len(names),
        "tensor_model_parallel_size": 1,
        "prompt_length": 64,
        "response_length": 64,
        "checkpoint_engine": {
            "backend": NAME,
            "engine_kwargs": {NAME: {"manager": manager, "replicas": list(names)}},
        },
    }
    default = OmegaConf.load(Path(verl.__file__).parent / "trainer" / "config" / "rollout" / "rollout.yaml")
    return OmegaConf.create(
        {"actor_rollout_ref": {"rollout": OmegaConf.merge(default, rollout), "model": {"path": model}}}
    )


async def updates(manager: Any, ranks: Any, servers: Any, count: int, path: Path) -> None:
    """Each step's version is brought, and served by both replicas."""
    client = servers.get_client(client_cls=LLMServerClient)
    for step in range(count):
        ranks.train(step)
        begun = time.monotonic()
        metrics = await manager.update_weights(step)
        count_asked = 2 * len(servers.server_handles)
        answers = await asyncio.gather(*(ask(client, f"{step}-{each}", TOKENS) for each in range(count_asked)))
        expected = reference_tokens(weights_of(step, path), PROMPT, TOKENS)
        say(
            step=step,
            metrics=metrics,
            seconds=time.monotonic() - begun,
            expected=expected.tokens,
            gap=expected.gap,
            tokens=[each.token_ids for each in answers],
            logprobs=[len(each.log_probs) for each in answers],
            steps=[[each.extra_fields[name] for name in STEPS] for each in answers],
            stop_reasons=[each.stop_reason for each in answers],
        )


STEPS = ("global_steps", "min_global_steps", "max_global_steps")


async def aborted(manager: Any, ranks: Any, servers: Any, step: int, path: Path) -> int:
    """An update to `step` while each replica is in the middle of 200 tokens, which verl's client asks for again; the
    number of answers that the update met."""
    ranks.train(step)
    client = servers.get_client(client_cls=FullyAsyncLLMServerClient)
    handles = servers.server_handles
    asked = [asyncio.create_task(ask(client, f"long-{step}-{number}", LONG)) for number in range(len(handles))]
    while not all(await asyncio.gather(*(each.__ray_call__.remote(under_way) for each in handles))):
        if any(each.done() for each in asked):
            break
        await asyncio.sleep(0.01)
    await manager.update_weights(step)
    met = 0
    models = [weights_of(each, path) for each in (step - 1, step)]
    for answer in await asyncio.gather(*asked):
        steps = [answer.extra_fields[name] for name in STEPS]
        met += steps == [step, step - 1, step]
        old, new = (regrets(model, PROMPT, answer.token_ids) for model in models)
        say(aborted=step, tokens=len(answer.token_ids), logprobs=len(answer.log_probs), steps=steps, old=old, new=new)
    return met


def under_way(server: Any) -> int:
    """Tokens of requests that run."""
    return sum(len(leg.tokens) for leg in server._legs.values())


async def ask(client: Any, request: str, count: int) -> Any:
    sampling = {"temperature": 0.0, "top_p": 1.0, "top_k": -1, "logprobs": True, "max_tokens": count}
    return await client.generate(request, prompt_ids=PROMPT, sampling_params=sampling)


def main(manager_address: str, model: str, output: str, count: str, *names: str) -> None:
    path = Path(output)
    config = configuration(manager_address, model, names)
    say(**signatures(), calls=engine_calls(), refused=refusals(config))
    ray.init(
        num_cpus=RANKS,
        object_store_memory=80 << 20,
        include_dashboard=False,
        log_to_driver=True,
        _node_ip_address="127.0.0.1",
        _temp_dir=os.environ["RAY_TMPDIR"],
    )
    try:
        engine_config = config.actor_rollout_ref.rollout.checkpoint_engine
        ranks = RayWorkerGroup(
            resource_pool=RayResourcePool([RANKS], use_gpu=False, max_colocate_count=1),
            ray_cls_with_init=RayClassWithInitArgs(cls=ray.remote(Rank), config=engine_config, path=output),
            use_gpu=False,
            device_name="cpu",
        )
        servers = LLMServerManager.create(config=config)
        manager = CheckpointEngineManager(omega_conf_to_dataclass(engine_config), ranks, servers.get_replicas())
        asyncio.run(_all(manager, ranks, servers, int(count), path))
    finally:
        ray.shutdown()


async def _all(manager: Any, ranks: Any, servers: Any, count: int, path: Path) -> None:
    await updates(manager, ranks, servers, count, path)
    # On a machine that is busy with other things an answer may be whole before the update comes.
    for step in range(count, count + ATTEMPTS):
        if await aborted(manager, ranks, servers, step, path) == len(servers.server_handles):
            break


if __name__ == "__main__":
    main(*sys.argv[1:])
