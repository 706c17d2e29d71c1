"""Which addresses only this machine reaches. Pure: no name is looked up."""

from __future__ import annotations

import ipaddress


def is_loopback(host: str) -> bool:
    """Whether only processes of one network namespace reach this address or name. Names other than localhost count as
    reachable by others."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
