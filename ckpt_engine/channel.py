"""The channel to the manager, for trainers, agents and commands: connection, blobs, problems.

Runs in the member's process, on its asyncio loop. Decides nothing about the protocol: that is the state machines'
part. Never imported by an engine (it needs grpc).
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import AsyncIterator, Iterable

import grpc
import grpc.aio

from ckpt_engine.connection import checked_address, connection_problem
from ckpt_engine.core.deadlines import Deadlines
from ckpt_engine.core.problems import CkptEngineError, invalid
from ckpt_engine.grpc_loops import quiet_loop
from ckpt_engine.leader import BlockingLeaderChannel, LeaderChannel, addresses_of, leader_options, names_several
from ckpt_engine.security.client import ClientSecurity
from ckpt_engine.v1 import manager_pb2, manager_pb2_grpc, weights_pb2

log = logging.getLogger("ckpt_engine.connection")

CHUNK_BYTES = 1 << 20
"""Most bytes of a blob in one message: small enough that heartbeats on the same connection get their turn."""

MESSAGE_BYTES = 64 << 20
"""Largest message that a client accepts. Only reports of very many replicas and workers come near it."""

PROBLEM_METADATA_KEY = "ckpt-engine-problem-bin"
"""Trailing metadata in which the manager puts the serialised Problem behind a failed call."""

NO_PING_MILLISECONDS = 1_000_000_000
"""Milliseconds between two pings of a connection: eleven days."""


def channel_options() -> list[tuple[str, int]]:
    """Options of every channel to the manager. Where several are named, some are other ones (`leader.py`).

    Sessions send their own heartbeats, so there are no HTTP/2 keepalive pings. A connection is given up if the peer
    acknowledges nothing for a lease (TCP_USER_TIMEOUT). TCP itself would go on for minutes, longer each time, and the
    next session would wait on that connection after the network has healed. A lost manager is tried again within two
    seconds, at the addresses that its name means by then: gRPC alone would look the name up every 30 seconds at most,
    and members would find a manager that has moved half a minute late. HTTP proxies are not used: the manager is a
    neighbour in the cluster, and a proxy cuts long streams. Raises INVALID_ARGUMENT for invalid deadlines in the
    environment.
    """
    return [
        ("grpc.keepalive_time_ms", NO_PING_MILLISECONDS),  # gRPC sets the timeout only where pings may come
        ("grpc.keepalive_timeout_ms", int(_lease() * 1000)),
        ("grpc.max_receive_message_length", MESSAGE_BYTES),
        ("grpc.max_send_message_length", MESSAGE_BYTES),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 1000),
        ("grpc.max_reconnect_backoff_ms", 2000),
        ("grpc.dns_min_time_between_resolutions_ms", 1000),
        ("grpc.enable_retries", 0),
        ("grpc.enable_http_proxy", 0),
        ("grpc.use_local_subchannel_pool", 1),
    ]


def _lease() -> float:
    try:
        return Deadlines.from_environment(os.environ).lease
    except ValueError as error:
        raise invalid(str(error)) from None


def open_channel(address: str, security: ClientSecurity | None = None) -> grpc.aio.Channel:
    """Opens a channel to the manager at `address`: host:port, or several with commas between them, of which the one
    that leads is called (`leader.py`). Call it on the loop that will use the channel.

    security: None: that of the environment, see `security/client.py`. Raises INVALID_ARGUMENT if that is invalid, or
    the address is.
    """
    checked_address(address)
    quiet_loop()
    security = security or ClientSecurity.from_environment(os.environ)
    credentials, options = security.credentials(), _options(address, security)

    def one(target: str) -> grpc.aio.Channel:
        if credentials is None:
            return grpc.aio.insecure_channel(target, options=options)
        return grpc.aio.secure_channel(target, credentials, options=options)

    channels = [one(target) for target in addresses_of(address)]
    return LeaderChannel(channels) if names_several(address) else channels[0]


def open_blocking_channel(address: str, security: ClientSecurity | None = None) -> grpc.Channel:
    """Opens a channel for calls that block, in a process that may have event loops of its own. Raises as
    `open_channel`."""
    checked_address(address)
    security = security or ClientSecurity.from_environment(os.environ)
    credentials, options = security.credentials(), _options(address, security)

    def one(target: str) -> grpc.Channel:
        if credentials is None:
            return grpc.insecure_channel(target, options=options)
        return grpc.secure_channel(target, credentials, options=options)

    channels = [one(target) for target in addresses_of(address)]
    return BlockingLeaderChannel(channels) if names_several(address) else channels[0]


def _options(address: str, security: ClientSecurity) -> list[tuple[str, int | str]]:
    """The options of each channel. Of two with one name the later counts."""
    options: dict[str, int | str] = dict([*channel_options(), *security.options()])
    if names_several(address):
        options |= dict(leader_options(_lease()))
    return list(options.items())


class ManagerStub(manager_pb2_grpc.CheckpointEngineManagerStub, manager_pb2_grpc.CheckpointEngineMembersStub):
    """The calls of both of the manager's services over a channel."""

    def __init__(self, channel: grpc.aio.Channel | grpc.Channel) -> None:
        for service in manager_pb2_grpc.CheckpointEngineManagerStub, manager_pb2_grpc.CheckpointEngineMembersStub:
            service.__init__(self, channel)


