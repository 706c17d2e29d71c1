"""What is planned for one of many tensors that are split alike is what the manager plans for all of them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from ckpt_engine.core.cells import cut
from ckpt_engine.core.chunk_sizes import chunk_bytes
from ckpt_engine.core.relay_layout import lay_out
from ckpt_engine.core.sealed import Sealed
from ckpt_engine.core.sealed_record import read_record
from ckpt_engine.planning import update
from ckpt_engine.planning.model import Tensor
from ckpt_engine.planning.question import PlanOptions, question_of
from ckpt_engine.planning.slots import slot_of
from ckpt_engine.planning.splits import Fsdp, Parallel
from ckpt_engine.planning.update import PlanAnswer, plan_update, traffic
from tests.sealing import record_of

CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "num_experts": 8,
    "dtype": "bfloat16",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "config.json"
    path.write_text(json.dumps(CONFIG))
    return path


@dataclass(frozen=True)
class EachFsdp(Fsdp):
    """As if no two tensors were split alike."""

    def key(self, tensor: Tensor) -> Hashable:
        return tensor.name


LAYOUTS = [
    PlanOptions(Path(), "fsdp=3", replicas=2, tp=2),
    PlanOptions(Path(), "fsdp=4", replicas=2, tp=4, ep=4, same_gpus=False, hosts=2),
    PlanOptions(Path(), "fsdp=16", replicas=2, tp=8, hosts=4, gpus_per_host=8),
    PlanOptions(Path(), "tp=2,pp=3,dp=2", replicas=1, tp=4, pp=3, hosts=3, gpus_per_host=4),
    PlanOptions(Path(), "tp=4,ep=4", replicas=3, tp=2, ep=2, prefetch="always"),
    PlanOptions(Path(), "files", replicas=4, tp=2, hosts=2),
]


def edges(answer: PlanAnswer) -> Counter[tuple[str, str, str]]:
    found: Counter[tuple[str, str, str]] = Counter()
    for line in (*answer.installs, *answer.fills):
        found[line.edge.source, line.edge.reader, line.edge.transport] += line.edge.bytes
    return found


@pytest.mark.parametrize("asked", LAYOUTS, ids=lambda asked: f"{asked.trainer} to tp={asked.tp}")
def test_one_tensor_stands_for_those_that_are_split_alike(
    model: Path, asked: PlanOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    question = question_of(replace(asked, model=model))
    few = plan_update(question)
    assert not few.impossible
    assert few.offered is not None
    monkeypatch.setattr(type(question.trainer), "key", lambda self, tensor: tensor.name)
    all_of_them = plan_update(question)
    assert all_of_them.offered is not None
    assert len(all_of_them.offered.kinds) == len(question.model.tensors) > 2 * len(few.offered.kinds)
    assert edges(few) == edges(all_of_them)
    slots = {name: (relay.slot.bytes, relay.slot.size) for name, relay in few.relays.filled.items()}
    assert slots == {name: (each.slot.bytes, each.slot.size) for name, each in all_of_them.relays.filled.items()}


@pytest.mark.parametrize("asked", LAYOUTS, ids=lambda asked: f"{asked.trainer} to tp={asked.tp}")
def test_every_worker_gets_what_it_needs_and_nothing_twice(model: Path, asked: PlanOptions) -> None:
    question = question_of(replace(asked, model=model))
    answer = plan_update(question)
    assert answer.offered is not None
    got: Counter[tuple[str, int]] = Counter()
    for line in answer.installs:
        got[line.replica, line.worker] += line.edge.bytes
    workers = range(question.replica.count)
    assert got == {(name, worker): answer.offered.needed(worker) for name in question.names for worker in workers}
    for relay in answer.relays.filled.values():
        assert sum(read.bytes for read in relay.reads) == relay.slot.bytes, "it takes memory for what it brings"
    moved = sum((ways for ways in traffic(answer).values()), Counter[str]())
    assert moved["network in"] == moved["network out"]


def test_a_slot_is_laid_out_as_a_relay_does(tmp_path: Path) -> None:
    """Of a record that is sealed as the manager seals it, with every tensor apart. Groups are larger than what they are
    rounded to, and cells larger than what travels at a time."""
    larger = {**CONFIG, "vocab_size": 9001, "hidden_size": 1024, "moe_intermediate_size": 129 * 4}
    (tmp_path / "config.json").write_text(json.dumps(larger))
    question = question_of(PlanOptions(tmp_path, "fsdp=3", tp=4))
    answer = plan_update(question)
    offered = answer.offered
    assert offered is not None
    apart = plan_update(replace(question, trainer=EachFsdp(3))).offered
    assert apart is not None
    cells = cut(apart.publication, apart.needed_boxes, chunk_bytes(question.model.bytes))
    zeros = np.zeros(len(cells), dtype=np.uint64)
    sealed = Sealed(apart.publication, cells, zeros, np.ones(len(cells), dtype=np.bool_))
    recorded = read_record(record_of(sealed), sealed.root())
    for workers in ([0], [1, 2], [0, 1, 2, 3]):
        laid = lay_out(recorded, [apart.needed_boxes[worker] for worker in workers])
        slot = slot_of(offered, workers)
        assert (slot.bytes, slot.size) == (laid.bytes, laid.size)


def test_a_step_in_between_takes_memory_for_what_its_host_has(model: Path) -> None:
    answer = plan_update(question_of(PlanOptions(model, "fsdp=32", replicas=4, tp=2, hosts=4)))
    assert answer.offered is not None
    ranks = answer.question.cluster.ranks
    for name, relay in answer.relays.filled.items():
        sources = [number for number, place in enumerate(ranks) if place.host == relay.host]
        held = sum(answer.offered.held(source) for source in sources)
        assert relay.slot.bytes == (answer.question.model.bytes if relay.replicas else held), name
    steps = [relay for relay in answer.relays.filled.values() if not relay.replicas]
    assert (len(steps), sum(relay.slot.bytes for relay in steps)) == (4, answer.question.model.bytes)


def test_hosts_of_a_network_get_each_byte_once_from_the_trainer(model: Path) -> None:
    answer = plan_update(question_of(PlanOptions(model, "fsdp=8", replicas=8, tp=2, hosts=8)))
    assert answer.offered is not None
    assert len(answer.relays.asks) == 8
    sent = traffic(answer)["trainer-0"]["network out"]
    assert sent == pytest.approx(answer.question.model.bytes, rel=0.01)


def test_files_of_another_host_are_read_last(model: Path) -> None:
    """A relay there is nearer than a directory that both hosts may have."""
    answer = plan_update(question_of(PlanOptions(model, "files", hosts=1)))
    first, second = sorted(answer.fills, key=lambda line: line.edge.transport)
    assert (first.edge.source, first.edge.transport) == ("rank 0", "file")
    assert (second.edge.source, second.edge.transport) == ("relay trainer-0", "tcp")
    without = plan_update(question_of(PlanOptions(model, "files", hosts=1, relays=False)))
    assert [line.edge.transport for line in without.installs] == ["file"]


def test_a_split_holds_every_element_once(model: Path) -> None:
    """Ranks of one copy, whatever the layout."""
    question = question_of(PlanOptions(model, "tp=2,pp=2,ep=2"))
    split = question.trainer
    assert isinstance(split, Parallel)
    for tensor in question.model.tensors:
        boxes = {box for rank in range(split.count) for box in split.boxes(tensor, rank)}
        assert sum(box.volume for box in boxes) == np.prod(tensor.shape), tensor.name


def test_layers_are_dealt_to_stages_as_vllm_does(model: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({**CONFIG, "num_hidden_layers": 5, "architectures": ["Qwen3ForCausalLM"]})
    )
    question = question_of(PlanOptions(tmp_path, pp=4))
    held = [set(names(question, stage)) for stage in range(4)]
    layers = [sorted({name.split(".")[2] for name in each if ".layers." in name}) for each in held]
    assert layers == [["0"], ["1"], ["2", "3"], ["4"]]
    assert "model.embed_tokens.weight" in held[0] - held[3]
    assert {"lm_head.weight", "model.norm.weight"} <= held[3] - held[0]
    mixture = question_of(PlanOptions(model, pp=2))
    around = {"model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"}
    assert all(around <= set(names(mixture, stage)) for stage in range(2)), "as vLLM's class of this model"


def names(question: update.PlanQuestion, worker: int) -> list[str]:
    return [each.name for each in question.model.tensors if question.replica.boxes(each, worker)]
