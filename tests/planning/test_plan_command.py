"""`ckpt-engine plan` as people run it: what it prints, mistakes, and a terabyte."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from ckpt_engine.cli import app_for
from ckpt_engine.planning import shapes
from ckpt_engine.planning.words import merge_numbers, seconds
from tests.planning.known_models import QWEN3_8B

DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "qk_nope_head_dim": 128,
    "first_k_dense_replace": 3,
    "num_nextn_predict_layers": 1,
    "torch_dtype": "bfloat16",
    "quantization_config": {"quant_method": "fp8"},
}

Run = Callable[..., Result]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs the command in a folder with two models; on ones that are wrong, too."""
    for name, config in (
        ("qwen", QWEN3_8B),
        ("terabyte", DEEPSEEK_V3),
        ("deepseek", {**DEEPSEEK_V3, "num_hidden_layers": 4}),
        ("other", {"architectures": ["GemmaForCausalLM"]}),
        ("lacking", {"architectures": ["LlamaForCausalLM"], "hidden_size": 64}),
        ("nameless", {"hidden_size": 64}),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "rates.json").write_text('{"digest": {"host": 0}}')
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: CliRunner().invoke(app_for(["plan"]), ["plan", *arguments])


def test_three_replicas_on_the_trainers_host(run: Run) -> None:
    shown = run("qwen", "--replicas", "3")
    assert shown.exit_code == 0, shown.output
    for words in (
        "399 tensors, 16.4 GB bfloat16",
        "rank 0 -> replica-0..2 worker 0: 3 of 16.4 GB each, 49.1 GB in all, by cuda_ipc",
        "relay trainer-0 is not filled",
        "cuda_ipc out of the GPU of rank 0",
        "pause of the slowest replica",
        "not from the engine's own",
    ):
        assert words in shown.output, words


@pytest.mark.slow
def test_a_terabyte_on_hundreds_of_gpus(run: Run) -> None:
    """How long that takes and how much memory: docs/plan.md."""
    large = "terabyte --trainer fsdp=256 --replicas 64 --tp 8 --ep 8 --network 400Gbit/s --host-memory 3TiB --json"
    told = told_of_experts(run, large, 64)
    assert told["model"]["bytes"] == 1_342_052_868_096


def test_many_experts_on_many_hosts(run: Run) -> None:
    told_of_experts(run, "deepseek --trainer fsdp=32 --replicas 4 --tp 8 --ep 8 --json", 4)


def told_of_experts(run: Run, line: str, replicas: int) -> dict[str, Any]:
    """A plan by way of relays, looked through."""
    shown = run(*line.split())
    assert shown.exit_code == 0, shown.output
    told: dict[str, Any] = json.loads(shown.output)
    assert told["ok"]
    assert any("quantised (fp8)" in note for note in told["model"]["notes"])
    installs = [edge for edge in told["edges"] if edge["stage"] == "install"]
    assert {(edge["transport"], edge["bytes"]) for edge in installs} == {("relay_memory", installs[0]["bytes"])}
    assert len(installs) == replicas * 8
    assert sum(edge["bytes"] for edge in installs if edge["replica"] == "replica-0") > told["model"]["bytes"]
    from_trainer = sum(edge["bytes"] for edge in told["edges"] if edge["source"].startswith("rank "))
    assert from_trainer == told["model"]["bytes"], "each byte leaves the trainer's GPUs once"
    assert told["time"]["pause_seconds"] < told["time"]["call_seconds"]
    return told


