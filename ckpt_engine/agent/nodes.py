"""Settings of one engine on several nodes: which node this is, and what must be equal on all of them.

Data only; `following.py` and `leading.py` say what the agents do.
"""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import zmq
import zmq.utils.z85

from ckpt_engine.addresses import join_address, split_address
from ckpt_engine.core.loopback import is_loopback
from ckpt_engine.core.problems import CkptEngineError, precondition
from ckpt_engine.security.client import warn_of_readers

MOST_NODES = 256
LEADER_PORT = 7100
"""Where the agent of node 0 listens if a LeaderWorkerSet names its host: that names no port."""

GROUP_SIZE, WORKER_INDEX, LEADER_ADDRESS = "LWS_GROUP_SIZE", "LWS_WORKER_INDEX", "LWS_LEADER_ADDRESS"
"""Variables that a LeaderWorkerSet of Kubernetes gives to each container of a group of pods."""

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

    @classmethod
    def found(
        cls, nodes: int | None, rank: int | None, leader: str, token: Path | None, environment: Mapping[str, str]
    ) -> NodeSettings:
        """The settings by the options, and where these say nothing by the variables of a LeaderWorkerSet.

        None, and an empty leader: the option is not given. With `--nodes 1` the variables say nothing. Raises
        ValueError with a message for the user.
        """
        names = [name for name in (GROUP_SIZE, WORKER_INDEX, LEADER_ADDRESS) if name in environment]
        if not names or nodes == 1:
            return cls(nodes or 1, rank or 0, leader, token)
        size = _number(GROUP_SIZE, "--nodes", environment) if nodes is None else nodes
        index = _number(WORKER_INDEX, "--node-rank or CKPT_ENGINE_NODE_RANK", environment) if rank is None else rank
        if size == 1 and nodes is None and not leader:
            token = None  # a group of one pod has nothing to share it with
        elif not leader and environment.get(LEADER_ADDRESS):
            leader = join_address(environment[LEADER_ADDRESS], LEADER_PORT)
        try:
            return cls(size, index, leader, token)
        except ValueError as error:
            values = ", ".join(f"{name}={environment[name]!r}" for name in names)
            raise ValueError(
                f"{error}; this pod is of a LeaderWorkerSet ({values}), and options win over that"
            ) from None

    @property
    def host(self) -> str:
        """The leader's host, without brackets."""
        return split_address(self.leader)[0] if self.leader else ""

    @property
    def endpoint(self) -> str:
        """The leader's ZeroMQ address, for dialling it."""
        return f"tcp://{self.leader}"

    def listening_endpoints(self) -> list[str]:
        """The leader's ZeroMQ addresses, for listening: one for each address that the name means on this host.

        ZeroMQ needs IP addresses; which of several a follower dials is not known here. May take as long as the resolver
        does. Raises FAILED_PRECONDITION if the name is not known, or means other hosts only.
        """
        host, port = split_address(self.leader)
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise precondition(f"--leader {self.leader} cannot be resolved on node 0: {error.strerror}") from error
        addresses = list(dict.fromkeys(str(each[4][0]) for each in found))
        own = [address for address in addresses if _is_of_this_host(address)]
        if not own:
            raise precondition(
                f"--leader {self.leader} means {', '.join(addresses)}, which is not an address of this host; it must "
                "be one of node 0's"
            )
        return [f"tcp://{join_address(address, port)}" for address in own]

    def keys(self) -> Keys | None:
        """Derives the keys from the token; None: there is none. Raises FAILED_PRECONDITION if its file is unusable."""
        if self.token is None:
            return None
        try:
            token = self.token.read_bytes().strip()
        except OSError as error:
            raise precondition(f"--node-token {self.token} cannot be read: {error.strerror}") from error
        warn_of_readers(str(self.token), "the file of --node-token")
        if len(token) < TOKEN_BYTES:
            raise precondition(
                f"--node-token {self.token} holds {len(token)} bytes; it takes {TOKEN_BYTES} random ones or more "
                "(openssl rand -hex 32)"
            )
        return Keys(*_pair(token, b"leader"), *_pair(token, b"follower"))


def _is_of_this_host(address: str) -> bool:
    try:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as trial:
            trial.bind((address, 0))
    except OSError:
        return False
    return True


def _number(name: str, option: str, environment: Mapping[str, str]) -> int:
    text = environment.get(name)
    if text is None:
        raise ValueError(
            f"{name} is not set, although this pod is of a LeaderWorkerSet: give {option}, or `--nodes 1` for an "
            "engine that is in this pod alone"
        )
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"{name} must be a number, not {text!r}: a LeaderWorkerSet sets it, and {option} wins over it")
    return int(text)


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
