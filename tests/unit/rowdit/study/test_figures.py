"""Figures as SVG files."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ElementTree

import pytest

from rowdit.study.figures import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Figure, Line, draw

SVG = "{http://www.w3.org/2000/svg}"


def places(text: str) -> list[tuple[float, float]]:
    """Where the markers in the plot are; those of the legend are right of it."""
    root = ElementTree.fromstring(text)
    found = []
    for path in root.iter(f"{SVG}path"):
        if "transform" in path.attrib:
            x, y = path.attrib["transform"].removeprefix("translate(").removesuffix(")").split()
            if float(x) <= WIDTH - RIGHT:
                found.append((float(x), float(y)))
    return found


def test_points_are_where_the_axes_say() -> None:
    text = draw(Figure("t", "step", "score", (Line("a", (0.0, 50.0, 100.0), (3.0, 2.0, 1.0)),)))
    (x0, y0), (x1, y1), (x2, y2) = places(text)
    assert LEFT < x0 < x1 < x2 < WIDTH - RIGHT and TOP < y0 < y1 < y2 < HEIGHT - BOTTOM
    assert x1 == pytest.approx((x0 + x2) / 2, abs=0.1) and y1 == pytest.approx((y0 + y2) / 2, abs=0.1)


def test_a_logarithmic_axis_has_equal_ratios_equally_far() -> None:
    text = draw(
        Figure("t", "lr", "score", (Line("a", (1e-3, 2e-3, 4e-3), (1.0, 10.0, 100.0)),), log_x=True, log_y=True)
    )
    (x0, y0), (x1, y1), (x2, y2) = places(text)
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2) and y0 - y1 == pytest.approx(y1 - y2, abs=0.2)
    with pytest.raises(ValueError, match="'t': 0.0 on a logarithmic axis"):
        draw(Figure("t", "lr", "score", (Line("a", (0.0, 1.0), (1.0, 2.0)),), log_x=True))


def test_what_is_not_finite_breaks_the_line_and_nothing_else() -> None:
    line = Line("a", (1.0, 2.0, 3.0), (1.0, math.nan, 3.0), (0.5, math.nan, math.nan), (1.5, math.nan, math.nan))
    text = draw(Figure("t", "x", "y", (line,)))
    assert len(places(text)) == 2 and "nan" not in text
    with pytest.raises(ValueError, match="no finite point"):
        draw(Figure("t", "x", "y", (Line("a", (1.0,), (math.nan,)),)))


def test_names_are_escaped() -> None:
    text = draw(Figure("a < b & c", "x", "y", (Line("<script>", (1.0,), (1.0,)),)))
    assert "<script>" not in text
    assert ElementTree.fromstring(text).findtext(f"{SVG}title") == "a < b & c"


def test_unequal_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="equally long"):
        Line("a", (1.0, 2.0), (1.0,))
