"""Nodes of the host's memory: those that exist, and memory spread over them.

A page lies where the thread that first takes it runs, unless it is told otherwise: a relay that fills a slot from one
thread would put all of it beside one socket, and the GPUs of the other one would read through the link between them.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
from pathlib import Path

log = logging.getLogger(__name__)

_NODES = Path("/sys/devices/system/node/has_memory")
_INTERLEAVE = 3
_MBIND = {"x86_64": 237, "aarch64": 235}


def memory_nodes(path: Path = _NODES) -> list[int]:
    """Numbers of the nodes that have memory; empty where the kernel knows of none."""
    try:
        text = path.read_text(encoding="ascii").strip()
    except OSError:
        return []
    nodes: list[int] = []
    for part in text.split(",") if text else []:
        first, _, last = part.partition("-")
        nodes += range(int(first), int(last or first) + 1)
    return nodes


def spread(address: int, size: int, path: Path = _NODES) -> list[int]:
    """Pages of a mapping that nobody has touched yet are taken from all nodes in turns, by whoever touches them, if
    there are two nodes or more. Returns those nodes; empty where that cannot be, which is in the log."""
    nodes = memory_nodes(path)
    if len(nodes) < 2:
        return nodes
    problem = interleave(address, size, nodes)
    if problem:
        log.info("ckpt-engine: memory lies where it is taken, not spread over nodes %s: %s", nodes, problem)
        return []
    return nodes


def interleave(address: int, size: int, nodes: list[int]) -> str:
    """Asks the kernel for it. Why it does not do that; empty if it does."""
    number = _MBIND.get(platform.machine())
    if number is None:
        return f"mbind is not known for {platform.machine()}"
    bits = max(nodes) + 2
    word = 8 * ctypes.sizeof(ctypes.c_ulong)
    mask = (ctypes.c_ulong * -(-bits // word))()
    for node in nodes:
        mask[node // word] |= 1 << node % word
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.restype = ctypes.c_long
    status = call(
        ctypes.c_long(number),
        ctypes.c_void_p(address),
        ctypes.c_ulong(size),
        ctypes.c_long(_INTERLEAVE),
        mask,
        ctypes.c_ulong(bits),
        ctypes.c_ulong(0),
    )
    return os.strerror(ctypes.get_errno()) if status else ""
