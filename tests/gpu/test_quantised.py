"""Quantised models of vLLM and SGLang on a GPU: after an update of ours, greedy tokens are those of a server that
loaded the same files with the same options, with CUDA graphs and eager.

Dense models and experts; quantised by the engine (`--quantization fp8`), and published as block-wise FP8, which our
recipe makes of the trainer's bfloat16 weights at each update. Four updates: of other weights, of those that the other
server loaded, of others, and of those again. Then a slice that is corrupt closes the gate, and the next update heals;
then the replica discards its weights (sleep at level 2), and the update that wakes it is right. Before all that, what
our recipe makes on the GPU must be, bit for bit, what the files hold, which it made on the CPU.

    python -m pytest tests/gpu/test_quantised.py -k "vllm and dense" --seen FILE

Or `vllm and experts`, or `sglang`. Of vLLM's servers a failure names the tensors that differ.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from ckpt_engine import Trainer, UpdateReport
from ckpt_engine.integrations.block_fp8 import BlockFp8
from tests.cluster import Cluster, Replica, corrupt_after_sealing, outcomes, running_cluster
from tests.engines import sglang_server, vllm_server
from tests.engines.plain import PlainServer
from tests.engines.quantised_models import dense, experts, write
from tests.engines.serving import Complete, check_closed
from tests.gpu import exact, gpu_server, sglang_fleet, tensors_of
from tests.gpu.exact import PROMPTS
from tests.gpu.pairs import Pairs

pytestmark = [pytest.mark.timeout(600)]

LOADED = 7
"""The seed of the weights that the other server loads."""

SEEDS = (1, LOADED, 3, LOADED)
TORN = "model.layers.1.self_attn.o_proj.weight"
UP_SECONDS = 270.0
AT_A_TIME = 4
"""Kinds whose servers, two each, are up or starting: they share a GPU and the host's memory."""


@dataclass(frozen=True)
class Engine:
    """How one engine is started and asked. sleeping: options with which it discards weights when it sleeps.
    environment: of both servers. without_nvcc: chooses kernels that are not compiled when they are used; for a machine
    that cannot. differing: which tensors of our server differ from the other one's, by their addresses."""

    start: Callable[..., Replica]
    plain: Callable[..., contextlib.AbstractContextManager[PlainServer]]
    complete: Complete
    tokens: Callable[[httpx.Response], list[int]]
    common: tuple[str, ...]
    loaded: tuple[str, ...]
    graphs: tuple[str, ...]
    eager: tuple[str, ...]
    sleeping: tuple[str, ...]
    environment: Mapping[str, str]
    without_nvcc: Mapping[str, str]
    differing: Callable[[str, str], list[str]]
    marks: Sequence[pytest.MarkDecorator]
    there: bool


# Experts that the engine quantises take the scale of their activations of all rows of a step together (per-tensor,
# dynamic), so that an answer depends on which rows those are. Hence no prefix caches, with which a prompt that comes
# again is one row; and vLLM's graphs are of one token: of a larger one a prompt would fill a part, and the rest of its
# rows hold what was there before.
ENGINES = {
    "vllm": Engine(
        start=gpu_server.start_gpu_vllm,
        plain=gpu_server.plain_vllm,
        complete=vllm_server.complete,
        tokens=vllm_server.tokens,
        common=(
            *("--kv-cache-memory-bytes", str(512 << 20), "--max-num-seqs", "4", "--no-enable-prefix-caching"),
            *tensors_of.ARGUMENTS,
        ),
        loaded=(),
        graphs=("--compilation-config", json.dumps({"cudagraph_capture_sizes": [1]})),
        eager=("--enforce-eager",),
        sleeping=("--enable-sleep-mode",),
        environment={
            "PYTHONPATH": ":".join(filter(None, (vllm_server.OVERLAY, tensors_of.PATH))),
            "VLLM_SERVER_DEV_MODE": "1",  # as our agent starts it; the other server shall have the same
        },
        without_nvcc={"VLLM_USE_DEEP_GEMM": "0"},
        differing=tensors_of.differing,
        marks=gpu_server.needs_gpu_vllm,
        there=bool(vllm_server.PYTHON),
    ),
    "sglang": Engine(
        start=sglang_fleet.start_gpu_sglang,
        plain=sglang_fleet.plain_sglang,
        complete=sglang_server.complete,
        tokens=sglang_server.tokens,
        common=("--max-total-tokens", "65536", "--max-running-requests", "4", "--disable-radix-cache"),
        loaded=("--load-format", "auto"),
        graphs=("--cuda-graph-max-bs-decode", "4"),
        eager=sglang_fleet.EAGER,
        sleeping=("--enable-memory-saver",),
        environment={},
        without_nvcc={"SGLANG_ENABLE_JIT_DEEPGEMM": "0"},
        differing=lambda *_: [],
        marks=sglang_fleet.needs_gpu_sglang,
        there=bool(sglang_server.PYTHON),
    ),
}


