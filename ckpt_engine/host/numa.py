"""Nodes of the host's memory: those that exist, and memory spread over them.

By default a page lies on the node of the thread that first takes it. A relay that fills a slot from one thread would
put all of it beside one socket, and the GPUs of the other socket would read through the link between them.
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
    """Has untouched pages of a mapping taken from all nodes in turns, by any thread, if there are two nodes or more.
    Returns the nodes; empty if the kernel refuses, which is logged."""
    nodes = memory_nodes(path)
    if len(nodes) < 2:
        return nodes
    problem = interleave(address, size, nodes)
    if problem:
        log.info("ckpt-engine: memory lies where it is taken, not spread over nodes %s: %s", nodes, problem)
        return []
    return nodes


def interleave(address: int, size: int, nodes: list[int]) -> str:
    """Asks the kernel to interleave pages over nodes. Returns why it refuses; empty if it does not."""
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
