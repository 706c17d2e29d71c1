"""A Ray of several raylets on this machine, and our cluster on it, in verl's environment, which has Ray. Prints marked
JSON lines, which tests/frameworks/test_ray.py judges.

    python -m frameworks.ray_run story MODEL OUTPUT    what happens to one cluster, and then to those of other programs
    python -m frameworks.ray_run program NAME LIFETIME ADDRESS MODEL    such a program: makes a cluster and waits
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import httpx
import psutil
import ray
import torch
from ray.cluster_utils import Cluster as Raylets
from tiny_model import make_tiny_qwen3, reference_tokens

from ckpt_engine import CkptEngineError, Trainer
from ckpt_engine.integrations.ray import ProcessStatus, RayCluster

T = TypeVar("T")

BEGUN = time.monotonic()
MARK = "ckpt-engine: "
VARIABLE = "CKPT_ENGINE_RAY_TEST"
"""In the environment of all that one cluster starts."""
PROMPT = [5, 6, 7, 8]
TOKENS = 12
SLOT = "slot"
"""A replica takes one; a node has one."""
SMALL: dict[str, Any] = {"num_gpus": 0, "num_cpus": 0, "insecure": True, "relay_options": ["--memory", "64MiB"]}


def say(part: str, **content: Any) -> None:
    print(MARK + json.dumps({"part": part, **content, "seconds": round(time.monotonic() - BEGUN, 1)}), flush=True)


def eventually(what: str, look: Callable[[], T | None], seconds: float = 200.0) -> T:
    end = time.monotonic() + seconds
    while not (found := look()):
        if time.monotonic() > end:
            raise AssertionError(f"not within {seconds} s: {what}")
        time.sleep(0.1)
    return found


def kept_files() -> set[str]:
    """What clusters leave in the system's directory for temporary files."""
    return {str(each) for each in Path(tempfile.gettempdir()).glob("ckpt-engine-ray-*")}


def ours(mark: str) -> list[str]:
    """The processes with this mark, as the system knows them."""
    found = []
    for each in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if each.environ().get(VARIABLE) == mark and each.status() != psutil.STATUS_ZOMBIE:
                found.append(f"{each.pid} {' '.join(each.cmdline())[:200]}")
    return found


def keeper_of(pid: int) -> Any:
    """The process of the actor that has started this one."""
    process = psutil.Process(pid)
    while "ray::" not in " ".join(process.cmdline()):
        process = process.parent()
    return process


class Training:
    """A training actor, as a user writes one; `weights_of` is in the place of its optimizer."""

    def __init__(self, manager: str, path: str) -> None:
        self._path = path
        self._model = weights_of(0, path)
        self._trainer = Trainer(manager, lineage="story")
        self._trainer.publish(self._model, snapshot=True)

    def update(self, version: int, replicas: int | None = None) -> dict[str, str]:
        """The outcome of each replica."""
        with torch.no_grad():
            for mine, fresh in zip(self._model.parameters(), weights_of(version, self._path).parameters(), strict=True):
                mine.copy_(fresh)
        report = self._trainer.update_weights(version, min_replicas=replicas, prefetch="never")
        return {each.name: each.outcome for each in report.replicas}


def weights_of(version: int, path: str) -> Any:
    return make_tiny_qwen3(Path(path) / f"{os.getpid()}", seed=100 + version, dtype=torch.float32, weights=False)