def blob_ref(data: bytes) -> manager_pb2.BlobRef:
    """The reference of a blob with these bytes: SHA-256 and size."""
    return manager_pb2.BlobRef(digest=hashlib.sha256(data).digest(), size=len(data))


async def put_blob(
    stub: ManagerStub,
    data: bytes,
    timeout_seconds: float = 60.0,
    ask: bool = True,
) -> manager_pb2.BlobRef:
    """Stores `data` with the manager, unless it already holds those bytes, and returns the reference. ask: False for
    bytes that cannot have been stored before.

    Raises CkptEngineError when the manager cannot be reached or refuses the blob.
    """
    ref = blob_ref(data)
    try:
        if ask and (await stub.HasBlob(ref, timeout=timeout_seconds)).present:
            return ref
        stored = await stub.PutBlob(_chunks(ref, data), timeout=timeout_seconds)
    except grpc.RpcError as error:
        raise error_of(error) from None
    if stored != ref:
        raise CkptEngineError(
            weights_pb2.Problem(
                code=weights_pb2.Problem.CODE_DATA_LOSS,
                message=f"the manager stored a blob of {stored.size} bytes as {stored.digest.hex()[:16]}, "
                f"but {ref.size} bytes with digest {ref.digest.hex()[:16]} were sent",
            )
        )
    return ref


async def get_blob(stub: ManagerStub, ref: manager_pb2.BlobRef, timeout_seconds: float = 60.0) -> bytes:
    """Fetches a blob and checks its size and SHA-256.

    Raises CkptEngineError: NOT_FOUND when the manager does not hold it, DATA_LOSS when other bytes came.
    """
    data = bytearray()
    try:
        async for chunk in stub.GetBlob(ref, timeout=timeout_seconds):
            data += chunk.data
            if len(data) > ref.size:
                break
    except grpc.RpcError as error:
        raise error_of(error) from None
    content = bytes(data)
    if blob_ref(content) != ref:
        raise CkptEngineError(
            weights_pb2.Problem(
                code=weights_pb2.Problem.CODE_DATA_LOSS,
                message=f"blob {ref.digest.hex()[:16]} of {ref.size} bytes arrived as {len(content)} other bytes",
            )
        )
    return content


def problem_of(error: grpc.RpcError) -> weights_pb2.Problem:
    """The Problem behind a failed call: the manager's own if it sent one, else the connection's in our words. gRPC's
    words are logged for debugging."""
    return _manager_problem(error) or _own_problem(error)


def error_of(error: grpc.RpcError, address: str = "") -> CkptEngineError:
    """The failed call as an error of this library. Raise it `from None`, so that gRPC's text is not in the traceback.
    address: of the manager, which the message names if it has not answered."""
    own_answer = _manager_problem(error)
    if own_answer is not None and own_answer.code != weights_pb2.Problem.CODE_UNAVAILABLE:
        return CkptEngineError(own_answer)
    problem = own_answer or _own_problem(error)
    if address:
        problem.message = f"manager {address}: {problem.message}"
    return CkptEngineError(problem)


def _manager_problem(error: grpc.RpcError) -> weights_pb2.Problem | None:
    if isinstance(error, grpc.aio.AioRpcError | grpc.Call):
        pairs: Iterable[tuple[str, str | bytes]] = error.trailing_metadata() or ()  # type: ignore[assignment]
        for key, value in pairs:
            if key == PROBLEM_METADATA_KEY and isinstance(value, bytes):
                return weights_pb2.Problem.FromString(value)
    return None


def _own_problem(error: grpc.RpcError) -> weights_pb2.Problem:
    code, details = grpc.StatusCode.UNKNOWN, str(error)
    if isinstance(error, grpc.aio.AioRpcError | grpc.Call):
        code, details = error.code(), error.details() or ""
    log.debug("gRPC says %s: %s", code.name, details)
    return connection_problem(code, details)


async def _chunks(ref: manager_pb2.BlobRef, data: bytes) -> AsyncIterator[manager_pb2.BlobChunk]:
    yield manager_pb2.BlobChunk(ref=ref, data=data[:CHUNK_BYTES])
    for start in range(CHUNK_BYTES, len(data), CHUNK_BYTES):
        yield manager_pb2.BlobChunk(data=data[start : start + CHUNK_BYTES])
