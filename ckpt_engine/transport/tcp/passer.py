"""The owner's side of a connection that asks for what is being filled: a chunk is sent once it is verified, not before.

A reader that asks for a missing chunk is told so every second, with a number that shows whether the owner receives
anything at all. That is how a reader tells an owner that waits from one that is stopped.
"""

from __future__ import annotations

import contextlib
import socket
import time

from ckpt_engine.core.problems import CkptEngineError, invalid
from ckpt_engine.core.rates import Flow
from ckpt_engine.transport.tcp import wire
from ckpt_engine.transport.tcp.lendings import Lendings
from ckpt_engine.transport.tcp.sending import Sender, frames
from ckpt_engine.transport.tcp.sockets import HungUp, Silence, receive, send, unsent

PULSE_SECONDS = 1.0
"""Between two messages to a reader that waits for a chunk."""


class Passer:
    """One connection that asks for chunks."""

    def __init__(self, connection: socket.socket, lendings: Lendings, sender: Sender) -> None:
        self._connection = connection
        self._lendings = lendings
        self._sender = sender

    def serve(self) -> None:
        """Answers until the reader hangs up. Raises INVALID_ARGUMENT for an invalid question, HungUp."""
        try:
            self._serve()
        finally:
            self._lendings.leave(self)

    def _serve(self) -> None:
        while True:
            question = None
            with contextlib.suppress(Silence):  # the reader has no question now
                question = wire.read_question(receive(self._connection, wire.QUESTION.size))
            if question is None:
                continue
            if question.kind != wire.PASS:
                raise invalid("this connection asks for what is being filled, and cannot read a slot")
            try:
                self._answer(question.lending, question.runs)
            except Silence as error:
                raise HungUp("it takes nothing of what it asked for") from error

    def _answer(self, key: bytes, chunk: int) -> None:
        while True:
            try:
                found = self._lendings.chunk(key, chunk, self, PULSE_SECONDS)
            except CkptEngineError as error:
                send(self._connection, wire.refusal(wire.GONE, error.problem.message))
                return
            if not isinstance(found, int):
                break
            send(self._connection, wire.frame(wire.WAIT, wire.PULSE.size) + wire.PULSE.pack(found))
        slot, runs, flows = found
        began, waiting, sent = time.monotonic(), unsent(self._connection), 0
        try:
            for part in frames(runs):
                if not self._lendings.passes(slot, key):
                    send(self._connection, wire.refusal(wire.GONE, "another version is brought into its place"))
                    return
                self._sender.send(slot, part)
                sent += sum(length for _, length in part)
        finally:
            # What lies in the kernel's memory has not been sent; it leaves later, when nothing may measure it.
            transmitted = sent + waiting - unsent(self._connection)
            flows.append(Flow(began, time.monotonic(), max(0, transmitted)))
            self._lendings.release(slot, self)
