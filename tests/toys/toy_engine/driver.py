"""Drives the toy engine, which is a server of the reference engine under another name."""

from __future__ import annotations

from dataclasses import replace

from ckpt_engine.engine.adapter import AdapterAvailability, AdapterSettings, EngineAdapter
from ckpt_engine_adapters.reference import driver as reference

CAPABILITIES = replace(reference.CAPABILITIES, notes=("It is a toy.",), sleep_levels=frozenset(), wake_tags=frozenset())


class ToyAdapter(reference.ReferenceAdapter):
    """See EngineAdapter."""

    kind = "toy"
    capabilities = CAPABILITIES


def create_adapter(settings: AdapterSettings) -> EngineAdapter:
    return ToyAdapter(settings)


launch_plan = reference.launch_plan
refused_command = reference.refused_command


def availability() -> AdapterAvailability:
    return AdapterAvailability(True, "1.0", "")
