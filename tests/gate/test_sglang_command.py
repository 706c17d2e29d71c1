"""How SGLang servers are started: what is added to a command, and what is refused before anything runs."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from ckpt_engine.engine.node_plan import NodePart
from ckpt_engine_adapters.sglang.command import LOADER, WRAPPER, check_options, options_of
from ckpt_engine_adapters.sglang.driver import launch_plan, node_plan

WHOLE = ("env", "A=1", "/opt/python", "-m", "sglang.launch_server", "--tp", "2")


def test_options_alone_become_a_server_of_this_python() -> None:
    plan = launch_plan(["--log-level", "info"], 1234, "model")
    assert plan.argv[:5] == (sys.executable, "-m", WRAPPER, "--log-level", "info")
    options = options_of(plan.argv)
    assert options["--model-path"] == ("model",)
    assert options["--port"] == ("1234",)
    assert options["--host"] == ("127.0.0.1",)
    assert options["--custom-weight-loader"] == (LOADER,)
    assert "--skip-server-warmup" in options
    assert plan.url == "http://127.0.0.1:1234"
    assert plan.workers == 1
    assert plan.env == {"CKPT_ENGINE_SGLANG_WORKERS": "1"}


def test_a_whole_command_keeps_its_python_and_what_it_says() -> None:
    arguments = ("--model", "mine", "--port=77", "--host", "0.0.0.0", "--context-length", "99")
    plan = launch_plan([*WHOLE, *arguments, "--custom-weight-loader", "a.b"], 1234, "model")
    assert plan.argv[:7] == (*WHOLE[:4], WRAPPER, *WHOLE[5:])
    assert "--model-path" not in plan.argv
    assert plan.url == "http://127.0.0.1:77"
    assert plan.workers == 2
    assert plan.argv[7 : 7 + len(arguments)] == arguments
    assert options_of(plan.argv)["--custom-weight-loader"] == ("a.b", LOADER)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--nnodes", "2"], "agent --nodes"),
        (["--tokenizer-worker-num", "4"], "--tokenizer-worker-num 4"),
        (["--grpc-port=50051"], "gate does not see"),
        (["--use-ray"], "--use-ray"),
        (["--pp", "2"], "stages"),
        (["--dp-size", "2"], "--enable-dp-attention"),
        (["--disaggregation-mode", "prefill"], "caches of old weights"),
        (["--hicache-storage-backend", "file"], "outlive an update"),
        (["--enable-lmcache"], "--enable-lmcache cannot be used .* outlive an update"),
        (["--enable-flexkv"], "--enable-flexkv cannot be used .* outlive an update"),
        (["--enable-unified-cache-external-linker"], "outlive an update"),
        (["--radix-cache-backend", "mine"], "--radix-cache-backend mine cannot be used"),
        (["--speculative-algorithm", "EAGLE"], "draft model"),
        (["/no/such/sglang", "serve"], "there is no program .*ckpt-engine.sglang"),
        (["launch", "sglang"], "python -m sglang.launch_server"),
    ],
)
def test_what_cannot_be_kept_behind_the_gate_is_refused_by_name(arguments: list[str], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        launch_plan(arguments, 1, "model")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--tokenizer-worker-num", "1"],
        ["--disaggregation-mode=null"],
        ["--speculative-algorithm", "NGRAM"],
        ["--pp-size", "1", "--dp", "1"],
        ["--tp", "8", "--dp", "8", "--enable-dp-attention"],
    ],
)
def test_harmless_values_pass(arguments: list[str]) -> None:
    launch_plan(arguments, 1, "model")


def test_each_node_is_told_its_place() -> None:
    plans = [node_plan(["--tp", "4"], 0, "model", NodePart(2, rank, "10.0.0.1", 29500)) for rank in (0, 1)]
    for rank, plan in enumerate(plans):
        options = options_of(plan.argv)
        assert options["--nnodes"] == ("2",)
        assert options["--node-rank"] == (str(rank),)
        assert options["--dist-init-addr"] == ("10.0.0.1:29500",)
        assert plan.workers == 4, "of the whole server"
    with pytest.raises(ValueError, match="3 workers cannot be shared by 2 nodes"):
        node_plan(["--tp", "3"], 0, "model", NodePart(2, 0, "10.0.0.1", 29500))


def test_servers_that_the_environment_turns_into_others_are_refused() -> None:
    with pytest.raises(ValueError, match="SGLANG_RUST_SERVER=1"):
        check_options({}, {"SGLANG_RUST_SERVER": "1"})
    check_options({}, {"SGLANG_RUST_SERVER": "0"})


def test_the_wrapper_refuses_too_and_needs_no_sglang_for_it() -> None:
    """A server that is started by hand goes through the same words."""
    command: list[Any] = [sys.executable, "-m", WRAPPER, "--grpc-mode"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 1
    assert "--grpc-mode cannot be used with ckpt-engine" in ended.stderr
