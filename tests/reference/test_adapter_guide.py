"""The guide quotes the reference adapter. A quotation that is no longer in the code misleads, so it fails here."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
QUOTATIONS = re.findall(r"```python\n# (\S+)\n(.*?)```", (ROOT / "docs/writing-an-adapter.md").read_text(), re.DOTALL)


@pytest.mark.parametrize(("path", "code"), QUOTATIONS)
def test_the_guide_quotes_code_that_is_there(path: str, code: str) -> None:
    assert code in (ROOT / path).read_text()
