"""What is worth running on a bare GPU host, the most worth first. README.md says the same for people.

`{out}` in a command is a directory for what it writes. Seconds are as they were on one or two H200, or, where nothing
of the kind ran yet (`guessed`), what its parts took.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Engine = Literal["", "vllm", "sglang"]

PYTEST = ("-m", "pytest", "-s", "-p", "no:cacheprovider")


@dataclass(frozen=True)
class Step:
    """One command of Python. seconds: expected; limit: after which it is ended. gpus: it needs so many at least.
    engine: whose CKPT_ENGINE_<ENGINE>_PYTHON it needs. cpu: the same on a small model without a GPU or an engine;
    empty: the command itself, which is skipped there."""

    name: str
    what: str
    command: tuple[str, ...]
    seconds: int
    limit: int
    gpus: int = 1
    engine: Engine = ""
    cpu: tuple[str, ...] = ()
    guessed: bool = True


def bench(file: str, limit: int, case: str = "") -> tuple[str, ...]:
    """A file of benchmarks/gpu, or the cases of it that are called so, with its JSON."""
    name = "_".join([file.removesuffix(".py"), *([case] if case else [])])
    command = (*PYTEST, f"benchmarks/gpu/{file}", f"--timeout={limit}", f"--benchmark-json={{out}}/{name}.json")
    return (*command, "-k", case) if case else command


def tests(where: str, limit: int, *words: str) -> tuple[str, ...]:
    """Tests of tests/gpu, with the JSON that `python -m tests.gpu.seen` makes a page of."""
    return (*PYTEST, f"tests/gpu{where}", f"--timeout={limit}", "-rs", "--seen={out}/seen.json", *words)


LOAD = ("-m", "benchmarks.gpu.under_load", "-o", "{out}/under_load.json")
TRACED = ("-m", "benchmarks.gpu.traced", "-o")
STAGED = ("-m", "benchmarks.gpu.stage_memory", "-o", "{out}/stage_memory.json")
FILES = ("-m", "benchmarks.gpu.directory", "-o", "{out}/directory.json")
SMALL = ("--streams", "4", "--updates", "3", "--warmup", "1", "--quiet", "2", "--idle", "4")
SMALL_LOAD = ("--engine", "reference", "--cpu", *SMALL)

VERL = ("-m", "tests.frameworks.verl_trainer", "--out", "{out}")

QUANTISING: tuple[Engine, ...] = ("vllm", "sglang")

KEEP = ("--only", "ours", "rival", "ours_by_relay")

STEPS = (
    Step(
        "staged",
        "vLLM, by a relay: a version in stage memory before the pause, half of it, none; pause at most 30 ms",
        STAGED,
        *(230, 300),
        engine="vllm",
        cpu=(*STAGED, "--cpu", *SMALL),
    ),
    Step(
        "under-load",
        "32 streams, an update every 1.5 s, against vLLM's ipc: at most 35 ms lost, worst gap 80 ms, none refused",
        LOAD,
        *(350, 530),
        engine="vllm",
        cpu=(*LOAD, *SMALL_LOAD),
    ),
    Step(
        "load-keep",
        "under-load in one pause mode and by way of a relay",
        (*LOAD, *KEEP),
        *(240, 400),
        engine="vllm",
        cpu=(*LOAD, *KEEP, *SMALL_LOAD),
    ),
    Step(
        "load-sglang",
        "the same of SGLang, against its update_weights_from_tensor",
        (*LOAD, "--engine", "sglang", *KEEP),
        *(260, 420),
        engine="sglang",
        cpu=(*LOAD, *KEEP, *SMALL_LOAD),
    ),
    Step(
        "model-classes",
        "vLLM: each class of models as a server that loaded the same files has it",
        tests("/test_model_classes.py", 1200),
        *(460, 580),
        engine="vllm",
    ),
    Step(
        "quantised-dense",
        "vLLM: FP8 online and block-wise, as a server that loaded the same files has it; a corrupt slice, sleep",
        tests("/test_quantised.py", 220, "-k", "vllm and dense"),
        *(190, 240),
        engine="vllm",
    ),
    Step(
        "quantised-experts",
        "the same of experts",
        tests("/test_quantised.py", 220, "-k", "vllm and experts"),
        *(190, 240),
        engine="vllm",
    ),
    Step(
        "quantised-sglang",
        "SGLang: the same, dense and experts",
        tests("/test_quantised.py", 280, "-k", "sglang"),
        *(280, 300),
        engine="sglang",
    ),
    *(
        Step(
            f"quantised-pause-{engine}",
            f"{engine}: an update of Qwen3-8B's shapes into FP8 that the engine makes, beside bfloat16",
            ("-m", "benchmarks.gpu.quantised_pause", "-o", "{out}/quantised_pause.json", "--engine", engine),
            *(120, 200),
            engine=engine,
        )
        for engine in QUANTISING
    ),
    Step(
        "hybrid",
        "vLLM, asleep at levels 1 and 2: sleep, and the update that wakes it",
        bench("test_hybrid.py", 220, "vllm"),
        *(109, 250),
        engine="vllm",
        guessed=False,
    ),
    Step(
        "hybrid-sglang",
        "SGLang, asleep at level 2: the same",
        bench("test_hybrid.py", 260, "sglang"),
        *(140, 290),
        engine="sglang",
    ),
    Step(
        "traced",
        "an update of Qwen3-8B's shapes traced, each stage within 30 % of its prediction",
        (*TRACED, "{out}/traced"),
        *(30, 180),
        cpu=(*TRACED, "{out}/traced", "--cpu", "--updates", "3"),
        guessed=False,
    ),
    Step(
        "directory",
        "a checkpoint directory to GPUs: 90 % of the pinned ceiling",
        FILES,
        *(74, 300),
        cpu=(*FILES, "--cpu", "--rounds", "3"),
        guessed=False,
    ),
    Step(
        "sglang",
        "SGLang, same GPU: 85 % of the copy ceiling, pause at most 45 ms, against update_weights_from_tensor",
        bench("test_sglang.py", 300),
        *(169, 330),
        engine="sglang",
        guessed=False,
    ),
    Step(
        "sglang-sleep",
        "SGLang: levels 1 and 2, experts",
        tests("/test_sglang_gpu.py", 270, "-k", "sleeps or mixture"),
        *(157, 300),
        engine="sglang",
        guessed=False,
    ),
    Step(
        "collective",
        "NCCL, GPU 0 to GPU 1: 85 % of bare NCCL",
        bench("test_collective.py", 170),
        20,
        200,
        gpus=2,
        guessed=False,
    ),
    Step(
        "traced-peer",
        "the traced update into a replica on GPU 1",
        (*TRACED, "{out}/traced-peer", "--replica-gpu", "1"),
        *(33, 180),
        gpus=2,
        cpu=(*TRACED, "{out}/traced-peer", "--cpu", "--updates", "3"),
        guessed=False,
    ),
    Step(
        "same",
        "vLLM, same GPU: 85 % of the copy ceiling, against ipc; the first pause at most 1.3 of the later ones",
        bench("test_from_gpu.py", 300, "same"),
        *(190, 330),
        engine="vllm",
    ),
    Step(
        "peer",
        "vLLM, GPU 0 to GPU 1, against vLLM's nccl",
        bench("test_from_gpu.py", 200, "peer"),
        *(87, 230),
        gpus=2,
        engine="vllm",
        guessed=False,
    ),
    Step(
        "against-nccl",
        "our collective, GPU 0 to GPU 1, against vLLM's nccl: pause to resume 1.4 times faster",
        bench("test_from_gpu.py", 240, "nccl"),
        *(86, 270),
        gpus=2,
        engine="vllm",
        guessed=False,
    ),
    Step(
        "collective-stages",
        "where the time of a collective goes, stage by stage",
        ("-m", "benchmarks.gpu.collective_stages", "--replicas", "1"),
        *(27, 150),
        gpus=2,
        guessed=False,
    ),
    Step(
        "both-ways",
        "a send and a receive of one GPU at a time, under several settings of NCCL",
        ("-m", "benchmarks.gpu.collective_both_ways"),
        *(64, 200),
        gpus=2,
        guessed=False,
    ),
    Step(
        "digest",
        "digests against the GPU's ceiling, and with a look for NaN",
        bench("test_digest.py", 120),
        *(58, 150),
        guessed=False,
    ),
    Step("gpu-tests", "tests/gpu that need no engine", tests("", 240, "-m", "not engine"), 150, 330),
    Step(
        "vllm-tests", "vLLM's tests on a GPU", tests("/test_vllm_gpu.py", 240), 156, 330, engine="vllm", guessed=False
    ),
    Step(
        "verl",
        "verl's own trainer, one rank, with a vLLM on the same GPU: versions, tokens, and verl's own comparison",
        VERL,
        *(150, 240),
        engine="vllm",
        cpu=(*VERL, "--cpu", "--seconds", "1000"),
    ),
    Step("sglang-tests", "all of SGLang's tests on GPUs", tests("/test_sglang_gpu.py", 400), 260, 430, engine="sglang"),
    Step(
        "chaos",
        "streams through a gateway, updates in all modes, killed engines",
        tests("/test_chaos_gpu.py", 480, "-s", "-k", "vllm"),
        *(250, 490),
        engine="vllm",
    ),
    Step(
        "chaos-sglang",
        "the same of SGLang",
        tests("/test_chaos_gpu.py", 480, "-s", "-k", "sglang"),
        *(250, 490),
        engine="sglang",
    ),
    Step("relay", "relays beside a GPU, against Moonshot", bench("test_relay.py", 300), 250, 400),
    Step(
        "load-alone",
        "under-load without the rival, for trying changes",
        (*LOAD, "--no-rival"),
        *(230, 400),
        engine="vllm",
        cpu=(*LOAD, *SMALL_LOAD),
    ),
)
