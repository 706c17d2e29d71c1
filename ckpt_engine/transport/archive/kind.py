"""What planners need to know about reading a relay's archive: that only the relay itself does. Loads no reader.

Workers do not read it, although the files may be open to them: what lies on a disk for weeks may be damaged, and a
worker would find that when it is half written. A relay finds it before anything is paused.
"""

from __future__ import annotations

from ckpt_engine.core.reach import Distance, Reach, by_directory
from ckpt_engine.core.relay_remedy import name_of
from ckpt_engine.core.transports import Availability, TransportKind
from ckpt_engine.v1.weights_pb2 import Host

NAME = "archive"


def by_archive(source: Host, reader: Host) -> Reach:
    """Judges an archive for a relay: it reads its own. One directory of sockets has one relay."""
    if not by_directory(source, reader).ok:
        return Reach(
            False,
            f"the archive of host {name_of(source)} is read by the relay of that host only",
            relays=(source, reader),
        )
    return Reach(True, f"the relay of host {name_of(source)} reads its archive on disk", Distance.FILE)


def on_host() -> Availability:
    """Always: a relay has one if it was started with --archive."""
    return Availability(True, "a relay reads its own archive (ckpt-engine relay --archive DIR)")


KIND = TransportKind(name=NAME, order=45, reach=by_archive, on_host=on_host)
