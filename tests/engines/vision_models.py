"""Small Qwen2.5-VL and Qwen3-VL models with random weights, with all files that a server needs to see pictures.

The tokenizer has a token for each byte and for each mark of a picture. Weights are drawn wide, so that what the tower
makes of a picture decides tokens. Imports of transformers are inside the functions: importing this module is cheap.
"""

from __future__ import annotations

import base64
import json
import struct
import zlib
from pathlib import Path
from typing import Any

import torch

from tests.tiny_model import VOCABULARY

MARKS = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% else %}<|vision_start|><|image_pad|><|vision_end|>{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FIRST_MARK = 256
IDS = {mark: FIRST_MARK + place for place, mark in enumerate(MARKS)}

_PICTURE_IDS: dict[str, Any] = {
    "image_token_id": IDS["<|image_pad|>"],
    "video_token_id": IDS["<|video_pad|>"],
    "vision_start_token_id": IDS["<|vision_start|>"],
    "vision_end_token_id": IDS["<|vision_end|>"],
}


def _text(width: int, head: int, sections: list[int], layers: int, **more: Any) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": sections, **more},
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }


def qwen2_5_vl(width: int = 128) -> Any:
    """The configuration of a small Qwen2.5-VL; both heads have a quarter of `width`."""
    from transformers import Qwen2_5_VLConfig

    head = width // 4
    vision = {
        "depth": 2,
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_heads": 4,
        "out_hidden_size": width,
        "window_size": 56,
        "fullatt_block_indexes": [1],
        "initializer_range": 0.2,
    }
    sections = [head // 8, 3 * head // 16, 3 * head // 16]
    return Qwen2_5_VLConfig(
        text_config=_text(width, head, sections, 2),
        vision_config=vision,
        tie_word_embeddings=False,
        architectures=["Qwen2_5_VLForConditionalGeneration"],
        **_PICTURE_IDS,
    )


def qwen3_vl(width: int = 128) -> Any:
    """The configuration of a small Qwen3-VL; both heads have a quarter of `width`."""
    from transformers import Qwen3VLConfig

    head = width // 4
    vision = {
        "depth": 3,
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_heads": 4,
        "out_hidden_size": width,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0, 1],
        "initializer_range": 0.2,
    }
    side = head // 2 // 3
    sections = [head // 2 - 2 * side, side, side]
    return Qwen3VLConfig(
        text_config={**_text(width, head, sections, 3, mrope_interleaved=True), "head_dim": head},
        vision_config=vision,
        tie_word_embeddings=False,
        architectures=["Qwen3VLForConditionalGeneration"],
        **_PICTURE_IDS,
    )


CLASSES = {"Qwen2.5-VL": qwen2_5_vl, "Qwen3-VL": qwen3_vl}


def save_files(config: Any, path: Path) -> Path:
    """Writes configuration, tokenizer, chat template and processors into `path`, without weights. Returns it."""
    path.mkdir(parents=True, exist_ok=True)
    config.dtype = torch.bfloat16
    config.save_pretrained(path)
    _save_tokenizer(path)
    vision = config.vision_config
    step = vision.patch_size * vision.spatial_merge_size
    third = "Qwen3VL" if "Qwen3" in config.architectures[0] else "Qwen2_5_VL"
    common = {
        "patch_size": vision.patch_size,
        "temporal_patch_size": vision.temporal_patch_size,
        "merge_size": vision.spatial_merge_size,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "size": {"shortest_edge": step * step, "longest_edge": 16 * step * step},
        "processor_class": f"{third}Processor",
    }
    videos = "Qwen3VLVideoProcessor" if third == "Qwen3VL" else "Qwen2VLVideoProcessor"
    files = {
        "preprocessor_config.json": {**common, "image_processor_type": "Qwen2VLImageProcessor"},
        "video_preprocessor_config.json": {**common, "video_processor_type": videos},
    }
    for name, content in files.items():
        (path / name).write_text(json.dumps(content))
    return path


def save_model(config: Any, seed: int, path: Path) -> tuple[Any, dict[str, torch.Tensor]]:
    """Writes a random model with all its files; returns it, and its tensors under the names of the checkpoint."""
    from safetensors.torch import load_file
    from transformers import AutoModelForImageTextToText

    save_files(config, path)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        auto: Any = AutoModelForImageTextToText
        model = auto.from_config(config, dtype=torch.bfloat16).eval()
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn(parameter.shape))
            if "lm_head" in name:
                parameter.mul_(torch.exp(0.4 * torch.randn(parameter.shape[0], 1)))
    model.save_pretrained(path)
    return model, load_file(path / "model.safetensors")


def _save_tokenizer(path: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    assert len(alphabet) == FIRST_MARK
    bare = Tokenizer(models.BPE(vocab={letter: place for place, letter in enumerate(alphabet)}, merges=[]))
    bare.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bare.decoder = decoders.ByteLevel()
    bare.add_special_tokens([AddedToken(mark, special=True) for mark in MARKS])
    bare.add_tokens([AddedToken(f"<unused{place}>", normalized=False) for place in range(VOCABULARY - FIRST_MARK - 6)])
    tokenizer: Any = PreTrainedTokenizerFast(
        tokenizer_object=bare,
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        chat_template=TEMPLATE,
        extra_special_tokens={"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"},
    )
    tokenizer.save_pretrained(path)


def picture(seed: int, width: int = 128, height: int = 96) -> str:
    """A `data:` address of a PNG with coloured squares of 16 pixels."""
    drawn = torch.Generator().manual_seed(seed)
    squares = torch.randint(0, 256, (height // 16, width // 16, 3), generator=drawn, dtype=torch.uint8)
    pixels = squares.repeat_interleave(16, 0).repeat_interleave(16, 1)
    rows = b"".join(b"\0" + bytes(row.flatten().tolist()) for row in pixels)
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    content = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in ((b"IHDR", head), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    )
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


def messages(text: str, seen: str | None = None) -> list[dict[str, Any]]:
    """A chat of one message: a picture, if there is one, and a text."""
    if seen is None:
        return [{"role": "user", "content": text}]
    parts = [{"type": "image_url", "image_url": {"url": seen}}, {"type": "text", "text": text}]
    return [{"role": "user", "content": parts}]
