"""JSON that others wrote."""

from __future__ import annotations

import pytest

from ckpt_engine.core.json_text import load_json


def test_what_is_not_json_or_too_deep_is_a_value_error() -> None:
    assert load_json(b'{"a": [1]}', parse_int=str) == {"a": ["1"]}
    with pytest.raises(ValueError, match="Expecting value"):
        load_json("[")
    with pytest.raises(ValueError, match="nested too deeply"):
        load_json("[" * 100_000)
    with pytest.raises(ValueError, match=r"more than 4,300 digits$"):
        load_json("[" + "9" * 5000 + "]")
