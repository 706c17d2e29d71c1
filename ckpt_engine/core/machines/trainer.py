"""The trainer's machine: one rank's session with the manager.

Decides when to connect, publish and seal. UpdateWeights itself is a call of its own, made by the shell.
"""

from __future__ import annotations

from typing import cast

from ckpt_engine.core.deadlines import Deadlines, bounded
from ckpt_engine.core.machines.deciding import commands_of
from ckpt_engine.core.machines.events import (
    CancelTimer,
    Done,
    Key,
    Message,
    PeerLost,
    PublicationDecided,
    PublishTable,
    PutBlobs,
    Released,
    Run,
    SealResult,
    SealSource,
    SetTimer,
    Start,
    Stop,
    TimerFired,
    TrainerCommand,
    TrainerEvent,
)
from ckpt_engine.core.machines.session import Session
from ckpt_engine.v1 import manager_pb2, weights_pb2

REPUBLISH: Key = ("publish",)


class TrainerMachine:
    """One rank. session_id: of this process; survives reconnects.

    A Seal with the fence of the last one is answered as before, whatever became of the first answer. A table is
    stored again before every hello, since the manager may have been restarted without its blobs.
    """

    def __init__(
        self,
        lineage: str,
        rank: int,
        world_size: int,
        session_id: str,
        host: weights_pb2.Host,
        deadlines: Deadlines | None = None,
    ) -> None:
        self._lineage = lineage
        self._rank = rank
        self._world_size = world_size
        self._session_id = session_id
        self._host = host
        self._deadlines = deadlines or Deadlines()
        self._out: list[TrainerCommand] = []
        self._session = Session(self._deadlines, self._out.append, self._dial, self._hello, self._beat)
        self._table: bytes | None = None
        self._ref: manager_pb2.BlobRef | None = None
        self._puts = 0
        self._decided = False
        self._epoch = 0
        self._sealing = manager_pb2.Seal()
        self._sealed: manager_pb2.Sealed | None = None

    def handle(self, event: TrainerEvent, now: float) -> list[TrainerCommand]:
        """Takes one event and says what is to be done."""
        return commands_of(self._out, lambda: self._take(event, now))

    def _take(self, event: TrainerEvent, now: float) -> None:
        match event:
            case Message(peer, body):
                if self._session.heard(peer, now):
                    self._message(body, now)
            case PeerLost(peer, reason, code):
                self._session.lost(peer, reason, now, code)
            case TimerFired(key):
                if not self._session.timer(key, now) and key == REPUBLISH:
                    self._publish()
            case Done(("put", int() as number), result, problem):
                if number == self._puts:
                    self._stored(result, problem, now)
            case Done(("seal", int() as epoch), result, problem):
                self._seal_done(epoch, result, problem)
            case PublishTable(table):
                self._table, self._ref, self._decided = table, None, False
                if self._session.welcomed:
                    self._put()
                elif self._session.peer is None and self._puts:
                    self._put()  # a dial that waits for the table before this one
            case Start():
                self._session.start(now)
            case Stop(reason):
                self._session.stop(reason)

    # -- session

    def _dial(self, now: float) -> None:
        if self._table is None:
            self._session.open(now)
        else:
            self._put()

    def _put(self) -> None:
        assert self._table is not None
        self._puts += 1
        self._out.append(Run(("put", self._puts), PutBlobs((self._table,), self._deadlines.blobs)))

    def _stored(self, result: object, problem: weights_pb2.Problem | None, now: float) -> None:
        if problem is not None:
            if self._session.peer is None:
                self._session.not_stored(problem, now)
            else:
                self._out.append(SetTimer(REPUBLISH, self._deadlines.resend))
            return
        (self._ref,) = cast(tuple[manager_pb2.BlobRef], result)
        self._decided = False
        if self._session.peer is None:
            self._session.open(now)
        else:
            self._publish()

    def _hello(self) -> manager_pb2.TrainerHello:
        return manager_pb2.TrainerHello(
            cluster=self._session.cluster,
            lineage=self._lineage,
            rank=self._rank,
            world_size=self._world_size,
            session_id=self._session_id,
            host=self._host,
            table=self._ref,
            epoch=self._epoch,
        )

    def _beat(self, sequence: int) -> manager_pb2.Heartbeat:
        return manager_pb2.Heartbeat(sequence=sequence)

    # -- messages

    def _message(self, body: object, now: float) -> None:
        match body:
            case manager_pb2.Welcome():
                if self._session.welcome(body):
                    self._decided = False
                    if self._table is not None and self._ref is None:
                        self._put()
                    elif self._ref is not None:
                        self._out.append(SetTimer(REPUBLISH, self._deadlines.resend))
            case manager_pb2.Refused():
                # Before the welcome, or when another session took over, the session is refused; else the publication.
                if not self._session.welcomed or body.problem.code in (
                    weights_pb2.Problem.ABORTED,
                    weights_pb2.Problem.UNAVAILABLE,
                ):
                    self._session.refused(body.problem, now)
                elif body.problem.code == weights_pb2.Problem.NOT_FOUND and self._table is not None:
                    # The manager that the table was stored with is not the one that took the hello.
                    self._ref, self._decided = None, False
                    self._out.append(SetTimer(REPUBLISH, self._deadlines.resend))
                else:
                    self._decide(PublicationDecided(None, body.problem))
            case manager_pb2.PublicationAccepted():
                if body.table == self._ref:
                    self._decide(PublicationDecided(body.manifest, None))
            case manager_pb2.Seal():
                self._seal(body)
            case manager_pb2.Release():
                if body.fence.cluster == self._session.cluster:
                    self._out.append(Released(body.fence.epoch))

    def _publish(self) -> None:
        """Sends the table until the manager has decided; it may be waiting for other ranks' tables."""
        if self._decided or not self._session.welcomed:
            return
        if self._ref is None:
            if self._table is not None:
                self._put()
            return
        self._session.send(manager_pb2.Publish(table=self._ref))
        self._out.append(SetTimer(REPUBLISH, self._deadlines.resend))

    def _decide(self, decision: PublicationDecided) -> None:
        if not self._decided:
            self._out.append(CancelTimer(REPUBLISH))
        self._decided = True
        self._out.append(decision)

    # -- sealing

    def _seal(self, seal: manager_pb2.Seal) -> None:
        if seal.fence.cluster != self._session.cluster or seal.fence.epoch < self._epoch:
            return
        if seal.fence.epoch == self._epoch:
            if self._sealed is not None:
                self._session.send(self._sealed)
            return
        self._epoch = seal.fence.epoch
        self._sealed = None
        self._sealing = seal
        task = SealSource(seal.fence.epoch, seal.version, seal.atoms, seal.keep, bounded(seal.deadline_seconds))
        self._out.append(Run(("seal", self._epoch), task))

    def _seal_done(self, epoch: int, result: object, problem: weights_pb2.Problem | None) -> None:
        if epoch != self._epoch:
            return  # overtaken by a later update
        answer = manager_pb2.Sealed(fence=self._sealing.fence, atoms=self._sealing.atoms)
        if problem is not None:
            answer.problem.CopyFrom(problem)
        else:
            sealed = cast(SealResult, result)
            answer.digests.CopyFrom(sealed.digests)
            answer.copy_seconds = sealed.copy_seconds
            answer.digest_seconds = sealed.digest_seconds
        self._sealed = answer
        self._session.send(answer)
