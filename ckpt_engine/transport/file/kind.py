"""What planners, workers and commands need to know about reading checkpoint files. Loads neither the reader nor the
lender."""

from __future__ import annotations

from ckpt_engine.core.reach import by_file
from ckpt_engine.core.transports import FILES, Availability, TransportKind

NAME = "file"


def on_host() -> Availability:
    """Always: a file that this process may not read is refused when it is opened."""
    return Availability(True, "files that this process may read")


KIND = TransportKind(
    name=NAME,
    order=40,
    reach=by_file,
    reader="ckpt_engine.transport.file.files:FileTransport",
    lender="ckpt_engine.transport.file.files:FileLender",
    lends=frozenset({FILES}),
    outlives=True,
    on_host=on_host,
    rates={"host": 16.0e9},
)
