"""Which version of an adapter a request gets in vLLM's API process, and which commands can serve adapters."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ckpt_engine.gate.page import WorkerSlot
from ckpt_engine.gate.shelf import ShelfPlace, shelf_directory
from ckpt_engine.v1 import weights_pb2
from ckpt_engine_adapters.vllm.adapter_names import vllm_request
from ckpt_engine_adapters.vllm.adapter_requests import (
    AdapterDoor,
    AdapterModels,
    AdapterNotHereError,
    end_running,
    guard_sends,
)
from ckpt_engine_adapters.vllm.command import check_adapter_workers
from ckpt_engine_adapters.vllm.driver import refuse_adapters

BASE = weights_pb2.Identity(lineage="base", version=1, root=b"b" * 32)
OTHER = weights_pb2.Identity(lineage="base", version=2, root=b"o" * 32)


class World:
    """An engine of one worker with a shelf of three places, and its door."""

    def __init__(self, path: Path) -> None:
        path.mkdir(mode=0o700)
        directory = shelf_directory(path, "policy").path
        self.places = [ShelfPlace(directory, number) for number in range(3)]
        self.words: list[WorkerSlot] = [place.page.claim(0, 1) for place in self.places]
        self.door = AdapterDoor(path, {"policy": 3})
        self.held: weights_pb2.Identity | None = BASE

    def base(self) -> weights_pb2.Identity | None:
        return self.held

    def put(self, place: int, version: int, epoch: int, base: weights_pb2.Identity = BASE) -> None:
        """Puts a version into a place, as a worker does."""
        identity = weights_pb2.Identity(lineage="policy", version=version, root=bytes([version]) * 32)
        self.places[place].note_base(identity, base.root)
        self.words[place].clean(epoch, identity)

    def pinned(self, model: Any) -> int | None:
        """The version that a request for this model is pinned to."""
        with self.door.pinned(json.dumps({"model": model, "prompt": "?"}).encode(), self.held) as pin:
            return None if pin is None else pin.identity.version


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path / "e")


def test_a_request_gets_what_was_put_there_last_or_what_it_names(world: World) -> None:
    world.put(0, 7, 1)
    world.put(1, 8, 2)
    assert world.pinned("policy") == 8
    assert world.pinned("policy@7") == 7
    world.put(0, 7, 3)
    assert world.pinned("policy") == 7, "after going back"
    assert world.pinned("base") is world.pinned(None) is world.pinned(["policy"]) is None
    assert world.pinned("policy-2") is None, "another name"


def test_a_request_keeps_its_version_in_use_until_it_ends(world: World) -> None:
    """Also when a newer one comes meanwhile: vLLM's mapping goes on naming the same."""
    world.put(0, 7, 1)
    models = AdapterModels(world.door, world)
    with world.door.pinned(b'{"model": "policy"}', BASE) as pin:
        assert pin is not None
        world.put(1, 8, 2)
        assert world.places[0].used()
        assert not world.places[1].used()
        assert "policy" in models
        assert pin.identity.version == 7
    assert not world.places[0].used()


def test_another_base_closes_an_adapter_and_says_so(world: World) -> None:
    world.put(0, 7, 1)
    world.put(1, 8, 2, OTHER)
    assert world.pinned("policy") == 7
    with pytest.raises(AdapterNotHereError, match=r"policy@8: it is not here \(policy@7 is\); policy@8 is for another"):
        world.pinned("policy@8")
    world.held = OTHER
    assert world.pinned("policy") == 8
    world.held = None
    with pytest.raises(AdapterNotHereError, match="no version of it is here; policy@8, policy@7 are for another base"):
        world.pinned("policy")


def test_what_can_be_asked_for_is_listed_by_exact_names(world: World) -> None:
    world.put(0, 7, 1)
    world.put(1, 8, 2)
    models = AdapterModels(world.door, world)
    assert list(models) == ["policy@7", "policy@8"]
    assert len(models) == 2
    with world.door.pinned(b'{"model": "policy"}', BASE):
        assert "policy" in models
        assert not [name for name in ("policy@7", "policy@9", "tiny") if name in models]
    assert "policy" not in models, "vLLM would compute with what no request keeps in use"


def test_a_name_in_escapes_is_seen(world: World) -> None:
    world.put(0, 7, 1)
    with world.door.pinned(rb'{"model": "p\u006flicy@7"}', BASE) as pin:
        assert pin is not None
        assert pin.model == "policy@7"


def test_versions_of_the_same_content_have_names_numbers_and_paths_of_their_own() -> None:
    """As after a restart of the trainer, or of two tenants that begin with the same adapter: one of them can go."""
    same = [
        weights_pb2.Identity(lineage=lineage, version=version, root=b"s" * 32)
        for lineage, version in (("policy", 7), ("policy", 8), ("critic", 7))
    ]
    requests = [vllm_request(lambda *words: words, each) for each in same]
    assert [len(set(words)) for words in zip(*requests, strict=True)] == [3, 3, 3]
    assert next(path for _, _, path in requests) == f"ckpt-engine:policy@7:{same[0].root.hex()}"


