"""Which addresses only this machine reaches. Pure: no name is looked up."""

from __future__ import annotations

import ipaddress


def is_loopback(host: str) -> bool:
    """Whether only processes of one network namespace reach this address or name. Names other than localhost count as
    reachable by others."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    # A server that listens at `::` sees callers over IPv4 as ::ffff:127.0.0.1.
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback
