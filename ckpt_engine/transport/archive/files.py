"""Archived versions as files that the relay maps: regions of files under another name, which no worker knows."""

from __future__ import annotations

from collections.abc import Sequence

from ckpt_engine.transport.archive.kind import NAME, on_host
from ckpt_engine.transport.base import OPEN_SECONDS, Availability
from ckpt_engine.transport.file.files import FileTransport, file_region
from ckpt_engine.transport.file.kind import NAME as FILE
from ckpt_engine.transport.mapped import MappedRegions
from ckpt_engine.v1.weights_pb2 import Region


def archive_region(id: int, path: str, size: int) -> Region:
    """A region of `size` bytes of an archived file as it is now. Raises UNAVAILABLE if it cannot be looked at."""
    return _renamed(file_region(id, path, 0, size), NAME)


class ArchiveTransport:
    """Reads regions of archived files. One instance a relay."""

    name = NAME

    def __init__(self) -> None:
        self._files = FileTransport()

    def availability(self) -> Availability:
        """Always there."""
        return on_host()

    def open(self, regions: Sequence[Region], seconds: float = OPEN_SECONDS) -> MappedRegions:
        """Maps the regions, as FileTransport does."""
        return self._files.open([_renamed(region, FILE) for region in regions], seconds)


def _renamed(region: Region, transport: str) -> Region:
    """The same region for another transport; its locator, by which mappings are found, is the same."""
    return Region(id=region.id, transport=transport, size=region.size, locator=region.locator)
