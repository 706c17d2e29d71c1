"""One connection to each relay that this one asks for chunks, kept from filling to filling. Any thread.

It does not decide which relay is asked, nor for what. Of the transports that are offered it takes the first one with
askers.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterator

from ckpt_engine.core.offers import by_transport
from ckpt_engine.core.problems import unavailable
from ckpt_engine.core.transports import chunk_kinds, make
from ckpt_engine.transport.base import ChunkAsker
from ckpt_engine.v1.weights_pb2 import OfferedRegion

IDLE_SECONDS = 300.0
"""How long a connection is kept that no filling uses; its owner keeps it for longer."""


class KeptAskers:
    """The connections of one relay. name: under which other relays know it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._idle: dict[bytes, tuple[float, ChunkAsker]] = {}  # by offered region: since when (monotonic seconds)
        self._keys: weakref.WeakKeyDictionary[ChunkAsker, bytes] = weakref.WeakKeyDictionary()  # of those in use
        self._open = True

    def take(self, offered: OfferedRegion, owner: str, stop_at: float) -> ChunkAsker:
        """A connection to a relay, ready for `begin`; a new one if none is kept, or the kept one has ended. Ends with
        `put_back`. offered: the relay's Filling.chunks. owner, stop_at: see ChunkAsker.

        Raises as ChunkAsker; UNAVAILABLE too if this relay knows no way to ask over.
        """
        key = offered.SerializeToString(deterministic=True)
        with self._lock:
            ended = list(self._outdated())
            _, asker = self._idle.pop(key, (0.0, None))
        for each in ended:
            each.close()
        if asker is not None and not asker.end():
            asker.close()
            asker = None
        if asker is None:
            asker = _connected(offered, owner, self._name, stop_at)
        with self._lock:
            if self._open:
                self._keys[asker] = key
                return asker
        asker.close()
        raise unavailable("this relay is being stopped")

    def put_back(self, asker: ChunkAsker) -> None:
        """Ends the use of a connection, which is closed if no other filling can use it. On the thread that used it."""
        is_kept = asker.end()
        with self._lock:
            key = self._keys.pop(asker, None)
            if is_kept and self._open and key is not None and key not in self._idle:
                self._idle[key] = time.monotonic(), asker
                return
        asker.close()

    def close(self) -> None:
        """Closes all connections that are not in use; the others at `put_back`. May be repeated."""
        with self._lock:
            self._open = False
            idle, self._idle = self._idle, {}
        for _, asker in idle.values():
            asker.close()

    def _outdated(self) -> Iterator[ChunkAsker]:
        before = time.monotonic() - IDLE_SECONDS
        for key in [key for key, (since, _) in self._idle.items() if since < before]:
            yield self._idle.pop(key)[1]


def _connected(offered: OfferedRegion, owner: str, name: str, stop_at: float) -> ChunkAsker:
    ways = by_transport(offered, owner)
    for kind in chunk_kinds():
        if kind.name in ways and kind.asker is not None:
            asker: ChunkAsker = make(kind.asker, offered, owner, name, stop_at)
            return asker
    raise unavailable(
        f"{owner} is asked for chunks over {', '.join(ways) or 'no transport'}, over which this relay cannot ask: "
        "bring both to one version"
    )
