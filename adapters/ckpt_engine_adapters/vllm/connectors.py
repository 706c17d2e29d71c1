"""Says whether blocks that a vLLM server keeps outside of its own cache are found by their salt. Pure.

It knows vLLM's connectors by name. It does not decide what becomes of a server with another one: the agent refuses to
update it in place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

BY_SALT = frozenset(
    {"LMCacheMPConnector", "MooncakeStoreConnector", "OffloadingConnector", "SimpleCPUOffloadConnector"}
)
"""Connectors that look blocks up by vLLM's own hashes, of which the salt is a part, or that pass the salt on."""

_SEVERAL = "MultiConnector"


def connectors(settings: Any) -> Sequence[str]:
    """The names of the connectors that a server has, those within a MultiConnector too. settings: its VllmConfig.

    One that comes from a module of the user's is `module.Class`, so that it is never taken for one of vLLM's.
    """
    transfer = getattr(settings, "kv_transfer_config", None)
    name = getattr(transfer, "kv_connector", None)
    if not name:
        return ()
    extra = getattr(transfer, "kv_connector_extra_config", None) or {}
    return tuple(_names(name, getattr(transfer, "kv_connector_module_path", None), extra))


def in_place_refusal(names: Sequence[str]) -> str:
    """Why a server with these connectors cannot be updated in place; empty: it can."""
    others = [name for name in names if name not in BY_SALT]
    if not others:
        return ""
    return (
        f"its --kv-transfer-config has {', '.join(others)}, which is not known to look blocks up by their salt: later "
        f"requests could be answered from blocks of old weights; start it without, or with {_any(sorted(BY_SALT))}"
    )


def _names(name: str, module: str | None, extra: Mapping[str, Any]) -> list[str]:
    if module:
        return [f"{module}.{name}"]
    if name != _SEVERAL:
        return [name]
    found = []
    for part in extra.get("connectors") or ():
        found += _names(
            str(part.get("kv_connector")),
            part.get("kv_connector_module_path"),
            part.get("kv_connector_extra_config") or {},
        )
    return found or [name]


def _any(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"
