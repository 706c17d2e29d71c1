"""A tiny Qwen3 that says what a test wants, with a tokenizer and a chat template: each token decides the next one.

No small model thinks or calls tools by itself, and a grammar would make its chats not resumable. So attention and MLPs
add nothing, and the output head has at the row of each token's successor that token's embedding.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tests.tiny_model import VOCABULARY, make_tiny_qwen3

IM_START, IM_END = "<|im_start|>", "<|im_end|>"
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% if not (continue_final_message and loop.last) %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THOUGHTS = [f" t{number}" for number in range(60)]
PLACES = [f"p{number} " for number in range(40)]
CALL = ['{"name": "look", "arguments": {"at": "', *PLACES, '"}}']
SCRIPT = ["<think>", *THOUGHTS, "</think>", "<tool_call>", *CALL, "</tool_call>", IM_END]
"""What it says after a prompt that opens the assistant's turn; each piece is a token."""


def save_tokenizer(path: Path) -> Any:
    """Bytes, and each piece of the script as a token of its own. Returns the tokenizer."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bare = Tokenizer(models.BPE(vocab={letter: place for place, letter in enumerate(alphabet)}, merges=[]))
    bare.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bare.decoder = decoders.ByteLevel()
    bare.add_special_tokens([AddedToken(IM_START, special=True), AddedToken(IM_END, special=True)])
    bare.add_tokens([AddedToken(piece, normalized=False) for piece in SCRIPT[:-1]])
    rest = [f"<unused{number}>" for number in range(VOCABULARY - bare.get_vocab_size())]
    bare.add_tokens([AddedToken(piece, normalized=False) for piece in rest])
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=bare, eos_token=IM_END, chat_template=TEMPLATE)
    tokenizer.save_pretrained(path)
    return tokenizer


def make_talking_qwen3(path: Path, script: Sequence[str] = SCRIPT) -> Any:
    """Writes its configuration and its tokenizer; returns the model."""
    model = make_tiny_qwen3(path, weights=False)
    tokenizer = save_tokenizer(path)
    spoken = tokenizer.convert_tokens_to_ids(list(script))
    (opening,) = tokenizer.encode("\n", add_special_tokens=False)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.norm.weight.fill_(1.0)
        embedding, head = model.model.embed_tokens.weight, model.lm_head.weight
        rows = torch.nn.functional.normalize(torch.randn(embedding.shape), dim=1).to(embedding.dtype)
        embedding.copy_(rows)
        head.zero_()
        for before, after in zip([opening, *spoken], spoken, strict=False):
            head[after] = rows[before]
    return model
