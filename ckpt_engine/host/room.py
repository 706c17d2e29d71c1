"""How much memory this process may still take.

Reserving more shared memory than there is does not fail: the kernel fills what it can and then kills some process of
this host. So the room is checked first. Two processes that check at the same time may both see it; that cannot be
prevented, and the reservation is then as dangerous as any other allocation.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def memory_room(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that can be taken before the host, or a cgroup (v2) of this process, is full. Never negative.

    Page cache counts as room. What cannot be read does not limit it.
    """
    rooms = [_fields(proc / "meminfo").get("MemAvailable:", 1 << 62) * 1024]
    rooms += [_group_room(group) for group in _groups(proc, cgroups)]
    return max(min(rooms), 0)


def memory_total(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that the host, or a cgroup (v2) of this process, has at most. What cannot be read does not limit it."""
    found = [_fields(proc / "meminfo").get("MemTotal:", 1 << 62) * 1024]
    for group in _groups(proc, cgroups):
        limit = _lines(group / "memory.max")
        if limit and limit[0] != "max":
            found.append(int(limit[0]))
    return min(found)


def _groups(proc: Path, cgroups: Path) -> Iterator[Path]:
    """The cgroups (v2) that this process is in, the innermost first."""
    for line in _lines(proc / "self" / "cgroup"):
        if line.startswith("0::"):
            group = cgroups / line.removeprefix("0::").strip().lstrip("/")
            while group != cgroups.parent:
                yield group
                group = group.parent


def _group_room(group: Path) -> int:
    limit, used = _lines(group / "memory.max"), _lines(group / "memory.current")
    if not limit or not used or limit[0] == "max":
        return 1 << 62
    cache = _fields(group / "memory.stat")
    return int(limit[0]) - int(used[0]) + cache.get("inactive_file", 0) + cache.get("active_file", 0)


def _fields(path: Path) -> dict[str, int]:
    return {words[0]: int(words[1]) for line in _lines(path) if len(words := line.split()) >= 2 and words[1].isdigit()}


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii").splitlines()
    except OSError:
        return []
