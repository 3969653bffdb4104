"""Line and dot charts as inline SVG: no library, no image, no script needed to read them.

Positions are per cent of the plot, so a chart is as wide as its place and its text keeps its size on any screen. Lines
are drawn in a stretched inner SVG whose strokes don't scale. Colours come from CSS classes (`s0`, `s1`, ...), so light
and dark follow the viewer; each style has its own dash and marker too, and a figure reads without colour.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from .formatting import number, tick
from .markup import Markup, join, tag

NUM_STYLES = 6
_MARKERS = (
    "M-3.5 0a3.5 3.5 0 1 0 7 0a3.5 3.5 0 1 0-7 0z",  # disc
    "M-3.2-3.2h6.4v6.4h-6.4z",  # square
    "M0-4.8 4.8 0 0 4.8-4.8 0z",  # diamond
    "M0-4.6 4.4 3.2h-8.8z",  # triangle up
    "M0 4.6 4.4-3.2h-8.8z",  # triangle down
    "M-1.3-4h2.6v2.7h2.7v2.6h-2.7v2.7h-2.6v-2.7h-2.7v-2.6h2.7z",  # plus
)
_CROSS = "M-5-5 5 5M-5 5 5-5"
_SIZE = 1000  # the inner SVG's own units per side


@dataclass(frozen=True)
class Series:
    """One line, or one cloud of dots.

    Attributes:
        label: what the legend and the hover box call it.
        style: colour, dash and marker, 0 to 5; larger values wrap around.
        x, y: equally long; where y isn't finite the line breaks.
        kind: "line" (`markers` adds one at every point), "faint" (a thin line outside legend and hover), "dots" or
            "squares" (points only).
        ends_badly: draw a cross on the last finite point, for a run that went on without finite numbers.
    """

    label: str
    style: int
    x: tuple[float, ...]
    y: tuple[float, ...]
    kind: Literal["line", "faint", "dots", "squares"] = "line"
    markers: bool = False
    ends_badly: bool = False

    def __post_init__(self) -> None:
        if len(self.x) != len(self.y):
            raise ValueError(f"series {self.label!r} has {len(self.x)} x and {len(self.y)} y values")

    def finite(self) -> list[tuple[float, float]]:
        return [(x, y) for x, y in zip(self.x, self.y, strict=True) if math.isfinite(x) and math.isfinite(y)]


@dataclass(frozen=True)
class Reference:
    """A thin dashed line with a label across the plot, at an x or at a y."""

    label: str
    x: float | None = None
    y: float | None = None


@dataclass(frozen=True)
class Chart:
    """What `render` draws.

    Attributes:
        key: a prefix for ids, unique on the page.
        x_name: under the axis and in the hover box ("step", "seconds").
        x_end: where the x axis ends at least; None: at the last point.
    """

    key: str
    title: str
    x_name: str
    series: tuple[Series, ...]
    subtitle: str = ""
    references: tuple[Reference, ...] = ()
    x_end: float | None = None


def linear_ticks(low: float, high: float, target: int = 5) -> list[float]:
    """Round values (1, 2, 2.5 or 5 times a power of ten apart) within [low, high], about `target` of them.

    Example:
        >>> linear_ticks(0, 800)
        [0.0, 200.0, 400.0, 600.0, 800.0]
    """
    if not high > low:
        return [low]
    raw = (high - low) / target
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """1, 2, 5 times powers of ten within [low, high]; powers alone over three decades; linear ones where these are few.

    Example:
        >>> log_ticks(30, 900)
        [50.0, 100.0, 200.0, 500.0]
    """
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1,) if math.log10(high / low) > 3 else (1, 2, 5)
    ticks = [factor * 10.0**decade for decade in decades for factor in factors]
    ticks = [t for t in ticks if low * 0.999 <= t <= high * 1.001]
    if len(ticks) >= 3:
        return ticks[:: math.ceil(len(ticks) / 8)]
    return [t for t in linear_ticks(low, high) if t > 0]


@dataclass(frozen=True)
class _Axis:
    low: float
    high: float
    log: bool
    ticks: tuple[float, ...]

    def place(self, value: float) -> float:
        """Position in [0, 1] from the low end."""
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


def _x_axis(values: Sequence[float]) -> _Axis:
    low, high = min(values), max(values)
    if 0 < low <= 0.5 * high:
        low = 0.0
    if high <= low:
        high = low + 1
    return _Axis(low, high, False, tuple(linear_ticks(low, high)))


def _y_axis(values: Sequence[float]) -> _Axis:
    """Logarithmic where the values span a factor of four or more, else linear; a margin of 6 % either way."""
    low, high = min(values), max(values)
    if low > 0 and high / low >= 4:
        margin = (high / low) ** 0.06
        low, high = low / margin, high * margin
        return _Axis(low, high, True, tuple(log_ticks(low, high)))
    margin = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
    low, high = (0.0 if 0 <= low < margin else low - margin), high + margin
    return _Axis(low, high, False, tuple(linear_ticks(low, high)))


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.2f}".rstrip("0").rstrip(".") + "%"


def _coordinate(fraction: float) -> str:
    return f"{_SIZE * fraction:.1f}".removesuffix(".0")


def _line_path(series: Series, x_axis: _Axis, y_axis: _Axis) -> str:
    """Path of a series; a point that isn't finite lifts the pen."""
    parts, pen_down = [], False
    for x, y in zip(series.x, series.y, strict=True):
        if not (math.isfinite(x) and math.isfinite(y)):
            pen_down = False
            continue
        point = f"{_coordinate(x_axis.place(x))} {_coordinate(1 - y_axis.place(y))}"
        if series.kind in ("dots", "squares"):
            parts.append(f"M{point}h0")  # a line of no length: its cap is the dot
        else:
            parts.append(("L" if pen_down else "M") + point)
        pen_down = True
    return "".join(parts)


