"""The owner's side of what is lent while it is being filled: a chunk is sent once it is verified, and never before.

Whoever asks for a chunk that is not there yet is told so every second, with a number that shows whether the owner gets
anything at all: that is how a reader tells an owner that waits from one that is stopped.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ckpt_engine.core.problems import CkptEngineError, invalid
from ckpt_engine.transport.tcp import wire
from ckpt_engine.transport.tcp.sending import Sender, frames
from ckpt_engine.transport.tcp.sockets import HungUp, Silence, receive, send

if TYPE_CHECKING:
    from ckpt_engine.transport.tcp.lendings import Lendings

PULSE_SECONDS = 1.0
"""How long a reader who waits for a chunk hears nothing."""

Runs = Sequence[tuple[int, int]]
"""(offset in the slot, length) of what a chunk consists of, in the order in which it is sent."""


class Passing:
    """One filling, as those see it who wait for its chunks. Any thread. over: why nothing of it is sent any more."""

    def __init__(self, key: bytes, chunks: Sequence[Runs], changed: threading.Condition) -> None:
        self.key = key
        self.chunks = chunks
        self.over = ""
        self.pulse = 0
        self._there = bytearray(len(chunks))
        self._filled = False
        self._changed = changed

    def verified(self, chunk: int) -> None:
        """A chunk lies in the slot as it was sealed, and is not written to any more."""
        with self._changed:
            self._there[chunk] = 1
            self.pulse += 1
            self._changed.notify_all()

    def moved(self) -> None:
        """Something has come. Waits for nothing."""
        self.pulse += 1

    def finish(self) -> None:
        """The filling is over: who waits for what is not there waits in vain."""
        with self._changed:
            self._filled = True
            self._changed.notify_all()

    def end(self, why: str) -> None:
        """Nothing of it is sent any more, but what is on its way. The first reason stays."""
        with self._changed:
            self.over = self.over or why
            self._changed.notify_all()

    def why_not(self, chunk: int) -> str:
        """Why a chunk will not be sent, now or later; empty: it may. Under the lock."""
        if self.over:
            return self.over
        if not 0 <= chunk < len(self.chunks):
            return f"there is no chunk {chunk}; it has {len(self.chunks)}"
        return "nobody has brought that as it was sealed" if self._filled and not self._there[chunk] else ""

    def has(self, chunk: int) -> bool:
        """Whether a chunk is verified. Under the lock."""
        return bool(self._there[chunk])


class Passer:
    """One connection that asks for chunks."""

    def __init__(self, connection: socket.socket, lendings: Lendings, sender: Sender) -> None:
        self._connection = connection
        self._lendings = lendings
        self._sender = sender

    def serve(self) -> None:
        """Answers until the reader hangs up. Raises INVALID_ARGUMENT for what nobody asks, HungUp."""
        while True:
            asked = None
            with contextlib.suppress(Silence):  # of one who has nothing to ask
                asked = wire.read_question(receive(self._connection, wire.QUESTION.size))
            if asked is None:
                continue
            if asked.kind != wire.PASS:
                raise invalid("where what is being filled is asked for, nobody reads a slot")
            try:
                self._answer(asked.lending, asked.runs)
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
        slot, runs = found
        try:
            for part in frames(runs):
                if not self._lendings.passes(slot, key):
                    send(self._connection, wire.refusal(wire.GONE, "another version is brought into its place"))
                    return
                self._sender.send(slot, part)
        finally:
            self._lendings.release(slot, self)
