"""The owner's side of a collective: memory that its owner sends itself, in one schedule with the others.

No reader opens this memory, so its locator says only on which device it lies, and where members meet if its owner
leads. A rank has one device: it is one member of a communicator.
"""

from __future__ import annotations

from ckpt_engine.core.problems import invalid, unavailable
from ckpt_engine.cuda.driver import driver
from ckpt_engine.transport.base import FileMemory, GpuMemory, Memory
from ckpt_engine.transport.collective.door import MeetingDoor
from ckpt_engine.transport.collective.kind import NAME
from ckpt_engine.v1.weights_pb2 import NcclLocator, Region


class CollectiveLender:
    """Offers memory of one device. advertise: see Door. Raises UNAVAILABLE if no address can be bound."""

    def __init__(self, advertise: str = "") -> None:
        try:
            self._door = MeetingDoor(advertise)
        except OSError as error:
            raise unavailable(
                f"members of a collective could not find this host: {advertise or 'its loopback'}: {error}; give the "
                "address at which other hosts reach it (advertise)"
            ) from error
        self._devices: set[int | None] = set()

    def offer(self, id: int, memory: Memory) -> Region:
        """The region. Raises UNAVAILABLE for a file, INVALID_ARGUMENT for memory of another device than before, and
        CudaDriverError."""
        if isinstance(memory, FileMemory):
            raise unavailable("files are not sent in a collective")
        gpu, device, size = b"", None, 0
        if isinstance(memory, GpuMemory):
            device, size, gpu = memory.device, memory.run.size, driver().uuid(memory.device)
        else:
            size = memory.bytes.numel()
        self._devices.add(device)
        if len(self._devices) > 1:
            places = " and on ".join(sorted("the CPU" if each is None else f"cuda:{each}" for each in self._devices))
            raise invalid(f"a rank is in a collective with one device, and publishes on {places}: move all to one")
        locator = NcclLocator(host=self._door.host, port=self._door.port, gpu=gpu)
        return Region(id=id, transport=NAME, size=size, locator=locator.SerializeToString(deterministic=True))

    def unchanged(self) -> bool:
        """True: no reader maps the memory, so nothing that was offered can have changed."""
        return True

    def withdraw(self, seconds: float) -> None:
        """Closes as `close` does."""
        self.close()

    def close(self) -> None:
        """Closes the door: no member finds this process any more. May be repeated."""
        self._door.close()
