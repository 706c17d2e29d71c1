"""Reads a region's locator, which came over a wire and may contain anything."""

from __future__ import annotations

from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from ckpt_engine.core.problems import invalid
from ckpt_engine.v1.weights_pb2 import Region

LocatorT = TypeVar("LocatorT", bound=Message)


def locator_of(region: Region, transport: str, kind: type[LocatorT]) -> LocatorT:
    """The region's locator. Raises INVALID_ARGUMENT if it is another transport's, or cannot be understood."""
    if region.transport != transport:
        raise invalid(f"region {region.id} is for {region.transport or 'no transport'}, not {transport}")
    try:
        return kind.FromString(region.locator)
    except DecodeError as error:
        raise invalid(
            f"the locator of region {region.id} ({len(region.locator)} bytes) is no {kind.DESCRIPTOR.name}"
        ) from error
