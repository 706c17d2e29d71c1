"""Images whose steps were performed in fresh directories, run as their manifests have them.

No image is pulled and no container engine is there: the base is this machine's own programs and Python, read-only. What
runs is process 1 of its namespaces, without rights, with a read-only root, and writes only where its manifest says.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import trustme
import yaml

from tests.images.building import Builder, Image
from tests.images.dockerfile import context_of
from tests.images.pods import Container, Pod, network_of_its_own
from tests.images.rooms import Mounted, can_be_made
from tests.tiny_model import make_tiny_qwen3

ROOT = Path(__file__).resolve().parents[2]
KUBERNETES = ROOT / "examples" / "kubernetes"
TOKENS = {"holder/*": "h" * 32, "viewer": "v" * 32, "trainer/*": "t" * 32, "replica/*": "r" * 32}

pytestmark = [
    pytest.mark.slow,  # 200 s, most of them pip, which brings the packages of the manager, the relay and the trainer
    pytest.mark.skipif(bool(can_be_made()), reason=can_be_made() or "as root, with a Python of its own"),
]


def pod_of(manifest: str, kind: str) -> Mapping[str, Any]:
    for document in yaml.safe_load_all((KUBERNETES / manifest).read_text()):
        if document["kind"] == kind:
            return document["spec"]["template"]["spec"]
    raise LookupError(f"{manifest} has no {kind}")


@pytest.fixture(scope="module")
def secrets() -> dict[str, dict[str, str]]:
    """The Secrets that the manifests name."""
    authority = trustme.CA()
    certificate = authority.issue_cert("ckpt-engine-manager", "127.0.0.1")
    ours = {
        "ca.crt": authority.cert_pem.bytes().decode(),
        "tls.crt": "".join(each.bytes().decode() for each in certificate.cert_chain_pems),
        "tls.key": certificate.private_key_pem.bytes().decode(),
        "tokens": "".join(f"{grant} {hashlib.sha256(token.encode()).hexdigest()}\n" for grant, token in TOKENS.items()),
    }
    return {
        "ckpt-engine-manager": ours,
        "ckpt-engine-gateway": {**ours, "token": TOKENS["viewer"]},
        "ckpt-engine-relay": {**ours, "token": TOKENS["holder/*"]},
        "ckpt-engine-trainer": {**ours, "token": TOKENS["trainer/*"]},
        "ckpt-engine-replica": {**ours, "token": TOKENS["replica/*"]},
    }


Starts = Callable[[str, str], Pod]


@pytest.fixture
def pod(builder: Builder, secrets: dict[str, dict[str, str]], tmp_path: Path) -> Iterator[Callable[..., Pod]]:
    """Makes pods of manifests on one network with loopback alone; all of them end with the test."""
    made: list[Pod] = []
    with network_of_its_own() as network:

        def make(spec: Mapping[str, Any], *targets: str) -> Pod:
            images = {f"ckpt-engine-{target}".replace("-manager", ""): builder.image(target) for target in targets}
            fields = {"spec.nodeName": "node-1", "status.podIP": "127.0.0.1", "metadata.name": "pod-0"}
            made.append(Pod(tmp_path / f"pod{len(made)}", network, spec, images, fields, secrets, tmp_path / "host"))
            return made[-1]

        try:
            yield make
        finally:
            for each in made:
                each.close()


def started(pod: Pod, spec: Mapping[str, Any]) -> Container:
    """The pod's one container, once its probes say that it is ready and alive."""
    (wanted,) = spec["containers"]
    container = pod.start(wanted)
    for kind in ("readinessProbe", "livenessProbe"):
        container.until(kind, lambda kind=kind: pod.probe(wanted, kind))
    return container


def ids_of(container: Container) -> dict[str, str]:
    lines = Path(f"/proc/{container.pid}/status").read_text().splitlines()
    return dict(line.split(":\t", 1) for line in lines if ":\t" in line)


def without_rights(container: Container) -> None:
    """Process 1 is user 10001, may nothing that only root may, and can write nowhere but in its volumes."""
    ids = ids_of(container)
    assert ids["Uid"].split() == ids["Gid"].split() == ["10001"] * 4
    assert {int(ids[name], 16) for name in ("CapPrm", "CapEff", "CapBnd", "CapInh")} == {0}
    assert ids["NoNewPrivs"] == "1"
    for folder in ("/opt", "/etc", "/var", "/usr/local"):
        tried = container.execute(["touch", f"{folder}/written"])
        assert tried.returncode, folder
        assert "Read-only file system" in tried.stderr or "Permission denied" in tried.stderr
    assert container.execute(["touch", "/tmp/written"]).returncode == 0


