"""What the demo teaches: the text, the model that memorises it, and how many steps that takes.

Standard library only, so that the process that shows the demo starts at once.
"""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

PROMPT_BYTES = 16
"""The opening words that replicas are asked to go on from: "Call me Ishmael."."""

CONTINUATION_BYTES = 96
"""How far they must go on exactly as the text does."""

STEPS = 80
"""Optimizer steps of the whole demo. With the seeds of `train` the text is recited from about step 60 on."""

BATCH = 4
WINDOW_BYTES = 128
LEARNING_RATE = 1.5e-3

MODEL_NAME = "demo"
"""What servers that need one call the model."""

MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "dtype": "float32",
    "torch_dtype": "float32",
    "vocab_size": 256,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
}
"""3.3 million parameters; a token is a byte. float32 throughout, so what is trained is, bit for bit, what is served."""


def text() -> bytes:
    """The first paragraph of Moby-Dick (1851, public domain)."""
    return files(__package__).joinpath("moby_dick.txt").read_bytes().rstrip()


def write_model(directory: Path) -> Path:
    """Writes the model's configuration (no weights) as engines expect it; returns the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(MODEL, indent=2) + "\n")
    return directory


def milestones(updates: int) -> list[int]:
    """The steps after which weights are sent, and so the versions: from 0, untrained, to STEPS, evenly spread.

    A single update comes at the end. Raises ValueError unless 1 <= updates <= STEPS + 1.
    """
    if not 1 <= updates <= STEPS + 1:
        raise ValueError(f"the demo makes from 1 to {STEPS + 1} updates, not {updates}")
    if updates == 1:
        return [STEPS]
    return [STEPS * number // (updates - 1) for number in range(updates)]
