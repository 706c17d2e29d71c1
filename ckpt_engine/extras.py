"""Checks for optional modules, and names the extra of the package that brings them."""

from __future__ import annotations

from importlib.util import find_spec

from ckpt_engine.core.problems import precondition


def missing(*modules: str) -> list[str]:
    """The modules among these that are not installed."""
    return [module for module in modules if find_spec(module) is None]


def require(extra: str, *modules: str, what: str) -> None:
    """Checks that `modules` are installed. Raises FAILED_PRECONDITION if one is not, with the extra that brings it to
    `what`."""
    absent = missing(*modules)
    if absent:
        raise precondition(
            f"{what} needs {', '.join(absent)}, which the base install leaves out: pip install 'ckpt-engine[{extra}]'"
        )
