"""A member that offers weights: a trainer rank, or a holder of sealed versions.

It decides what all kinds share: connecting, storing what the hello refers to, announcing what is offered until the
manager has decided, sealing in the order of fill fences, answering repetitions, leaving. The kinds differ in their
messages only (`MemberKind`). It decides nothing about weights: its shell seals and digests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

from google.protobuf.message import Message as ProtobufMessage

from ckpt_engine.core.deadlines import Deadlines, bounded
from ckpt_engine.machines.deciding import commands_of
from ckpt_engine.machines.events import (
    CancelTimer,
    Done,
    HoldVersions,
    Key,
    Message,
    OfferedVersion,
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
    WithdrawTable,
)
from ckpt_engine.machines.session import Session
from ckpt_engine.v1 import manager_pb2, weights_pb2

NOT_FINITE_NAMED = 16
"""Tensors with NaN or infinity that a Sealed names at most."""

REPUBLISH: Key = ("publish",)


@dataclass(frozen=True)
class HelloState:
    """What a hello says of a member's state."""

    cluster: str  # that it last served
    epoch: int  # of the highest fill fence that it has obeyed
    held: Sequence[manager_pb2.Held]  # what it offers, as stored with the manager
    sealed: weights_pb2.Fence | None = None  # of the last command to seal what it offers; None: there was none


@dataclass(frozen=True)
class MemberKind:
    """What differs from kind to kind of member."""

    session: str  # the service's call
    message: type[ProtobufMessage]  # the envelope of what it sends
    hello: Callable[[HelloState], ProtobufMessage]  # makes the first message
    changed: Callable[
        [HelloState], ProtobufMessage
    ]  # makes the message, on the open stream, that its offer has changed


