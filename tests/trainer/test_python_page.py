"""docs/python.md names what there is: every public call with its parameters and defaults, every field of a report; and
docs/api.md is what the code says."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ckpt_engine
from ckpt_engine import AsyncClient, Client, Reader, Trainer, UpdateOptions, UpdateReport, pull
from ckpt_engine.report import ReplicaReport

PAGE = (Path(__file__).parents[2] / "docs" / "python.md").read_text()
METHODS = [name for name in vars(Trainer) if not name.startswith("_")]


def written(name: str, call: Callable[..., Any]) -> str:
    """A call as the page writes it: no types, no self."""
    parameters = [
        each.replace(annotation=inspect.Parameter.empty)
        for each in inspect.signature(call).parameters.values()
        if each.name != "self"
    ]
    text = str(inspect.Signature(parameters))
    return name + text.replace("'", '"')


@pytest.mark.parametrize("name", METHODS)
def test_every_method_is_there_as_it_is_called(name: str) -> None:
    assert f"`{written(name, getattr(Trainer, name))}`" in PAGE


def test_so_is_every_call_of_a_client() -> None:
    asked = [name for name in vars(Client) if not name.startswith("_")]
    assert asked == [name for name in vars(AsyncClient) if not name.startswith("_")]
    for name in asked:
        call = f"`{written(name, getattr(Client, name))}`"
        assert call in PAGE, call
        assert written(name, getattr(Client, name)) == written(name, getattr(AsyncClient, name))
    assert f"`{written('Client', Client.__init__)}`" in PAGE


def test_so_are_the_constructor_and_pulling() -> None:
    assert f"`{written('Trainer', Trainer.__init__)}`" in PAGE
    assert f"`{written('pull', pull)}`" in PAGE


def test_so_is_reading() -> None:
    assert f"`{written('Reader', Reader.__init__)}`" in PAGE
    for name in [name for name, value in vars(Reader).items() if not name.startswith("_") and callable(value)]:
        assert f"`{written(name, getattr(Reader, name))}`" in PAGE


def test_every_parameter_and_field_is_explained() -> None:
    for call in (Trainer.__init__, Trainer.update_weights, Trainer.publish):
        for name in list(inspect.signature(call).parameters)[1:]:
            assert re.search(rf"`{name}[`=]", PAGE) or name in ("weights", "options"), name
    for name in UpdateOptions.__annotations__:
        assert re.search(rf"`{name}`", PAGE), name
    for report in (UpdateReport, ReplicaReport):
        fields = [name for name, value in vars(report).items() if isinstance(value, property)]
        assert len(fields) > 10
        assert [name for name in fields if f"`{name}`" not in PAGE] == []


def test_everything_public_is_named() -> None:
    assert [name for name in ckpt_engine.__all__ if f"`{name}`" not in PAGE] == []


def test_the_reference_is_what_the_code_says(tmp_path: Path) -> None:
    """As docs/generate_api.py writes it."""
    docs = Path(__file__).parents[2] / "docs"
    subprocess.run([sys.executable, docs / "generate_api.py", tmp_path / "api.md"], check=True, timeout=60)
    assert (tmp_path / "api.md").read_text() == (docs / "api.md").read_text(), "run `make api`"


def test_the_reference_has_all_that_is_exported() -> None:
    page = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
    for name in ckpt_engine.__all__:
        assert name == "__version__" or f"### `{name}`" in page, name
