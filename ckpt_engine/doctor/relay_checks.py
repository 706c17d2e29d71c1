"""Checks whether a relay could run on this host: its directory, its memory, its pages. Each row: name, whether it works
(None: a fact that decides nothing), what was found. No check raises."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from ckpt_engine.addresses import split_address
from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.core.relay_layout import GROUP_BYTES, SLOTS
from ckpt_engine.core.sizes import in_words
from ckpt_engine.core.transports import chunk_kinds, make
from ckpt_engine.host.relay_directory import made_directory, relay_directory
from ckpt_engine.host.room import memory_room
from ckpt_engine.relay.alone import TakenError, alone
from ckpt_engine.relay.arena import Arena, free_huge_pages
from ckpt_engine.relay.settings import RELAY_INSECURE, RELAY_LISTEN, half_of_the_room
from ckpt_engine.transport.base import Network

Row = tuple[str, bool | None, str]

PAGES = Path("/sys/kernel/mm/hugepages/hugepages-2048kB")
SHARED_PAGES = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")


def relay_rows() -> Iterator[Row]:
    """What a relay would find that this user starts now."""
    yield _directory()
    yield _lending()
    yield _network()
    room, taken = in_words(memory_room()), in_words(half_of_the_room())
    yield "relay's memory", None, f"{room} left, of which a relay without --memory takes {taken}"
    yield "huge pages", None, _pages()


def _directory() -> Row:
    folder = relay_directory()
    existed = folder.exists()
    try:
        made_directory(shared=False)
        with alone(folder):
            return "relay's directory", True, f"{folder}; no relay runs there"
    except TakenError as error:
        return "relay's directory", True, error.problem.message
    except (CkptEngineError, OSError) as error:
        return "relay's directory", False, error.problem.message if isinstance(error, CkptEngineError) else str(error)
    finally:
        if not existed:
            with contextlib.suppress(OSError):
                folder.rmdir()


def _lending() -> Row:
    """Makes a memory file that no other process can write to, and closes it again."""
    try:
        arena = Arena(SLOTS * GROUP_BYTES)
    except (CkptEngineError, OSError) as error:
        return "memory that only a relay writes", False, str(error)
    arena.close()
    return "memory that only a relay writes", True, "a memory file was made and sealed against writing by others"


def _network() -> Row:
    """Checks where relays of other hosts would reach it: tries the port and the certificates."""
    name = "relays of other hosts"
    listen = os.environ.get(RELAY_LISTEN, "")
    if not listen:
        return name, None, f"do not reach it: no relay --listen, and no {RELAY_LISTEN}"
    arena = Arena(SLOTS * GROUP_BYTES)
    try:
        address = os.environ.get("CKPT_ENGINE_ADVERTISE", "") or split_address(listen, RELAY_LISTEN)[0]
        insecure = os.environ.get(RELAY_INSECURE, "") not in ("", "0", "false")
        for kind in chunk_kinds():
            make(kind.chunks or "", arena.lendable(), Network(listen, address, 0.0, insecure)).close()
    except CkptEngineError as error:
        return name, False, error.problem.message
    finally:
        arena.close()
    return name, True, f"reach it at {listen}, as {address}"


def _pages() -> str:
    free = free_huge_pages(PAGES)
    if free:
        return f"{free} of 2 MiB are reserved and free: a relay of {in_words(free << 21)} or less uses them"
    try:
        words = SHARED_PAGES.read_text(encoding="ascii").split()
    except OSError:
        return "none are reserved, and this kernel gives none to shared memory"
    chosen = next((word.strip("[]") for word in words if word.startswith("[")), "unknown")
    if chosen in ("advise", "always", "within_size", "force"):
        return f"none are reserved; the kernel gives transparent ones where it can ({SHARED_PAGES} is {chosen})"
    return (
        f"none are reserved, and {SHARED_PAGES} is {chosen}: a relay's memory has pages of 4 KiB; write advise there, "
        "or reserve as many as it has in /proc/sys/vm/nr_hugepages"
    )