def impossible(shown: Result) -> str:
    assert shown.exit_code == 1, shown.output
    return " ".join(shown.output.partition("Impossible")[2].split())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("qwen --tp 3", "the model's 32 attention heads do not divide by tp=3"),
        ("qwen --engine reference --tp 16", "the model's 8 key-value heads do not divide by tp=16"),
        ("qwen --trainer tp=3", "trainer: the model's 32 attention heads do not divide by tp=3"),
        ("qwen --ep 2 --tp 2", "ep=2, and the model has no experts"),
        ("deepseek --tp 3 --ep 3", "the model's 256 experts do not divide by ep=3"),
        ("qwen --pp 40", "the model's 36 layers are fewer than pp=40 stages"),
        ("qwen --hosts 1 --no-relays", "start a relay on host "),
        ("qwen --hosts 1 --prefetch never", "relays are there, and bring nothing, since prefetch is 'never'"),
        ("qwen --hosts 1 --relay-memory 8GiB", "give the relay 32765902848 bytes or more (it keeps two versions)"),
        (
            "qwen --hosts 1 --host-memory 16GiB",
            "keeps two versions, 32.8 GB, and host rollout-0 has 17.2 GB (--host-memory): give hosts more, or spread "
            "each replica over several (--hosts)",
        ),
        (
            "qwen --trainer-memory host --host-memory 8GiB",
            "its trainer ranks' weights and its relay's two versions are 16.4 GB, and it has 8.6 GB",
        ),
        (
            "qwen --trainer fsdp=8 --hosts 1 --host-memory 16GiB",
            "relay trainer-0 keeps two versions, 32.8 GB, and host trainer-0 has 17.2 GB (--host-memory): give hosts "
            "more, or spread the trainer over more (--trainer): it passes on what ranks there have",
        ),
        ("deepseek --trainer tp=1,ep=8,dp=3", "ep=8 does not divide tp=1"),
        ("qwen --gpu-link none --no-relays", "no peer access leads from the worker's GPU"),
    ],
)
def test_what_is_impossible_is_said_with_the_reason(run: Run, arguments: str, says: str) -> None:
    assert says in impossible(run(*arguments.split()))


def test_an_update_that_reaches_nobody_takes_no_time(run: Run) -> None:
    shown = run("qwen", "--hosts", "1", "--no-relays")
    assert "Time" not in shown.output
    assert json.loads(run("qwen", "--hosts", "1", "--no-relays", "--json").output)["time"]["stages"] == {}


def test_a_config_that_names_no_dtype_is_counted_with_a_note(run: Run, tmp_path: Path) -> None:
    config = {name: value for name, value in QWEN3_8B.items() if name != "torch_dtype"}
    (tmp_path / "qwen" / "config.json").write_text(json.dumps(config))
    words = "config.json names no dtype, and this counts bfloat16"
    assert words in " ".join(run("qwen").output.split())
    assert words not in " ".join(run("qwen", "--dtype", "float32").output.split())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("nowhere", "nowhere is not there: give a config.json"),
        ("empty", "does not say any shapes: there are no safetensors files"),
        ("other", "the shapes of GemmaForCausalLM are not known here (known: LlamaForCausalLM,"),
        ("lacking", "config.json has no vocab_size"),
        ("nameless", "config.json names no architecture"),
        ("broken.json", "cannot be read as JSON"),
        ("qwen --trainer fspd=8", "--trainer 'fspd=8': write fsdp=N, or tp=N"),
        ("qwen --trainer fsdp=0", "--trainer 'fsdp=0': write fsdp=N"),
        ("qwen --trainer fsdp=8,tp=2", "fsdp together with tp is not planned for"),
        ("qwen --trainer fsdp=99999", "99999 processes in all are more than the 8192"),
        ("qwen --gpus-per-host 100000", "--gpus-per-host 100000: a host has 64 at most"),
        ("qwen --engine sglang --ep 2", "--ep 2: ckpt-engine drives sglang with TP only"),
        ("deepseek --tp 8 --ep 4", "so --ep is 1 or as --tp (8)"),
        ("deepseek --trainer tp=1,ep=8,dp=8", "expert parallelism wider than tp is not planned for"),
        ("deepseek --trainer files", "quantised (fp8), and does not say how large its files are: give the directory"),
        ("qwen --cpu", "add --trainer-memory host, or leave --cpu out"),
        ("qwen --same-gpus --replicas 2", "2 workers in all, and the trainer is on 1: name fewer replicas"),
        ("qwen --same-gpus --hosts 2", "leave out --hosts and --cpu"),
        ("qwen --network 100", "--network '100' is not a rate: write a number and a unit, such as 100Gbit/s"),
        ("qwen --network 0GB/s", "--network '0GB/s' is not a rate"),
        ("qwen --host-memory lots", "--host-memory 'lots' is not an amount of memory"),
        ("qwen --hosts 1 --replicas 9", "--hosts 1: 9 replicas of 1 worker take 2 hosts of 8 GPUs"),
        ("qwen --hosts 2", "cannot be spread evenly over so many hosts; name 1, or leave it out"),
        ("qwen --trainer-hosts 4", "the trainer has 1 rank, fewer than hosts"),
        ("qwen --trainer fsdp=16 --trainer-hosts 1", "16 ranks are 16 a host, and a host has 8 GPUs"),
        ("qwen --rates none.json", "none.json is not a file"),
        ("qwen --rates broken.json", "cannot be read as JSON"),
        ("qwen --rates rates.json", "digest, host: 0 is not a number above 0"),
    ],
)
def test_mistakes_are_said_in_words(run: Run, arguments: str, says: str) -> None:
    shown = run(*arguments.split())
    assert shown.exit_code == 1, shown.output
    assert shown.stderr.startswith("ckpt-engine plan: ")
    assert says in shown.stderr
    assert shown.stderr.count("\n") == 1
    told: dict[str, Any] = json.loads(run(*arguments.split(), "--json").stdout)
    assert told["ok"] is False
    assert says in told["problem"]["message"]


