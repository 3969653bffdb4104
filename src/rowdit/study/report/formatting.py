"""Numbers as a reader wants them: a few significant digits, units, and a dash where there is no number."""

from __future__ import annotations

import math

MISSING = "–"
_MINUS = "\u2212"
_NBSP = "\u00a0"


def number(value: float | None, digits: int = 4) -> str:
    """`value` with `digits` significant digits, thousands separated, no exponent between 1e-4 and 1e9.

    Example:
        >>> number(1234.5), number(48.123), number(0.18349), number(None)
        ('1,234', '48.12', '0.1835', '–')
    """
    if value is None or math.isnan(value):
        return MISSING
    if math.isinf(value):
        return "∞" if value > 0 else _MINUS + "∞"
    magnitude = abs(value)
    if magnitude == 0:
        return "0"
    if not 1e-4 <= magnitude < 1e9:
        return f"{value:.{max(digits - 2, 1)}e}".replace("-", _MINUS)
    decimals = max(digits - 1 - math.floor(math.log10(magnitude)), 0)
    return f"{value:,.{decimals}f}".replace("-", _MINUS)


def tick(value: float) -> str:
    """An axis label: as short as the value allows.

    Example:
        >>> tick(200.0), tick(0.25), tick(12000.0)
        ('200', '0.25', '12,000')
    """
    if value != 0 and not 1e-4 <= abs(value) < 1e7:
        return f"{value:.0e}".replace("e+0", "e").replace("e-0", "e-").replace("e+", "e").replace("-", _MINUS)
    short = f"{value:,.6f}".rstrip("0").rstrip(".")
    return short.replace("-", _MINUS)


def relative(value: float | None, base: float | None) -> float:
    """value / base - 1; NaN where that means nothing."""
    if value is None or base is None or not math.isfinite(value) or not math.isfinite(base) or base <= 0:
        return math.nan
    return value / base - 1


def percent_change(change: float | None) -> str:
    """A fraction as a signed change in per cent, from a doubling on as a factor; a dash where there is none.

    Example:
        >>> [percent_change(c).replace("\u00a0", " ") for c in (-0.143, 0.0, 8.2)]
        ['−14.3 %', '±0 %', '×9.20']
    """
    if change is None or not math.isfinite(change):
        return MISSING
    if abs(change) < 5e-4:
        return f"±0{_NBSP}%"
    if change >= 1:
        return f"×{number(1 + change, 3)}"
    return ("+" if change > 0 else _MINUS) + percent(100 * abs(change))


def percent(value: float) -> str:
    """A value in per cent with its sign of per cent: one decimal below 100."""
    return f"{value:.1f}{_NBSP}%" if value < 100 else f"{value:,.0f}{_NBSP}%"


def duration(seconds: float | None) -> str:
    """A time in the unit that suits it.

    Example:
        >>> [duration(s).replace("\\u00a0", " ") for s in (0.00042, 0.0153, 12.3, 128.0, 11520.0)]
        ['0.420 ms', '15.3 ms', '12.3 s', '2 min 08 s', '3 h 12 min']
    """
    if seconds is None or not math.isfinite(seconds):
        return MISSING
    if seconds == 0:
        return f"0{_NBSP}s"
    if abs(seconds) < 0.9995:
        return f"{number(seconds * 1e3, 3)}{_NBSP}ms"
    if seconds < 99.95:
        return f"{number(seconds, 3)}{_NBSP}s"
    total = round(seconds)
    if total < 7200:
        return f"{total // 60}{_NBSP}min{_NBSP}{total % 60:02d}{_NBSP}s"
    return f"{total // 3600}{_NBSP}h{_NBSP}{total % 3600 // 60:02d}{_NBSP}min"
