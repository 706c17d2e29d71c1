"""Finds the installed build of NIXL. Loads none of them."""

from __future__ import annotations

import importlib.util

PACKAGES = ("nixl_cu13", "nixl_cu12")
"""Builds that can be told apart by name; either works without a GPU."""


def installed() -> str | None:
    """The name of the package to import; None if there is none."""
    return next((name for name in PACKAGES if importlib.util.find_spec(name) is not None), None)
