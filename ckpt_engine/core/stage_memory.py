"""How much stage memory a worker may take, as people write it. It takes none (install/stage_memory.py does). Pure."""

from __future__ import annotations

from ckpt_engine.core.sizes import bytes_of

ENVIRONMENT = "CKPT_ENGINE_STAGE_MEMORY"
"""The variable in which workers find it: an agent sets it for the engine that it launches."""

OPTION = "--stage-memory"

AUTO = "auto"
NONE = "0"


def stage_bytes(text: str) -> int | None:
    """Bytes for each worker; None: "auto", as much as a version wants and there is room for. Raises
    INVALID_ARGUMENT."""
    if text in ("", NONE):
        return 0
    return None if text == AUTO else bytes_of(text, OPTION)
