"""The worker's end of the channel to its agent: requests out, answers in, over ZeroMQ on ipc://.

`ask` repeats a request until its answer comes or its time is over. The agent answers a repeated request as before, so
repeating is safe. `tell` sends once and does not wait, for progress. Answers are matched by sequence number; late and
repeated ones are dropped.

The channel has its own ZeroMQ context and shares nothing with the engine's; after a fork it makes a new one. Calls may
come from any thread, one at a time.
"""

from __future__ import annotations

import os
import threading
import time

import zmq
from google.protobuf.message import DecodeError

from ckpt_engine.core.problems import deadline, invalid
from ckpt_engine.v1 import worker_pb2

FRAME_LIMIT_BYTES = 1 << 30
"""ZeroMQ cuts the connection when a longer answer is announced. The plan of 50,000 tensors takes a few MiB."""

HIGH_WATER_MARK = 64
"""Most progress messages that wait for an agent that does not read them; further ones are dropped."""


class WorkerChannel:
    """One worker's channel. It connects at its first use, so the agent may start later or restart."""

    def __init__(self, endpoint: str, rank: int, boot_id: bytes, attempt_seconds: float = 2.0) -> None:
        """endpoint: of the agent's socket (`EngineDirectory.endpoint`). boot_id: of this worker's slot.
        attempt_seconds: how long to wait for an answer before repeating the request, over a new connection."""
        self._endpoint = endpoint
        self._rank = rank
        self._boot_id = boot_id
        self._attempt_seconds = attempt_seconds
        self._lock = threading.Lock()
        self._sequence = 0
        self._process = 0
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._socket: zmq.Socket[bytes] | None = None

    def ask(self, request: worker_pb2.WorkerRequest, seconds: float) -> worker_pb2.AgentReply:
        """Sends a request and waits for the agent's answer. Fills in sequence, rank and boot id of `request`.

        Raises CkptEngineError: DEADLINE_EXCEEDED without an answer within `seconds` (the agent may have read the
        request); INVALID_ARGUMENT if `request` has no body.
        """
        if request.WhichOneof("body") is None:
            raise invalid("a request to the agent needs a body")
        with self._lock:
            stop_at = time.monotonic() + seconds
            body = self._stamp(request)
            attempts = 0
            while (now := time.monotonic()) < stop_at:
                attempts += 1
                if self._send(body):
                    reply = self._receive(min(stop_at, now + self._attempt_seconds))
                    if reply is not None:
                        return reply
                else:  # the queue is full
                    time.sleep(min(0.05, stop_at - now))
                self._disconnect()
        raise deadline(
            f"worker {self._rank} got no answer from its agent at {self._endpoint} within {seconds:g} s "
            f"({attempts} attempts)"
        )

    def tell(self, request: worker_pb2.WorkerRequest) -> None:
        """Sends a message that may be lost. Returns at once and raises nothing."""
        with self._lock:
            self._send(self._stamp(request))

    def close(self) -> None:
        """Drops unsent messages and closes the connection. The channel may be used again."""
        with self._lock:
            self._disconnect()
            if self._context is not None and self._process == os.getpid():
                self._context.term()
            self._context = None

    def _stamp(self, request: worker_pb2.WorkerRequest) -> bytes:
        self._sequence += 1
        request.sequence = self._sequence
        request.rank = self._rank
        request.boot_id = self._boot_id
        return request.SerializeToString()

    def _connected(self) -> zmq.Socket[bytes]:
        if self._process != os.getpid():  # ZeroMQ's threads do not survive a fork; its old objects must not be touched
            self._process, self._context, self._socket = os.getpid(), None, None
        if self._context is None:
            self._context = zmq.Context()
        if self._socket is None:
            socket = self._context.socket(zmq.DEALER)
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
            socket.setsockopt(zmq.MAXMSGSIZE, FRAME_LIMIT_BYTES)
            socket.setsockopt(zmq.RECONNECT_IVL, 20)
            socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
            socket.connect(self._endpoint)
            self._socket = socket
        return self._socket

    def _disconnect(self) -> None:
        if self._socket is not None and self._process == os.getpid():
            self._socket.close()
        self._socket = None

    def _send(self, body: bytes) -> bool:
        try:
            self._connected().send(body, zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    def _receive(self, stop_at: float) -> worker_pb2.AgentReply | None:
        """Waits for the answer to the last request; None: it has not come by `stop_at`."""
        socket = self._connected()
        while (remaining := stop_at - time.monotonic()) > 0:
            if not socket.poll(max(1, int(remaining * 1000))):
                return None
            try:
                reply = worker_pb2.AgentReply.FromString(socket.recv(zmq.NOBLOCK))
            except (zmq.ZMQError, DecodeError):
                continue
            if reply.sequence == self._sequence:
                return reply
        return None
