"""vLLM on a GPU, fed from live parameters of a trainer on the same GPU: every update exact, with CUDA graphs and
without, while requests run, and in hybrid mode. The trainer is this process.

Greedy tokens are judged twice: by transformers (exact.py), and by a vLLM server that loaded the same weights from
files. It runs the same kernels, so its tokens are equal.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engines.vllm_server import complete, tokens
from tests.gpu.exact import PROMPTS, Exact, Fleet, bare_models
from tests.gpu.gpu_server import KV_BYTES, needs_gpu_vllm, plain_vllm, start_gpu_vllm
from tests.tiny_model import make_tiny_qwen3

pytestmark = [*needs_gpu_vllm, pytest.mark.timeout(400)]

FRESH = 7  # the seed of the weights that a server of its own loads from files
VLLM = Exact(complete, tokens, KV_BYTES)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """All servers of this module, started at once."""
    path = tmp_path_factory.mktemp("fleet")
    bare_models(path)
    with contextlib.ExitStack() as stack:
        fleet = Fleet(path, stack, start_gpu_vllm)
        fleet.start("graphs", path / "bare", "--enable-sleep-mode", options=("--mode", "hybrid"))
        fleet.start("eager", path / "bare", "--enforce-eager")
        fleet.start("tied", path / "bare-tied")
        fleet.start("mixture", path / "bare-mixture")
        yield fleet


@pytest.fixture(scope="module")
def fresh(fleet: Fleet) -> Iterator[Any]:
    """A server that loads version FRESH from files with its own loader."""
    make_tiny_qwen3(fleet.path / "fresh", FRESH)
    with plain_vllm(fleet.path / "fresh", fleet.path / "fresh.log", "--enforce-eager") as server:
        yield server


@pytest.mark.parametrize(("kind", "updates"), [("graphs", 20), ("eager", 20), ("tied", 5)])
def test_vllm_updates_from_live_parameters(fleet: Fleet, fresh: Any, tmp_path: Path, kind: str, updates: int) -> None:
    _, replica = fleet.ready(kind)

    def compare(version: int) -> None:
        if kind == "eager" and version == FRESH:
            fresh.wait()
            for prompt in PROMPTS:
                assert tokens(complete(replica, prompt)) == tokens(complete(fresh, prompt)), prompt

    VLLM.check_updates(fleet.ready(kind), tmp_path, updates, after=compare, tied=kind == "tied")


def test_a_mixture_of_experts_in_vllm(fleet: Fleet, tmp_path: Path) -> None:
    VLLM.check_mixture(fleet.ready("mixture"), tmp_path)


def test_a_corrupt_slice_closes_vllms_gate_until_the_next_good_update(fleet: Fleet, tmp_path: Path) -> None:
    VLLM.check_corrupt(fleet.ready("eager"), tmp_path)


@pytest.mark.parametrize("mode", ["keep", "in_place"])
def test_updates_while_streams_of_vllm_generate(fleet: Fleet, tmp_path: Path, mode: str) -> None:
    """CUDA graphs are replayed right after each update."""
    VLLM.check_streams(fleet.ready("graphs"), tmp_path, mode, {200, 503})


@pytest.mark.parametrize("level", [1, 2])
def test_vllm_sleeps_while_the_trainer_trains_and_serves_what_came_of_it(
    fleet: Fleet, tmp_path: Path, level: int
) -> None:
    VLLM.check_hybrid(fleet.ready("graphs"), tmp_path, level, same_again=True)
