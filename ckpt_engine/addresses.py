"""Addresses of servers: ``host:port``, with brackets around an IPv6 host. Decides which of them ours may listen on."""

from __future__ import annotations

import errno
import ipaddress
import logging
import socket

from ckpt_engine.core.loopback import is_loopback
from ckpt_engine.core.problems import invalid, unavailable

log = logging.getLogger(__name__)

MANAGER = "127.0.0.1:50051"
"""Default address of a manager, for itself and for its members."""

EVERY_ADDRESS = ("0.0.0.0", "::")
"""Hosts to listen at that stand for all addresses of a host, and name none."""

AUTHENTICATE = "--certificate, --key and --tokens or --client-authority (docs/security.md)"
"""The options that say who may call a server."""


def split_address(address: str, option: str = "") -> tuple[str, int]:
    """Host (without brackets) and port. Raises INVALID_ARGUMENT naming an address that is not ``host:port``, and the
    option that it was given to."""
    subject = f"{option} {address!r}".lstrip()
    host, separator, port = address.rpartition(":")
    if "://" in address:
        raise invalid(f"{subject} is a URL: write host:port alone, like {MANAGER}")
    if not separator or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise invalid(f"{subject} is not an address: write host:port, like {MANAGER} or [::1]:50051")
    if host.startswith("[") and host.endswith("]"):
        return host[1:-1], int(port)
    if ":" in host:
        raise invalid(f"{subject} is not an address: an IPv6 host stands in brackets, like [::1]:50051")
    return host, int(port)


def join_address(host: str, port: int) -> str:
    """The inverse of ``split_address``."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def with_port(address: str, port: int, option: str) -> str:
    """The address, with this port if it names a host alone. Raises as ``split_address``."""
    host = address[1:-1] if address.startswith("[") and address.endswith("]") else address
    try:
        is_host = ":" not in host or ipaddress.ip_address(host).version == 6
    except ValueError:
        is_host = False
    if is_host and not set(host) & set("[]/ "):
        return join_address(host, port)
    split_address(address, option)
    return address


def bound_socket(host: str, port: int) -> socket.socket:
    """Binds a TCP socket to the address; it does not listen yet. Raises OSError.

    A name is bound at the first of its addresses that this host has. `::` stands for all addresses of the host, also
    those of IPv4.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    problem: OSError | None = None
    for family, _, _, _, where in found:
        try:
            # With the protocol named, asyncio turns Nagle's algorithm off on what it accepts.
            bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        except OSError as error:  # this kernel has no such addresses
            problem = problem or error
            continue
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            bound.bind(where)
        except OSError as error:
            bound.close()
            problem = problem or error
        else:
            return bound
    assert problem is not None
    raise problem


def check_free(address: str) -> None:
    """Binds an address for a moment. Raises UNAVAILABLE if that fails; gRPC would report it among lines of its own."""
    try:
        bound_socket(*split_address(address)).close()
    except OSError as error:
        advice = "end that manager" if error.errno == errno.EADDRINUSE else "this host must have that address"
        words = f"{error.strerror or error}; {advice}, or name another one (--listen)"
        raise unavailable(f"cannot listen on {address}: {words}") from error


def listen_on(address: str, option: str = "--listen") -> socket.socket:
    """A socket that listens there, for an option. Raises UNAVAILABLE for an address that cannot be bound."""
    host, port = split_address(address, option)
    try:
        listener = bound_socket(host, port)
    except OSError as error:
        problem = f"cannot listen on {address}: {error.strerror}; name another address ({option})"
        raise unavailable(problem) from error
    listener.listen(2048)
    return listener


def check_reach(host: str, *, authenticates: bool, insecure: bool, remedy: str = "") -> None:
    """Raises INVALID_ARGUMENT if other machines would be served without authentication; if insecure, warns only.

    remedy: how the caller's user says who may call; empty: by the options of a command."""
    if is_loopback(host) or authenticates:
        return
    if not insecure:
        remedy = remedy or f"{AUTHENTICATE}, or --insecure to let everybody"
        raise invalid(f"other machines reach {host}, and nothing says who may call this server: give {remedy}")
    log.warning("listening on %s: everybody who reaches it may call this server, nothing is encrypted", host)
