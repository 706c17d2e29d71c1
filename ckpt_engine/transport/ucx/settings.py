"""Whether a relay is to use UCX, and over which devices."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

UCX = "ucx"
"""The transport's name, as in Region.transport."""

DEVICES = "CKPT_ENGINE_RELAY_UCX_DEVICES"
"""Environment variable, which `ckpt-engine relay --ucx-devices` sets."""

ALL = "all"
"""All devices that UCX finds, in one lane."""


TLS = "UCX_TLS"


def helper_environment(environment: Mapping[str, str], devices: Path = Path("/dev")) -> dict[str, str]:
    """The environment of a helper. NIXL 1.5 refuses a UCX_TLS without CUDA transports where there is a GPU ("Invalid
    UCX_TLS=tcp for NIXL UCX backend"), although helpers do not use it: so the smallest of them is added."""
    found = dict(environment)
    transports = found.get(TLS, "")
    names = {each.strip() for each in transports.split(",")}
    lacks = transports and not transports.startswith("^") and not names & {"all", "cuda", "cuda_copy"}
    if lacks and any(each.name[6:].isdigit() for each in devices.glob("nvidia*")):
        found[TLS] = f"{transports},cuda_copy"
    return found


def ucx_devices() -> tuple[str, ...]:
    """One entry a lane, as UCX_NET_DEVICES has it. One empty entry: all that UCX finds; no entry: UCX is not used."""
    names = [each.strip() for each in os.environ.get(DEVICES, "").split(",")]
    found = tuple(each for each in names if each)
    return ("",) if found == (ALL,) else found
