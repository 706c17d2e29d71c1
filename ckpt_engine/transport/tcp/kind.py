"""What planners, relays and commands need to know about TCP between relays. Loads neither the reader nor the lender."""

from __future__ import annotations

from ckpt_engine.core.reach import by_network
from ckpt_engine.core.transports import TransportKind

NAME = "tcp"

KIND = TransportKind(
    name=NAME,
    order=60,
    reach=by_network,
    reader="ckpt_engine.transport.tcp.fetcher:TcpFetcher",
    relays_only=True,
    arena="ckpt_engine.transport.tcp.server:TcpArenaLender",
    passed="ckpt_engine.transport.tcp.asking:ChunkReader",
    over_network=True,
    rates={"host": 5.6e9},  # of 32 processors of an EPYC
)
