"""Adapters (LoRA) in a real vLLM server: each a lineage of its own, without a pause, several versions at a time."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from ckpt_engine import Trainer
from ckpt_engine.gate.shelf import Shelf
from ckpt_engine.integrations.adapters import adapter
from tests.cluster import Stream, outcomes
from tests.engines.adapter_models import stir, with_adapter
from tests.engines.adapter_world import LORA, PROMPT, World, adapter_world, ask, version_of
from tests.engines.serving import model_of, publish, token_of
from tests.engines.vllm_server import needs_vllm, plain_vllm, tokens
from tests.gateway.gateways import running_gateway
from tests.tiny_model import ROUNDING, regrets
from tests.waiting import eventually

pytestmark = needs_vllm


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with adapter_world(tmp_path_factory.mktemp("adapters"), ["policy=3", "critic"]) as made:
        yield made


def test_each_version_gives_the_tokens_of_the_engines_own_load(world: World, tmp_path: Path) -> None:
    """Exactly, and within rounding those of the merged weights in float32. rsLoRA, ranks and alphas by pattern."""
    assert ask(world.replica, "policy").status_code == 503, "no version of it is here"
    settings = {"use_rslora": True, "rank_pattern": {"v_proj": 2}, "alpha_pattern": {"q_proj": 3}}
    model = with_adapter(world.base, 0, **settings)
    found: dict[str, list[int]] = {}
    for version in range(3):
        stir(model, version)
        model.save_pretrained(tmp_path / f"policy@{version}")
    modules = [f"policy@{version}={tmp_path / f'policy@{version}'}" for version in range(3)]
    with (
        plain_vllm(world.cluster.path / "base", tmp_path / "plain.log", *LORA, "--lora-modules", *modules) as plain,
        world.trainer("policy") as trainer,
    ):
        trainer.wait_for_replicas(1, timeout=120)
        trainer.publish(adapter(model, base=world.root))
        for version in range(3):
            stir(model, version)
            world.note(f"policy@{version}", model)
            report = trainer.update_weights(version=version)
            assert report.ok, f"{report}\n{world.replica.tail()}"
            answer = ask(world.replica, "policy")
            world.check(answer, f"policy@{version}")
            assert answer.json()["model"] == f"policy@{version}"
        for version in range(3):
            name = f"policy@{version}"
            answer = ask(world.replica, name)
            world.check(answer, name)
            found[name] = tokens(answer)
        assert len(set(map(tuple, found.values()))) == 3, "each version has tokens of its own"
        listed = [each["id"] for each in httpx.get(f"{world.replica.url}/v1/models", timeout=60).json()["data"]]
        assert listed == ["tiny", *found]
        assert "x-ckpt-engine-adapter" not in ask(world.replica, "tiny").headers
        plain.wait()
        for name, expected in found.items():
            assert tokens(ask(plain, name)) == expected, name


def test_streams_keep_the_version_that_they_began_with(world: World) -> None:
    """Versions change meanwhile; each answer is of one version from its first token to its last."""
    model = with_adapter(world.base, 10)
    answers: list[Any] = []
    with world.trainer("policy") as trainer:
        trainer.publish(adapter(model, base=world.root))
        stir(model, 3)
        world.note("policy@3", model)
        assert trainer.update_weights(version=3).ok
        streams = [Stream(lambda: ask(world.replica, "policy", 60)) for _ in range(8)]

        def seen() -> set[int]:
            done = [answer for stream in streams for answer in stream.results]
            return {version_of(answer) for answer in done if answer.status_code == 200}

        try:
            eventually("an answer of the first version", 240, seen)
            for version in range(4, 11):
                stir(model, version)
                world.note(f"policy@{version}", model)
                # All places may be in use by requests; then the version comes once one has ended.
                eventually(
                    f"version {version}", 240, lambda version=version: trainer.update_weights(version=version).ok
                )
                world.check(ask(world.replica, "policy", 8), f"policy@{version}")
            eventually("an answer of the last version", 240, lambda: 10 in seen())
        finally:
            answers = [answer for stream in streams for answer in stream.end()]
    assert {answer.status_code for answer in answers} == {200}, "no request fails because versions change"
    judged = set()
    for answer in answers:
        version, made = version_of(answer), tuple(tokens(answer))
        if (version, made) not in judged:
            judged.add((version, made))
            world.check(answer, f"policy@{version}")


def test_more_versions_than_slots_are_loaded_again_from_our_memory(world: World) -> None:
    """Six versions and three slots: vLLM drops what it used least, in the middle of its work, and asks for it again."""
    model = with_adapter(world.base, 20, target_modules=["k_proj", "gate_proj"], r=8)
    with world.trainer("critic") as trainer:
        trainer.wait_for_replicas(1, timeout=120)
        trainer.publish(adapter(model, base=world.root))
        for version in range(3):
            stir(model, 20 + version)
            world.note(f"critic@{version}", model)
            assert trainer.update_weights(version=version).ok, world.replica.tail()
    listed = [each["id"] for each in httpx.get(f"{world.replica.url}/v1/models", timeout=60).json()["data"]]
    names = [name for name in listed if "@" in name]
    assert len(names) == 6, listed
    with ThreadPoolExecutor(6) as pool:
        for _ in range(4):
            for name, answer in zip(names, pool.map(lambda name: ask(world.replica, name, 24), names), strict=True):
                world.check(answer, name)


def test_versions_of_the_same_content_go_one_by_one(world: World) -> None:
    """As after a restart of the trainer. The other one stays, also for what vLLM loads again."""
    model, other = with_adapter(world.base, 25), with_adapter(world.base, 26)
    with world.trainer("critic") as trainer:
        trainer.publish(adapter(model, base=world.root))
        same = [trainer.update_weights(), trainer.update_weights()]
        assert all(report.ok for report in same), same
        assert same[0].root == same[1].root
        first, second = (f"critic@{report.version}" for report in same)
        world.note(second, model)
        trainer.publish(adapter(other, base=world.root))
        later = [trainer.update_weights() for _ in range(2)]
        assert all(report.ok for report in later), later
    assert ask(world.replica, first).status_code == 503
    listed = [each["id"] for each in httpx.get(f"{world.replica.url}/v1/models", timeout=60).json()["data"]]
    for name in [each for each in listed if each.startswith("policy@")]:
        assert ask(world.replica, name, 4).status_code == 200
    world.check(ask(world.replica, second), second)
    newest = f"critic@{later[-1].version}"
    world.note(newest, other)
    world.check(ask(world.replica, "critic"), newest)


def test_what_does_not_belong_here_is_refused_by_name(world: World, tmp_path: Path) -> None:
    """Another base, another lineage, a rank above the server's, a foreign adapter. What is here goes on."""
    model = with_adapter(world.base, 30)
    newest = ask(world.replica, "critic").headers["x-ckpt-engine-adapter"]
    with world.trainer("critic") as trainer:
        trainer.publish(adapter(model, base="ab" * 32))
        report = trainer.update_weights()
        assert outcomes(report) == {"vllm.critic": "old_serving"}, report
        assert "is for the base with root abababababab" in str(report)
        trainer.publish(adapter(with_adapter(world.base, 31, r=16), base=world.root))
        with pytest.raises(Exception, match=r"rank 16, and this server takes 8"):
            trainer.update_weights()
    with Trainer(world.cluster.address, lineage="thief", pool="critic") as thief:
        thief.publish(adapter(model, base=world.root))
        report = thief.update_weights()
        assert outcomes(report) == {"vllm.critic": "old_serving"}, report
        assert "slots of the adapter 'critic'" in str(report)
    model.save_pretrained(tmp_path / "foreign")
    foreign = {"lora_name": "foreign", "lora_path": str(tmp_path / "foreign")}
    url = f"{world.replica.url}/v1/load_lora_adapter"
    assert httpx.post(url, json=foreign, timeout=60).status_code == 403
    assert httpx.post(url, json=foreign, headers=token_of(world.replica), timeout=60).status_code >= 400
    assert ask(world.replica, "foreign").status_code == 404
    gone = ask(world.replica, "critic@77")
    assert gone.status_code == 503
    assert "critic@77" in gone.json()["detail"]
    world.check(ask(world.replica, "critic"), newest)


