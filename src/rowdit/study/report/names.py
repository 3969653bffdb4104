"""What stands for an optimizer everywhere on the page, and how a place in a run is told."""

from __future__ import annotations

import math

from .charts import NUM_STYLES, Series, swatch
from .data import Point, Study
from .formatting import duration, number
from .markup import Markup, join, tag

_LONG = {"adamw": "AdamW", "muon": "Muon", "periodic": "Periodic Row-wise Muon"}
_SHORT = {"periodic": "Periodic"}
_STYLE = {"adamw": 0, "muon": 1, "periodic": 2}


def long_name(name: str) -> str:
    """An optimizer's name in a sentence."""
    return _LONG.get(name, name)


def short_name(name: str) -> str:
    """An optimizer's name where space is short."""
    return _SHORT.get(name, long_name(name))


def style(study: Study, name: str) -> int:
    """Colour, dash and marker of an optimizer: fixed for the three of the method, by order for any others."""
    if name in _STYLE:
        return _STYLE[name]
    others = [result.name for result in study.results if result.name not in _STYLE]
    return (len(_STYLE) + others.index(name)) % NUM_STYLES


def key(study: Study, name: str) -> Markup:
    """The colour and marker that stand for an optimizer everywhere on the page."""
    return swatch(Series(name, style(study, name), (), (), markers=True))


def where(point: Point) -> Markup:
    """Range over the seeds if there are several, step, time: as far as known, a span each."""
    if not math.isfinite(point.value):
        return Markup("")
    values = [value for value in point.by_seed.values() if math.isfinite(value)]
    ends = (number(min(values)), number(max(values))) if values else ("", "")
    parts = [f"{ends[0]} to {ends[1]}"] if ends[0] != ends[1] else []
    parts += [f"step {point.step:,.0f}"] if math.isfinite(point.step) else []
    parts += [duration(point.seconds)] if math.isfinite(point.seconds) else []
    return join(tag("span", part) for part in parts)