def _marker(style: int, x: str, y: str, path: str | None = None) -> Markup:
    shape = tag("path", d=path or _MARKERS[style % NUM_STYLES])
    return tag("svg", shape, x=x, y=y, class_=f"{'cross' if path else 'mark'} s{style % NUM_STYLES}")


def _grid(x_axis: _Axis, y_axis: _Axis) -> Iterable[Markup]:
    for value in y_axis.ticks:
        y = _percent(1 - y_axis.place(value))
        yield tag("line", x1="0", x2="100%", y1=y, y2=y, class_="grid")
        yield tag("text", tick(value), x="-8", y=y, dy="0.32em", class_="tick end")
    yield tag("line", x1="0", x2="100%", y1="100%", y2="100%", class_="axis")
    for value in x_axis.ticks:
        x = _percent(x_axis.place(value))
        yield tag("line", x1=x, x2=x, y1="100%", y2="100%", class_="axis notch")
        yield tag("text", tick(value), x=x, y="100%", dy="20", class_="tick middle")


def _references(chart: Chart, x_axis: _Axis, y_axis: _Axis) -> Iterable[Markup]:
    for reference in chart.references:
        if reference.x is not None and x_axis.low <= reference.x <= x_axis.high:
            place = x_axis.place(reference.x)
            x, right = _percent(place), place > 0.6
            yield tag("line", x1=x, x2=x, y1="0", y2="100%", class_="reference")
            yield tag(
                "text", reference.label, x=x, y="0", dx="-5" if right else "5", dy="10",
                class_="note end" if right else "note",
            )  # fmt: skip
        elif reference.y is not None and y_axis.low <= reference.y <= y_axis.high:
            y = _percent(1 - y_axis.place(reference.y))
            yield tag("line", x1="0", x2="100%", y1=y, y2=y, class_="reference")
            yield tag("text", reference.label, x="4", y=y, dy="-5", class_="note")


