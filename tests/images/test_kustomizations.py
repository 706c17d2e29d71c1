"""The kustomizations of examples/kubernetes: expanded by kubectl, and read by the schema of Kubernetes.

What a cluster would refuse only when a pod starts (rights, volumes, ports, names) is checked here besides.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from tests.images.dockerfile import stages_of

ROOT = Path(__file__).resolve().parents[2]
KUBERNETES = ROOT / "examples" / "kubernetes"
FOLDERS = sorted(path.parent for path in KUBERNETES.rglob("kustomization.yaml"))
OVERLAYS = [KUBERNETES / name for name in ("attached", "mine", "standby", "together", "wide")]
"""Those that no other one names; between them they name every folder."""
VERSION = "1.32"
OF_AN_OPERATOR = {"LeaderWorkerSet", "ServiceMonitor", "PodMonitor"}
"""Kinds that Kubernetes's own schema does not have."""

LEADER_WORKER_SET = {
    "type": "object",
    "additionalProperties": False,
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "properties": {
        "apiVersion": {"const": "leaderworkerset.x-k8s.io/v1"},
        "kind": {"const": "LeaderWorkerSet"},
        "metadata": {"type": "object"},
        "spec": {
            "type": "object",
            "additionalProperties": False,
            "required": ["leaderWorkerTemplate"],
            "properties": {
                "replicas": {"type": "integer", "minimum": 0},
                "startupPolicy": {"enum": ["LeaderCreated", "LeaderReady"]},
                "leaderWorkerTemplate": {
                    "type": "object",
                    "additionalProperties": False,
                    "required": ["workerTemplate"],
                    "properties": {
                        "size": {"type": "integer", "minimum": 1},
                        "restartPolicy": {
                            "enum": ["Default", "RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"]
                        },
                        "leaderTemplate": {"type": "object"},
                        "workerTemplate": {"type": "object"},
                    },
                },
            },
        },
    },
}
"""What a LeaderWorkerSet takes, as far as ours go. Its pods are PodTemplates', which Kubernetes's schema has."""

DELETED = {"standby": [("PersistentVolumeClaim", "ckpt-engine-ledger")]}
"""What the patches of an overlay delete."""

Document = Mapping[str, Any]


def documents(text: str) -> list[Document]:
    return [document for document in yaml.load_all(text, yaml.CSafeLoader) if document]


def plain(folder: Path) -> Iterator[Document]:
    """What a kustomization and those below it name, without patches; objects that a patch of its own deletes are left
    out."""
    deleted = {(kind, name) for kind, name in DELETED.get(folder.name, ())}
    yield from (each for each in _named(folder) if (each["kind"], each["metadata"]["name"]) not in deleted)


def _named(folder: Path) -> Iterator[Document]:
    (wanted,) = documents((folder / "kustomization.yaml").read_text())
    for name in (*wanted.get("resources", ()), *wanted.get("components", ())):
        path = (folder / name).resolve()
        yield from plain(path) if path.is_dir() else documents(path.read_text())


def templates(document: Document) -> list[Mapping[str, Any]]:
    """Of the pods that an object makes."""
    spec = document.get("spec", {})
    group = spec.get("leaderWorkerTemplate", {})
    found = (spec.get("template"), group.get("leaderTemplate"), group.get("workerTemplate"))
    return [each for each in found if each is not None and "spec" in each]


def pods(found: Sequence[Document]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for document in found:
        for template in templates(document):
            yield f"{document['kind']} {document['metadata']['name']}", template["spec"]


def running(pod: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Its containers that run as long as it does: native sidecars are init containers that always restart."""
    return [*pod["containers"], *(each for each in pod.get("initContainers", ()) if each.get("restartPolicy"))]


def validate(document: Document) -> None:
    """Raises a ValidationError of kubernetes_validate, or of jsonschema for what is not Kubernetes's own."""
    if document["kind"] == "LeaderWorkerSet":
        jsonschema.validate(document, LEADER_WORKER_SET)
        for template in templates(document):
            named = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "pod"}, "template": template}
            kubernetes_validate.validate(named, VERSION, strict=True)
    elif document["kind"] not in OF_AN_OPERATOR:
        kubernetes_validate.validate(document, VERSION, strict=True)


