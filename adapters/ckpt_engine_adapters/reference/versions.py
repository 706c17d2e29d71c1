"""The reference engine's version, as the engine and its driver each read it where they run."""

from __future__ import annotations

import importlib.metadata


def engine_version() -> str:
    """The version of the package that this engine comes with; "0+source" when run from a checkout."""
    try:
        return importlib.metadata.version("ckpt-engine")
    except importlib.metadata.PackageNotFoundError:
        return "0+source"