class OfferingMachine:
    """One process that offers weights.

    A Seal with the fence of the last one is answered as before, but one that asks for other digests of what stays
    sealed is a new one. What the member offers is stored again before every hello, since the manager may have been
    restarted without its blobs.
    """

    def __init__(self, kind: MemberKind, deadlines: Deadlines | None = None) -> None:
        self.kind = kind
        self._deadlines = deadlines or Deadlines()
        self._out: list[TrainerCommand] = []
        self._session = Session(self._deadlines, self._out.append, self._dial, self._hello, self._beat)
        self._offered: tuple[OfferedVersion, ...] | None = None  # None: nothing yet
        self._held: tuple[manager_pb2.Held, ...] | None = None  # the same as stored; None: not stored
        self._puts = 0
        self._waiting: set[bytes] = set()  # tables that the manager has not decided on
        self._decided = False
        self._epoch = self._seals = 0
        self._sealing = manager_pb2.Seal()
        self._seal_came = 0.0
        self._sealed: manager_pb2.Sealed | None = None
        self._sealed_under: weights_pb2.Fence | None = None  # see HelloState.sealed

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
            case Done(("seal", int() as number), result, problem):
                self._seal_done(number, result, problem, now)
            case PublishTable(table):
                self._offer((OfferedVersion(table),))
            case WithdrawTable():
                self._offer(())
            case HoldVersions(versions):
                self._offer(versions)
            case Start():
                self._session.start(now)
            case Stop(reason):
                self._session.stop(reason)

    def _offer(self, offered: tuple[OfferedVersion, ...]) -> None:
        stored = tuple(zip(self._offered or (), self._held or (), strict=False))
        remaining = tuple(held for version, held in stored if version in offered)
        less = len(remaining) == len(offered) < len(stored)
        self._offered, self._held, self._decided, self._sealed_under = offered, None, False, None
        if less and self._session.welcomed:
            # Nothing is to be stored, so the manager hears what is given up before anything else happens to it.
            self._puts += 1
            self._held = remaining
            self._undecided()
            self._publish()
        elif self._session.welcomed:
            self._put()
        elif self._session.peer is None and self._puts:
            self._put()  # a dial that waits for what was offered before this

    # -- session

    def _dial(self, now: float) -> None:
        if self._offered is None:
            self._session.open(now)
        else:
            self._put()

    def _put(self) -> None:
        assert self._offered is not None
        self._puts += 1
        blobs = tuple(blob for version in self._offered for blob in (version.table, version.record) if blob)
        self._out.append(Run(("put", self._puts), PutBlobs(blobs, self._deadlines.blobs)))

    def _stored(self, result: object, problem: weights_pb2.Problem | None, now: float) -> None:
        if problem is not None:
            if self._session.peer is None:
                self._session.not_stored(problem, now)
            else:
                self._out.append(SetTimer(REPUBLISH, self._deadlines.resend))
            return
        assert self._offered is not None
        refs = iter(cast(tuple[manager_pb2.BlobRef, ...], result))
        self._held = tuple(
            manager_pb2.Held(
                identity=version.identity,
                table=next(refs),
                record=next(refs) if version.record else None,
                bytes=version.bytes,
                wanted_bytes=version.wanted_bytes,
            )
            for version in self._offered
        )
        self._undecided()
        if self._session.peer is None:
            self._session.open(now)
        else:
            self._publish()

    def _undecided(self) -> None:
        """Waits for the manager's decision on all that is offered."""
        self._waiting = {held.table.digest for held in self._held or ()}
        self._decided = False

    def _obeyed(self) -> int:
        """The epoch of the highest fill fence that it has obeyed, of any command."""
        return self._epoch

    def _hello_state(self) -> HelloState:
        return HelloState(self._session.cluster, self._obeyed(), self._held or (), self._sealed_under)

    def _hello(self) -> ProtobufMessage:
        return self.kind.hello(self._hello_state())

    def _beat(self, sequence: int) -> manager_pb2.Heartbeat:
        return manager_pb2.Heartbeat(sequence=sequence)

    # -- messages

    def _message(self, body: object, now: float) -> None:
        match body:
            case manager_pb2.Welcome():
                if self._session.welcome(body, now):
                    self._undecided()
                    if self._offered is not None and self._held is None:
                        self._put()
                    elif self._held is not None:
                        self._out.append(SetTimer(REPUBLISH, self._deadlines.resend))
            case manager_pb2.Refused():
                # Before the welcome, or when another session took over, the session is refused; else what is offered.
                if not self._session.welcomed or body.problem.code in (
                    weights_pb2.Problem.CODE_ABORTED,
                    weights_pb2.Problem.CODE_UNAVAILABLE,
                ):
                    self._session.refused(body.problem, now)
                elif body.problem.code == weights_pb2.Problem.CODE_NOT_FOUND and self._offered is not None:
                    # What it offers was stored with another manager than the one that took the hello.
                    self._held, self._decided = None, False
                    self._out.append(SetTimer(REPUBLISH, self._deadlines.resend))
                else:
                    self._decide(PublicationDecided(None, body.problem))
            case manager_pb2.PublicationAccepted():
                if any(held.table == body.table for held in self._held or ()):
                    self._waiting.discard(body.table.digest)
                    if not self._waiting:
                        self._decide(PublicationDecided(body.manifest, None))
            case manager_pb2.Heartbeat():
                self._session.echoed(body, now)
            case manager_pb2.Seal():
                self._seal(body)
            case manager_pb2.Release():
                if body.fence.cluster == self._session.cluster:
                    self._out.append(Released(body.fence.epoch))

    def _publish(self) -> None:
        """Announces what is offered until the manager has decided, which may wait for other ranks' tables."""
        if self._decided or not self._session.welcomed:
            return
        if self._held is None:
            if self._offered is not None:
                self._put()
            return
        self._session.send(self.kind.changed(self._hello_state()))
        if self._held:
            self._out.append(SetTimer(REPUBLISH, self._deadlines.resend))
        else:
            self._decided = True  # there is nothing to decide on

    def _decide(self, decision: PublicationDecided) -> None:
        if not self._decided:
            self._out.append(CancelTimer(REPUBLISH))
        self._decided = True
        self._out.append(decision)

    # -- sealing

    def _seal(self, seal: manager_pb2.Seal) -> None:
        if seal.fence.cluster != self._session.cluster or seal.fence.epoch < self._obeyed():
            return
        if seal.fence.epoch == self._epoch and (seal.atoms == self._sealing.atoms or not seal.keep):
            if self._sealed is not None:
                self._session.send(self._sealed)
            return
        self._epoch = seal.fence.epoch
        self._seals += 1
        self._sealed = None
        self._sealing, self._seal_came = seal, self._session.heard_at
        if not seal.keep:
            self._sealed_under = seal.fence
        task = SealSource(seal.fence.epoch, seal.version, seal.atoms, seal.keep, bounded(seal.deadline_seconds))
        self._out.append(Run(("seal", self._seals), task))

    def _seal_done(self, number: int, result: object, problem: weights_pb2.Problem | None, now: float) -> None:
        if number != self._seals:
            return  # overtaken by a later one
        answer = manager_pb2.Sealed(fence=self._sealing.fence, atoms=self._sealing.atoms)
        if problem is not None:
            answer.problem.CopyFrom(problem)
        else:
            sealed = cast(SealResult, result)
            answer.digests.CopyFrom(sealed.digests)
            answer.copy_seconds = sealed.copy_seconds
            answer.digest_seconds = sealed.digest_seconds
            answer.broken_communicator = sealed.broken
            answer.digested = sealed.digested
            answer.not_finite.extend(sealed.not_finite[:NOT_FINITE_NAMED])
            answer.not_finite_tensors = len(sealed.not_finite)
            answer.span.CopyFrom(self._session.clock.span(self._seal_came, now))
        self._sealed = answer
        self._session.send(answer)
