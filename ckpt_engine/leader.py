"""Channels to several managers of which one leads: each call goes to the one that says it serves.

Decides which of the named managers a call is made to. It repeats no call: that is for its caller to decide, and the
next one finds the manager that leads by then.

A manager's own health service says whether it leads. gRPC's client watches that at every address, also at all addresses
that a DNS name has, and takes a connection for ready only as long as the manager behind it serves. Pings find a manager
that is stopped or cut off, within a lease.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import grpc
import grpc.aio

from ckpt_engine.v1 import manager_pb2

SERVICE = manager_pb2.DESCRIPTOR.services_by_name["CheckpointEngineManager"].full_name

REACH_SECONDS = 3.0
"""How long a first call waits for a manager that leads. Then it is made anyway, and says why there is none."""

LOOK_SECONDS = 0.02

AnyChannel = TypeVar("AnyChannel")


def addresses_of(address: str) -> list[str]:
    """The addresses that are named, with commas between them."""
    return [address] if address.startswith(("ipv4:", "ipv6:")) else [each.strip() for each in address.split(",")]


def names_several(address: str) -> bool:
    """Whether several managers may be meant: by several addresses, or by a DNS name that may have several
    (`dns:///NAME:PORT`)."""
    return "," in address or address.startswith("dns:///")


def leader_options(lease: float) -> list[tuple[str, int | str]]:
    """Options of a channel that is ready only while a manager behind it leads. lease: seconds after which a silent one
    is given up."""
    policy = {"loadBalancingConfig": [{"round_robin": {}}], "healthCheckConfig": {"serviceName": SERVICE}}
    return [
        ("grpc.service_config", json.dumps(policy)),
        ("grpc.keepalive_time_ms", int(lease * 500)),
        ("grpc.keepalive_timeout_ms", int(lease * 500)),
        ("grpc.http2.ping_timeout_ms", int(lease * 500)),  # else a minute, whatever the one above says
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]


class _ChannelChoice(Generic[AnyChannel]):
    """Which of several channels the next call is made on."""

    def __init__(self, channels: Sequence[AnyChannel], state: Callable[[AnyChannel], grpc.ChannelConnectivity]) -> None:
        self.channels = channels
        self._state = state
        self._last = 0

    def ready(self) -> int | None:
        """The channel to a manager that leads; None: none is known. Has all of them connect."""
        found = [self._state(each) is grpc.ChannelConnectivity.READY for each in self.channels]
        return found.index(True) if any(found) else None

    def take(self) -> int:
        """The channel of the next call: that of the leader, else each in turn."""
        ready = self.ready()
        self._last = (self._last + 1) % len(self.channels) if ready is None else ready
        return self._last

    def settled(self, end: float) -> bool:
        """Whether a call needs not wait any longer: a manager is known to lead, none can be reached, or it is `end`
        (monotonic seconds)."""
        failed = all(self._state(each) is grpc.ChannelConnectivity.TRANSIENT_FAILURE for each in self.channels)
        return failed or self.ready() is not None or time.monotonic() >= end


class _Method:
    """One method of a stub, on whichever channel the call goes to."""

    def __init__(self, choose: Callable[[], int], methods: Sequence[Any]) -> None:
        self._choose = choose
        self._methods = methods

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self._methods[self._choose()](*arguments, **options)


class _Methods(Generic[AnyChannel]):
    """A channel's methods, each on the channel that is taken for the call."""

    _choice: _ChannelChoice[AnyChannel]

    def _take(self) -> int:
        raise NotImplementedError

    def _method(self, kind: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        return _Method(self._take, [getattr(each, kind)(*arguments, **options) for each in self._choice.channels])

    def unary_unary(self, *arguments: Any, **options: Any) -> Any:
        return self._method("unary_unary", arguments, options)

    def unary_stream(self, *arguments: Any, **options: Any) -> Any:
        return self._method("unary_stream", arguments, options)

    def stream_unary(self, *arguments: Any, **options: Any) -> Any:
        return self._method("stream_unary", arguments, options)

    def stream_stream(self, *arguments: Any, **options: Any) -> Any:
        return self._method("stream_stream", arguments, options)


class LeaderChannel(_Methods[grpc.aio.Channel], grpc.aio.Channel):
    """A channel to the manager that leads among several, for asyncio."""

    def __init__(self, channels: Sequence[grpc.aio.Channel]) -> None:
        self._choice = _ChannelChoice(channels, lambda each: each.get_state(try_to_connect=True))

    async def reach(self, seconds: float = REACH_SECONDS) -> None:
        """Returns once a manager is known to lead, or after `seconds`; also when none can be reached."""
        end = time.monotonic() + seconds
        while True:
            if self._choice.settled(end):
                return
            await asyncio.sleep(LOOK_SECONDS)

    def _take(self) -> int:
        return self._choice.take()

    async def close(self, grace: float | None = None) -> None:
        await asyncio.gather(*(each.close(grace) for each in self._choice.channels))

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        chosen: grpc.aio.Channel = self._choice.channels[self._choice.take()]
        return chosen.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        while True:
            if self.get_state() is not last_observed_state:
                return
            await asyncio.sleep(LOOK_SECONDS)

    async def channel_ready(self) -> None:
        while True:
            if self._choice.ready() is not None:
                return
            await asyncio.sleep(LOOK_SECONDS)

    async def __aenter__(self) -> LeaderChannel:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class BlockingLeaderChannel(_Methods[grpc.Channel], grpc.Channel):
    """A channel to the manager that leads among several, for calls that block. Each call waits up to REACH_SECONDS for
    one that is known to lead."""

    def __init__(self, channels: Sequence[grpc.Channel]) -> None:
        self._states = dict.fromkeys(channels, grpc.ChannelConnectivity.IDLE)
        self._choice = _ChannelChoice(channels, self._states.__getitem__)
        for each in channels:
            each.subscribe(self._follow(each), try_to_connect=True)

    def _follow(self, channel: grpc.Channel) -> Callable[[grpc.ChannelConnectivity], None]:
        def follow(state: grpc.ChannelConnectivity) -> None:
            self._states[channel] = state

        return follow

    def _take(self) -> int:
        end = time.monotonic() + REACH_SECONDS
        while not self._choice.settled(end):
            time.sleep(LOOK_SECONDS)
        return self._choice.take()

    def subscribe(self, callback: Any, try_to_connect: bool = False) -> None:
        for each in self._choice.channels:
            each.subscribe(callback, try_to_connect)

    def unsubscribe(self, callback: Any) -> None:
        for each in self._choice.channels:
            each.unsubscribe(callback)

    def close(self) -> None:
        for each in self._choice.channels:
            each.close()

    def __enter__(self) -> BlockingLeaderChannel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


async def reached(channel: grpc.aio.Channel) -> grpc.aio.Channel:
    """The channel, once a first call on it can go to a manager that leads. A channel to one manager as it is."""
    if isinstance(channel, LeaderChannel):
        await channel.reach()
    return channel
