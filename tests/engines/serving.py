"""What tests ask of a real engine's server in the same way, whichever engine it is; how to ask it for tokens they pass.

`complete` is the engine's own: replica, prompt's token ids, count of tokens to the HTTP answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx

from ckpt_engine import Trainer
from ckpt_engine.install.directory import TOKEN_HEADER, EngineDirectory
from ckpt_engine.install.gate import ROUTES_ROUTE, Gate
from tests.cluster import Cluster, Replica
from tests.end_to_end.test_several_nodes import free_address
from tests.tiny_model import DECISIVE_GAP, decisive_prompts, make_tiny_qwen3, named_weights, reference_tokens

TOKENS = 32

Complete = Callable[..., httpx.Response]


def model_of(path: Path, seed: int, **options: Any) -> Any:
    return make_tiny_qwen3(path / str(seed), seed, weights=False, **options)


def publish(trainer: Trainer, model: Any) -> None:
    trainer.publish(named_weights(model))


def check_serves(
    complete: Complete, tokens: Callable[[httpx.Response], list[int]], replica: Replica, model: Any, version: int
) -> httpx.Response:
    """Greedy tokens are transformers', where rounding cannot decide, under this version. Returns the answer."""
    prompt = decisive_prompts(model, 1, TOKENS)[0]
    expected = reference_tokens(model, prompt, TOKENS)
    assert expected.gap > DECISIVE_GAP
    response = complete(replica, prompt)
    assert tokens(response) == expected.tokens
    assert response.headers["x-ckpt-engine-version"] == str(version)
    return response


def check_closed(complete: Complete, replica: Replica) -> None:
    """The server lives and answers no request."""
    assert httpx.get(f"{replica.url}/health", timeout=30).status_code == 200
    response = complete(replica, [1, 2, 3], 2)
    assert response.status_code == 503, response.text


def token_of(replica: Replica) -> dict[str, str]:
    """The header with which the agent shows its token."""
    directory = Path(httpx.get(f"{replica.url}/ckpt_engine/info", timeout=30).json()["directory"])
    return {TOKEN_HEADER: EngineDirectory(directory).token()}


def check_routes(replica: Replica, gate: type[Gate], root_path: str = "") -> None:
    """Every route of the server has a class, and none that changes it answers without the token.

    One that this engine has and the gate does not know fails here by name: it must be judged by somebody.
    """
    routes = httpx.get(replica.url + ROUTES_ROUTE, headers=token_of(replica), timeout=30).json()
    assert [route for route, access in routes.items() if access == "unknown"] == []
    assert set(routes.values()) == {"open", "gated", "control"}
    for route in {*gate.control_routes, *(route for route, access in routes.items() if access == "control")}:
        for path in {route, root_path + route}:
            for method in ("POST", "GET"):
                assert httpx.request(method, replica.url + path, timeout=30).status_code == 403, (method, path)


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