def _description(chart: Chart) -> str:
    """What a reader who can't see the figure gets: first, last and lowest value of each series."""
    sentences = []
    for series in chart.series:
        points = series.finite()
        if series.kind == "faint":
            continue
        if not points:
            sentences.append(f"{series.label}: no finite value.")
            continue
        (x0, y0), (x1, y1) = points[0], points[-1]
        lowest = min(y for _, y in points)
        sentences.append(
            f"{series.label}: {number(y0)} at {chart.x_name} {number(x0)}, "
            f"{number(y1)} at {chart.x_name} {number(x1)}, lowest {number(lowest)}."
            + (" Diverged." if series.ends_badly else "")
        )
    return " ".join(sentences)


def _hover_data(chart: Chart, x_axis: _Axis) -> str:
    """The hover box's values as JSON; the script only looks them up, the formatting is done here."""
    series = [
        {
            "name": s.label,
            "style": s.style % NUM_STYLES,
            "x": [float(f"{x:.6g}") for x, _ in s.finite()],
            "y": [number(y) for _, y in s.finite()],
        }
        for s in chart.series
        if s.kind != "faint" and s.finite()
    ]
    data = {"low": x_axis.low, "high": x_axis.high, "name": chart.x_name, "series": series}
    return json.dumps(data, ensure_ascii=False, separators=(",", ":"))


def swatch(series: Series) -> Markup:
    """The legend's sample of a series: its line, dash and marker at the size they have in the plot."""
    style = f"s{series.style % NUM_STYLES}"
    if series.kind in ("dots", "squares"):
        body = tag("path", d="M14 6h0", class_=f"{series.kind} {style}")
    else:
        body = tag("path", d="M0 6h28", class_=f"line {style}")
        if series.markers:
            body = join([body, _marker(series.style, "14", "6")])
    return tag("svg", body, class_="swatch", width="28", height="12", aria_hidden="true")


def render(chart: Chart) -> Markup:
    """One `<figure>` with caption, legend and plot. Where no series has a finite value it says so instead of a plot."""
    caption = tag("figcaption", tag("strong", chart.title), tag("span", chart.subtitle) if chart.subtitle else None)
    points = [point for series in chart.series for point in series.finite()]
    if not points:
        return tag("figure", caption, tag("p", "No finite value to draw.", class_="empty"), class_="chart")
    x_axis = _x_axis([x for x, _ in points] + ([] if chart.x_end is None else [chart.x_end]))
    y_axis = _y_axis([y for _, y in points] + [r.y for r in chart.references if r.y is not None and math.isfinite(r.y)])
    legend = [
        tag("li", swatch(s), tag("span", s.label + (" (diverged)" if s.ends_badly else "")))
        for s in chart.series
        if s.kind != "faint"
    ]
    lines, marks = [], []
    for series in chart.series:
        style = f"s{series.style % NUM_STYLES}"
        path = _line_path(series, x_axis, y_axis)
        if path:
            lines.append(tag("path", d=path, class_=f"{series.kind} {style}"))
        placed = [(_percent(x_axis.place(x)), _percent(1 - y_axis.place(y))) for x, y in series.finite()]
        if series.markers:
            marks += [_marker(series.style, x, y) for x, y in placed]
        if series.ends_badly and placed:
            marks.append(_marker(series.style, *placed[-1], path=_CROSS))
    title_id, desc_id = f"{chart.key}-title", f"{chart.key}-desc"
    svg = tag(
        "svg",
        tag("title", chart.title, id=title_id),
        tag("desc", _description(chart), id=desc_id),
        join(_grid(x_axis, y_axis)),
        join(_references(chart, x_axis, y_axis)),
        tag("svg", *lines, viewBox=f"0 0 {_SIZE} {_SIZE}", preserveAspectRatio="none"),
        join(marks),
        role="img",
        aria_labelledby=f"{title_id} {desc_id}",
    )
    plot = tag("div", svg, class_="plot", tabindex="0", data_chart=_hover_data(chart, x_axis))
    unit = tag("p", chart.x_name, class_="unit", aria_hidden="true")
    return tag("figure", caption, tag("ul", *legend, class_="legend"), plot, unit, class_="chart")
