"""Whether a relay of this host could use UCX: finds the installed build of NIXL. Loads none of them."""

from __future__ import annotations

import importlib.util

from ckpt_engine.core.transports import Availability
from ckpt_engine.transport.ucx.settings import DEVICES, ucx_devices

PACKAGES = ("nixl_cu13", "nixl_cu12")
"""Builds that can be told apart by name; either works without a GPU."""


def installed() -> str | None:
    """The name of the package to import; None if there is none."""
    return next((name for name in PACKAGES if importlib.util.find_spec(name) is not None), None)


def availability() -> Availability:
    """Whether a relay of this host could use UCX. Loads nothing, starts nothing."""
    package = installed()
    if package is None:
        return Availability(False, "NIXL is not installed: pip install 'ckpt-engine[relay-ucx]'")
    devices = ucx_devices()
    if not devices:
        return Availability(
            False, f"not switched on: {package} is installed, and a relay uses it with --ucx-devices ({DEVICES})"
        )
    return Availability(True, f"{package}, {', '.join(devices) if devices[0] else 'all devices that UCX finds'}")
