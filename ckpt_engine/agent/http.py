"""HTTP towards an engine on this host: the client that adapters should use."""

from __future__ import annotations

from collections.abc import Mapping

import httpx


def engine_client(url: str, headers: Mapping[str, str] | None = None) -> httpx.AsyncClient:
    """A client for the engine at `url`; every call brings its own timeout. No I/O.

    Each call takes a new connection. Engines answer head and body in two writes, and most of them (uvicorn on a socket
    that was bound for it, as in vLLM) leave Nagle's algorithm on: over a connection that was used before, the body
    waits for the 40 ms timer of our delayed acknowledgement. With pause, stamp and resume that was 130 ms of each
    update in which no token was produced; a new connection acknowledges at once and costs 0.2 ms on loopback.
    """
    return httpx.AsyncClient(
        base_url=url,
        headers=headers,
        timeout=None,
        limits=httpx.Limits(max_keepalive_connections=0),
        trust_env=False,  # a proxy has no business between an agent and its engine
    )
