"""The Helm chart of examples/helm, rendered by the real helm: objects as kustomizations make them, and values."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from typing import Any

import pytest

from tests.images.helm import helm
from tests.images.test_kustomizations import KUBERNETES, ROOT, VERSION, Document, agrees, documents, pods

CHART = ROOT / "examples" / "helm"
OF_THE_USER = {("Job", "trainer")}
"""Objects of the kustomizations that the chart leaves to its user."""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([helm(), *arguments], capture_output=True, text=True, timeout=120, check=False)


def rendered(*values: str) -> list[Document]:
    settings = [word for value in values for word in ("--set", value)]
    done = run("template", "weights", str(CHART), "--kube-version", VERSION, *settings)
    assert done.returncode == 0, done.stderr
    return documents(done.stdout)


def kustomized(folder: str) -> list[Document]:
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl, which expands kustomizations, is not installed")
    done = subprocess.run(
        ["kubectl", "kustomize", str(KUBERNETES / folder)], capture_output=True, text=True, timeout=120, check=True
    )
    return documents(done.stdout)


def by_name(found: list[Document]) -> dict[tuple[str, str], Document]:
    return {(document["kind"], document["metadata"]["name"]): document for document in found}


@pytest.mark.parametrize(
    ("values", "folder"), [((), "relayed"), (("replica.sidecar=true",), "attached")], ids=["relayed", "attached"]
)
def test_it_makes_what_a_kustomization_makes(values: tuple[str, ...], folder: str) -> None:
    ours, theirs = by_name(rendered(*values)), by_name(kustomized(folder))
    assert theirs.keys() - ours.keys() == OF_THE_USER
    for name, document in ours.items():
        assert document == theirs[name], name


def test_its_monitors_are_those_of_the_component() -> None:
    monitors = {
        name: document
        for name, document in by_name(rendered("monitoring.enabled=true")).items()
        if "Monitor" in name[0]
    }
    assert len(monitors) == 3
    assert monitors.items() <= by_name(documents((KUBERNETES / "monitoring" / "monitors.yaml").read_text())).items()


@pytest.mark.parametrize("values", [(), ("replica.sidecar=true", "monitoring.enabled=true")], ids=["usual", "all"])
def test_what_it_makes_fits_together(values: tuple[str, ...]) -> None:
    agrees(rendered(*values))


def test_values_reach_what_they_are_for() -> None:
    found = rendered(
        "images.registry=images.example/rl",
        "images.tag=7",
        "relay.memory=200",
        "relay.nodeSelector.weights=relay",
        "replica.count=8",
        "replica.gpus=4",
        "replica.ready=at_least=1200&lineage=run-7",
        "replica.arguments={--tensor-parallel-size=4,--max-model-len=4096}",
    )
    agrees(found)
    made: Mapping[str, Mapping[str, Any]] = dict(pods(found))
    (relay,), (replica,) = (made[name]["containers"] for name in ("DaemonSet ckpt-engine-relay", "StatefulSet replica"))
    assert "--memory=200GiB" in relay["args"]
    assert relay["resources"]["limits"] == {"memory": "202Gi"}
    assert made["DaemonSet ckpt-engine-relay"]["nodeSelector"] == {"weights": "relay"}
    assert replica["args"][-3:] == ["--host=0.0.0.0", "--tensor-parallel-size=4", "--max-model-len=4096"]
    assert replica["readinessProbe"]["httpGet"]["path"] == "/ckpt_engine/ready?at_least=1200&lineage=run-7"
    assert replica["resources"]["limits"] == {"nvidia.com/gpu": 4}
    images = {container["image"] for pod in made.values() for container in pod["containers"]}
    assert all(image.startswith("images.example/rl/ckpt-engine") and image.endswith(":7") for image in images), images


def test_helm_finds_nothing_wrong_with_it() -> None:
    done = run("lint", "--strict", str(CHART))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("value", ["replica.counts=8", "relay.nodeSelector.weights=true", "relay.memory=64GiB"])
def test_a_value_that_cannot_be_is_refused(value: str) -> None:
    done = run("template", "weights", str(CHART), "--set", value)
    assert done.returncode != 0
    assert value.partition("=")[0].split(".")[1] in done.stderr


def test_its_version_is_that_of_the_package() -> None:
    (chart,) = documents((CHART / "Chart.yaml").read_text())
    (values,) = documents((CHART / "values.yaml").read_text())
    assert f'version = "{chart["version"]}"' in (ROOT / "pyproject.toml").read_text()
    assert chart["appVersion"] == values["images"]["tag"] == chart["version"]
