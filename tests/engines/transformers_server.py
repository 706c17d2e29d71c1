"""A real `transformers serve` on the CPU as a replica. It runs in the environment of these tests.

Its API has texts and no token ids, so the tokenizer that is made here has one word for each id: w0 w1 w2 ...
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.cluster import Cluster, Replica
from tests.tiny_model import VOCABULARY, make_tiny_qwen3

COMMAND = (str(Path(sys.executable).with_name("transformers")), "serve")
OPTIONS = ("--device", "cpu", "--cb-num-blocks", "32", "--cb-max-batch-tokens", "256")
ENVIRONMENT = {"HF_HUB_OFFLINE": "1"}
OWN_SEED = 99
"""Of the weights that a server has before its first update; no test publishes them."""


def why_not_here() -> str:
    """Why no server can be started; empty: one can."""
    lacking = [module for module in ("accelerate", "openai") if importlib.util.find_spec(module) is None]
    return f"{', '.join(lacking)} is not installed; `make test` installs it" if lacking else ""


def start_transformers(
    cluster: Cluster,
    name: str,
    model: Path,
    *arguments: str,
    options: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Replica:
    """A server with random weights of its own for the model with the config.json in `model`; not waited for.

    options: the agent's. environment: added to what it needs; of the agent too.
    """
    directory = cluster.path / f"{name}-model"
    make_tiny_qwen3(directory, OWN_SEED)
    shutil.copy(model / "config.json", directory)
    write_tokenizer(directory)
    return cluster.replica(
        name,
        "transformers",
        directory,
        *(*COMMAND, *OPTIONS, *arguments),
        options=options,
        environment={**ENVIRONMENT, **(environment or {})},
    )


def write_tokenizer(directory: Path) -> None:
    """A tokenizer of one word for each token id."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(WordLevel({f"w{token}": token for token in range(VOCABULARY)}, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False).save_pretrained(directory)


def text_of(tokens: Sequence[int]) -> str:
    return " ".join(f"w{token}" for token in tokens)


def tokens_of(text: str) -> list[int]:
    return [int(word.removeprefix("w")) for word in text.split()]