def agrees(found: Sequence[Document]) -> None:
    """Raises AssertionError for what does not fit together."""
    names = [(document["kind"], document["metadata"]["name"]) for document in found]
    assert len(set(names)) == len(names), "two objects of one name"
    labelled: dict[str, tuple[set[int], set[str]]] = {}
    for document in found:
        validate(document)
        for template in templates(document):
            numbers, port_names = labelled.setdefault(template["metadata"]["labels"]["app"], (set(), set()))
            for port in (port for each in running(template["spec"]) for port in each.get("ports", ())):
                numbers.add(port["containerPort"])
                port_names |= {port["name"]} if "name" in port else set()
    services = {
        document["metadata"].get("labels", {}).get("app"): {port["name"] for port in document["spec"]["ports"]}
        for document in found
        if document["kind"] == "Service"
    }
    for document in found:
        spec, name = document.get("spec", {}), document["metadata"]["name"]
        match document["kind"]:
            case "Service":
                ports, _ = labelled[spec["selector"]["app"]]
                assert {port["port"] for port in spec["ports"]} <= ports, name
            case "NetworkPolicy":
                ports, _ = labelled[spec["podSelector"]["matchLabels"]["app"]]
                assert {port["port"] for rule in spec["ingress"] for port in rule["ports"]} <= ports, name
            case "LeaderWorkerSet":
                assert ("Service", name) not in names, f"{name}: it makes a Service of its own name"
            case "PodDisruptionBudget":
                assert spec["selector"]["matchLabels"]["app"] in labelled, name
            case "ServiceMonitor":
                assert {each["port"] for each in spec["endpoints"]} <= services[spec["selector"]["matchLabels"]["app"]]
            case "PodMonitor":
                (term,) = spec["selector"]["matchExpressions"]
                for app in term["values"]:
                    assert {each["port"] for each in spec["podMetricsEndpoints"]} <= labelled[app][1], name
    for name, pod in pods(found):
        confined(name, pod)


def confined(name: str, pod: Mapping[str, Any]) -> None:
    """No container of ours is root, can become it, or writes beside its volumes; one sets the owner of a hostPath."""
    context = pod["securityContext"]
    assert context["runAsNonRoot"] is True, name
    assert context["runAsUser"] == context["runAsGroup"] == context["fsGroup"] == 10001, name
    assert context["seccompProfile"] == {"type": "RuntimeDefault"}, name
    assert pod["automountServiceAccountToken"] is False, name
    assert not pod.get("hostNetwork"), name
    volumes = {volume["name"] for volume in pod["volumes"]}
    for container in (*pod["containers"], *pod.get("initContainers", ())):
        if "restartPolicy" in container:
            sidecar = container not in pod["containers"] and container["restartPolicy"] == "Always"
            assert sidecar, f"{name}: {container['name']} is no sidecar"
        own = container["securityContext"]
        assert own["allowPrivilegeEscalation"] is False, name
        assert own["readOnlyRootFilesystem"] is True, name
        assert not own.get("privileged"), name
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        assert set(mounts.values()) <= volumes, name
        if container in running(pod):
            assert own["capabilities"] == {"drop": ["ALL"]}, name
            assert "/tmp" in mounts, f"{name}: a root that is read-only needs a /tmp"
        else:
            assert own["capabilities"] == {"drop": ["ALL"], "add": ["CHOWN", "FOWNER"]}, name


def test_each_folder_names_what_lies_in_it() -> None:
    assert {folder.name for folder in FOLDERS} == {path.name for path in KUBERNETES.iterdir()}
    named = set()
    for folder in FOLDERS:
        (wanted,) = documents((folder / "kustomization.yaml").read_text())
        files = {path.name for path in folder.glob("*.yaml")} - {"kustomization.yaml"}
        resources = wanted.get("resources", ())
        patches = {each["path"] for each in wanted.get("patches", ()) if "path" in each}
        assert {name for name in resources if name.endswith(".yaml")} | patches == files, folder.name
        folders = (*resources, *wanted.get("components", ()))
        named |= {(folder / name).resolve() for name in folders if not name.endswith(".yaml")}
    assert set(FOLDERS) - named == set(OVERLAYS)


