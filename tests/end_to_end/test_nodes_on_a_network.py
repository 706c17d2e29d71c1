"""A server on two nodes with a network between them: the second one in a network namespace of its own.

Addresses and ports are those of a real network; boot id and process ids are one host's, so that both nodes' workers can
read weights through shared memory. Needs root and `ip`.
"""

from __future__ import annotations

import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest
import torch

from ckpt_engine import Trainer
from tests.cluster import Replica, eventually, generate, running_cluster
from tests.tiny_model import decisive_prompts, make_tiny_qwen3, named_weights, reference_tokens

TOKENS = 8


class Network(NamedTuple):
    """device: of this side, with `address`; the same device in the namespace has `other`."""

    namespace: str
    device: str
    address: str
    other: str


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=60)


@pytest.fixture
def network() -> Iterator[Network]:
    """This host and a namespace, joined by a cable."""
    if shutil.which("ip") is None:
        pytest.skip("`ip` is not installed")
    name = f"ck{secrets.token_hex(3)}"
    found = Network(name, f"{name}v", "10.213.77.1", "10.213.77.2")
    try:
        ip("netns", "add", name)
        ip("link", "add", found.device, "type", "veth", "peer", "name", found.device, "netns", name)
    except subprocess.CalledProcessError as error:
        subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True, timeout=60)
        pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
    try:
        ip("addr", "add", f"{found.address}/30", "dev", found.device)
        ip("link", "set", found.device, "up")
        ip("-n", name, "addr", "add", f"{found.other}/30", "dev", found.device)
        ip("-n", name, "link", "set", found.device, "up")
        ip("-n", name, "link", "set", "lo", "up")
        yield found
    finally:
        ip("netns", "del", name)


@pytest.mark.slow
def test_a_server_spans_a_network(
    network: Network, bare_model: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    torch.set_num_threads(1)
    (tmp_path / "token").write_text(secrets.token_hex(32))
    with running_cluster(tmp_path / "cluster") as cluster:
        for rank in (0, 1):
            runtime = tmp_path_factory.mktemp("n")  # short: paths of sockets have 107 bytes
            runtime.chmod(0o700)
            command = [sys.executable, "-m", "ckpt_engine", "agent", "--manager", cluster.address]
            command += ["--engine", "reference", "--model", str(bare_model), "--name", "wide"]
            command += ["--node-token", str(tmp_path / "token")]
            command += ["--deadline", "lease=15", "--advertise", network.address, "--engine-output", "--"]
            command += ["--tensor-parallel", "2", "--host", "0.0.0.0"]
            inside = ["ip", "netns", "exec", network.namespace] if rank else []
            environment = {
                "XDG_RUNTIME_DIR": str(runtime),
                "GLOO_SOCKET_IFNAME": network.device,
                "OMP_NUM_THREADS": "1",
                # As a LeaderWorkerSet tells the pods of a group: the command line is the same on both nodes.
                "LWS_GROUP_SIZE": "2",
                "LWS_WORKER_INDEX": str(rank),
                "LWS_LEADER_ADDRESS": network.address,
            }
            cluster.replicas.append(Replica(cluster, f"wide{'-1' * rank}", [*inside, *command], environment))
        wide = cluster.replicas[0]
        wide.registered()
        assert wide.url.startswith(f"http://{network.address}:"), "what other hosts are told"
        with Trainer(cluster.address, lineage="far") as trainer:
            for version in range(2):
                model = make_tiny_qwen3(tmp_path / str(version), version + 3, vocabulary=500, weights=False)
                trainer.publish(named_weights(model))
                assert trainer.update_weights(version=version).ok
                prompt = decisive_prompts(model, 1, TOKENS)[0]
                assert generate(wide, prompt, TOKENS) == reference_tokens(model, prompt, TOKENS).tokens
        # From the other host: tokens, and whether it serves; but neither where the engine lies nor how to change it.
        for route, status in (("ready", 200), ("info", 403), ("install", 403)):
            code = f"import httpx, sys; sys.exit(httpx.get('{wide.url}/ckpt_engine/{route}').status_code != {status})"
            subprocess.run(
                ["ip", "netns", "exec", network.namespace, sys.executable, "-c", code], check=True, timeout=60
            )
        # The cable is pulled: nobody resets a connection, nothing is heard any more.
        ip("link", "set", network.device, "down")

        def is_closed() -> bool:
            try:
                answer = httpx.get(f"{wide.url.replace(network.address, '127.0.0.1')}/ckpt_engine/ready", timeout=60)
            except httpx.TransportError:
                return True
            return answer.status_code == 503

        eventually("the replica is closed", 60, is_closed)
        ended = cluster.replicas[1]
        eventually("the part without a leader ends", 60, lambda: "this part of the engine is ended" in ended.tail())
