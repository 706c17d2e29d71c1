"""What planners, relays and commands need to know about one-sided reads (UCX) between relays. Loads neither the reader
nor the lender."""

from __future__ import annotations

from ckpt_engine.core.reach import by_network
from ckpt_engine.core.transports import TransportKind
from ckpt_engine.transport.ucx.settings import UCX

KIND = TransportKind(
    name=UCX,
    order=50,
    reach=by_network,
    on_host="ckpt_engine.transport.ucx.packages:availability",
    carrier="ckpt_engine.transport.ucx.lanes:lanes_on",
    link="ckpt_engine.transport.ucx.link:link_to",
    over_network=True,
    checks="ckpt_engine.doctor.ucx_checks:ucx_rows",
    rates={"host": 1.03e9},
)