@dataclass(frozen=True)
class Kind:
    """One kind of model in one setting of the servers. sleeps: whether it is put to sleep as well."""

    engine: str
    make: Callable[[], Any]
    block_wise: bool
    graphs: bool
    sleeps: bool = False

    @property
    def arguments(self) -> tuple[str, ...]:
        """Of both servers."""
        engine = ENGINES[self.engine]
        how = () if self.block_wise else ("--quantization", "fp8")
        return (*engine.common, *how, *(engine.graphs if self.graphs else engine.eager))


KINDS = {
    f"{engine}, {what}, {how}, {'graphs' if graphs else 'eager'}": Kind(
        engine, make, how == "block-wise", graphs, sleeps=graphs
    )
    for engine in ENGINES
    for what, make in (("dense", dense), ("experts", experts))
    for graphs in (False, True)  # eager servers are up first
    for how in ("online", "block-wise")
}


@dataclass
class Pair:
    """Our replica of one kind, and the server that loaded `files`, those of LOADED."""

    kind: Kind
    files: Path
    weights: dict[int, dict[str, torch.Tensor]]
    cluster: Cluster
    replica: Replica
    plain: PlainServer


@pytest.fixture(scope="module")
def pairs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pairs[Pair]]:
    """Of the kinds that were asked for, in the order in which they run."""
    asked = [item.callspec.params["name"] for item in request.session.items if "pairs" in item.fixturenames]
    asked = [name for name in asked if ENGINES[KINDS[name].engine].there]
    path = tmp_path_factory.mktemp("quantised")

    def start(name: str, stack: contextlib.ExitStack) -> Pair:
        return _start(KINDS[name], path / str(asked.index(name)), stack)

    made = Pairs(asked, start, AT_A_TIME, UP_SECONDS)
    yield made
    made.close()


def _start(kind: Kind, path: Path, stack: contextlib.ExitStack) -> Pair:
    engine = ENGINES[kind.engine]
    weights = {
        seed: write(kind.make(), seed, path / str(seed), block_wise=kind.block_wise) for seed in sorted({*SEEDS})
    }
    bare = path / "bare"
    bare.mkdir()
    shutil.copy(path / str(LOADED) / "config.json", bare)
    environment = {**engine.environment, **({} if _has_nvcc() else engine.without_nvcc)}
    files = path / str(LOADED)
    plain = engine.plain(files, path / "plain.log", *kind.arguments, *engine.loaded, environment=environment)
    server = stack.enter_context(plain)
    cluster = stack.enter_context(running_cluster(path / "cluster"))
    sleeping, options = (engine.sleeping, ("--mode", "hybrid")) if kind.sleeps else ((), ())
    replica = engine.start(cluster, "ours", bare, *kind.arguments, *sleeping, options=options, environment=environment)
    return Pair(kind, files, weights, cluster, replica, server)


def _has_nvcc() -> bool:
    return shutil.which("nvcc") is not None or Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin/nvcc").exists()