@pytest.mark.parametrize("folder", OVERLAYS, ids=lambda path: path.name)
def test_what_an_overlay_names_fits_together(folder: Path) -> None:
    agrees(list(plain(folder)))


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl, which expands kustomizations, is not installed")
@pytest.mark.parametrize("folder", OVERLAYS, ids=lambda path: path.name)
def test_kustomize_expands_it(folder: Path) -> None:
    done = subprocess.run(
        ["kubectl", "kustomize", str(folder)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr, "what is deprecated is said there"
    found = documents(done.stdout)
    agrees(found)
    assert len(found) == len(list(plain(folder)))
    if folder.name == "attached":
        ((_, replica),) = (each for each in pods(found) if each[0] == "StatefulSet replica")
        (engine,), (agent,) = replica["containers"], replica["initContainers"]
        assert (engine["name"], agent["name"], agent["restartPolicy"]) == ("engine", "agent", "Always")
        assert replica["shareProcessNamespace"] is True
        shared = [{mount["mountPath"]: mount["name"] for mount in each["volumeMounts"]} for each in (engine, agent)]
        for path in ("/tmp", "/run/relays"):
            assert shared[0][path] == shared[1][path], f"both must see one {path}"
    if folder.name == "standby":
        ((_, manager),) = (pod for pod in pods(found) if pod[0] == "Deployment ckpt-engine-manager")
        assert not any(word.startswith("--ledger") for word in manager["containers"][0]["args"])
        assert not any("persistentVolumeClaim" in volume for volume in manager["volumes"])
    if folder.name == "mine":
        (relay,) = (pod for name, pod in pods(found) if name == "DaemonSet ckpt-engine-relay")
        (container,) = relay["containers"]
        assert "--memory=200GiB" in container["args"]
        assert container["resources"]["limits"] == container["resources"]["requests"] == {"memory": "202Gi"}
        images = {container["image"] for _, pod in pods(found) for container in pod["containers"]}
        assert all(image.startswith("images.example/rl/") for image in images), images
        assert {document["metadata"]["namespace"] for document in found} == {"rl"}


def test_a_cluster_s_mistakes_are_found() -> None:
    """The checks of this file see what they are for."""
    for change, said in (
        (lambda pod: pod["containers"][0]["volumeMounts"].pop(), "needs a /tmp"),
        (lambda pod: pod["containers"][0]["securityContext"].pop("capabilities"), "capabilities"),
        (lambda pod: pod["securityContext"].update(runAsUser=0), "Deployment ckpt-engine-manager"),
        (lambda pod: pod["containers"][0].update(livenessprobe={}), "livenessprobe"),
        (lambda pod: pod["containers"][0].update(ports=[{"containerPort": 1}]), "ckpt-engine-manager"),
        (
            lambda pod: pod.update(initContainers=[{"name": "agent", "restartPolicy": "Sometimes"}]),
            "agent is no sidecar",
        ),
    ):
        found = list(plain(KUBERNETES / "base"))
        ((_, pod),) = (each for each in pods(found) if each[0] == "Deployment ckpt-engine-manager")
        change(pod)
        with pytest.raises((AssertionError, KeyError, kubernetes_validate.ValidationError), match=said):
            agrees(found)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda group: group.update(startupPolicy="Late"), "Late"),
        (lambda group: group["leaderWorkerTemplate"].update(sizes=2), "sizes"),
        (lambda group: group["leaderWorkerTemplate"].pop("workerTemplate"), "workerTemplate"),
        (lambda group: group["leaderWorkerTemplate"]["workerTemplate"]["spec"].update(hostPid=True), "hostPid"),
        (lambda group: group["leaderWorkerTemplate"]["leaderTemplate"]["spec"]["containers"][0].pop("name"), "name"),
    ],
)
def test_a_leader_worker_set_s_mistakes_are_found(change: Callable[[Any], object], said: str) -> None:
    (group,) = (each for each in plain(KUBERNETES / "wide") if each["kind"] == "LeaderWorkerSet")
    change(group["spec"])
    with pytest.raises((jsonschema.ValidationError, kubernetes_validate.ValidationError), match=said):
        validate(group)


def test_images_of_manifests_are_those_that_can_be_built() -> None:
    stages = {stage.name for stage in stages_of((ROOT / "images" / "Dockerfile").read_text(), {})}
    built = {"ckpt-engine", "ckpt-engine-vllm", *(f"ckpt-engine-{name}" for name in stages)}
    version = re.search(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.M)
    assert version is not None
    for folder in OVERLAYS:
        for name, pod in pods(list(plain(folder))):
            for container in (*pod["containers"], *pod.get("initContainers", ())):
                image, _, tag = container["image"].partition(":")
                assert (image in built, tag) == (True, version[1]), f"{name}: {container['image']}"