class _Engine:
    """The part of vLLM's AsyncLLM that is asked."""

    def __init__(self) -> None:
        lora = _Named(lora_name="policy@7")
        states = {"a": _Named(lora_request=lora), "b": _Named(lora_request=None), "c": _Named(lora_request=lora)}
        self.output_processor = _Named(request_states=states)
        self.engine_core = self
        self.output_processor.abort_requests = self._forget
        self.ended: list[str] = []
        self.forgotten: list[str] = []
        self.sent: list[Any] = []

    async def abort(self, ids: list[str], internal: bool) -> None:
        assert internal
        self.ended += ids

    def _forget(self, ids: list[str], internal: bool) -> None:
        assert internal
        self.forgotten += ids

    async def add_request_async(self, request: Any) -> None:
        self.sent.append(request)


@dataclass
class _Base:
    """What the gate says when it is asked."""

    now: weights_pb2.Identity | None

    def __call__(self) -> weights_pb2.Identity | None:
        return self.now


class _Named:
    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)


async def test_a_change_of_the_base_ends_requests_with_adapters_only(world: World) -> None:
    engine = _Engine()
    assert await end_running(engine, world.door) == 2
    assert engine.ended == ["a", "c"]


async def test_no_request_with_an_adapter_is_computed_with_another_base(world: World) -> None:
    """One that was let in before an update of the base, and had to be tokenised: neither while it runs, nor when the
    gate is open again with another base. vLLM forgets it."""
    world.put(0, 7, 1)
    engine, base = _Engine(), _Base(BASE)
    guard_sends(engine, world.door, base)
    request = _Named(request_id="a", lora_request=_Named(lora_name="policy@7"))
    plain = _Named(request_id="b", lora_request=None)
    with pytest.raises(ValueError, match="policy@7"):
        await engine.add_request_async(request)  # pinned to nothing: its version may go at any time
    with world.door.pinned(b'{"model": "policy"}', BASE) as pin:
        assert pin is not None
        await engine.add_request_async(request)
        assert not pin.refusal
        for base.now in (None, OTHER):
            await engine.add_request_async(plain)
            with pytest.raises(ValueError, match="adapter policy@7: its base is being updated, or was: ask again"):
                await engine.add_request_async(request)
        assert pin.refusal
    assert engine.sent == [request, plain, plain]
    assert engine.forgotten == ["a", "a", "a"]


async def test_a_request_that_the_core_did_not_get_is_answered_as_by_the_gate(world: World) -> None:
    """And not with vLLM's 500; a stream that has begun goes on to vLLM's event of an error."""
    world.put(0, 7, 1)
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    error = [
        {"type": "http.response.start", "status": 500, "headers": []},
        {"type": "http.response.body", "body": b"EngineGenerateError"},
    ]
    with world.door.pinned(b'{"model": "policy"}', BASE) as pin:
        assert pin is not None
        begun = pin.naming(send)
        await begun({"type": "http.response.start", "status": 200, "headers": []})
        pin.refusal = "ask again"
        await begun({"type": "http.response.body", "body": b"data: error"})
        assert [message.get("status", message.get("body")) for message in sent] == [200, b"data: error"]
        sent.clear()
        naming = pin.naming(send)
        for message in error:
            await naming(message)
    start, body = sent
    assert start["status"] == 503
    answer = json.loads(body["body"])
    assert (answer["reason"], answer["detail"]) == ("adapter_not_here", "ask again")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "only with --enable-lora"),
        (["--enable-lora"], "--max-loras 1: 3 versions of the adapter policy"),
        (["--enable-lora", "--max-loras", "2"], "start vLLM with --max-loras 3 or more"),
        (["--enable-lora", "--max-loras", "3", "--lora-modules", "a=b"], "--lora-modules a=b cannot be used"),
        (["--enable-lora", "--max-loras", "3", "--fully-sharded-loras"], "not verified"),
        (["--enable-lora", "--max-loras", "3", "-pp=2"], "--pipeline-parallel-size 2 cannot be used"),
    ],
)
def test_a_server_that_cannot_serve_adapters_is_refused_by_name(options: list[str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        refuse_adapters(["vllm", "serve", "m", *options], {"policy": 3, "critic": 2})


@pytest.mark.parametrize("variable", ["VLLM_ALLOW_RUNTIME_LORA_UPDATING", "VLLM_ENABLE_RESPONSES_API_STORE"])
def test_a_server_that_can_is_not(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    command = ["vllm", "serve", "m", "--enable-lora", "--max-loras=3", "-tp", "2", "-dp=2", "-pp", "1"]
    refuse_adapters(command, {"policy": 3})
    monkeypatch.setenv(variable, "1")
    with pytest.raises(ValueError, match=f"{variable}=1 cannot be used"):
        refuse_adapters(command, {"policy": 3})


@pytest.mark.parametrize(
    "field", ["pipeline_parallel_size", "prefill_context_parallel_size", "decode_context_parallel_size", "nnodes"]
)
def test_workers_refuse_what_no_command_says(field: str) -> None:
    """As with vLLM's --config. Tensor parallelism they can; the cores of a model with experts know of each other."""
    check_adapter_workers(SimpleNamespace(tensor_parallel_size=2, pipeline_parallel_size=1), {})
    for parallel in ({field: 2}, {"data_parallel_size": 2}, {"enable_expert_parallel": True}):
        name = next(iter(parallel)).removeprefix("enable_expert_parallel") or "experts"
        with pytest.raises(ValueError, match=f"{name} 2 cannot be used with adapters"):
            check_adapter_workers(SimpleNamespace(**parallel), {})
    with pytest.raises(ValueError, match="VLLM_ENABLE_RESPONSES_API_STORE=1 cannot be used"):
        check_adapter_workers(SimpleNamespace(), {"VLLM_ENABLE_RESPONSES_API_STORE": "1"})
