"""Mistakes that people make, and what each prints: what is wrong, with which value, and what to do."""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import subprocess
import sys
import tomllib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from rich.console import Console
from safetensors.torch import save_file
from typer.testing import CliRunner

from ckpt_engine import CkptEngineError, Trainer, extras
from ckpt_engine.agent.logs import new_log
from ckpt_engine.agent.remedies import remedy
from ckpt_engine.cli import app_for
from ckpt_engine.commands import status as status_command
from ckpt_engine.commands.choices import Level, LogForm
from ckpt_engine.commands.logs import JsonLines
from ckpt_engine.core.names import some
from ckpt_engine.demo.play import Outcome
from ckpt_engine.demo.show import ConsoleShow
from ckpt_engine.demo.stage import DemoSettings
from ckpt_engine.scraping import scraped_at
from ckpt_engine.source.open import open_source
from ckpt_engine.trainer.sealer import Sealer
from ckpt_engine.v1 import manager_pb2, weights_pb2

Run = Callable[..., Result]


def said(call: Callable[[], object]) -> str:
    with pytest.raises(CkptEngineError) as caught:
        call()
    return caught.value.problem.message


@pytest.mark.parametrize(
    ("wish", "words"),
    [
        ({"version": "3"}, "version '3' is not a count of steps: give a whole number from 0"),
        ({"version": 3.0}, "version 3.0 is not a count of steps"),
        ({"version": True}, "version True is not a count of steps"),
        ({"version": -1}, "version -1 is not a count of steps"),
        ({"timeout": "60"}, "a timeout is a number of seconds, not '60'"),
        ({"timeout": 0}, "a timeout of 0 s cannot be waited for"),
        ({"min_replicas": "1"}, "min_replicas '1' is not a number of replicas: give a whole number from 0"),
        ({"min_replicas": -1}, "min_replicas -1 is not a number of replicas"),
        ({"replicas": "rollout-0"}, "replicas is a list of names: ['rollout-0']"),
        ({"replicas": [0]}, "replicas is a list of names, not [0]"),
        ({"pause_mode": "stop"}, "pause_mode 'stop' is none of keep, abort, wait, in_place"),
        ({"prefetch": True}, "prefetch True is none of auto, always, never"),
        ({"until": "hold"}, "until 'hold' is none of installed, held"),
        ({"until": ["held"]}, "until ['held'] is none of installed, held"),
    ],
)
def test_arguments_of_an_update_that_cannot_be(wish: dict[str, Any], words: str) -> None:
    with Trainer("127.0.0.1:1", lineage="run") as trainer, pytest.raises(CkptEngineError) as caught:
        trainer.update_weights(**wish)
    assert (caught.value.code, words in caught.value.problem.message) == ("INVALID_ARGUMENT", True), caught.value


def test_arguments_of_a_trainer_that_cannot_be() -> None:
    text = said(lambda: Trainer("127.0.0.1:1", rank="0", world_size="1", lineage="run"))  # type: ignore[arg-type]
    assert "must be ints, got '0' and '1': convert environment variables with int()" in text
    assert "give both, or neither under torchrun" in said(lambda: Trainer("127.0.0.1:1", rank=0, lineage="run"))
    assert "ranks count from 0" in said(lambda: Trainer("127.0.0.1:1", rank=2, world_size=2, lineage="run"))


def test_arguments_of_other_calls_that_cannot_be() -> None:
    for made, words in (
        ({"address": 50051}, "must be HOST:PORT, not 50051"),
        ({"lineage": 3}, "a lineage's name must be a str, got 3"),
        ({"deadlines": {"connect": 1}}, "deadlines must be ckpt_engine.Deadlines(NAME=SECONDS, ...)"),
    ):
        assert words in said(lambda made=made: Trainer(**{"address": "127.0.0.1:1", "lineage": "run", **made}))
    weights = {"a": torch.ones(2)}
    with Trainer("127.0.0.1:1", lineage="run") as trainer:
        for call, words in (
            (lambda: trainer.sleep("1"), "level '1' is not a whole number"),  # type: ignore[arg-type]
            (lambda: trainer.sleep(replicas="r"), "replicas is a list of names: ['r']"),
            (lambda: trainer.wake("weights"), "tags is a list of names: ['weights']"),
            (lambda: trainer.wait_for_replicas("2"), "count '2' is not a number of replicas"),  # type: ignore[arg-type]
            (lambda: trainer.publish(weights, check_finite="no"), "check_finite 'no' is neither True nor False"),  # type: ignore[arg-type]
            (lambda: trainer.publish(weights, snapshot="no"), "snapshot 'no' is neither True nor False"),  # type: ignore[arg-type]
            (lambda: trainer.publish(weights, move="yes"), "move 'yes' is neither True nor False"),  # type: ignore[arg-type]
            (lambda: trainer.publish(weights, move=True, snapshot=True), "snapshot=True copies the weights at each"),
            (lambda: trainer.publish(weights, snapshot=False), "only with move=True"),
            (lambda: trainer.publish(weights, dtype="bf16"), "cannot serve weights as bf16: dtype 'bf16' is not"),
            (lambda: trainer.publish([3]), "expected (name, tensor) pairs, found an item of type int"),  # type: ignore[list-item]
        ):
            assert words in said(call)


