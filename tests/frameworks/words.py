"""A tokenizer of numbers, for models without one."""

from __future__ import annotations

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """Every word is a number, and that is its token."""
    words = {str(number): number for number in range(vocabulary - 2)}
    made = Tokenizer(models.WordLevel({**words, "[UNK]": vocabulary - 2, "[PAD]": vocabulary - 1}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="[UNK]", pad_token="[PAD]", eos_token="[PAD]")