class Story:
    """One cluster's life. Nodes: the head, and some with a slot each."""

    def __init__(self, model: str, output: str) -> None:
        self.model, self.output = model, output
        self.raylets = Raylets(initialize_head=True, head_node_args=self.arguments("head", num_cpus=1))
        self.nodes: dict[str, Any] = {}
        for _ in range(2):
            self.add_node()
        ray.init(address=self.raylets.address, log_to_driver=False)
        self.expected = {
            version: reference_tokens(weights_of(version, output), PROMPT, TOKENS).tokens for version in (1, 2)
        }

    def arguments(self, directory: str, **more: Any) -> dict[str, Any]:
        """A node of its own to us: with its own directory of relays."""
        relays = Path(self.output) / f"relays-{directory}"
        variables = {"CKPT_ENGINE_RELAY_DIRECTORY": str(relays)}
        return {"object_store_memory": 80 << 20, "include_dashboard": False, "env_vars": variables, **more}

    def add_node(self) -> str:
        node = self.raylets.add_node(**self.arguments(str(len(self.nodes)), num_cpus=0, resources={SLOT: 1}))
        self.nodes[node.node_id] = node
        return str(node.node_id)

    def tell(self) -> None:
        files = kept_files()
        self.refusals()
        with self.cluster() as cluster, cluster.client() as client:
            self.client, self.whole = client, cluster
            self.training = ray.remote(Training).options(num_cpus=1).remote(cluster.manager_address, self.output)
            cluster.wait_for_replicas(timeout=200)
            outcomes = ray.get(self.training.update.remote(1), timeout=200)
            nodes = [self.process(f"replica-{number}").node for number in range(2)]
            relays = [each.node for each in cluster.status().processes if each.kind == "relay"]
            say(
                "update",
                outcomes=outcomes,
                nodes=nodes,
                relays=sorted(relays),
                alive=sorted(each["NodeID"] for each in ray.nodes() if each["Alive"]),
                answers=[self.ask(cluster.gateway_url, 1) for _ in range(4)],
                expected=self.expected[1],
            )
            self.scaled(cluster)
            self.node_killed(cluster)
            self.manager_killed()
        ray.kill(self.training)
        actors = ray.util.list_named_actors(True)
        say("close", left=ours("story"), actors=actors, groups=self.groups(), files=sorted(kept_files() - files))
        self.example()
        for lifetime in ("", "detached"):
            self.program(lifetime)

    def cluster(self, name: str = "ckpt-engine", model: str = "", replicas: int = 2) -> RayCluster:
        """With a replica for each of two nodes."""
        return RayCluster(
            name,
            agent_options=["--engine", "reference", "--model", model or self.model],
            engine=["--dtype", "float32"],
            replicas=replicas,
            resources={SLOT: 1, "memory": 100 << 20},
            gateway=True,
            environment={VARIABLE: "story"},
            timeout=200,
            **SMALL,
        )

    def refusals(self) -> None:
        """What cannot be is refused, and leaves nothing."""
        reference = {"agent_options": ["--engine", "reference", "--model", self.model]}
        attempts: dict[str, dict[str, Any]] = {
            "a name": {"name": "a b"},
            "no engine": {"replicas": 1},
            "nothing to take": {"replicas": 1, **reference},
            "a text": {"replicas": 1, "engine": "vllm serve model"},
            "a number": {"replicas": 1, "engine": ["vllm", 3]},
            "options as a text": {"replicas": 1, "agent_options": "--engine reference"},
            "an environment": {"environment": ["A=1"]},
            "resources": {"resources": [SLOT]},
            "an amount": {"replicas": 1, "num_gpus": 1.5, **reference},
            "open to others": {"insecure": False},
            "an option": {"manager_options": ["--no-such-option"]},
            "a ledger": {"ledger": "/no/such/directory/ledger"},
            "no place": {"replicas": 1, "resources": {SLOT: 2}, "timeout": 20, **reference},
        }
        refused = {}
        for what, arguments in attempts.items():
            try:
                RayCluster(
                    **{"environment": {VARIABLE: "refused"}, "relays": False, "timeout": 60, **SMALL, **arguments}
                )
            except CkptEngineError as error:
                refused[what] = str(error)
        try:
            RayCluster.connect("absent")
        except CkptEngineError as error:
            refused["absent"] = str(error)
        with self.cluster(model="/no/such/model", name="no-model", replicas=1) as cluster:
            try:
                cluster.wait_for_replicas(timeout=30)
            except CkptEngineError as error:
                refused["a model"] = str(error)
        say("refusals", refused=refused, left=ours("refused"))

    def scaled(self, cluster: RayCluster) -> None:
        """One more replica, on one more node, and one less."""
        node = self.add_node()
        cluster.scale(3, timeout=100)
        self.serving("replica-2", 1)
        added = self.process("replica-2")
        cluster.scale(2, timeout=100)
        with RayCluster.connect().client() as client:
            left = [each.name for each in client.replicas()]
        say(
            "scale",
            added=added.node,
            new=node,
            left=left,
            # Ray takes a moment to say so.
            free=eventually("its slot is free", lambda: ray.available_resources().get(SLOT)),
            groups=self.groups(),
        )

    def node_killed(self, cluster: RayCluster) -> None:
        """A node dies while an update goes on: a stopped worker of its replica keeps that from ending before."""
        victim = self.process("replica-1")
        found = next(each for each in self.client.replicas() if each.name == "replica-1")
        psutil.Process(found.workers[0].pid).suspend()
        update = self.training.update.remote(2)
        eventually("the update goes on", lambda: self.client.status().phase != "idle")
        waited = eventually("only replica-1 is waited for", lambda: self.replica("replica-0") == 2)
        self.raylets.remove_node(self.nodes.pop(victim.node), allow_graceful=False)
        outcomes = ray.get(update, timeout=200)
        self.serving("replica-1", 2)
        say(
            "node",
            killed=victim.node,
            waited=waited,
            outcomes=outcomes,
            now=self.process("replica-1").node,
            relays=sorted(each.node for each in cluster.status().processes if each.kind == "relay"),
            alive=sorted(each["NodeID"] for each in ray.nodes() if each["Alive"]),
            answers=[self.ask(cluster.gateway_url, 2) for _ in range(4)],
            expected=self.expected[2],
        )

    def manager_killed(self) -> None:
        """The manager's process, and then its actor: it is back at its address, with its ledger."""
        cluster_id = self.client.status().fence.cluster
        for what in ("process", "actor"):
            old = self.process("manager").pid
            keeper = keeper_of(old)
            (keeper if what == "actor" else psutil.Process(old)).kill()
            eventually("another manager", lambda old=old: self.other_manager(old))
            eventually("it knows its replicas", lambda: [self.replica(f"replica-{each}") for each in (0, 1)] == [2, 2])
            clusters = [cluster_id, self.client.status().fence.cluster]
            now = keeper_of(self.process("manager").pid)
            say(f"manager {what}", keepers=[keeper.pid, now.pid], clusters=clusters)

    def example(self) -> None:
        """The example, on this Ray."""
        script = Path(__file__).parents[2] / "examples" / "ray" / "train.py"
        command = [sys.executable, str(script), "--insecure", "--model", self.model, "--address", self.raylets.address]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
        assert ended.returncode == 0, f"{ended.stdout[-2000:]}\n{ended.stderr[-4000:]}"
        say("example", printed=ended.stdout[-4000:])

    def program(self, lifetime: str) -> None:
        """A program that makes a cluster is killed."""
        name = f"of-{lifetime or 'a'}-program"
        command = [sys.executable, "-m", "frameworks.ray_run", "program", name, lifetime, self.raylets.address]
        with subprocess.Popen([*command, self.model], stdout=subprocess.PIPE, text=True) as program:
            assert program.stdout is not None
            assert any(line.startswith(MARK) for line in program.stdout), "it ended"
            there = ours(name)
            program.kill()
        if not lifetime:
            with contextlib.suppress(AssertionError):
                eventually("nothing is left", lambda: not ours(name), 60)
            say("program", there=there, left=ours(name))
            return
        time.sleep(3)  # what would end with the program has time to
        with RayCluster.connect(name) as found:
            self.whole = found
            with found.client() as client:
                identity = client.status().fence.cluster
            stayed = [each.state for each in found.status().processes]
            self.supervisor_killed(found)
        say("detached program", stayed=stayed, cluster=identity, left=ours(name))

    def supervisor_killed(self, cluster: RayCluster) -> None:
        """The actor that owns all of it: so all of it is started again."""
        cluster.scale(1, timeout=100)
        before = cluster.manager_address
        first = {each.name: each.pid for each in cluster.status().processes}
        for each in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if "ray::Supervisor" in " ".join(each.cmdline()):
                    each.kill()
        eventually("all of it runs again", lambda: self.other_processes(first))
        status = cluster.status()
        say("supervisor", replicas=status.replicas, address=status.manager_address, before=before, groups=self.groups())

    def other_processes(self, first: dict[str, int]) -> bool:
        """Whether all run, and none is the one of before."""
        with contextlib.suppress(CkptEngineError):
            now = {each.name: each.pid for each in self.whole.status().processes if each.state == "running"}
            return now.keys() == first.keys() and all(now[name] != first[name] for name in now)
        return False

    def process(self, name: str) -> ProcessStatus:
        return next(each for each in self.whole.status().processes if each.name == name)

    def other_manager(self, pid: int) -> ProcessStatus | None:
        """The manager, if it runs as another process."""
        now = self.process("manager")
        return now if now.state == "running" and now.pid not in (0, pid) else None

    def replica(self, name: str) -> int | None:
        """The version that it serves, as the manager says."""
        with contextlib.suppress(CkptEngineError):
            for each in self.client.replicas():
                if each.name == name and each.connected and each.serving:
                    return int(each.identity.version)
        return None

    def serving(self, name: str, version: int) -> None:
        eventually(f"{name} serves version {version}", lambda: self.replica(name) == version)

    def groups(self) -> list[str]:
        """Placement groups that hold, or wait for, a place."""
        table = ray.util.placement_group_table()
        return sorted(each["name"] for each in table.values() if each["state"] != "REMOVED")

    def ask(self, url: str | None, version: int) -> list[int]:
        """Tokens, by way of the gateway."""
        body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": TOKENS, "temperature": 0}}
        headers = {"X-Ckpt-Engine-Version": str(version), "X-Ckpt-Engine-Lineage": "story"}
        answer = httpx.post(f"{url}/generate", json=body, headers=headers, timeout=100)
        assert answer.status_code == 200, answer.text
        tokens: list[int] = answer.json()["output_ids"]
        return tokens


def program(name: str, lifetime: str, address: str, model: str) -> None:
    ray.init(address=address, log_to_driver=False)
    cluster = RayCluster(
        name,
        agent_options=["--engine", "reference", "--model", model],
        resources={SLOT: 1},
        gateway=True,
        environment={VARIABLE: name},
        lifetime="detached" if lifetime else None,
        **SMALL,
    )
    eventually("all of it runs", lambda: all(each.state == "running" for each in cluster.status().processes))
    say("begun")
    time.sleep(600)


if __name__ == "__main__":
    if sys.argv[1] == "story":
        Story(*sys.argv[2:]).tell()
    else:
        program(*sys.argv[2:])
