"""Each node's part of an engine: the command lines that adapters make of one, and what cannot be shared."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ckpt_engine.engine import adapter
from ckpt_engine.engine.node_plan import NodePart, node_plan_of
from ckpt_engine_adapters.reference import driver as reference
from ckpt_engine_adapters.reference.server import parse
from ckpt_engine_adapters.sglang import driver as sglang
from ckpt_engine_adapters.vllm import driver as vllm
from ckpt_engine_adapters.vllm.command import options_of
from tests.distributions import SMALL, distribution

FIRST, SECOND = NodePart(2, 0, "10.0.0.1", 7200), NodePart(2, 1, "10.0.0.1", 7200)


def test_vllm_gets_the_options_of_its_node_and_the_headless_form_elsewhere() -> None:
    arguments = ("--tensor-parallel-size", "16", "--max-model-len", "4096")
    leads, follows = (vllm.node_plan(arguments, 8000, "model", place) for place in (FIRST, SECOND))
    for rank, plan in enumerate((leads, follows)):
        options = options_of(plan.argv)
        assert (options["--nnodes"], options["--node-rank"]) == (("2",), (str(rank),))
        assert (options["--master-addr"], options["--master-port"]) == (("10.0.0.1",), ("7200",))
        assert (options["--max-model-len"], options["--weight-transfer-config"]) == (("4096",), (vllm.TRANSFER,))
        assert (plan.workers, plan.env[vllm.WORKERS_VARIABLE]) == (16, "16")
    assert leads.argv[:3] == (sys.executable, "-m", vllm.MODULE)
    assert follows.argv[:3] == (sys.executable, "-m", vllm.HEADLESS)
    assert "--headless" not in (*leads.argv, *follows.argv), "our module says so itself"
    theirs = vllm.node_plan(("vllm", "serve", "model", "-tp", "2"), 8000, "", SECOND)
    assert theirs.argv[:2] == ("vllm", "serve")
    assert theirs.argv[-1] == "--headless"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--tensor-parallel-size", "3"), "3 workers cannot be shared by 2 nodes"),
        (("--tensor-parallel-size", "2", "--data-parallel-hybrid-lb"), "only node 0 may have an API server"),
        (("--data-parallel-size", "2", "--data-parallel-rank=1"), "only node 0 may have an API server"),
        (("-dp", "2", "-dpn", "1"), "--data-parallel-rank: on several --nodes only node 0 may have an API server"),
        (("--tensor-parallel-size", "2", "--nnodes", "2"), "leave --nnodes out"),
        (("-tp", "2", "-n", "2"), "leave --nnodes out"),
    ],
)
def test_what_vllm_could_not_do_or_our_gate_not_see_is_refused(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        vllm.node_plan(arguments, 8000, "model", FIRST)


@pytest.mark.parametrize("launch_plan", [vllm.launch_plan, sglang.launch_plan], ids=["vllm", "sglang"])
def test_where_an_engine_listens_is_where_its_agent_calls_it(launch_plan: adapter.AdapterModule) -> None:
    for given, reached in (("", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("localhost", "localhost"), ("::1", "[::1]")):
        plan = launch_plan(["--host", given] if given else [], 8000, "model")  # type: ignore[operator]
        assert (plan.url, plan.listens_at) == (f"http://{reached}:8000", given or "127.0.0.1")


@pytest.mark.parametrize("launch_plan", [vllm.launch_plan, reference.launch_plan], ids=["vllm", "reference"])
def test_nodes_behind_the_agents_back_are_refused(launch_plan: adapter.AdapterModule) -> None:
    """Workers that no agent of ours sees would leave the gate closed for ever."""
    with pytest.raises(ValueError, match=r"leave --nnodes(, --node-rank)? out"):
        launch_plan(["--nnodes", "2", "--node-rank", "0"], 1, "model")  # type: ignore[operator]


def test_the_reference_engines_parts_are_commands_that_its_server_understands(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    model = tmp_path_factory.mktemp("model")
    (model / "config.json").write_text("{}")
    for place in (FIRST, SECOND):
        plan = reference.node_plan(("--tensor-parallel", "4"), 8000, str(model), place)
        options = parse(list(plan.argv[3:]))
        assert (options.nnodes, options.node_rank, options.master_addr) == (2, place.rank, "10.0.0.1")
    with pytest.raises(ValueError, match="1 workers cannot be shared by 2 nodes"):
        reference.node_plan((), 8000, str(model), FIRST)


def test_an_adapter_that_says_nothing_of_nodes_has_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(distribution(tmp_path, "small", SMALL))
    with pytest.raises(ValueError, match="--nodes: an engine of kind small on several nodes cannot be driven yet"):
        node_plan_of("small")
