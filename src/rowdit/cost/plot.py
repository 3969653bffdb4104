"""The sweep as an SVG file: milliseconds of a step over the number of ranks, both axes logarithmic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from rowdit.cost.sweep import MODES, Point

_WIDTH, _HEIGHT, _LEFT, _TOP, _GAP = 380, 260, 64, 54, 36
_COLORS = ("#b3261e", "#c77700", "#2e7d32", "#00788a", "#3f51b5", "#7b1fa2")
_LINE = '<polyline points="{}" fill="none" stroke="{}" stroke-width="2"{}/>'


def sweep_svg(points: Sequence[Point], periods: Sequence[int], title: str) -> str:
    """One panel for each way of refreshing, a line for each period; dashed, a step without the optimizer."""
    sizes = sorted({point.world_size for point in points})
    values = [point.at(k).total for point in points for k in periods] + [point.time.rest for point in points]
    low, high = 10 ** math.floor(math.log10(min(values))), 10 ** math.ceil(math.log10(max(values)))
    width = _LEFT + len(MODES) * (_WIDTH + _GAP) + 60
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{_TOP + _HEIGHT + 60}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{_LEFT}" y="20" font-size="14">{escape(title)}</text>',
    ]
    for panel, mode in enumerate(MODES):
        left = _LEFT + panel * (_WIDTH + _GAP)
        own = [point for point in points if point.refresh == mode]
        parts += _axes(left, sizes, low, high, mode, labels=panel == 0)

        def place(point: Point, seconds: float, left: int = left) -> str:
            return f"{_x(left, sizes, point.world_size):.1f},{_y(low, high, seconds):.1f}"

        rest = " ".join(place(point, point.time.rest) for point in own)
        parts.append(_LINE.format(rest, "#777", ' stroke-dasharray="5 4"'))
        for color, period in zip(_COLORS, periods, strict=False):
            line = " ".join(place(point, point.at(period).total) for point in own)
            parts.append(_LINE.format(line, color, ""))
    legend = _LEFT + len(MODES) * (_WIDTH + _GAP) - 20
    for row, (color, period) in enumerate(zip(_COLORS, periods, strict=False)):
        parts.append(f'<text x="{legend}" y="{_TOP + 16 * (row + 1)}" fill="{color}">K = {period}</text>')
    parts.append(f'<text x="{legend}" y="{_TOP + 16 * (len(periods) + 1)}" fill="#777">no optimizer</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _axes(left: int, sizes: Sequence[int], low: float, high: float, mode: str, labels: bool) -> list[str]:
    bottom = _TOP + _HEIGHT
    parts = [
        f'<rect x="{left}" y="{_TOP}" width="{_WIDTH}" height="{_HEIGHT}" fill="none" stroke="#999"/>',
        f'<text x="{left + _WIDTH / 2}" y="{_TOP - 8}" text-anchor="middle">refresh by {mode}</text>',
        f'<text x="{left + _WIDTH / 2}" y="{bottom + 40}" text-anchor="middle">ranks</text>',
    ]
    for size in sizes:
        x = _x(left, sizes, size)
        parts.append(f'<line x1="{x:.1f}" y1="{_TOP}" x2="{x:.1f}" y2="{bottom}" stroke="#ddd"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{size}</text>')
    for power in range(round(math.log10(low)), round(math.log10(high)) + 1):
        y = _y(low, high, 10.0**power)
        parts.append(f'<line x1="{left}" y1="{y:.1f}" x2="{left + _WIDTH}" y2="{y:.1f}" stroke="#ddd"/>')
        if labels:
            milliseconds = f"{10.0 ** (power + 3):,.0f}" if power >= -3 else f"{10.0 ** (power + 3):g}"
            parts.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{milliseconds} ms</text>')
    return parts


def _x(left: int, sizes: Sequence[int], size: int) -> float:
    first, last = math.log(sizes[0]), math.log(sizes[-1])
    share = (math.log(size) - first) / (last - first) if last > first else 0.5
    return left + 16 + share * (_WIDTH - 32)


def _y(low: float, high: float, seconds: float) -> float:
    share = (math.log10(seconds) - math.log10(low)) / (math.log10(high) - math.log10(low))
    return _TOP + _HEIGHT * (1 - share)
