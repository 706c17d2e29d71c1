"""Refuses requests that a foreign web page makes a user's browser send to a server of ours. Pure.

Two attacks come from pages that have nothing to do with us:

- *Rebinding.* The page's own name is made to resolve to our address, so the browser takes us for the page's server, and
  the page may read our answers and post what it likes. The Host header then has the page's name. Where callers must
  prove their identity this wins nothing, since the page has no token. Elsewhere the Host must be a name that no
  stranger can have pointed here.
- *Forged requests.* The page posts to us under our own name. It cannot read the answer, and need not. The browser names
  the page in Origin.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection, Mapping
from urllib.parse import urlsplit

from ckpt_engine.core.loopback import is_loopback
from ckpt_engine.core.problems import forbidden, invalid

READING = frozenset({"GET", "HEAD", "OPTIONS"})
"""Methods that change nothing."""

OUR_OWN = frozenset({"same-origin", "none"})
"""Sec-Fetch-Site of a request from our own page, or from a user who typed the address."""

LOCAL_ENDINGS = (".local", ".internal", ".svc", ".localdomain", ".home.arpa", ".lan")
"""Endings of names that no public DNS resolves: mDNS, Kubernetes (cluster.local), and reserved for private networks."""

PORTS = {"http": 80, "https": 443}

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
"""A host's name."""


def host_of(header: str) -> str:
    """The host that a Host header names, in lower case, without port, brackets and trailing dot."""
    if header.startswith("["):
        return header[1:].partition("]")[0].lower()
    return header.partition(":")[0].rstrip(".").lower()


def names_of_host(name: str, hosts: str) -> set[str]:
    """All names of this host, in lower case. hosts: the text of /etc/hosts, which may have its full name as well."""
    lines = [[each.lower() for each in line.partition("#")[0].split()[1:]] for line in hosts.splitlines()]
    return {name.lower()}.union(*(names for names in lines if name.lower() in names))


def checked_names(names: Collection[str]) -> list[str]:
    """Names for --http-name, as `host_of` returns them. Raises INVALID_ARGUMENT for one with a scheme, port or path."""
    for name in names:
        if not NAME.fullmatch(name):
            raise invalid(f"--http-name {name!r} is not a name alone: write it like manager.example.com")
    return [host_of(name) for name in names]


def check_host(header: str, loopback: bool, asks: bool, own: Collection[str] = ()) -> None:
    """Raises PERMISSION_DENIED for a request that was meant for another server.

    header: its Host. loopback: only this machine can have sent it, or a proxy on it for callers that prove their
    identity. asks: callers must prove their identity. own: further names of this server.
    """
    host = host_of(header)
    if loopback:
        if not is_loopback(host) and not (asks and host in own):
            raise forbidden(f"this manager is not {header!r}; it serves its own machine only")
    elif not asks and not _ours(host) and host not in own:
        raise forbidden(
            "this manager asks callers for no proof, so it answers under its address only, and a web page's name may "
            f"lead to it: {header!r} is none that it knows; name it by its address, or start it with --http-name {host}"
        )


def check_origin(method: str, headers: Mapping[str, str], public_names: Collection[str] = ()) -> None:
    """Raises PERMISSION_DENIED for a change that a page other than our own asks for. Programs send no Origin.

    public_names: names under which our page is reached through a proxy, which may send another Host than the browser.
    """
    if method in READING:
        return
    origin, host = headers.get("origin"), headers.get("host", "")
    if origin is not None and not _same(origin, host) and not _named(origin, public_names):
        raise forbidden(
            f"a page of {origin!r} may change nothing here, only this manager's own page may; if that is its name "
            "behind a proxy, start the manager with --http-name and that name"
        )
    site = headers.get("sec-fetch-site")
    if site is not None and site not in OUR_OWN:
        raise forbidden(f"a page of another site ({site}) may change nothing here, only this manager's own page may")


def _ours(host: str) -> bool:
    """Whether it is an address, or a name that no stranger can have registered."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return "." not in host or host.endswith(LOCAL_ENDINGS)
    return True


def _named(origin: str, names: Collection[str]) -> bool:
    """Whether the origin is a page of one of these names."""
    try:
        parts = urlsplit(origin)
        return parts.scheme in PORTS and parts.hostname is not None and host_of(parts.hostname) in names
    except ValueError:
        return False


def _same(origin: str, host: str) -> bool:
    """Whether the origin's host and port are those of a Host header."""
    try:
        parts = urlsplit(origin)
        sent = urlsplit(f"//{host}")
        usual = PORTS[parts.scheme]
        return parts.hostname is not None and (parts.hostname, parts.port or usual) == (
            sent.hostname,
            sent.port or usual,
        )
    except (KeyError, ValueError):  # null, another scheme, no port
        return False
