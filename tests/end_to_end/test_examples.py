"""The examples: what torchrun starts is really run; units and manifests are read as their programs read them."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from ckpt_engine.agent.nodes import NodeSettings
from ckpt_engine.cli import app_for
from ckpt_engine.commands.agent import EVICTED
from ckpt_engine.engine.adapter import load_adapter
from ckpt_engine.engine.node_plan import NodePart, node_plan_of
from ckpt_engine.gate.gate import READY_ROUTE
from tests.cluster import Cluster, generate, running_cluster

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
UNITS = sorted((EXAMPLES / "systemd").glob("*.service"))
MANIFESTS = sorted((EXAMPLES / "kubernetes").rglob("*.yaml"))


def parsed(command: Sequence[str], environment: Mapping[str, str] = {}) -> dict[str, Any]:
    """The options of a `ckpt-engine` command line, read by our own command line; raises what that raises."""
    program, *arguments = command
    assert Path(program).name == "ckpt-engine"
    group = typer.main.get_command(app_for(arguments))
    context = group.make_context("ckpt-engine", list(arguments))
    name, rest = context._protected_args[0], [*context._protected_args[1:], *context.args]
    found = dict(group.commands[name].make_context(name, rest, parent=context).params)
    if name == "agent":
        options = (found["nodes"], found["node_rank"], found["leader"], found["node_token"])
        nodes = NodeSettings.found(*options, environment)
        arguments, model = tuple(found["arguments"] or ()), found["model"]
        if found["url"]:
            return found
        if nodes.nodes == 1:
            plan = load_adapter(found["engine"]).launch_plan(arguments, found["port"] or 1, model)
        else:
            part = NodePart(nodes.nodes, nodes.rank, nodes.host, 1)
            plan = node_plan_of(found["engine"])(arguments, found["port"] or 1, model, part)
        assert plan.url.startswith("http://127.0.0.1:")
    return found


def test_our_reading_of_command_lines_refuses_what_the_command_would() -> None:
    with pytest.raises(Exception, match="No such option"):
        parsed(["ckpt-engine", "manager", "--lisen", "127.0.0.1:1"])


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, bare_model: Path) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("examples")) as running:
        running.replica("one", "reference", bare_model)
        yield running


@pytest.mark.slow
def test_ranks_that_torchrun_starts_update_a_replica(cluster: Cluster, bare_model: Path) -> None:
    replica = cluster.replicas[0].registered()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-id", "run-7"]
    # Here so that two runs on one machine do not meet at one port.
    torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    script = [str(EXAMPLES / "torchrun" / "train.py"), "--manager", cluster.address, "--model", str(bare_model)]
    done = subprocess.run(
        [*torchrun, *script, "--steps", "2"],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
        cwd=EXAMPLES.parent,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step 1, loss" in done.stdout
    status = replica.serving(1).status
    assert status is not None
    assert status.identity.lineage == "run-7", "named after torchrun's rendezvous"
    assert len(generate(replica, [1, 2, 3], 4)) == 4


def service(unit: Path) -> list[str]:
    """The command of a unit, with its variables filled in from the example's environment file, as systemd would."""
    text = unit.read_text()
    variables = dict(
        line.split("=", 1)
        for path in (EXAMPLES / "systemd").glob("*.env")
        for line in path.read_text().splitlines()
        if "=" in line and not line.startswith("#")
    )
    (command,) = re.findall(r"^ExecStart=(.*)$", text, re.M)
    words = []
    for word in shlex.split(command.replace("%i", "0").replace("%H", "host")):
        if whole := re.fullmatch(r"\$(\w+)", word):
            words += variables[whole[1]].split()
        else:
            words.append(re.sub(r"\$\{(\w+)\}", lambda match: variables[match[1]], word))
    return words