@pytest.mark.parametrize("name", [pytest.param(name, marks=ENGINES[kind.engine].marks) for name, kind in KINDS.items()])
def test_a_quantised_model(pairs: Pairs[Pair], record_property: Callable[[str, object], None], name: str) -> None:
    try:
        pair = pairs.get(name)
        if pair.kind.block_wise:
            assert not (others := recipe_differs(pair)), f"made on the GPU with other bits than on the CPU: {others}"
        pair.plain.wait(UP_SECONDS)
        check(pair, record_property)
    finally:
        pairs.end(name)


def recipe_differs(pair: Pair) -> list[str]:
    """Names of tensors of which our recipe makes other bits of weights on the GPU than the files hold."""
    from safetensors.torch import load_file

    files = load_file(pair.files / "model.safetensors")
    made = dict(BlockFp8({name: tensor.to(exact.DEVICE) for name, tensor in pair.weights[LOADED].items()})())
    assert made.keys() == files.keys()
    return [name for name, tensor in files.items() if not torch.equal(_bytes(made[name].cpu()), _bytes(tensor))]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def check(pair: Pair, record: Callable[[str, object], None]) -> None:
    engine, replica = ENGINES[pair.kind.engine], pair.replica

    def answers(server: Replica | PlainServer) -> list[list[int]]:
        return [engine.tokens(engine.complete(server, prompt)) for prompt in PROMPTS]

    expected = answers(pair.plain)
    assert answers(pair.plain) == expected, "the other server gives two answers to one prompt"
    replica.registered(UP_SECONDS)
    live = {name: torch.zeros_like(tensor, device=exact.DEVICE) for name, tensor in pair.weights[LOADED].items()}
    with Trainer(pair.cluster.address, lineage="quantised") as trainer:
        trainer.publish(BlockFp8(live) if pair.kind.block_wise else live)

        def update(version: int, seed: int) -> UpdateReport:
            for name, tensor in pair.weights[seed].items():
                live[name].copy_(tensor)
            return trainer.update_weights(version=version)

        equal = []
        for version, seed in enumerate(SEEDS):
            report = update(version, seed)
            assert report.ok, f"{report}\n{replica.tail()}"
            assert report.verified
            equal.append(answers(replica) == expected)
        (worker,) = report.replicas[0].message.workers
        record("equal to the other server, by update", equal)
        record("quantised", [f"{each.method}: {each.layers}" for each in worker.quantised])
        record("pause seconds", report.replicas[0].message.pause_seconds)
        if equal != (wanted := [seed == LOADED for seed in SEEDS]):
            differing = engine.differing(replica.url, pair.plain.url)
            record("tensors that differ after the last update", differing)
            lines = "\n".join(differing)
            raise AssertionError(f"{equal}, where {wanted} is right; {lines}\n{replica.tail()}")
        assert {each.published for each in worker.quantised} == {pair.kind.block_wise}

        restore = corrupt_after_sealing(trainer, _sealed(trainer, TORN), 7)
        report = update(len(SEEDS), 3)
        restore()
        assert outcomes(report) == {replica.name: "quarantined"}, str(report)
        assert "o_proj" in report.replicas[0].problem
        check_closed(engine.complete, replica)
        report = update(len(SEEDS) + 1, LOADED)
        assert report.ok, f"{report}\n{replica.tail()}"
        assert answers(replica) == expected, "after the update that heals"

        if pair.kind.sleeps:
            exact.sleep(pair.cluster, 2)
            check_closed(engine.complete, replica)
            report = update(len(SEEDS) + 2, LOADED)
            assert report.ok, f"{report}\n{replica.tail()}"
            assert answers(replica) == expected, "after the update that wakes"
    record("passed", "four updates, a corrupt slice" + (", sleep" if pair.kind.sleeps else ""))


def _sealed(trainer: Any, name: str) -> torch.Tensor:
    """The memory that readers see of a published tensor: the trainer's own, or the source's copy."""
    source = trainer._sealer._source
    names = [box.name for box in source._published]
    sealed: torch.Tensor = source._sealed[names.index(name)]
    return sealed
