"""Draws a run's outcome.json as an SVG: reward over steps, and each step's version and sync time below it.

python plot.py outcome.json reward.svg
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

WIDTH, LEFT, RIGHT = 760, 60, 20
REWARD, SYNC = (40, 260), (320, 400)
"""Top and bottom of the two pictures, in pixels."""


def scaled(value: float, most: float, place: tuple[int, int]) -> float:
    """Where a value from 0 to `most` lies."""
    top, bottom = place
    return bottom - (bottom - top) * value / most


def text(x: float, y: float, words: str, anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{words}</text>'


def axis(place: tuple[int, int], most: float, unit: str) -> Iterator[str]:
    for part in (0.0, 0.5, 1.0):
        y = scaled(part, 1.0, place)
        yield f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="#ddd"/>'
        yield text(LEFT - 6, y + 4, f"{part * most:.2g}{unit}", "end")


def drawn(rows: list[dict[str, Any]]) -> str:
    """The SVG. rows: of a step each, with reward, version and sync_seconds."""
    wide = (WIDTH - LEFT - RIGHT) / len(rows)
    middles = [LEFT + wide * (number + 0.5) for number in range(len(rows))]
    rewards = [row["reward"] for row in rows]
    syncs = [row["sync_seconds"] * 1000 for row in rows]
    slowest = max(syncs)
    line = " ".join(f"{x:.1f},{scaled(reward, 1.0, REWARD):.1f}" for x, reward in zip(middles, rewards, strict=True))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} 450" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="450" fill="white"/>',
        text(LEFT, 24, f"reward of each step, from {rewards[0]:.2f} to {rewards[-1]:.2f}", "start"),
        *axis(REWARD, 1.0, ""),
        f'<polyline points="{line}" fill="none" stroke="#1f6feb" stroke-width="2"/>',
        text(LEFT, 304, f"sync of each version, median {sorted(syncs)[len(syncs) // 2]:.0f} ms", "start"),
        *axis(SYNC, slowest, " ms"),
    ]
    every = max(1, len(rows) // 12)
    for number, (x, sync, row) in enumerate(zip(middles, syncs, rows, strict=True)):
        top = scaled(sync, slowest, SYNC)
        parts.append(
            f'<rect x="{x - wide * 0.35:.1f}" y="{top:.1f}" width="{wide * 0.7:.1f}" height="{SYNC[1] - top:.1f}" '
            'fill="#8ab4f8"/>'
        )
        if number % every == 0:
            parts.append(text(x, SYNC[1] + 16, str(row["version"])))
    return "\n".join([*parts, text(LEFT, 440, "version that made the step's tokens", "start"), "</svg>", ""])


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(drawn(json.loads(Path(sys.argv[1]).read_text())["steps"]))
