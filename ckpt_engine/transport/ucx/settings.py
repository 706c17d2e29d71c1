"""Whether a relay is to use UCX, and over which devices."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

UCX = "ucx"
"""As in Region.transport."""

DEVICES = "CKPT_ENGINE_RELAY_UCX_DEVICES"
"""Names the environment variable: what `ckpt-engine relay --ucx-devices` sets, too."""

ALL = "all"
"""As UCX finds them, in one lane."""


TLS = "UCX_TLS"


def helper_environment(environment: Mapping[str, str], devices: Path = Path("/dev")) -> dict[str, str]:
    """What a helper is started with. NIXL 1.5 refuses a UCX_TLS without transports of CUDA where there is a GPU
    ("Invalid UCX_TLS=tcp for NIXL UCX backend"), although nothing of ours lies on it: the least of them is added."""
    found = dict(environment)
    transports = found.get(TLS, "")
    names = {each.strip() for each in transports.split(",")}
    lacks = transports and not transports.startswith("^") and not names & {"all", "cuda", "cuda_copy"}
    if lacks and any(each.name[6:].isdigit() for each in devices.glob("nvidia*")):
        found[TLS] = f"{transports},cuda_copy"
    return found


def ucx_devices() -> tuple[str, ...]:
    """One entry a lane, as UCX_NET_DEVICES has it; one empty entry: as UCX finds them; none: UCX is not to be used."""
    names = [each.strip() for each in os.environ.get(DEVICES, "").split(",")]
    found = tuple(each for each in names if each)
    return ("",) if found == (ALL,) else found
