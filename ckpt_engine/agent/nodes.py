"""Settings of one engine on several nodes: which node this is, and what must be equal on all of them.

Data only; `following.py` and `leading.py` say what the agents do.
"""

from __future__ import annotations

import hashlib
import socket
from dataclasses import dataclass
from pathlib import Path

import zmq
import zmq.utils.z85

from ckpt_engine.addresses import join_address, split_address
from ckpt_engine.core.loopback import is_loopback
from ckpt_engine.core.problems import CkptEngineError, precondition

MOST_NODES = 256
TOKEN_BYTES = 32
"""The shortest node token: keys are derived from it, and a shorter one could be guessed."""


@dataclass(frozen=True)
class NodeSettings:
    """The engine's node of this agent, and where the agents meet."""

    nodes: int = 1  # of the engine; 1: it does not span nodes
    rank: int = 0  # of this node; 0 leads
    leader: str = ""  # HOST:PORT at which the agent of node 0 listens for the others; equal on all nodes
    token: Path | None = None  # file with the secret that all nodes share; None: loopback only

    def __post_init__(self) -> None:
        """Checks the settings. Raises ValueError with a message for the user."""
        if not 1 <= self.nodes <= MOST_NODES:
            raise ValueError(f"--nodes {self.nodes} must be from 1 to {MOST_NODES}")
        if not 0 <= self.rank < self.nodes:
            raise ValueError(f"--node-rank {self.rank}: nodes count from 0 to {self.nodes - 1}")
        if self.nodes == 1:
            if self.leader or self.token:
                raise ValueError("--leader and --node-token are for engines on several --nodes")
            return
        try:
            host, port = split_address(self.leader)
        except CkptEngineError:
            port = 0
        if not port:
            raise ValueError(f"--leader must be HOST:PORT of node 0, equal on all nodes, not {self.leader!r}")
        if self.token is None and not is_loopback(host):
            raise ValueError(
                f"--leader {self.leader} is reached by other machines: give all nodes one --node-token FILE "
                f"(at least {TOKEN_BYTES} bytes: openssl rand -hex 32)"
            )

    @property
    def host(self) -> str:
        """The leader's host, without brackets."""
        return split_address(self.leader)[0] if self.leader else ""

    @property
    def endpoint(self) -> str:
        """The leader's ZeroMQ address, for dialling it."""
        return f"tcp://{self.leader}"

    def listening_endpoint(self) -> str:
        """The leader's ZeroMQ address, for listening: ZeroMQ needs an IP address, so a name is resolved.

        Raises FAILED_PRECONDITION if this host cannot resolve the name.
        """
        host, port = split_address(self.leader)
        try:
            addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise precondition(f"--leader {self.leader} cannot be resolved on node 0: {error.strerror}") from error
        return f"tcp://{join_address(str(addresses[0][4][0]), port)}"

    def keys(self) -> Keys | None:
        """Derives the keys from the token; None: there is none. Raises FAILED_PRECONDITION if its file is unusable."""
        if self.token is None:
            return None
        try:
            token = self.token.read_bytes().strip()
        except OSError as error:
            raise precondition(f"--node-token {self.token} cannot be read: {error.strerror}") from error
        if len(token) < TOKEN_BYTES:
            raise precondition(
                f"--node-token {self.token} holds {len(token)} bytes; it takes {TOKEN_BYTES} random ones or more "
                "(openssl rand -hex 32)"
            )
        return Keys(*_pair(token, b"leader"), *_pair(token, b"follower"))


@dataclass(frozen=True)
class Keys:
    """CURVE keys of both sides (Z85), all derived from the token."""

    leader_public: bytes
    leader_secret: bytes
    follower_public: bytes
    follower_secret: bytes


def _pair(token: bytes, side: bytes) -> tuple[bytes, bytes]:
    secret = zmq.utils.z85.encode(hashlib.sha256(b"ckpt-engine node " + side + b"\0" + token).digest())
    return zmq.curve_public(secret), secret
