"""Whether a relay is to use UCX, and over which devices."""

from __future__ import annotations

import os

UCX = "ucx"
"""As in Region.transport."""

DEVICES = "CKPT_ENGINE_RELAY_UCX_DEVICES"
"""Names the environment variable: what `ckpt-engine relay --ucx-devices` sets, too."""

ALL = "all"
"""As UCX finds them, in one lane."""


def ucx_devices() -> tuple[str, ...]:
    """One entry a lane, as UCX_NET_DEVICES has it; one empty entry: as UCX finds them; none: UCX is not to be used."""
    named = [each.strip() for each in os.environ.get(DEVICES, "").split(",")]
    found = tuple(each for each in named if each)
    return ("",) if found == (ALL,) else found
