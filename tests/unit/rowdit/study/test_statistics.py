"""Intervals over seeds."""

from __future__ import annotations

import math
import random

import pytest

from rowdit.study.statistics import mean_interval, ratio_of_means, relative_difference, t_cdf, t_quantile

# Quantiles of Student's t as printed in every table.
TABLE = [(0.975, 1, 12.7062), (0.975, 2, 4.3027), (0.975, 4, 2.7764), (0.95, 5, 2.0150), (0.995, 9, 3.2498)]


@pytest.mark.parametrize(("p", "df", "t"), TABLE)
def test_quantiles_are_those_of_the_tables(p: float, df: int, t: float) -> None:
    assert t_quantile(p, df) == pytest.approx(t, abs=5e-5)
    assert t_quantile(1 - p, df) == pytest.approx(-t, abs=5e-5)


@pytest.mark.parametrize("df", [1, 2, 3, 4, 7, 30])
def test_the_cdf_is_the_integral_of_the_density(df: int) -> None:
    constant = math.gamma((df + 1) / 2) / math.sqrt(df * math.pi) / math.gamma(df / 2)
    step = 1e-3
    area = sum(constant * (1 + ((i + 0.5) * step) ** 2 / df) ** (-(df + 1) / 2) * step for i in range(1700))
    assert t_cdf(1.7, df) == pytest.approx(0.5 + area, abs=1e-6)
    assert t_cdf(-1.7, df) == pytest.approx(0.5 - area, abs=1e-6)


def test_the_interval_of_a_mean() -> None:
    interval = mean_interval([1.0, 2.0, 3.0, 4.0, 5.0])
    half = 2.7764451 * math.sqrt(2.5 / 5)
    assert (interval.mean, interval.num) == (3.0, 5)
    assert (interval.low, interval.high) == pytest.approx((3 - half, 3 + half))
    assert math.isnan(mean_interval([2.0]).low)
    assert math.isnan(mean_interval([2.0, math.nan]).mean)
    with pytest.raises(ValueError, match="no values"):
        mean_interval([])


def test_differences_are_paired() -> None:
    baseline = [100.0, 200.0, 400.0]
    interval = relative_difference([0.9 * b for b in baseline], baseline)
    assert (interval.mean, interval.low, interval.high) == pytest.approx((-0.1, -0.1, -0.1))
    with pytest.raises(ValueError):
        relative_difference([1.0], baseline)


def test_fieller_covers_the_true_ratio_as_often_as_it_says() -> None:
    generator = random.Random(0)
    num_trials, hits = 2000, 0
    for _ in range(num_trials):
        shared = [generator.gauss(0, 1) for _ in range(5)]
        b = [4 + s + generator.gauss(0, 1) for s in shared]
        a = [3 + s + generator.gauss(0, 1) for s in shared]
        interval = ratio_of_means(a, b)
        hits += interval.low <= 0.75 <= interval.high
    # 95 % of 2,000 with a standard error of 0.5 %; unbounded intervals count as covering.
    assert 0.935 < hits / num_trials < 0.975


def test_a_denominator_that_may_be_zero_gives_no_bounds() -> None:
    interval = ratio_of_means([1.0, 2.0, 1.5], [-1.0, 1.2, 0.1])
    assert (interval.low, interval.high) == (-math.inf, math.inf)
    assert ratio_of_means([2.0, 4.0], [1.0, 2.0]).mean == pytest.approx(2.0)
