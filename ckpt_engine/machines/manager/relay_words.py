"""What a holder that can be filled said last of being filled, and of what it passed on. Kept while its process runs."""

from __future__ import annotations

from dataclasses import dataclass, field

from ckpt_engine.core.rates import Measured, Rate
from ckpt_engine.v1 import manager_pb2


@dataclass
class RelayWords:
    """What one relay has said of its fillings.

    last_filled, progress: what it said of the last filling that ended, and of the one that goes on. measured: how
    fast its network was in its last fillings.
    """

    last_filled: manager_pb2.RelayFilled | None = None
    progress: manager_pb2.RelayProgress | None = None
    measured: Measured = field(default_factory=Measured)

    def note(self, body: object) -> None:
        """Remembers what it says."""
        match body:
            case manager_pb2.RelayProgress():
                self.progress = body
            case manager_pb2.RelayFilled():
                self.last_filled, self.progress = body, None
                turn = body.fence.epoch, body.attempt
                self.measured.filled(turn, _rate(body, "sent"), _rate(body, "received"))
            case manager_pb2.RelayPassedOn():
                if (sent := _rate(body, "sent")) is not None:
                    self.measured.passed_on((body.fence.epoch, body.attempt), sent)


def _rate(body: manager_pb2.RelayFilled | manager_pb2.RelayPassedOn, name: str) -> Rate | None:
    """What nobody can have measured counts for nothing."""
    if not body.HasField(name):
        return None
    said: manager_pb2.Rate = getattr(body, name)
    fits = 0 < said.bytes_per_second < float("inf") and 0 < said.seconds < float("inf")
    return Rate(said.bytes_per_second, said.seconds) if fits else None
