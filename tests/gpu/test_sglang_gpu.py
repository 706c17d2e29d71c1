"""SGLang on a GPU, fed from live parameters of a trainer on the same GPU or another one: every update exact, with CUDA
graphs and without, tied embeddings, experts, two tensor-parallel workers, while requests run, and in hybrid mode. The
trainer is this process.

What is asked of vLLM too is in exact.py; what every engine must do is in tests/conformance.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.engines.sglang_server import complete, tokens
from tests.engines.test_vllm_models import build
from tests.gpu.exact import FLIPS, PROMPTS, Exact, Fleet, bare_models, mixture, right
from tests.gpu.sglang_fleet import CACHED_TOKENS, EAGER, GRAPHS, needs_gpu_sglang, plain_sglang, start_gpu_sglang
from tests.tiny_model import regrets

pytestmark = [*needs_gpu_sglang, pytest.mark.timeout(400)]

GPUS = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")[: torch.cuda.device_count()]
"""As servers name them; the trainer is on the first."""

CACHE_BYTES = CACHED_TOKENS * 2 * 2 * 2 * 32 * 2
"""Of the tiny model: keys and values of two layers, two heads of 32 bfloat16 each."""

HEAD_DIM = 64
"""Of experts. With smaller heads SGLang 0.5.16 ends at its first request on a GPU, also without us ("save kv cache is
not supported for fallback_rotary_embedding")."""

SGLANG = Exact(complete, tokens, CACHE_BYTES, labels=True, head_dim=HEAD_DIM)


LOADED = 3
"""The seed of the experts that a server without us loads: the last version of `check_mixture`."""


class Loaded(NamedTuple):
    """A server that SGLang's own loader brought its weights, and transformers' model of the same."""

    server: Any
    model: Any


@pytest.fixture(scope="module")
def loaded_mixture(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loaded]:
    """Experts. It may be starting still."""
    path = tmp_path_factory.mktemp("loaded")
    model, _ = build(mixture(HEAD_DIM), LOADED, path / "model")
    with plain_sglang(path / "model", path / "loaded.log", *EAGER, "--load-format", "auto") as server:
        yield Loaded(server, model)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, loaded_mixture: Loaded) -> Iterator[Fleet]:
    """All servers of this module, started at once; loaded_mixture too."""
    path = tmp_path_factory.mktemp("sglang")
    bare_models(path, HEAD_DIM)
    with contextlib.ExitStack() as stack:
        fleet = Fleet(path, stack, start_gpu_sglang)
        hybrid = ("--mode", "hybrid")
        fleet.start("graphs", path / "bare", *GRAPHS, "--enable-memory-saver", options=hybrid, visible=GPUS[0])
        kept = ("--enable-memory-saver", "--enable-weights-cpu-backup")
        fleet.start("eager", path / "bare", *EAGER, *kept, options=hybrid, visible=GPUS[0])
        fleet.start("tied", path / "bare-tied", *EAGER, visible=GPUS[0])
        fleet.start("mixture", path / "bare-mixture", *EAGER, visible=GPUS[0])
        if len(GPUS) > 1:
            fleet.start("peer", path / "bare", *GRAPHS, visible=GPUS[1])
            fleet.start("halves", path / "bare", *EAGER, visible=",".join(GPUS[:2]), tensor_parallel=2)
        yield fleet


@pytest.mark.parametrize(
    ("kind", "updates"), [("graphs", 20), ("eager", 20), ("tied", 5), ("peer", 10), ("halves", 10)]
)
def test_sglang_updates_from_live_parameters(fleet: Fleet, tmp_path: Path, kind: str, updates: int) -> None:
    workers = 2 if kind == "halves" else 1
    SGLANG.check_updates(fleet.ready(kind), tmp_path, updates, workers=workers, tied=kind == "tied")


def test_sglangs_own_loading_of_a_mixture_of_experts(fleet: Fleet, loaded_mixture: Loaded) -> None:
    """What the next test stands on: if this fails, it is not our doing."""
    loaded_mixture.server.wait()
    for prompt in PROMPTS:
        found = tokens(complete(loaded_mixture.server, prompt))
        assert right(regrets(loaded_mixture.model, prompt, found), FLIPS)


def test_a_mixture_of_experts_in_sglang(fleet: Fleet, loaded_mixture: Loaded, tmp_path: Path) -> None:
    served = fleet.ready("mixture")
    SGLANG.check_mixture(served, tmp_path)
    for prompt in PROMPTS:
        assert tokens(complete(served[1], prompt)) == tokens(complete(loaded_mixture.server, prompt)), prompt


def test_a_corrupt_slice_closes_sglangs_gate_until_the_next_good_update(fleet: Fleet, tmp_path: Path) -> None:
    SGLANG.check_corrupt(fleet.ready("eager"), tmp_path)


@pytest.mark.parametrize("mode", ["keep", "in_place"])
def test_updates_while_streams_of_sglang_generate(fleet: Fleet, tmp_path: Path, mode: str) -> None:
    """CUDA graphs are replayed right after each update, and the scheduler overlaps steps. No request fails."""
    SGLANG.check_streams(fleet.ready("graphs"), tmp_path, mode, {200})


@pytest.mark.parametrize(("level", "kind"), [(1, "eager"), (2, "graphs")])
def test_sglang_sleeps_while_the_trainer_trains_and_serves_what_came_of_it(
    fleet: Fleet, tmp_path: Path, level: int, kind: str
) -> None:
    """Level 1 needs a server that keeps its weights on the host."""
    SGLANG.check_hybrid(fleet.ready(kind), tmp_path, level, same_again=False)
