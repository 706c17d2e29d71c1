"""A member's session with the manager: dial, say hello, keep the lease, dial again.

It decides when a manager counts as lost, but not what that means for weights (mostly nothing). The machines that use
it, of agents and of members that offer weights, say what a hello contains and what must be stored before it.
"""

from __future__ import annotations

from collections.abc import Callable

from google.protobuf.message import Message as ProtobufMessage

from ckpt_engine.core.deadlines import Deadlines, bounded
from ckpt_engine.core.manifest import other_format
from ckpt_engine.machines.clock import ManagersClock
from ckpt_engine.machines.events import (
    CancelTimer,
    ClosePeer,
    Key,
    OpenStream,
    Peer,
    Send,
    SessionEnded,
    SessionOpened,
    SetTimer,
)
from ckpt_engine.v1 import manager_pb2, weights_pb2

RECONNECT: Key = ("session", "reconnect")
BEAT: Key = ("session", "beat")

PATIENCE = 1.25
"""Leases to wait for a member's name that another process holds: if that one is dead, its lease has ended by then."""

DENIED = frozenset(
    {
        weights_pb2.Problem.CODE_INVALID_ARGUMENT,
        weights_pb2.Problem.CODE_UNAUTHENTICATED,
        weights_pb2.Problem.CODE_PERMISSION_DENIED,
    }
)
"""Refusals that a second attempt cannot change."""

SessionCommand = Send | ClosePeer | SetTimer | CancelTimer | OpenStream | SessionOpened | SessionEnded


