"""The machine of a relay's process: a holder of kind "relay" that the manager can tell to bring versions.

Its session and the digests that it is asked for are those of every holder; what it does with its slots is in
`RelayFilling`. Here is what lies between the two:

- Sealing and filling obey one count of fill fences: a command below the highest of both is stale.
- What it holds is announced before the answer that it was brought, so that the manager can plan with it as soon as it
  has the answer. What it gives up is announced before the first byte changes.
- It lets go of memory that its owner takes back once nothing reads that, and keeps what it has copied from there.
"""

from __future__ import annotations

from ckpt_engine.core.deadlines import Deadlines
from ckpt_engine.machines.events import Done, OfferedVersion, Run, Stop, TrainerEvent
from ckpt_engine.machines.holder.machine import HolderMachine
from ckpt_engine.machines.relay.machine import Answer, HeldNotice, RelayFilling
from ckpt_engine.machines.relay.tasks import ChunksPassed, FillingProgress, LetGoOf
from ckpt_engine.v1 import manager_pb2, weights_pb2

KIND = "relay"

LET_GO_SECONDS = 600.0
"""Seconds for a filling that still reads what is to be let go of."""


class RelayMachine(HolderMachine):
    """One relay. filling: its memory and what it wants; the shell may change it, and the next hello says so.

    Events: a holder's except HoldVersions, which it makes itself, and FillingProgress and ChunksPassed. Commands: a
    holder's, Run of CountSlot or FillSlot (one at a time), Run of LetGoOf (beside these), and StopFilling.
    """

    def __init__(
        self,
        name: str,
        session_id: str,
        host: weights_pb2.Host,
        filling: manager_pb2.Filling,
        deadlines: Deadlines | None = None,
    ) -> None:
        super().__init__(KIND, name, session_id, host, deadlines, filling)
        self._filling = RelayFilling(self._out.append, self._answer, self._hold, self._session.clock)
        self._letting_go = 0
        self._unsent_answer: manager_pb2.RelayFilled | None = None  # waits until what it holds is announced

    def _take(self, event: TrainerEvent, now: float) -> None:
        match event:
            case Done() if self._filling.done(event, now):
                return
            case FillingProgress():
                self._filling.progress(event)
                return
            case ChunksPassed():
                rate = manager_pb2.Rate(bytes_per_second=event.sent.per_second, seconds=event.sent.seconds)
                message = manager_pb2.RelayPassedOn(fence=event.fence, attempt=event.attempt, sent=rate)
                self._session.send(message)
                return
            case Stop():
                self._filling.stop()
        super()._take(event, now)

    def _message(self, body: object, now: float) -> None:
        match body:
            case manager_pb2.FillRelay():
                if body.fence.epoch >= self._obeyed():
                    if self._filling.is_newer(body):
                        self._unsent_answer = None
                    self._filling.message(body, self._session.cluster, now)
            case manager_pb2.LetGo():
                self._letting_go += 1
                task = LetGoOf(tuple(body.tables), LET_GO_SECONDS)
                self._out.append(Run(("let go", self._letting_go), task))
            case _:
                super()._message(body, now)

    def _obeyed(self) -> int:
        return max(super()._obeyed(), self._filling.epoch)

    def _hold(self, versions: tuple[HeldNotice, ...]) -> None:
        self._offer(
            tuple(
                OfferedVersion(each.table, each.record, each.identity.message(), each.bytes, each.wanted_bytes)
                for each in versions
            )
        )

    def _answer(self, body: Answer) -> None:
        if not isinstance(body, manager_pb2.RelayProgress):
            self._unsent_answer = None
        if isinstance(body, manager_pb2.RelayFilled) and not body.HasField("problem") and self._held is None:
            self._unsent_answer = body
        else:
            self._session.send(body)

    def _publish(self) -> None:
        super()._publish()
        if self._unsent_answer is not None and self._held is not None:
            self._session.send(self._unsent_answer)
            self._unsent_answer = None