def settings(unit: Path) -> dict[str, str]:
    return dict(re.findall(r"^(\w+)=(.*)$", unit.read_text(), re.M))


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.name)
def test_units_start_what_there_is(unit: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPT_ENGINE_MANAGER", "127.0.0.1:50051")  # in the environment file
    options = parsed(service(unit))
    if "replica" in unit.name:
        assert str(EVICTED) in settings(unit)["RestartPreventExitStatus"].split(), "an evicted agent stays away"
        assert options["arguments"] == ["--max-model-len", "8192", "--gpu-memory-utilization", "0.8"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.name)
def test_systemd_takes_the_units(unit: Path, tmp_path: Path) -> None:
    program = tmp_path / "ckpt-engine"
    program.write_text("#!/bin/sh\n")  # verify wants the program to be there
    program.chmod(0o755)
    copy = tmp_path / unit.name.replace("@", "@0")
    copy.write_text(unit.read_text().replace("/opt/ckpt-engine/bin/ckpt-engine", str(program)))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", "--generators=no", str(copy)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    complaints = [line for line in done.stderr.splitlines() if unit.name.partition("@")[0] in line]
    assert complaints == []
    assert done.returncode == 0, done.stderr


def containers() -> Iterator[tuple[str, Mapping[str, Any], set[str], Mapping[str, str]]]:
    """Each container with the volumes of its pod, and what its pods' owner adds to its environment."""
    for path in MANIFESTS:
        for document in yaml.safe_load_all(path.read_text()):
            if document["kind"] in ("Kustomization", "Component"):
                continue  # tests/images/test_kustomizations.py
            assert document["apiVersion"]
            assert document["metadata"]["name"]
            for name, template, environment in templates(document):
                pod = template["spec"]
                patch = "volumes" not in pod  # of a pod of another file
                if not patch and "selector" in document["spec"]:
                    assert document["spec"]["selector"]["matchLabels"] == template["metadata"]["labels"]
                given = (patched(document) if patch else pod)["volumes"]
                volumes = {volume["name"] for volume in given if "$patch" not in volume}
                for container in (*pod["containers"], *pod.get("initContainers", ())):
                    whole = container if "command" in container else {**of_base(document, container), **container}
                    if "$patch" not in container and whole["command"][0] != "sh":
                        yield f"{path.parent.name}-{name}{container['name']}", whole, volumes, environment


def templates(document: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any], Mapping[str, str]]]:
    """Templates of an object's pods, each with what to call it and what the object tells its pods."""
    spec = document.get("spec", {})
    if "template" in spec:
        yield "", spec["template"], {}
    for rank, name in enumerate(("leader", "worker")):
        if template := spec.get("leaderWorkerTemplate", {}).get(f"{name}Template"):
            size = str(spec["leaderWorkerTemplate"]["size"])
            address = f"{document['metadata']['name']}-0.{document['metadata']['name']}.default"
            yield (
                f"{name}-",
                template,
                {"LWS_GROUP_SIZE": size, "LWS_WORKER_INDEX": str(rank), "LWS_LEADER_ADDRESS": address},
            )


def of_base(patch: Mapping[str, Any], container: Mapping[str, Any]) -> Mapping[str, Any]:
    """The manager's container that a patch changes; of another object's container nothing."""
    for document in yaml.safe_load_all((EXAMPLES / "kubernetes/base/manager.yaml").read_text()):
        if (document["kind"], document["metadata"]["name"]) == (patch["kind"], patch["metadata"]["name"]):
            for each in document["spec"]["template"]["spec"]["containers"]:
                if each["name"] == container["name"]:
                    return each  # type: ignore[no-any-return]
    return {"command": ["sh"]}


def patched(patch: Mapping[str, Any]) -> Mapping[str, Any]:
    """The pod that a patch changes."""
    (found,) = [
        document["spec"]["template"]["spec"]
        for document in yaml.safe_load_all((EXAMPLES / "kubernetes/relayed/replica.yaml").read_text())
        if (document["kind"], document["metadata"]["name"]) == (patch["kind"], patch["metadata"]["name"])
    ]
    return found  # type: ignore[no-any-return]


CONTAINERS = list(containers())


@pytest.mark.parametrize(
    ("container", "volumes", "environment"), [each[1:] for each in CONTAINERS], ids=[each[0] for each in CONTAINERS]
)
def test_manifests_run_command_lines_that_we_take(
    container: Mapping[str, Any], volumes: set[str], environment: Mapping[str, str]
) -> None:
    given = {variable["name"]: "10.0.0.1" for variable in container.get("env", ())}
    # Kubernetes leaves $(NAME) as it is if there is no such variable.
    command = [re.sub(r"\$\((\w+)\)", lambda match: given[match[1]], word) for word in container["args"]]
    if container["command"] == ["torchrun"]:
        script = next(word for word in command if word.endswith(".py"))
        assert (EXAMPLES.parent / script).is_file()
        usage = (EXAMPLES.parent / script).read_text()
        for option in command[command.index(script) + 1 :]:
            assert f'"{option.partition("=")[0]}"' in usage
    elif container["command"] == ["vllm"]:
        # An attached agent adds nothing: what it would give an engine that it launches must be there already.
        plan = load_adapter("vllm").launch_plan(("vllm", *command[:2]), 8000, "")
        added = list(zip(plan.argv[3::2], plan.argv[4::2], strict=True))
        assert {f"{name}={value}" for name, value in added if name != "--host"} <= set(command)
        assert "--middleware" in dict(added)
        assert ("VLLM_SERVER_DEV_MODE", "1") in [(each["name"], each["value"]) for each in container["env"]]
        assert plan.env["VLLM_SERVER_DEV_MODE"] == "1"
    else:
        options = parsed([*container["command"], *command], environment)
        assert not options.get("insecure"), "an example must not teach this"
    ports = {port["containerPort"] for port in container.get("ports", ())}
    for probe in (container[name]["httpGet"] for name in ("readinessProbe", "livenessProbe") if name in container):
        assert probe["port"] in ports
        assert probe["path"] in ("/health", "/healthz", "/livez", "/readyz", "/metrics", READY_ROUTE)
        assert any(word.endswith(f":{probe['port']}") or word == f"--port={probe['port']}" for word in command)
    assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