def test_commands_and_the_gateway_know_adapters(world: World, tmp_path: Path) -> None:
    """An adapter goes back by itself, from a relay; the gateway's answers name its version."""

    def command(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "ckpt_engine", *words, "--manager", world.cluster.address],
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        return done.stdout

    model = with_adapter(world.base, 35)
    relay = world.cluster.relay("relay", "--memory", "64MiB").registered()
    with world.trainer("policy") as trainer:
        trainer.publish(adapter(model, base=world.root))
        numbers = []
        for step in range(2):
            stir(model, 36 + step)
            report = trainer.update_weights(prefetch="always")
            assert report.ok, report
            world.note(f"policy@{report.version}", model)
            numbers.append(report.version)
    first, second = numbers
    eventually("the relay holds both", 120, lambda: set(relay.held) == set(numbers))
    replicas = {each["name"]: each for each in json.loads(command("status", "--json"))["replicas"]}
    assert int(replicas["vllm.policy"]["identity"]["version"]) == second
    assert replicas["vllm"]["identity"]["lineage"] == "base"
    held = json.loads(command("version", "list", "--lineage", "policy", "--json"))
    assert {first, second} <= {int(each["identity"]["version"]) for each in held}, held
    command("trace", str(second), "--lineage", "policy", "--output", str(tmp_path / "trace.json"))
    assert "vllm.policy" in (tmp_path / "trace.json").read_text()
    with running_gateway(tmp_path / "gateway.log", "--manager", world.cluster.address) as gateway:
        gateway.ready()
        body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "return_token_ids": True, "detokenize": False}
        for wish, version in ((f"policy@{first}", first), ("policy", second)):
            answer = gateway.post("/v1/completions", {**body, "model": wish, "ignore_eos": True})
            (choice,) = answer.json()["choices"]
            assert choice["ckpt_engine"]["adapter"] == f"policy@{version}", answer.text
            assert max(regrets(world.made[f"policy@{version}"], list(PROMPT), choice["token_ids"])) < ROUNDING
        listed = {each["id"] for each in httpx.get(f"{gateway.url}/v1/models", timeout=60).json()["data"]}
        assert {"tiny", f"policy@{first}", f"policy@{second}"} <= listed
    command("rollback", "--pool", "policy", "--version", str(first))
    world.check(ask(world.replica, "policy", 8), f"policy@{first}")
    world.check(ask(world.replica, f"policy@{second}", 8), f"policy@{second}")
    relay.end()


