"""Tests whether another process can map this process's GPU memory, by starting one that tries.

The result depends on settings, driver versions, containers and permissions, so no rule could predict it. A process
cannot open its own handle, so a second process is needed. It loads the driver without torch, takes a fraction of a
second, and needs memory for one context on the GPU. If the GPU has no room for that, the answer is yes: a reader that
cannot map the memory reports why before any weight is touched. Runs in the owner, on any thread.
"""

from __future__ import annotations

import ctypes
import logging
import os
import subprocess
import sys

from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.cuda.driver import OUT_OF_MEMORY, CudaDriverError, driver
from ckpt_engine.transport.cuda_ipc.memory import Imported
from ckpt_engine.v1.weights_pb2 import CudaIpcLocator, Region

log = logging.getLogger(__name__)

PROBE_SECONDS = 60.0
"""The most seconds that the other process may take. It takes less than one unless the host is overloaded."""

_BYTES = 64
_NO_ROOM = 3
"""Exit status: the GPU has no room for a context of the probing process."""


def probe(region: Region) -> str:
    """Maps `region` in a new process and compares bytes. Returns why that failed; empty: it worked. Never raises."""
    command = [sys.executable, "-m", "ckpt_engine.transport.cuda_ipc.probe"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    try:
        found = subprocess.run(
            command,
            input=region.SerializeToString(),
            capture_output=True,
            timeout=PROBE_SECONDS,
            env=environment,
            check=False,
        )
        locator = CudaIpcLocator.FromString(region.locator)
        with driver().on(driver().device_of(locator.pointer)):
            own = _first_bytes(locator.pointer)
    except subprocess.TimeoutExpired:
        return f"the process that tried to map it did not answer within {PROBE_SECONDS:g} s"
    except (OSError, CudaDriverError) as error:
        return f"a process that tries to map it could not be started: {error}"
    if found.returncode == _NO_ROOM:
        log.info("ckpt-engine: GPU memory was not tried out in another process: the GPU has no room for one")
        return ""
    if found.returncode:
        lines = found.stderr.decode("utf-8", "replace").strip().splitlines()
        return lines[-1] if lines else f"the process that tried to map it ended with status {found.returncode}"
    return "" if found.stdout == own else "another process that mapped it found other bytes there"


def _first_bytes(pointer: int) -> bytes:
    """The first bytes, read in the context of a device that can read them."""
    found = ctypes.create_string_buffer(_BYTES)
    driver().copy(ctypes.addressof(found), pointer, _BYTES)
    return found.raw


def _main() -> int:
    region = Region.FromString(sys.stdin.buffer.read())
    locator = CudaIpcLocator.FromString(region.locator)
    try:
        device = driver().device_of_uuid(locator.gpu_uuid)
        if device is None:
            print("a process that this one starts does not see its GPU", file=sys.stderr)
            return 1
        try:
            with driver().on(device):
                pass
        except CudaDriverError as error:
            if error.code == OUT_OF_MEMORY:
                return _NO_ROOM
            raise
        memory = Imported(driver(), device, region)
        with driver().on(device):
            sys.stdout.buffer.write(_first_bytes(memory.pointer))
            memory.release()
    except CkptEngineError as error:
        print(error.problem.message, file=sys.stderr)
        return 1
    except CudaDriverError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(_main())