def small_relay() -> Mapping[str, Any]:
    """The relay's pod, with less memory than the example gives it: this machine has not as much."""
    spec = dict(pod_of("relayed/relay.yaml", "DaemonSet"))
    (container,) = spec["containers"]
    words = ["--memory=64MiB" if word.startswith("--memory") else word for word in container["args"]]
    return {**spec, "containers": [{**container, "args": words}]}


def test_manager_gateway_and_relay_run_from_their_images(pod: Callable[..., Pod], tmp_path: Path) -> None:
    manager_spec = pod_of("base/manager.yaml", "Deployment")
    manager_pod = pod(manager_spec, "manager")
    manager = started(manager_pod, manager_spec)
    without_rights(manager)
    assert manager.execute(["ls", "/var/lib/ckpt-engine"]).stdout.split()[0] == "ledger.sqlite3"
    assert manager.execute(["python", "-c", "import torch"]).returncode == 1, "the manager's image has no torch"

    relay_spec = small_relay()
    relay_pod = pod(relay_spec, "relay")
    (owner,) = relay_spec["initContainers"]
    assert relay_pod.start(owner).process.wait(60) == 0
    relay = started(relay_pod, relay_spec)
    without_rights(relay)
    directory = tmp_path / "host" / "run" / "ckpt-engine-relays"
    assert (directory.stat().st_uid, directory.stat().st_mode & 0o777) == (10001, 0o700)

    def holders() -> list[dict[str, Any]]:
        shown = ("CKPT_ENGINE_AUTHORITY=/etc/ckpt-engine/ca.crt", "CKPT_ENGINE_TOKEN_FILE=/tmp/token")
        command = ("ckpt-engine", "status", "--manager=ckpt-engine-manager:50051", "--json")
        asked = manager.execute(["env", *shown, *command])
        assert asked.returncode == 0, asked.stderr + asked.stdout
        return json.loads(asked.stdout).get("holders", [])

    written = manager.execute(["sh", "-c", f"umask 077; printf {TOKENS['viewer']} > /tmp/token"])
    assert written.returncode == 0, written.stderr
    relay.until("the relay at the manager", lambda: [each["name"] for each in holders()] == ["node-1"])

    gateway_spec = pod_of("base/gateway.yaml", "Deployment")
    gateway_pod = pod(gateway_spec, "gateway")
    gateway = started(gateway_pod, gateway_spec)
    without_rights(gateway)

    for container, spec in ((gateway, gateway_spec), (relay, relay_spec), (manager, manager_spec)):
        grace = spec.get("terminationGracePeriodSeconds", 30)
        assert container.stop(grace) == 0, container.said()
    assert list(directory.glob("*.sock*")) == [], "a relay leaves no socket"


def launched(pod: Callable[..., Pod]) -> list[Container]:
    """The replica of `relayed`, with the reference engine, in the trainer's image, in the place of vLLM."""
    spec = pod_of("relayed/replica.yaml", "StatefulSet")
    (container,) = spec["containers"]
    words = ["--engine=reference" if word == "--engine=vllm" else word for word in container["args"]]
    words.remove("--tensor-parallel-size=2")
    return [pod(spec, "trainer").start({**container, "image": "ckpt-engine-trainer:0.1.0", "args": words})]


def attached(pod: Callable[..., Pod]) -> list[Container]:
    """That of `attached`: its agent, in the manager's image, is there before the engine, and ends after it."""
    expanded = subprocess.run(
        ["kubectl", "kustomize", str(KUBERNETES / "attached")], capture_output=True, text=True, timeout=120, check=True
    )
    (spec,) = [
        document["spec"]["template"]["spec"]
        for document in yaml.safe_load_all(expanded.stdout)
        if (document["kind"], document["metadata"]["name"]) == ("StatefulSet", "replica")
    ]
    (agent,), (engine,) = spec["initContainers"], spec["containers"]
    made = pod(spec, "manager", "trainer")
    words = ["--engine=reference" if word == "--engine=vllm" else word for word in agent["args"]]
    first = made.start({**agent, "args": words})
    first.until("the agent waits", lambda: "waiting for the engine" in first.said())
    server = ["python", "-m", "ckpt_engine_adapters.reference.server"]
    words = ["--model=/models/policy", "--host=0.0.0.0", "--port=8000"]
    image = "ckpt-engine-trainer:0.1.0"
    return [made.start({**engine, "image": image, "command": server, "args": words}), first]