class Session:
    """One member's session, through any number of streams.

    emit: takes commands. dial: called when a connection is due; it calls `open` once everything that the hello refers
    to is stored, or `failed`. hello, beat: make the messages when they are sent.
    """

    def __init__(
        self,
        deadlines: Deadlines,
        emit: Callable[[SessionCommand], None],
        dial: Callable[[float], None],
        hello: Callable[[], ProtobufMessage],
        beat: Callable[[int], ProtobufMessage],
    ) -> None:
        self._deadlines = deadlines
        self._emit = emit
        self._dial = dial
        self._hello = hello
        self._beat = beat
        self._streams = 0
        self._failures = 0
        self._sequence = 0
        self._sent_at = 0.0  # when the last heartbeat was sent, or the first hello of the stream
        self._heard = 0.0
        self._taken_since: float | None = None
        self._lease = deadlines.lease
        self._heartbeat = deadlines.heartbeat
        self.peer: Peer | None = None
        self.welcomed = False
        self._hello_changed = False
        self.ended = False
        self.cluster = ""
        self.clock = ManagersClock()

    def start(self, now: float) -> None:
        """Connects for the first time."""
        self._dial(now)

    def open(self, now: float) -> None:
        """Opens a stream and says hello, once everything that the hello refers to is stored."""
        if self.ended or self.peer is not None:
            return
        self._streams += 1
        self.peer = Peer(f"manager-{self._streams}")
        self.welcomed = False
        self._hello_changed = False
        self._heard = self._sent_at = now
        self._emit(OpenStream(self.peer))
        self._emit(Send(self.peer, self._hello()))
        self._emit(SetTimer(BEAT, self._deadlines.resend))

    def send(self, body: ProtobufMessage) -> None:
        """Sends if there is a welcomed stream. The caller repeats what must arrive."""
        if self.peer is not None and self.welcomed:
            self._emit(Send(self.peer, body))

    def beat_now(self, now: float) -> None:
        """Sends a heartbeat out of turn."""
        self._sequence += 1
        self._sent_at = now
        self.send(self._beat(self._sequence))

    def hello_again(self) -> None:
        """Sends the changed hello on the open stream; the manager takes it as a repetition.

        Before the welcome it is put off: a manager that has not answered the first hello reads no second one.
        """
        self._hello_changed = not self.welcomed
        if self.welcomed:
            self.send(self._hello())

    def heard(self, peer: Peer, now: float) -> bool:
        """Notes that a message came, which keeps the lease. Returns whether it came over the current stream."""
        if peer != self.peer:
            return False
        self._heard = now
        return True

    @property
    def heard_at(self) -> float:
        """When the last message came, or the stream was opened."""
        return self._heard

    def echoed(self, beat: manager_pb2.Heartbeat, now: float) -> None:
        """Takes the answer to a heartbeat."""
        if beat.sequence == self._sequence:
            self.clock.answered(self._sent_at, beat.clock, now)

    def welcome(self, welcome: manager_pb2.Welcome, now: float) -> bool:
        """Takes a welcome. Returns whether it is the first one on this stream. A manager that makes other digests is
        left and dialled again: another release may come in its place."""
        if other := other_format("the manager", welcome.digest_format):
            self.refused(weights_pb2.Problem(code=weights_pb2.Problem.CODE_FAILED_PRECONDITION, message=other), now)
            return False
        first = not self.welcomed
        if first:
            self.clock.forget()
            self.clock.answered(self._sent_at, welcome.clock, now)
        self.welcomed = True
        self._taken_since = None
        self._failures = 0
        self._lease = bounded(welcome.lease_seconds or self._deadlines.lease)
        self._heartbeat = bounded(welcome.heartbeat_seconds or self._deadlines.heartbeat)
        self.cluster = welcome.fence.cluster
        if first:
            self._emit(SetTimer(BEAT, self._heartbeat))
            self._emit(SessionOpened(self.cluster))
            if self._hello_changed:
                self.hello_again()
        return first

    def refused(self, problem: weights_pb2.Problem, now: float) -> None:
        """Takes a refusal, before or after the welcome: dials again, or ends the session for good.

        It dials again if the manager is unavailable, if another process has this member's name (that may be a dead one
        with a running lease), if the manager is of another cluster, or if a member that was welcomed before has lost
        its grants. Meanwhile it serves on, until an operator has put the right manager there or has given the grants
        back. Anything else is final. A welcomed member that is refused with FAILED_PRECONDITION was evicted.
        """
        welcomed = self.welcomed
        self._close()
        name_taken = problem.code == weights_pb2.Problem.CODE_ABORTED and not welcomed
        if name_taken and self._taken_since is None:
            self._taken_since = now
        patient = name_taken and self._taken_since is not None and now - self._taken_since < PATIENCE * self._lease
        state = problem.code == weights_pb2.Problem.CODE_FAILED_PRECONDITION
        elsewhere = state and not welcomed
        if (
            problem.code == weights_pb2.Problem.CODE_UNAVAILABLE
            or patient
            or elsewhere
            or self._lost_its_grants(problem)
        ):
            self.failed(problem.message, now, problem.code, PATIENCE * self._lease if patient else 0.0)
        else:
            self.end(problem, evicted=state and welcomed)

    def not_stored(self, problem: weights_pb2.Problem, now: float) -> None:
        """Dials again, or ends, since what the hello refers to could not be stored with the manager."""
        self._failed_with(problem, now)

    def _failed_with(self, problem: weights_pb2.Problem, now: float) -> None:
        denied = problem.code in DENIED
        if denied and not self.cluster:
            self.end(problem)
        else:
            self.failed(problem.message, now, problem.code if denied else weights_pb2.Problem.CODE_UNAVAILABLE)

    def _lost_its_grants(self, problem: weights_pb2.Problem) -> bool:
        """Whether a manager has welcomed this member before, and one rejects its credentials now."""
        grants = (weights_pb2.Problem.CODE_UNAUTHENTICATED, weights_pb2.Problem.CODE_PERMISSION_DENIED)
        return bool(self.cluster) and problem.code in grants

    def lost(
        self,
        peer: Peer,
        reason: str,
        now: float,
        code: weights_pb2.Problem.Code = weights_pb2.Problem.CODE_UNAVAILABLE,
    ) -> bool:
        """Takes the end of a stream. Returns whether it was the current one. Then it dials again, unless no manager has
        ever welcomed this member and this one never will."""
        if peer != self.peer:
            return False
        self.peer = None
        self.welcomed = False
        self._failed_with(weights_pb2.Problem(code=code, message=reason), now)
        return True

    def failed(
        self,
        reason: str,
        now: float,
        code: weights_pb2.Problem.Code = weights_pb2.Problem.CODE_UNAVAILABLE,
        patience: float = 0.0,
    ) -> None:
        """Dials again, each time a little later, after the manager was lost, not reached, or refused for now."""
        if self.ended:
            return
        self._emit(CancelTimer(BEAT))
        first, most = self._deadlines.reconnect_first, self._deadlines.reconnect_most
        wait = min(most, first * 2 ** min(self._failures, 16))
        self._failures += 1
        self._emit(SetTimer(RECONNECT, wait))
        self._emit(SessionEnded(weights_pb2.Problem(code=code, message=reason), final=False, patience=patience))

    def end(self, problem: weights_pb2.Problem, evicted: bool = False) -> None:
        """Ends the session for good."""
        self.ended = True
        self._close()
        self._emit(CancelTimer(BEAT))
        self._emit(CancelTimer(RECONNECT))
        self._emit(SessionEnded(problem, final=True, evicted=evicted))

    def stop(self, reason: str) -> None:
        """Says goodbye and ends, also before the welcome, since the manager may have accepted the hello already."""
        if self.peer is not None:
            self._emit(Send(self.peer, manager_pb2.Goodbye(reason=reason)))
        self.end(weights_pb2.Problem(code=weights_pb2.Problem.CODE_ABORTED, message=f"stopped: {reason}"))

    def timer(self, key: Key, now: float) -> bool:
        """Takes a timer. Returns whether it was the session's."""
        if key == RECONNECT:
            if not self.ended and self.peer is None:
                self._dial(now)
        elif key == BEAT:
            self._tick(now)
        else:
            return False
        return True

    def _tick(self, now: float) -> None:
        if self.peer is None:
            return
        silence = now - self._heard
        if silence >= self._lease:
            self._close()
            self.failed(f"nothing was heard from it for {silence:.1f} s", now)
        elif self.welcomed:
            self.beat_now(now)
            self._emit(SetTimer(BEAT, self._heartbeat))
        else:
            self._emit(Send(self.peer, self._hello()))
            self._emit(SetTimer(BEAT, self._deadlines.resend))

    def _close(self) -> None:
        if self.peer is not None:
            self._emit(ClosePeer(self.peer))
        self.peer = None
        self.welcomed = False
