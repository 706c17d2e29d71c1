"""Ports for servers that tests start, and start again."""

from __future__ import annotations

import fcntl
import os
import random
import tempfile
from pathlib import Path

from ckpt_engine.agent.ports import is_free

FIRST, LAST = 12_000, 19_999
"""Below the ports of outgoing connections and of engines that agents start: neither takes one while its server is
away."""

_ours: list[int] = []


def free_port() -> int:
    """A port of loopback that no other test process gets until this one has ended. Raises AssertionError: none is."""
    folder = Path(tempfile.gettempdir()) / f"ckpt-engine-test-ports-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    for number in random.SystemRandom().sample(range(FIRST, LAST + 1), 500):
        descriptor = os.open(folder / str(number), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            continue
        if is_free(number):
            _ours.append(descriptor)
            return number
        os.close(descriptor)
    raise AssertionError(f"500 ports between {FIRST} and {LAST} were tried and none is free")


def free_address() -> str:
    """The same, as 127.0.0.1:PORT."""
    return f"127.0.0.1:{free_port()}"