def test_a_config_without_end_is_refused(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shapes, "MOST_TENSORS", 1000)
    (tmp_path / "qwen" / "config.json").write_text(json.dumps({**QWEN3_8B, "num_hidden_layers": 10**12}))
    assert "config.json says more than 1000 tensors, which no model has" in run("qwen").stderr


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ("[" * 100_000, "config.json cannot be read as JSON"),
        ('{"a":' * 100_000, "config.json cannot be read as JSON"),
        (json.dumps({**QWEN3_8B, "architectures": ["\ud800"]}), "the shapes of \\ud800 are not known here"),
        (json.dumps({**QWEN3_8B, "hidden_size": 1 << 62}), "more than any memory holds"),
        (json.dumps({**QWEN3_8B, "hidden_size": 10**4000}), "more than any memory holds"),
    ],
)
def test_a_config_of_a_stranger_is_refused_in_words(run: Run, tmp_path: Path, config: str, says: str) -> None:
    (tmp_path / "qwen" / "config.json").write_text(config)
    shown = run("qwen")
    assert shown.exit_code == 1, shown.output
    assert says in shown.stderr
    assert shown.stderr.count("\n") == 1
    assert len(shown.stderr) < 1000


def test_stage_memory_takes_the_relay_out_of_the_pause(run: Run) -> None:
    def pause(*options: str) -> float:
        result = run("qwen", "--prefetch", "always", "--json", *options)
        assert result.exit_code == 0, result.output
        found: float = json.loads(result.stdout)["time"]["pause_seconds"]
        return found

    plain, half, whole = pause(), pause("--stage-memory", "8.19GB"), pause("--stage-memory", "auto")
    assert whole < 0.04 < half < plain
    assert half == pytest.approx((plain + whole) / 2, rel=0.05)
    wrong = run("qwen", "--stage-memory", "much")
    assert wrong.exit_code == 1
    assert "--stage-memory 'much' is not an amount of memory" in wrong.output


def test_a_rate_that_is_not_known_is_no_prediction(run: Run) -> None:
    """Nobody measured what a GPU reads from files itself."""
    shown = run("qwen", "--trainer", "files", "--no-relays")
    assert shown.exit_code == 0, shown.output
    assert "nothing is known of the rate of file" in shown.output
    assert "pause of the slowest" not in shown.output


def test_rates_that_were_measured_elsewhere(run: Run, tmp_path: Path) -> None:
    (tmp_path / "rates.json").write_text('{"links": {"cuda_ipc": {"gpu": 100}}, "seconds": {"quiesce": 1}}')
    stages = json.loads(run("qwen", "--rates", "rates.json", "--json").output)["time"]["stages"]
    assert stages["transfer"]["seconds"] == pytest.approx(0.1638, rel=0.001)
    assert stages["quiesce"]["seconds"] == 1


def test_names_that_differ_in_numbers_are_told_once() -> None:
    assert merge_numbers(["a-1 b 2", "a-2 b 2", "a-4 b 2", "c"]) == ["a-1..2,4 b 2", "c"]
    assert merge_numbers(["{0} of 3", "{0} of 4"]) == ["{0} of 3..4"]
    assert [seconds(value) for value in (0.0431, 3.27, 240.5, 1234.5)] == ["43.1 ms", "3.27 s", "240 s", "1234 s"]
