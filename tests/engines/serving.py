"""What tests ask of a real engine's server in the same way, whichever engine it is; how to ask it for tokens they pass.

`complete` is the engine's own: replica, prompt's token ids, count of tokens to the HTTP answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from ckpt_engine import CkptEngineError, Trainer
from ckpt_engine.gate.directory import TOKEN_HEADER, EngineDirectory
from ckpt_engine.gate.gate import ROUTES_ROUTE, Gate
from tests.cluster import Cluster, Replica, Stream
from tests.conformance.weights import load, of_either_version
from tests.end_to_end.test_several_nodes import free_address
from tests.tiny_model import DECISIVE_GAP, decisive_prompts, make_tiny_qwen3, named_weights, reference_tokens

TOKENS = 32
UPDATES_UNDER_LOAD = 15
PROMPT = [3, 5, 7, 11, 13, 17]

Complete = Callable[..., httpx.Response]


def model_of(path: Path, seed: int, **options: Any) -> Any:
    return make_tiny_qwen3(path / str(seed), seed, weights=False, **options)


def publish(trainer: Trainer, model: Any) -> None:
    trainer.publish(named_weights(model))


def bare(config: Any, path: Path) -> Path:
    """A directory with this configuration and without weights: whatever is served was installed."""
    config.dtype = torch.bfloat16
    path.mkdir()
    config.save_pretrained(path)
    return path


def refuses_without(trainer: Trainer, weights: Mapping[str, torch.Tensor], lacking: str) -> None:
    """An update that lacks one tensor."""
    trainer.publish({name: tensor for name, tensor in weights.items() if name != lacking})
    with pytest.raises(CkptEngineError, match="come from nowhere"):
        trainer.update_weights(version=3)


def check_serves(
    complete: Complete, tokens: Callable[[httpx.Response], list[int]], replica: Replica, model: Any, version: int
) -> httpx.Response:
    """Greedy tokens are transformers', where rounding cannot decide, under this version. Returns the answer."""
    prompt = decisive_prompts(model, 1, TOKENS)[0]
    expected = reference_tokens(model, prompt, TOKENS)
    assert expected.gap > DECISIVE_GAP
    response = complete(replica, prompt)
    assert tokens(response) == expected.tokens
    assert response.headers["x-ckpt-engine-admitted-version"] == str(version)
    return response


def label_of(replica: Replica) -> str:
    """What its engine is to call its tokens by, made of what its gate says that the workers hold."""
    held = httpx.get(f"{replica.url}/ckpt_engine/info", timeout=60).json()
    return f"{held['version']}:{held['root'][:8]}:{held['lineage']}"


def check_closed(complete: Complete, replica: Replica) -> None:
    """The server lives and answers no request."""
    assert httpx.get(f"{replica.url}/health", timeout=60).status_code == 200
    response = complete(replica, [1, 2, 3], 2)
    assert response.status_code == 503, response.text


def token_of(replica: Replica) -> dict[str, str]:
    """The header with which the agent shows its token."""
    directory = Path(httpx.get(f"{replica.url}/ckpt_engine/info", timeout=60).json()["directory"])
    return {TOKEN_HEADER: EngineDirectory(directory).token()}


def check_routes(replica: Replica, gate: type[Gate], root_path: str = "") -> None:
    """Every route of the server has a class, and none that changes it answers without the token.

    One that this engine has and the gate does not know fails here by name: it must be judged by somebody.
    """
    routes = httpx.get(replica.url + ROUTES_ROUTE, headers=token_of(replica), timeout=60).json()
    assert [route for route, access in routes.items() if access == "unknown"] == []
    assert set(routes.values()) == {"open", "gated", "control"}
    for route in {*gate.control_routes, *(route for route, access in routes.items() if access == "control")}:
        for path in {route, root_path + route}:
            for method in ("POST", "GET"):
                assert httpx.request(method, replica.url + path, timeout=60).status_code == 403, (method, path)


def start_on_two_nodes(
    start: Callable[..., Replica], cluster: Cluster, model: Path, variables: Mapping[str, str]
) -> tuple[Replica, Replica]:
    """One server of two workers, with an agent for each of them; leader and follower, not waited for.

    start: of the engine. Both agents run on this host, with runtime directories of their own. variables: what the
    engine needs to talk to itself over loopback.
    """
    token = cluster.path / "node.token"
    token.write_text("0123456789abcdef" * 4)
    options = ["--nodes", "2", "--leader", free_address(), "--node-token", str(token), "--startup-timeout", "600"]
    started = []
    for rank, name in enumerate(("wide", "wide-node-1")):
        runtime = cluster.path / f"n{rank}"
        runtime.mkdir(mode=0o700)
        started.append(
            start(
                cluster,
                name,
                model,
                tensor_parallel=2,
                options=[*options, "--node-rank", str(rank)],
                environment={"XDG_RUNTIME_DIR": str(runtime), "GLOO_SOCKET_IFNAME": "lo", **variables},
            )
        )
    leader, follower = started
    return leader, follower


def check_under_load(
    complete: Complete,
    tokens: Callable[[httpx.Response], list[int]],
    cluster: Cluster,
    path: Path,
    mode: str,
    count: int = 60,
) -> Any:
    """Twenty streams, and updates meanwhile: each request is answered, and each answer consists of tokens of whole
    versions. Returns the model of the last version, which is number UPDATES_UNDER_LOAD."""
    (replica,) = cluster.replicas
    models = [model_of(path, seed) for seed in (80, 81)]
    live = model_of(path, 98)
    statuses: list[int] = []

    def ask() -> list[int]:
        response = complete(replica, PROMPT, count)
        statuses.append(response.status_code)
        return tokens(response) if response.status_code == 200 else []

    with Trainer(cluster.address, lineage=f"streams-{mode}") as trainer:
        trainer.publish(live, move=True)
        load(live, models[0])
        assert trainer.update_weights(version=0).ok
        streams = [Stream(ask) for _ in range(20)]
        try:
            for version in range(1, UPDATES_UNDER_LOAD + 1):
                load(live, models[version % 2])
                report = trainer.update_weights(version=version, pause_mode=mode)
                assert report.ok, f"{report}\n{replica.tail()}"
        finally:
            answers: list[Any] = [answer for stream in streams for answer in stream.end()]
    assert set(statuses) == {200}, "no request fails because weights change"
    whole = [answer for answer in answers if answer]
    assert len(whole) >= 20
    if mode != "abort":
        assert {len(answer) for answer in whole} == {count}, "a request that was let in ends as it should"
    if mode != "in_place":  # there new tokens are made over caches of old weights
        for answer in set(map(tuple, whole)):
            assert of_either_version(models, PROMPT, answer), answer
    strange = reference_tokens(model_of(path, 82), PROMPT, count).tokens
    assert not of_either_version(models, PROMPT, strange), "the judge would let other weights pass"
    return models[UPDATES_UNDER_LOAD % 2]
