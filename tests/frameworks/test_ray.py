"""Our processes on a Ray of several raylets, as tests/frameworks/ray_run.py starts it: what runs where, what becomes of
it when nodes, managers and programs die, and that nothing of it is left. In verl's environment, which has Ray."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.frameworks.ray_environment import messages, ray_environment
from tests.tiny_model import make_tiny_qwen3

in_the_story = pytest.mark.slow
"""Of all tests that look at it: it takes two minutes."""


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What each part of the story says, by the part's name."""
    import torch

    output = tmp_path_factory.mktemp("ray")
    make_tiny_qwen3(output / "model", dtype=torch.float32)
    command = [os.environ["CKPT_ENGINE_VERL_PYTHON"], "-m", "frameworks.ray_run", "story", output / "model", output]
    with ray_environment() as environment, (output / "log").open("w+") as log:
        status = subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=output).wait(1000)
        log.seek(0)
        printed = log.read()
    assert status == 0, printed[-8000:]
    return {each["part"]: each for each in messages(printed)}


def test_without_ray_it_says_what_to_install() -> None:
    """Here it is not installed."""
    command = [sys.executable, "-c", "import ckpt_engine.integrations.ray"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert "pip install 'ckpt-engine[ray]'" in ended.stderr


@in_the_story
@pytest.mark.parametrize(
    ("attempt", "words"),
    [
        ("a name", "INVALID_ARGUMENT: a cluster's name is 1 to 63 letters"),
        ("no engine", "INVALID_ARGUMENT: replicas=1 and no engine"),
        ("nothing to take", "INVALID_ARGUMENT: a replica takes nothing of its node"),
        ("a text", "INVALID_ARGUMENT: engine is a list of words, such as ['vllm', 'serve', 'model']"),
        ("a number", "INVALID_ARGUMENT: engine is a list of words, each a str, not ['vllm', 3]"),
        ("options as a text", "agent_options is a list of words, such as ['--engine', 'reference'], not a text"),
        ("an environment", "INVALID_ARGUMENT: environment must be a dict of str to str, not ['A=1']"),
        ("resources", "INVALID_ARGUMENT: resources must be a dict of Ray's resources to amounts, not ['slot']"),
        ("an amount", "INVALID_ARGUMENT: num_gpus=1.5: Ray gives whole GPUs, or a part of one"),
        ("open to others", "nothing says who may call this server: give manager_options with --certificate"),
        ("an option", "INVALID_ARGUMENT: manager exited with status 2"),
        ("a model", "DEADLINE_EXCEEDED: 0 of 1 replicas were up after 30 s: replica-0 ("),
        ("a ledger", "FAILED_PRECONDITION: manager was started 3 times, and exited with status 1"),
        (
            "no place",
            "DEADLINE_EXCEEDED: cluster 'ckpt-engine' is not complete after 20 s: replica-0 (placing) asks for ",
        ),
        ("absent", "NOT_FOUND: there is no cluster 'absent' on this Ray; there are: none"),
    ],
)
def test_what_cannot_be_is_refused(story: dict[str, dict[str, Any]], attempt: str, words: str) -> None:
    refused = story["refusals"]
    assert words in refused["refused"][attempt]
    assert refused["left"] == []


@in_the_story
def test_an_update_of_a_training_actor_reaches_two_nodes(story: dict[str, dict[str, Any]]) -> None:
    """Two replicas on two raylets, a relay on each, and the weights are what the gateway answers with."""
    update = story["update"]
    assert update["outcomes"] == {"replica-0": "new_serving", "replica-1": "new_serving"}
    assert len({*update["nodes"]}) == 2
    assert update["relays"] == update["alive"]
    assert update["answers"] == [update["expected"]] * 4


@in_the_story
def test_a_replica_is_added_and_one_is_taken_away(story: dict[str, dict[str, Any]]) -> None:
    """On a node that has come since; and what it took is free again, and its agent has said goodbye."""
    scaled = story["scale"]
    assert scaled["added"] == scaled["new"]
    assert scaled["left"] == ["replica-0", "replica-1"]
    assert scaled["free"] == 1
    assert [name.rpartition(":")[2] for name in scaled["groups"]] == ["replica-0", "replica-1"]


@in_the_story
def test_a_node_dies_in_an_update(story: dict[str, dict[str, Any]]) -> None:
    """The update tells each outcome; the replica comes back on another node, and is brought to the version."""
    killed = story["node"]
    assert killed["outcomes"].pop("replica-0") == "new_serving"
    assert killed["outcomes"].keys() == {"replica-1"}
    assert killed["outcomes"]["replica-1"] != "new_serving"
    assert killed["now"] in killed["alive"]
    assert killed["relays"] == killed["alive"]
    assert killed["killed"] not in killed["alive"]
    assert killed["answers"] == [killed["expected"]] * 4


@in_the_story
def test_a_manager_comes_back_at_its_address(story: dict[str, dict[str, Any]]) -> None:
    """Its process was killed, then its actor; each time it knew its replicas again."""
    assert len({*story["manager process"]["keepers"]}) == 1, "its actor has started it again"
    assert len({*story["manager actor"]["keepers"]}) == 2, "Ray has started its actor again"
    assert story["manager process"]["clusters"] == story["manager actor"]["clusters"]
    assert len({*story["manager actor"]["clusters"]}) == 1, "another ledger"


@in_the_story
def test_a_supervisor_that_was_killed_has_all_of_it_again(story: dict[str, dict[str, Any]]) -> None:
    again = story["supervisor"]
    assert again["replicas"] == 1, "as it was scaled"
    assert again["address"] == again["before"]
    assert len(again["groups"]) == 1, "one placement group is of before"


@in_the_story
def test_closing_leaves_nothing(story: dict[str, dict[str, Any]]) -> None:
    closed = story["close"]
    assert (closed["left"], closed["actors"], closed["groups"], closed["files"]) == ([], [], [], [])


@in_the_story
def test_it_ends_with_its_program(story: dict[str, dict[str, Any]]) -> None:
    ended = story["program"]
    assert len(ended["there"]) > 4
    assert ended["left"] == []


@in_the_story
def test_detached_it_stays_until_it_is_closed(story: dict[str, dict[str, Any]]) -> None:
    stayed = story["detached program"]
    assert {*stayed["stayed"]} == {"running"}
    assert stayed["cluster"]
    assert stayed["left"] == []


@in_the_story
def test_the_example_runs(story: dict[str, dict[str, Any]]) -> None:
    printed = story["example"]["printed"]
    assert [f"after step {step}: [5, 6, 7, 8" in printed for step in range(3)] == [True] * 3
    assert len((Path(__file__).parents[2] / "examples" / "ray" / "train.py").read_text().splitlines()) <= 60
