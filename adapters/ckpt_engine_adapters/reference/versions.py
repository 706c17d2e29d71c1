"""The reference engine's version, for the engine and for its driver, each in its own environment."""

from __future__ import annotations

import importlib.metadata


def engine_version() -> str:
    """The version of the package with this engine; "0+source" in a checkout."""
    try:
        return importlib.metadata.version("ckpt-engine")
    except importlib.metadata.PackageNotFoundError:
        return "0+source"