def test_a_trainer_that_was_closed_says_so() -> None:
    trainer = Trainer("127.0.0.1:1", lineage="run")
    for _ in range(3):
        trainer.close()
    for call in (trainer.update_weights, lambda: trainer.publish({"a": torch.ones(2)}), trainer.sleep):
        with pytest.raises(CkptEngineError, match="closed: make another one") as caught:
            call()
        assert caught.value.code == "FAILED_PRECONDITION"


def test_a_name_that_nobody_has(run: Run, manager: str) -> None:
    for operation in ("sleep", "wake", "retry", "evict"):
        result = run("replica", operation, "nosuch", "--manager", manager)
        assert result.exit_code == 1
        assert result.stderr == f"manager {manager}: there is no replica 'nosuch' (none is known)\n"
    for operation in ("evict", "forget"):
        result = run("lineage", operation, "nosuch", "--manager", manager)
        assert f"manager {manager}: there is no lineage 'nosuch' (none is known)\n" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["replica", "wake", "--tag", "kvcache"], "'kvcache' is not one of 'weights', 'kv_cache'"),
        (["update", "--checkpoint", "x", "--pause-mode", "stop"], "'stop' is not one of 'keep', 'abort', 'wait'"),
        (["manager", "--log-level", "loud"], "'loud' is not one of 'debug', 'info', 'warning', 'error'"),
        (["manager", "--deadline", "leese=3"], "leese"),
        (["replica", "sleep", "--timeout", "1e9"], "cannot be waited for"),
        (["update", "--checkpoint", "x", "--timeout", "0"], "cannot be waited for"),
        (["update", "--checkpoint", "x", "--version", "-1"], "--version"),
        (["agent", "--manager", "a:1", "--engine", "vllm", "--port", "99999"], "--port"),
        (
            ["agent", "--manager", "a:1", "--engine", "vllm", "--url", "a:2"],
            "not the URL of an HTTP server: try 'http://a:2'",
        ),
        (["demo", "--engine", "tgi"], "'tgi' is not one of 'reference', 'sglang', 'transformers', 'vllm'"),
        (["demo", "--engine", "transformers"], "of engine 'transformers' does not say how the demo would start one"),
        (["engines", "tgi"], "'tgi' is not one of"),
        (["rollback", "--version", "three"], "'--version': must be a valid integer"),
        (["update"], "--checkpoint or --from-directory: name one of them"),
        (["managr"], "No such command 'managr'. Did you mean 'manager'?"),
        (["replica", "lst"], "No such command 'lst'. Did you mean 'list'?"),
        (["--pool", "judge", "status"], "No such option: --pool. Options of a command stand behind it"),
        (["--json"], "Missing command"),
        (["--json", "engines"], "No such option: --json"),
        (["trace", "3", "-o", "-", "--timeout", "3"], "only with --wait"),
        (["update", "weights/7"], "extra argument(s) (weights/7). Name the checkpoint's directory by --checkpoint"),
    ],
)
def test_options_that_cannot_be(run: Run, arguments: list[str], words: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert words in result.stderr
    assert "Traceback" not in result.output


def test_a_port_in_use_is_told_without_noise(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        for option in ("--listen", "--http"):
            other = {"--listen": "--http", "--http": "--listen"}[option]
            command = ["manager", "--ledger", str(tmp_path / "ledger"), option, address, other, "127.0.0.1:0"]
            done = subprocess.run(
                [sys.executable, "-m", "ckpt_engine", *command], capture_output=True, text=True, timeout=60, check=False
            )
            assert done.returncode == 1
            (line,) = done.stderr.splitlines()
            assert f"cannot listen on {address}" in line
            assert option in line, "it names the option"


def test_a_base_install_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fake: find_spec finds no torch, as in an environment without."""
    monkeypatch.setattr(extras, "find_spec", lambda name: None if name == "torch" else object())
    words = said(lambda: extras.require("trainer", "torch", "numpy", what="ckpt_engine.Trainer"))
    assert words.startswith("ckpt_engine.Trainer needs torch")
    assert words.endswith("pip install 'ckpt-engine[trainer]'")
    reference = ["--manager", "a:1", "--engine", "reference"]
    for command, needed in {"update": ["--checkpoint", "."], "agent": reference, "demo": []}.items():
        result = CliRunner().invoke(app_for([command]), [command, *needed])
        assert "pip install 'ckpt-engine[" in f"{result.exception} {result.stderr}"
        assert result.exit_code == 1


def test_an_agent_wants_no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its engine has one of its own. A fake: find_spec finds no torch, as in an environment without."""
    monkeypatch.setattr(extras, "find_spec", lambda name: None if name == "torch" else object())
    command = ["agent", "--manager", "nowhere", "--engine", "vllm"]
    assert "must be HOST:PORT, not 'nowhere'" in CliRunner().invoke(app_for(command), command).stderr


def test_a_demo_that_cannot_begin_says_why_and_nothing_else() -> None:
    shown = Console(width=140, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    settings = DemoSettings(engine="vllm")
    with ConsoleShow(shown) as show:
        show.end(Outcome(settings, problem="vllm is not installed here"))
    assert shown.export_text().strip() == "vllm is not installed here"


def test_an_engine_that_is_not_installed() -> None:
    lines = ["Traceback (most recent call last):", "ModuleNotFoundError: No module named 'vllm.entrypoints'"]
    words = remedy(["env", "A=b", "/opt/bin/python3", "-m", "vllm"], lines)
    assert words.startswith("/opt/bin/python3 has no vllm: activate the engine's environment")
    words = remedy(["python", "-m", "x"], ["(ModuleNotFoundError: No module named 'ckpt_engine_adapters')"])
    assert "install it into the engine's environment" in words
    assert remedy(["python"], ["CUDA out of memory"]) == ""


def test_many_names_are_counted() -> None:
    assert some(["a"]) == "a"
    assert some([str(number) for number in range(25)]) == "0, 1, 2, 3 and 21 more"


def test_where_metrics_cannot_be(tmp_path: Path) -> None:
    for address, words in (("9100", "host:port"), (":9100", "host:port"), ("::1:9100", "in brackets")):
        with pytest.raises(CkptEngineError, match=f"--metrics '{address}' .*{words}"), scraped_at(address, list):
            continue
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(CkptEngineError, match=r"cannot listen on .* for metrics"), scraped_at(address, list):
            pass


def test_weights_that_are_no_numbers_are_refused_by_name(manager: str, tmp_path: Path) -> None:
    weights = {"fine": torch.ones(3), "wrong": torch.tensor([1.0, float("nan")]), "count": torch.tensor([1])}
    save_file(weights, tmp_path / "model.safetensors")
    for published in (weights, str(tmp_path)):
        for checked in (True, False):
            sealer = Sealer()
            table = weights_pb2.SourceTable.FromString(sealer.offer(open_source(published), check_finite=checked))
            atoms = weights_pb2.Atoms(table_digest=sealer._table_digest)
            for index, shard in enumerate(table.shards):
                atoms.atoms.add(shard=index, start=shard.start, stop=shard.stop)
            assert table.rank == 0
            seal = partial(sealer.seal, atoms, keep=False)
            if checked:
                assert "weights of rank 0 hold NaN or infinity: wrong" in said(seal)
            else:
                seal()
            sealer.close()


def test_a_log_of_json_lines_has_fields() -> None:
    words = "session opened peer=%s rank=%d took %.1f%% at=%r"
    record = logging.LogRecord("ckpt_engine", logging.INFO, "", 0, words, ("t-1", 3, 5.0, "x"), None)
    line = json.loads(JsonLines(replica="r").format(record))
    assert (line["peer"], line["rank"], line["at"], line["replica"], line["level"]) == ("t-1", 3, "x", "r", "info")
    assert line["message"] == "session opened peer=t-1 rank=3 took 5.0% at='x'"
    assert {each.value for each in LogForm} == {"text", "json"}
    assert Level("debug") is Level.DEBUG


def test_the_status_fits_into_eighty_columns() -> None:
    identity = weights_pb2.Identity(lineage="grpo-qwen3-8b", version=1234, root=bytes(32))
    answer = manager_pb2.GetStatusResponse(
        software_version="0.1.0",
        phase="idle",
        latest=identity,
        trainers=[manager_pb2.TrainerStatus(lineage="grpo-qwen3-8b", rank=15, world_size=16, description="host-a")],
        replicas=[
            manager_pb2.ReplicaStatus(
                name="rollout-node-17-gpu-3",
                connected=True,
                identity=identity,
                last_outcome=manager_pb2.ReplicaOutcome(),
            )
        ],
        holders=[
            manager_pb2.HolderStatus(
                kind="relay",
                name="rollout-node-17",
                connected=True,
                held=[identity],
                progress=manager_pb2.RelayProgress(bytes_done=1, bytes_total=3),
                slow="sent 3 MB/s",
            )
        ],
    )
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(status_command.as_tables("10.0.0.1:50051", answer, wide=False))
    text = console.export_text()
    for row in ("rollout-node-17-gpu-3", "1234 of grpo-qwen3-8b", "15 of 16", "filling, 33 %"):
        assert row in text, text
    assert "relay rollout-node-17 passes nothing on to others: it sent 3 MB/s" in text
    assert " host " in text
    assert "publishes" not in text


def test_the_status_shows_what_relays_hold_and_who_filled_them() -> None:
    identity = weights_pb2.Identity(lineage="run", version=7, root=bytes(32))
    brought = [manager_pb2.RelayFilled.Brought(source="rank 0", bytes=16_400_000_000)]
    relay = manager_pb2.HolderStatus(
        kind="relay",
        name="a",
        connected=True,
        held=[identity],
        shares=[manager_pb2.VersionShare(identity=identity)],
        filling=manager_pb2.Filling(memory_bytes=200 << 30),
        last_filled=manager_pb2.RelayFilled(identity=identity, brought=brought, fill_seconds=0.5),
    )
    refused = manager_pb2.RelayFilled(identity=identity, problem=weights_pb2.Problem(message="no room"))
    lost = manager_pb2.HolderStatus(kind="relay", name="b", last_filled=refused)
    answer = manager_pb2.GetStatusResponse(holders=[relay, lost])
    console = Console(width=300, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(status_command.as_tables("127.0.0.1:50051", answer))
    text = console.export_text()
    for words in ("7 of run", "214.7 GB", "version 7: 16.4 GB from rank 0 in 0.500 s", "disconnected", "7: no room"):
        assert words in text, text


def test_old_engine_logs_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckpt_engine.agent.logs.MOST_BYTES", 100)
    old, new = new_log(tmp_path, "old"), new_log(tmp_path, "new")
    old.write_bytes(bytes(80))
    new.write_bytes(bytes(80))
    os.utime(old, (1, 1))
    newest = new_log(tmp_path, "newest")
    assert set((tmp_path / "logs").iterdir()) == {new, newest}


def test_every_variable_of_a_command_is_documented() -> None:
    root = Path(__file__).parents[2]
    page = "".join(path.read_text() for path in (root / "docs").rglob("*.md"))
    sources = [*(root / "ckpt_engine").rglob("*.py"), *(root / "adapters").rglob("*.py")]
    names = {name for path in sources for name in re.findall(r'"(CKPT_ENGINE_[A-Z_]+[A-Z])"', path.read_text())}
    manager = (root / "ckpt_engine/commands/manager.py").read_text()
    names |= {f"CKPT_ENGINE_MANAGER_{name}" for name in re.findall(r'_option\(\s*"([A-Z_]+)"', manager)}
    assert len([name for name in names if name.startswith("CKPT_ENGINE_MANAGER_")]) == 12
    assert sorted(name for name in names if name not in page) == []


def test_the_base_leaves_out_what_is_large() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    base = {re.split(r"[<>=\[]", name)[0] for name in project["dependencies"]}
    assert not base & {"torch", "numba", "transformers", "ray"}
    extras_there = project["optional-dependencies"]
    engines = {"sglang", "transformers", "vllm"}
    others = {"trainer", "relay", "relay-ucx", "demo", "peft", "trl", "verl", "ray", "postgresql", "dev"}
    assert set(extras_there) == engines | others
    for extra in set(extras_there) - {"dev"}:
        assert not [each for each in extras_there[extra] if "<" in each or "==" in each], "users choose versions"


def test_a_manager_loads_no_torch() -> None:
    code = (
        "import sys, ckpt_engine.commands.manager, ckpt_engine.manager.service\n"
        "assert not {'torch', 'numba', 'transformers'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
