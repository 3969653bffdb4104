"""Medians with their spread, and tables of them."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = ["Spread", "digits", "table"]


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of repeated measurements.

    Example:
        >>> Spread.of([1.0, 2.0, 4.0]).show()
        '2.00 [1.50, 3.00]'
    """

    median: float
    lower: float  # first quartile
    upper: float  # third quartile
    num: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        values = sorted(values)
        if not values:
            raise ValueError("a spread needs at least one value")
        if len(values) == 1:
            return cls(values[0], values[0], values[0], 1)
        lower, median, upper = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, lower, upper, len(values))

    @classmethod
    def of_ratio(cls, above: Iterable[float], below: Iterable[float]) -> Spread:
        """Of the ratios round by round: what slows down a whole round isn't in it."""
        return cls.of(a / b for a, b in zip(above, below, strict=True))

    def show(self, scale: float = 1.0, num_digits: int = 3) -> str:
        """``median [lower, upper]`` to ``num_digits`` significant digits."""
        return f"{digits(self.median * scale, num_digits)} [{digits(self.lower * scale, num_digits)}, " + (
            f"{digits(self.upper * scale, num_digits)}]"
        )


def digits(value: float, num_digits: int = 3) -> str:
    """`value` to that many significant digits, without an exponent."""
    if value == 0:
        return "0"
    decimals = max(num_digits - 1 - int(f"{abs(value):e}".partition("e")[2]), 0)
    return f"{value:.{decimals}f}"


def table(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table, its columns padded so that it also reads as plain text."""
    cells = [[str(cell) for cell in row] for row in (headers, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(headers))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in cells
    ]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])
