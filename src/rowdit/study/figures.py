"""Line figures as SVG files that stand alone: for documents, which carry neither style sheets nor scripts.

A colour, a dash and a marker tell lines apart, so a figure reads without colour. Error bars are 95 % intervals.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rowdit.study.report.charts import linear_ticks, log_ticks
from rowdit.study.report.markup import Markup, join, tag

WIDTH, HEIGHT = 640, 400
LEFT, RIGHT, TOP, BOTTOM = 64, 176, 40, 48
COLOURS = ("#4477aa", "#cc4455", "#228844", "#aa7711", "#885599", "#444444", "#2299aa", "#bb5522")
DASHES = ("", "6 3", "2 3", "8 3 2 3", "1 4", "10 4", "4 2", "3 6")
MARKERS = (
    "M-3.5 0a3.5 3.5 0 1 0 7 0a3.5 3.5 0 1 0-7 0z",
    "M-3-3h6v6h-6z",
    "M0-4.6 4.6 0 0 4.6-4.6 0z",
    "M0-4.4 4.2 3h-8.4z",
)

Place = Callable[[float, float], tuple[float, float]]
"""(x, y) in the units of the axes -> place on the page."""


@dataclass(frozen=True)
class Line:
    """Points of one line; `low` and `high`, where given, are the ends of their error bars. NaN breaks the line."""

    label: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        lengths = {len(self.x), len(self.y), len(self.low or self.y), len(self.high or self.y)}
        if len(lengths) > 1:
            raise ValueError(f"line {self.label!r}: x, y, low and high must be equally long, not {sorted(lengths)}")


@dataclass(frozen=True)
class Figure:
    """What `draw` draws. Axes are linear; `log_x`, `log_y` make them logarithmic, for values > 0."""

    title: str
    x_name: str
    y_name: str
    lines: tuple[Line, ...]
    log_x: bool = False
    log_y: bool = False


@dataclass(frozen=True)
class _Axis:
    low: float
    high: float
    log: bool

    def place(self, value: float) -> float:
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        return log_ticks(self.low, self.high) if self.log else linear_ticks(self.low, self.high)


def draw(figure: Figure) -> str:
    """The figure as the text of an SVG file.

    Raises:
        ValueError: no finite point, or a value <= 0 on a logarithmic axis.
    """
    points = [(x, y) for line in figure.lines for x, y in zip(line.x, line.y, strict=True) if _finite(x, y)]
    if not points:
        raise ValueError(f"figure {figure.title!r}: no finite point")
    ends = [value for line in figure.lines for value in (*line.low, *line.high) if math.isfinite(value)]
    x_axis = _axis([x for x, _ in points], figure.log_x, figure.title)
    y_axis = _axis([y for _, y in points] + ends, figure.log_y, figure.title)

    def at(x: float, y: float) -> tuple[float, float]:
        width, height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
        return round(LEFT + width * x_axis.place(x), 1), round(TOP + height * (1 - y_axis.place(y)), 1)

    body = [
        tag("rect", width=WIDTH, height=HEIGHT, fill="#ffffff"),
        tag("text", figure.title, x=LEFT, y=22, font_size=15, font_weight="bold"),
        *_grid(x_axis, y_axis, figure, at),
    ]
    for i, line in enumerate(figure.lines):
        body += _line(i, line, at)
        body += _legend(i, line.label)
    return (
        tag(
            "svg",
            tag("title", figure.title),
            join(body),
            xmlns="http://www.w3.org/2000/svg",
            viewBox=f"0 0 {WIDTH} {HEIGHT}",
            width=WIDTH,
            height=HEIGHT,
            font_family="sans-serif",
            font_size=12,
            fill="#222222",
            role="img",
        )
        + "\n"
    )


def _finite(*values: float) -> bool:
    return all(math.isfinite(value) for value in values)


def _axis(values: Sequence[float], log: bool, title: str) -> _Axis:
    low, high = min(values), max(values)
    if log:
        if low <= 0:
            raise ValueError(f"figure {title!r}: {low} on a logarithmic axis")
        margin = (high / low) ** 0.05 if high > low else 1.1
        return _Axis(low / margin, high * margin, True)
    margin = 0.05 * (high - low) or 0.1 * abs(high) or 1.0
    return _Axis(low - margin, high + margin, False)


def _grid(x_axis: _Axis, y_axis: _Axis, figure: Figure, at: Place) -> list[Markup]:
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    parts = [tag("rect", x=LEFT, y=TOP, width=right - LEFT, height=bottom - TOP, fill="none", stroke="#999999")]
    for value in x_axis.ticks():
        x, _ = at(value, y_axis.low)
        parts.append(tag("line", x1=x, x2=x, y1=TOP, y2=bottom, stroke="#e4e4e4"))
        parts.append(tag("text", f"{value:g}", x=x, y=bottom + 16, text_anchor="middle"))
    for value in y_axis.ticks():
        _, y = at(x_axis.low, value)
        parts.append(tag("line", x1=LEFT, x2=right, y1=y, y2=y, stroke="#e4e4e4"))
        parts.append(tag("text", f"{value:g}", x=LEFT - 6, y=y + 4, text_anchor="end"))
    middle = (TOP + bottom) / 2
    parts.append(tag("text", figure.x_name, x=(LEFT + right) / 2, y=HEIGHT - 10, text_anchor="middle"))
    turned = f"rotate(-90 16 {middle:g})"
    parts.append(tag("text", figure.y_name, x=16, y=middle, text_anchor="middle", transform=turned))
    return parts


def _line(i: int, line: Line, at: Place) -> list[Markup]:
    colour, path, pen_down = COLOURS[i % len(COLOURS)], "", False
    parts = []
    for k, (x, y) in enumerate(zip(line.x, line.y, strict=True)):
        if not _finite(x, y):
            pen_down = False
            continue
        px, py = at(x, y)
        path += f"{'L' if pen_down else 'M'}{px} {py}"
        pen_down = True
        parts.append(_marker(i, px, py))
        if line.low and line.high and _finite(line.low[k], line.high[k]):
            (_, y1), (_, y2) = at(x, line.low[k]), at(x, line.high[k])
            parts.append(tag("path", d=f"M{px} {y1}V{y2}M{px - 3} {y1}h6M{px - 3} {y2}h6", stroke=colour, fill="none"))
    stroke = tag(
        "path", d=path, fill="none", stroke=colour, stroke_width=2, stroke_dasharray=DASHES[i % len(DASHES)] or None
    )
    return [stroke, *parts]


def _legend(i: int, label: str) -> list[Markup]:
    x, y = WIDTH - RIGHT + 12, TOP + 10 + 20 * i
    colour, dash = COLOURS[i % len(COLOURS)], DASHES[i % len(DASHES)] or None
    return [
        tag("path", d=f"M{x} {y}h26", stroke=colour, stroke_width=2, stroke_dasharray=dash),
        _marker(i, x + 13, y),
        tag("text", label, x=x + 32, y=y + 4),
    ]


def _marker(i: int, x: float, y: float) -> Markup:
    return tag("path", d=MARKERS[i % len(MARKERS)], fill=COLOURS[i % len(COLOURS)], transform=f"translate({x} {y})")
