"""Means over seeds with Student's t: no assumption but that seeds are independent and about normal.

A difference of two optimizers is taken seed by seed, for equal seeds share initial weights, data order and noise.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Interval:
    """A mean and its 95 % interval. With one value there is none: the bounds are NaN. A ratio's may be unbounded."""

    mean: float
    low: float
    high: float
    num: int


def t_cdf(t: float, df: int) -> float:
    """P(T <= t) for Student's t with `df` degrees of freedom, by its finite sum for integers.

    Source: Abramowitz and Stegun, 26.7.3 and 26.7.4.

    >>> round(t_cdf(2.776445, 4), 6)
    0.975
    """
    if df < 1:
        raise ValueError(f"df = {df}: must be an integer >= 1")
    theta = math.atan(abs(t) / math.sqrt(df))
    sine, cosine = math.sin(theta), math.cos(theta)
    if df % 2:
        term, total = cosine, 0.0
        for k in range(1, df - 1, 2):
            total += term
            term *= cosine**2 * (k + 1) / (k + 2)
        share = 2 / math.pi * (theta + sine * total)
    else:
        term, total = 1.0, 0.0
        for k in range(0, df - 1, 2):
            total += term
            term *= cosine**2 * (k + 1) / (k + 2)
        share = sine * total
    return 0.5 + math.copysign(share / 2, t)


def t_quantile(p: float, df: int) -> float:
    """The t with P(T <= t) = p, for p in (0, 1), by bisection."""
    if not 0 < p < 1:
        raise ValueError(f"p = {p}: must be in (0, 1)")
    if p < 0.5:
        return -t_quantile(1 - p, df)
    low, high = 0.0, 1.0
    while t_cdf(high, df) < p:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if t_cdf(middle, df) < p else (low, middle)
    return (low + high) / 2


def mean_interval(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """The mean with its two-sided interval.

    Raises:
        ValueError: no values.
    """
    if not values:
        raise ValueError("a mean of no values")
    num, mean = len(values), statistics.fmean(values)
    if num == 1 or not math.isfinite(mean):
        return Interval(mean, math.nan, math.nan, num)
    half = t_quantile(0.5 + confidence / 2, num - 1) * statistics.stdev(values) / math.sqrt(num)
    return Interval(mean, mean - half, mean + half, num)


def relative_difference(values: Sequence[float], baseline: Sequence[float]) -> Interval:
    """values / baseline - 1, paired: the mean over seeds of each seed's own ratio, with its interval."""
    return mean_interval([a / b - 1 for a, b in zip(values, baseline, strict=True)])


def ratio_of_means(numerator: Sequence[float], denominator: Sequence[float], confidence: float = 0.95) -> Interval:
    """mean(a) / mean(b) of pairs (a_i, b_i), with Fieller's interval.

    All r are in it for which the mean of a_i - r b_i isn't significantly different from 0. Where mean(b) itself isn't
    significantly different from 0, that set isn't an interval; the bounds are then infinite.

    Source: Fieller, "Some problems in interval estimation", 1954.
    """
    num = len(numerator)
    a, b = statistics.fmean(numerator), statistics.fmean(denominator)
    if num == 1 or b == 0 or not math.isfinite(a + b):
        return Interval(a / b if b else math.nan, math.nan, math.nan, num)
    t2 = t_quantile(0.5 + confidence / 2, num - 1) ** 2
    var_a, var_b = statistics.variance(numerator) / num, statistics.variance(denominator) / num
    pairs = zip(numerator, denominator, strict=True)
    cov = sum((x - a) * (y - b) for x, y in pairs) / (num - 1) / num
    # b^2 (r - a/b)^2 <= t^2 (var_a - 2 r cov + r^2 var_b), a quadratic in r
    square, linear, constant = b * b - t2 * var_b, a * b - t2 * cov, a * a - t2 * var_a
    if square <= 0:
        return Interval(a / b, -math.inf, math.inf, num)
    root = math.sqrt(max(0.0, linear * linear - square * constant))
    return Interval(a / b, (linear - root) / square, (linear + root) / square, num)