def test_a_version_in_use_is_not_taken_away(world: World) -> None:
    """With requests on all older versions the next one is refused, naming the option; it comes once one has ended."""
    model = with_adapter(world.base, 40)
    info = httpx.get(f"{world.replica.url}/ckpt_engine/info", timeout=60).json()
    shelf = Shelf(Path(info["directory"]), "critic", 3)
    held = [(place, identity) for place, identity in shelf.held() if place.use(identity)]
    assert len(held) == 3
    oldest_place, oldest = held[-1]
    with world.trainer("critic") as trainer:
        trainer.publish(adapter(model, base=world.root))
        report = trainer.update_weights()
        assert outcomes(report) == {"vllm.critic": "old_serving"}
        assert "--adapter critic=4" in str(report)
        world.check(ask(world.replica, f"critic@{oldest.version}"), f"critic@{oldest.version}")
        oldest_place.leave()
        report = trainer.update_weights()
        assert report.ok, report
    world.note(f"critic@{report.version}", model)
    world.check(ask(world.replica, "critic"), f"critic@{report.version}")
    assert ask(world.replica, f"critic@{oldest.version}").status_code == 503
    for place, _ in held[:-1]:
        place.leave()
    shelf.close()


def test_another_base_closes_the_adapters_of_the_one_before(world: World, tmp_path: Path) -> None:
    """Until theirs come. After going back to the base, they are there again."""
    model = with_adapter(world.base, 50)
    with world.trainer("policy") as trainer:
        trainer.publish(adapter(model, base=world.root))
        before = trainer.update_weights()
        assert before.ok
        world.note(f"policy@{before.version}", model)
        streams = [Stream(lambda: ask(world.replica, "policy", 200)) for _ in range(4)]
        other = model_of(tmp_path, 84)
        with Trainer(world.cluster.address, lineage="base") as base_trainer:
            publish(base_trainer, other)
            second = base_trainer.update_weights(version=2)
            assert second.ok, second
            closed = ask(world.replica, "policy")
            assert closed.status_code == 503
            assert "for another base" in closed.json()["detail"]
            for answer in [answer for stream in streams for answer in stream.end()]:
                # Ended early when the base changed, or before; one that ended before its first token has none.
                if answer.status_code == 200 and (found := tokens(answer)):
                    assert max(regrets(world.made[f"policy@{before.version}"], list(PROMPT), found)) < ROUNDING
            eventually(
                "the shelf says so",
                60,
                lambda: (
                    not next(each for each in world.cluster.status().replicas if each.name == "vllm.policy").serving
                ),
            )
            theirs = with_adapter(other, 51)
            trainer.publish(adapter(theirs, base=second.root))
            report = trainer.update_weights()
            assert report.ok, report
            world.note(f"policy@{report.version}", theirs)
            world.check(ask(world.replica, "policy"), f"policy@{report.version}")
            publish(base_trainer, world.base)
            assert base_trainer.update_weights(version=3).root == world.root
        world.check(ask(world.replica, "policy"), f"policy@{before.version}")
