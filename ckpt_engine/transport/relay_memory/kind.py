"""What planners, workers and commands need to know about reading a relay's memory on the same host. Loads neither the
reader nor the lender."""

from __future__ import annotations

from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.core.reach import by_directory
from ckpt_engine.core.transports import Availability, TransportKind
from ckpt_engine.host.relay_directory import directory_identity, made_directory, relay_directory

NAME = "relay_memory"


def on_host() -> Availability:
    """Whether there is a directory for relays' sockets. Makes it if it is missing, so that readers can find a relay
    that starts after them."""
    if not directory_identity():
        try:
            made_directory(shared=False)
        except CkptEngineError as error:
            return Availability(False, error.problem.message)
    return Availability(True, f"relays lend their memory in {relay_directory()}")


KIND = TransportKind(
    name=NAME,
    order=20,
    reach=by_directory,
    reader="ckpt_engine.transport.relay_memory.reader:RelayMemoryTransport",
    on_host=on_host,
    of_relays=True,
    rates={"host": 16.0e9, "gpu": 55.3e9},
)
