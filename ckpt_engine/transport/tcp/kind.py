"""What planners, relays and commands need to know about TCP between relays. Loads neither of its sides."""

from __future__ import annotations

from ckpt_engine.core.reach import by_network
from ckpt_engine.core.transports import Availability, TransportKind

NAME = "tcp"


def available() -> Availability:
    """Always: every host has sockets."""
    return Availability(True, "plain sockets, encrypted where relays have certificates")


KIND = TransportKind(
    name=NAME,
    order=60,
    reach=by_network,
    on_host=available,
    chunks="ckpt_engine.transport.tcp.server:TcpChunkLender",
    asker="ckpt_engine.transport.tcp.asker:TcpAsker",
    over_network=True,
    rates={"host": 5.6e9},  # of 32 processors of an EPYC
)
