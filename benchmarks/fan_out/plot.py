"""Draws how late the last host is, by number of hosts, as an SVG: no library is needed for one figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log10

WAYS = (
    ("rank_0", "rank 0 sends all", "#b03a2e"),
    ("all_pull", "all pull", "#ca8a04"),
    ("chain", "chain", "#2563a8"),
    ("fan_out", "fan-out", "#15803d"),
    ("fan_out_faults", "fan-out, faults", "#15803d"),
)
WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 360, 300, 50, 34, 44


def plot(rows: Sequence[Mapping[str, float | int | str]]) -> str:
    """rows: as `benchmarks.fan_out` makes them. One panel a model; both axes are logarithmic."""
    sizes = sorted({int(row["bytes"]) for row in rows})
    panels = [_panel([row for row in rows if row["bytes"] == size], size, at) for at, size in enumerate(sizes)]
    width = WIDTH * len(sizes) + 130
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{HEIGHT}" font-family="sans-serif" '
        f'font-size="11"><rect width="{width}" height="{HEIGHT}" fill="white"/>\n'
        + "\n".join(panels)
        + _legend(WIDTH * len(sizes) + 6)
        + "</svg>\n"
    )


def _panel(rows: Sequence[Mapping[str, float | int | str]], size: int, at: int) -> str:
    left, right, low = WIDTH * at + LEFT, WIDTH * (at + 1) - 14, HEIGHT - BOTTOM

    def x(hosts: float) -> float:
        return left + (right - left) * log10(hosts) / log10(1024)

    def y(times: float) -> float:
        return low - (low - TOP) * log10(max(times, 1.0)) / log10(1100)

    name = "16 GB" if size < 10**12 else "1 TB"
    parts = [f'<text x="{left}" y="18" font-weight="bold">{name}: last host, in multiples of its bound</text>']
    parts += [
        f'<line x1="{left}" x2="{right}" y1="{y(times):.1f}" y2="{y(times):.1f}" stroke="#ddd"/>'
        f'<text x="{left - 6}" y="{y(times) + 4:.1f}" text-anchor="end">{times}</text>'
        for times in (1, 2, 10, 100, 1000)
    ]
    for row in rows:
        where = x(float(row["hosts"]))
        parts.append(f'<text x="{where:.1f}" y="{low + 16}" text-anchor="middle">{row["hosts"]}</text>')
    parts.append(f'<text x="{(left + right) / 2}" y="{HEIGHT - 10}" text-anchor="middle">hosts</text>')
    for key, _, colour in WAYS:
        points = [(x(float(row["hosts"])), y(float(row[key]))) for row in rows if key in row]
        line = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
        dash = ' stroke-dasharray="4 3"' if key.endswith("faults") else ""
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')
        parts += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="2.5" fill="{colour}"/>' for a, b in points]
    return "\n".join(parts)


def _legend(left: int) -> str:
    parts = []
    for number, (key, name, colour) in enumerate(WAYS):
        at = TOP + 18 * number
        dash = ' stroke-dasharray="4 3"' if key.endswith("faults") else ""
        parts.append(
            f'<line x1="{left}" x2="{left + 20}" y1="{at}" y2="{at}" stroke="{colour}" stroke-width="2"{dash}/>'
            f'<text x="{left + 26}" y="{at + 4}">{name}</text>'
        )
    return "\n".join(parts)