@pytest.mark.parametrize("replica_of", [launched, attached])
def test_a_job_updates_a_replica_by_way_of_its_node_s_relay(
    pod: Callable[..., Pod], tmp_path: Path, replica_of: Callable[..., list[Container]]
) -> None:
    """All of `relayed`, on one node: its replica shares the relay's directory, and no processes with other pods."""
    if replica_of is attached and shutil.which("kubectl") is None:
        pytest.skip("kubectl, which expands kustomizations, is not installed")
    model = tmp_path / "host" / "models" / "policy"
    make_tiny_qwen3(model)
    for path in model.iterdir():
        path.chmod(0o644)  # for user 10001
    manager_spec, relay_spec = pod_of("base/manager.yaml", "Deployment"), small_relay()
    manager = started(pod(manager_spec, "manager"), manager_spec)
    relay_pod = pod(relay_spec, "relay")
    assert relay_pod.start(relay_spec["initContainers"][0]).process.wait(60) == 0
    relay = started(relay_pod, relay_spec)

    containers = replica_of(pod)
    replica, probed = containers[0], pod_of("relayed/replica.yaml", "StatefulSet")["containers"][0]
    ready = "http://127.0.0.1:8000/ckpt_engine/ready"
    replica.until("a closed engine", lambda: replica.pod.get(ready)[0] == 503)
    assert not replica.pod.probe(probed, "readinessProbe")

    job_spec = pod_of("relayed/trainer.yaml", "Job")
    (container,) = job_spec["containers"]
    words = {"--steps=1000": "--steps=2", "--replicas=2": "--replicas=1"}
    job = pod(job_spec, "trainer").start({**container, "args": [words.get(word, word) for word in container["args"]]})
    assert job.process.wait(300) == 0, job.said() + "".join(each.said() for each in containers) + relay.said()
    assert replica.pod.probe(probed, "readinessProbe"), replica.said()
    assert replica.pod.get(f"{ready}?at_least=1")[0] == 200
    assert replica.pod.get(f"{ready}?at_least=2")[0] == 503
    if (
        replica_of is launched
    ):  # the other one sees the trainer's processes too (pods.py), and reads their memory itself
        assert "version 1 of " in relay.said(), relay.said()
        assert " is held: " in relay.said(), relay.said()
    for each in (*containers, relay, manager):
        assert each.stop(60) == 0, each.said()


@pytest.mark.parametrize(
    ("target", "options"),
    [
        ("manager", ()),
        ("gateway", ("gateway", "--replica", "http://127.0.0.1:9")),
        ("relay", ("relay", "--manager", "127.0.0.1:9", "--memory", "64MiB")),
    ],
)
def test_health_checks_of_images_tell_whether_they_answer(
    builder: Builder, tmp_path: Path, target: str, options: tuple[str, ...]
) -> None:
    """An image without a manifest: as `docker run --read-only --tmpfs /tmp` would, with its own command."""
    image: Image = builder.image(target)
    spec = {"securityContext": {}, "volumes": [{"name": "tmp", "emptyDir": {}}, {"name": "state", "emptyDir": {}}]}
    with network_of_its_own() as network:
        pod = Pod(tmp_path / "pod", network, spec, {}, {}, {}, tmp_path)
        try:
            state = tmp_path / "pod" / "state"
            os.chown(state, 10001, 10001)
            mounts = [Mounted(tmp_path / "pod" / "tmp", "/tmp", True), Mounted(state, "/var/lib/ckpt-engine", True)]
            words = [*image.entrypoint, *(options or image.command)]
            container = pod.begin(
                target, image, words, image.room.environment, mounts, user=image.user, caged=True, writable=False
            )
            assert container.pid
            container.until("a healthy container", lambda: container.execute(image.health).returncode == 0)
            unhealthy = [*image.health[:-1], "/there-is-no-such-page"]
            if target != "relay":  # whose metrics are at every path
                assert container.execute(unhealthy).returncode == 1
            assert container.stop(60) == 0, container.said()
        finally:
            pod.close()


def test_the_wheel_is_the_same_from_another_checkout(builder: Builder, tmp_path: Path) -> None:
    """Other times, other modes, another folder: the wheel has the same bytes."""
    (first,) = (builder.image("wheel").room.top / "wheels").glob("*.whl")
    other = tmp_path / "checkout"
    for name in [*context_of(ROOT), Path(".dockerignore")]:
        (other / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, other / name)
        (other / name).chmod(0o600)
        os.utime(other / name, (1e9, 1e9))
    again = builder.on(other, tmp_path / "roots")
    (second,) = (again.image("wheel").room.top / "wheels").glob("*.whl")
    assert first.name == second.name
    assert hashlib.sha256(first.read_bytes()).digest() == hashlib.sha256(second.read_bytes()).digest()
