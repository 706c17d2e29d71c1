"""A tokenizer of numbers, for models without one."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def tokenizer(
    vocabulary: int, kind: type[PreTrainedTokenizerFast] = PreTrainedTokenizerFast
) -> PreTrainedTokenizerFast:
    """Every word is a number, and that is its token."""
    words = {str(number): number for number in range(vocabulary - 2)}
    made = Tokenizer(models.WordLevel({**words, "[UNK]": vocabulary - 2, "[PAD]": vocabulary - 1}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return kind(tokenizer_object=made, unk_token="[UNK]", pad_token="[PAD]", eos_token="[PAD]")


class ToolWords(PreTrainedTokenizerFast):  # type: ignore[misc]
    """It reads a call of the tool `add` in every answer of a conversation that is shorter than 20 tokens: a model with
    random weights calls none."""

    def parse_response(self, response: list[int], prefix: list[int] | None = None, **_: Any) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": self.decode(response)}
        if len(prefix or ()) < 20:
            function = {"name": "add", "arguments": {"first": response[0], "second": len(response)}}
            message["tool_calls"] = [{"type": "function", "function": function}]
        return message


def add(first: int, second: int) -> int:
    """Adds two numbers.

    Args:
        first: A number.
        second: Another one.
    """
    return (first + second) % 500
