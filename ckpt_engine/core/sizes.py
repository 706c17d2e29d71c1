"""Amounts of memory and rates of networks, as people write them. Pure."""

from __future__ import annotations

import re

from ckpt_engine.core.problems import invalid

UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40, "KB": 10**3, "MB": 10**6, "GB": 10**9}
UNITS |= {"TB": 10**12, "B": 1}
_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,15})?)\s*([A-Za-z]+)")

BITS = {"Mbit/s": 10**6, "Gbit/s": 10**9, "Tbit/s": 10**12}
_RATE = re.compile(r"(\d{1,15}(?:\.\d{1,15})?)\s*([A-Za-z]+/s)")


def bytes_of(text: str, option: str = "--memory") -> int:
    """Parses a size such as "200GiB" as bytes. option: its command-line option, for messages. Raises INVALID_ARGUMENT,
    saying what to write."""
    found = _SIZE.fullmatch(text.strip())
    unit = next((size for name, size in UNITS.items() if found and name.lower() == found[2].lower()), 0)
    if not found or not unit:
        raise invalid(
            f"{option} {text!r} is not an amount of memory: write a number and a unit, such as 200GiB, 512MiB or 1.5TB"
        )
    return int(float(found[1]) * unit)


def rate_of(text: str, option: str) -> float:
    """Parses a rate such as "100Gbit/s" or "12.5GB/s" as bytes a second. Raises INVALID_ARGUMENT, saying what to write,
    also for 0."""
    found = _RATE.fullmatch(text.strip())
    bits = next((size / 8 for name, size in BITS.items() if found and name.lower() == found[2].lower()), 0.0)
    plain = next(
        (float(size) for name, size in UNITS.items() if found and f"{name}/s".lower() == found[2].lower()), 0.0
    )
    if not found or not (bits or plain) or not float(found[1]):
        raise invalid(f"{option} {text!r} is not a rate: write a number and a unit, such as 100Gbit/s or 12.5GB/s")
    return float(found[1]) * (bits or plain)


def in_words(count: int) -> str:
    """Formats bytes as people write memory: "200 GiB"."""
    for name in ("TiB", "GiB", "MiB"):
        if count >= UNITS[name]:
            return f"{count / UNITS[name]:.4g} {name}"
    return f"{count} bytes"


def human_bytes(count: int) -> str:
    """`count` bytes in decimal units: "13.1 MB"."""
    size = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
