"""Axes, paths and number formats of the report's charts."""

from __future__ import annotations

import doctest
import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowdit.study.report import charts, curves, formatting, markup
from rowdit.study.report.charts import Chart, Reference, Series, linear_ticks, log_ticks, render


@pytest.mark.parametrize("module", [charts, formatting, markup])
def test_examples_in_docstrings(module):
    result = doctest.testmod(module)
    assert result.attempted > 0 and result.failed == 0


bounds = st.floats(min_value=1e-6, max_value=1e9, allow_nan=False)


@given(bounds, bounds)
def test_linear_ticks_are_few_round_and_inside(a, b):
    low, high = sorted((a, b))
    if high - low < 1e-6 * high:
        return
    ticks = linear_ticks(low, high)
    assert 2 <= len(ticks) <= 7
    assert ticks == sorted(set(ticks))
    slack = 1e-6 * (high - low) + 1e-11
    assert all(low - slack <= t <= high + slack for t in ticks)


@given(bounds, st.floats(min_value=1.5, max_value=1e8))
def test_log_ticks_are_few_and_inside(low, factor):
    ticks = log_ticks(low, low * factor)
    assert 1 <= len(ticks) <= 9
    assert ticks == sorted(set(ticks))
    assert all(0.99 * low <= t <= 1.01 * low * factor for t in ticks)


def chart(*series: Series, **more) -> str:
    return str(render(Chart("c", "title", "step", series, **more)))


def paths(text: str, kind: str) -> list[str]:
    """Path data of the series of a kind, without the legend's samples."""
    text = text[text.index('class="plot"') :]
    return re.findall(rf'<path d="([^"]*)" class="{kind} s\d">', text)


def test_a_line_goes_through_its_points():
    # y from 1 to 2: linear, a margin of 6 % either way, so 1 lies at 0.06 / 1.12 from the bottom.
    (path,) = paths(chart(Series("a", 0, (0.0, 5.0, 10.0), (1.0, 2.0, 1.5))), "line")
    points = [tuple(map(float, pair.split())) for pair in re.split("[ML]", path)[1:]]
    bottom, top = 1000 * (1 - 0.06 / 1.12), 1000 * 0.06 / 1.12
    expected = [(0, bottom), (500, top), (1000, (bottom + top) / 2)]
    assert points == [pytest.approx(p, abs=0.06) for p in expected]
    assert path[0] == "M" and path.count("M") == 1


def test_a_logarithmic_axis_is_taken_over_a_factor_of_four():
    (path,) = paths(chart(Series("a", 0, (0.0, 1.0, 2.0), (1.0, 10.0, 100.0))), "line")
    ys = [float(pair.split()[1]) for pair in re.split("[ML]", path)[1:]]
    assert ys[0] - ys[1] == pytest.approx(ys[1] - ys[2], abs=0.2)


def test_a_value_that_is_not_finite_breaks_the_line():
    (path,) = paths(chart(Series("a", 0, (0.0, 1.0, 2.0, 3.0), (1.0, math.nan, 2.0, math.inf))), "line")
    assert path.count("M") == 2 and path.count("L") == 0


def test_dots_are_single_points():
    (path,) = paths(chart(Series("a", 2, (0.0, 1.0), (1.0, 2.0), "squares")), "squares")
    assert path.count("M") == path.count("h0") == 2


def test_a_bad_end_gets_a_cross_on_the_last_finite_point():
    text = chart(Series("a", 0, (0.0, 1.0, 2.0), (1.0, 2.0, math.nan), ends_badly=True))
    (cross,) = re.findall(r'<svg x="([\d.]+)%" y="[\d.]+%" class="cross s0">', text)
    assert float(cross) == 100.0 and "a (diverged)" in text and "Diverged." in text


def test_references_outside_are_left_out_and_widen_only_in_y():
    line = Series("a", 0, (10.0, 20.0), (1.0, 2.0))
    text = chart(line, references=(Reference("too late", x=30.0), Reference("mid", x=15.0), Reference("floor", y=0.5)))
    assert "too late" not in text and ">mid</text>" in text and ">floor</text>" in text


def test_a_chart_without_a_finite_value_says_so():
    assert "No finite value to draw." in chart(Series("a", 0, (1.0,), (math.nan,)))


def test_one_point_and_equal_values_have_axes():
    text = chart(Series("a", 0, (5.0,), (2.0,)), Series("b", 1, (5.0,), (2.0,)))
    assert "nan" not in text and len(paths(text, "line")) == 2


def test_unequal_columns_are_refused():
    with pytest.raises(ValueError, match="'a' has 2 x and 1 y"):
        Series("a", 0, (1.0, 2.0), (1.0,))


def test_windows_hold_equal_shares_of_the_steps_and_skip_what_is_not_finite():
    steps = [float(step) for step in range(1, 13)]
    values = [1.0, 3.0, math.nan, 5.0, 5.0, 8.0, *[math.nan] * 6]
    windows, xs, ys = curves.window_means((steps, steps, values), 1, 12, 4)
    assert windows == [0, 1, 2, 3] and xs == [2.0, 5.0, 8.0, 11.0]
    assert ys[:2] == [2.0, 6.0] and all(map(math.isnan, ys[2:]))


def test_numbers_are_short():
    shown = [formatting.number(v) for v in (0.0, 1e12, 3e-7, -2.5, math.inf, 99999.0)]
    assert shown == ["0", "1.00e+12", "3.00e\u221207", "\u22122.500", "∞", "99,999"]
    assert formatting.duration(math.nan) == formatting.duration(None) == "–"
    assert formatting.duration(59.996) == "60.0\u00a0s" and formatting.duration(7300) == "2\u00a0h\u00a001\u00a0min"
