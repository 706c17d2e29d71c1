"""What tests ask of a vision model's servers in the same way, on a CPU and on a GPU: after each update of ours, chats
with and without pictures get the tokens of a server that loaded the same files.

One manager has two replicas of a class: one that sees, and one that was started to serve text only, which has no tower.
Each of two versions of the weights is served by a server without us, too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch

from ckpt_engine import Trainer
from ckpt_engine.report import UpdateReport
from tests.cluster import Cluster, Replica, running_cluster
from tests.engines.plain import PlainServer
from tests.engines.vision_models import messages, picture, save_files, save_model

SEEDS = (1, 2)
TEXT_ONLY = ("--limit-mm-per-prompt", '{"image": 0, "video": 0}')
OPTIONS = ("--no-skip-tokenizer-init", "--max-num-seqs", "4")
TOKENS = 16
LARGEST_DIFFERENCE = 1e-3
"""Of log-probabilities: servers with and without us run the same kernels on the same device, a request at a time."""

PICTURES = {"none": None, "one": picture(1), "other": picture(2)}

Answer = tuple[list[int], list[float]]
Weights = dict[str, torch.Tensor]


def answer(server: Replica | PlainServer, name: str) -> Answer:
    """Greedy tokens of a chat about the picture of this name, and their log-probabilities."""
    body = {"model": "tiny", "messages": messages("What is this?", PICTURES[name]), "max_tokens": TOKENS}
    body |= {"temperature": 0, "ignore_eos": True, "return_token_ids": True, "logprobs": True}
    response = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120)
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    return choice["token_ids"], [each["logprob"] for each in choice["logprobs"]["content"]]


def answers(server: Replica | PlainServer, *names: str) -> dict[str, Answer]:
    return {name: answer(server, name) for name in names}


def difference(ours: dict[str, Answer], others: dict[str, Answer]) -> float:
    """The largest of log-probabilities; fails where tokens differ."""
    assert {name: tokens for name, (tokens, _) in ours.items()} == {name: others[name][0] for name in ours}
    pairs = ((ours[name][1], others[name][1]) for name in ours)
    found = max(abs(one - other) for each in pairs for one, other in zip(*each, strict=True))
    assert found <= LARGEST_DIFFERENCE
    return found


@dataclass
class Scene:
    """The replicas of one class, and what servers without us answered."""

    weights: dict[int, Weights]
    expected: dict[int, dict[str, Answer]]  # by seed
    cluster: Cluster
    seeing: Replica
    reading: Replica  # text only


@contextlib.contextmanager
def running(
    make: Callable[[], Any],
    path: Path,
    start: Callable[..., Replica],
    plain: Callable[..., AbstractContextManager[PlainServer]],
    seconds: float,
    arguments: Sequence[str] = (),
) -> Iterator[Scene]:
    """Starts all servers of a class at once. make: its configuration. start, plain: a replica, and a server without us
    (`vllm_server.py`). seconds: until a server is up. arguments: of all servers, beside OPTIONS."""
    options = (*OPTIONS, *arguments)
    weights = {seed: save_model(make(), seed, path / str(seed))[1] for seed in SEEDS}
    bare = save_files(make(), path / "bare")
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(running_cluster(path / "cluster"))
        seeing = start(cluster, "seeing", bare, *options)
        reading = start(cluster, "reading", bare, *options, *TEXT_ONLY)
        expected = {}
        with contextlib.ExitStack() as others:
            servers = {
                seed: others.enter_context(plain(path / str(seed), path / f"{seed}.log", *options)) for seed in SEEDS
            }
            for seed, server in servers.items():
                server.wait(seconds)
                expected[seed] = answers(server, *PICTURES)
        yield Scene(weights, expected, cluster, seeing.registered(seconds), reading.registered(seconds))


def check_chats(scene: Scene, device: str = "cpu") -> tuple[float, UpdateReport]:
    """Four updates of everything, then towers alone and in place. device: of the trainer's tensors. Returns the largest
    difference of a log-probability, and the report of the last update."""
    one, two = SEEDS
    for name in PICTURES:
        assert scene.expected[one][name][0] != scene.expected[two][name][0], "the weights decide"
    for seed in SEEDS:
        assert len({tuple(tokens) for tokens, _ in scene.expected[seed].values()}) == 3, "the picture decides"
    live = {name: torch.zeros_like(tensor, device=device) for name, tensor in scene.weights[one].items()}
    tower = {name for name in live if "visual." in name}
    differences = []
    with Trainer(scene.cluster.address, lineage="vision") as trainer:
        trainer.publish(live, move=True)

        def update(seed: int, mode: Any, tower_seed: int) -> UpdateReport:
            for name, tensor in live.items():
                tensor.copy_(scene.weights[tower_seed if name in tower else seed][name])
            report = trainer.update_weights(pause_mode=mode)
            assert report.ok, f"{report}\n{scene.seeing.tail()}\n{scene.reading.tail()}"
            assert report.verified
            return report

        for seed in (*SEEDS, *SEEDS):
            update(seed, "keep", seed)
            differences.append(difference(answers(scene.seeing, *PICTURES), scene.expected[seed]))
            differences.append(difference(answers(scene.reading, "none"), scene.expected[seed]))

        update(two, "keep", one)  # another tower below the same language model
        found = answers(scene.seeing, *PICTURES)
        differences.append(difference({"none": found["none"]}, scene.expected[two]))
        for name in ("one", "other"):
            assert found[name][0] not in (scene.expected[one][name][0], scene.expected[two][name][0])
        for seed in (two, one):  # in place, where vLLM empties no cache: a new tower alone, then everything
            report = update(seed, "in_place", seed)
            differences.append(difference(answers(scene.seeing, *PICTURES), scene.expected[seed]))
            differences.append(difference(answers(scene.reading, "none"), scene.expected[seed]))
        check_absent(report, live, tower)
    return max(differences), report


def check_absent(report: UpdateReport, live: Weights, tower: set[str]) -> None:
    """The text-only replica takes nothing of the tower, and says so; the other takes all."""
    reports = {each.name: each for each in report.replicas}
    assert reports["seeing"].absent == ()
    (row,) = reports["reading"].absent
    assert {name for name in live if name.startswith(row.prefix)} == tower
    assert (row.tensors, row.nbytes) == (len(tower), sum(live[name].nbytes for name in tower))
    assert row.reason == "was made without its vision tower"
    assert f"reading: takes nothing of {row.prefix}* ({len(tower)} tensors" in report.details
    assert reports["reading"].nbytes == sum(live[name].nbytes for name in live.keys() - tower)
