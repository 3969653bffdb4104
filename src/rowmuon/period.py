"""When a parameter refreshes: the period K, schedules of it, and staggered phases. Plain integers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

__all__ = ["Period", "StepKind", "assign_phases", "check_period", "is_refresh", "kind_of_step", "period_at"]

Period = int | None | tuple[tuple[int, int | None], ...]
"""K; 1 is Muon; None never refreshes after the first step; or ((step, K), ...): from that step on, that K."""

StepKind = Literal["refresh", "row", "mixed"]

_MAX_PHASES = 256


def check_period(period: object) -> Period:
    """Validates a period and returns it as plain, immutable data (lists become tuples).

    Raises:
        ValueError: not an int >= 1, None, or a schedule whose steps rise from 0.
    """
    way_out = "Give K >= 1, None (never refresh), or a schedule such as ((0, 3), (8000, 1))."
    if period is None:
        return None
    if isinstance(period, int) and not isinstance(period, bool):
        if period < 1:
            raise ValueError(f"period={period!r} is less than 1. {way_out}")
        return period
    if not isinstance(period, (tuple, list)) or not period:
        raise ValueError(f"period={period!r} isn't a period. {way_out}")
    schedule: list[tuple[int, int | None]] = []
    for entry in period:
        if not isinstance(entry, (tuple, list)) or len(entry) != 2:
            raise ValueError(f"period={period!r}: entry {entry!r} isn't a pair (step, K). {way_out}")
        start, every = entry
        if not isinstance(start, int) or isinstance(start, bool):
            raise ValueError(f"period={period!r}: the step {start!r} isn't an integer. {way_out}")
        if every is not None and (not isinstance(every, int) or isinstance(every, bool) or every < 1):
            raise ValueError(f"period={period!r}: K = {every!r} from step {start} isn't None or >= 1. {way_out}")
        if (not schedule and start != 0) or (schedule and start <= schedule[-1][0]):
            raise ValueError(f"period={period!r}: the steps must start at 0 and rise. {way_out}")
        schedule.append((start, every))
    return tuple(schedule)


def period_at(period: Period, step: int) -> tuple[int, int | None]:
    """(first step of the segment that ``step`` is in, its K)."""
    if isinstance(period, (tuple, list)):  # lists where a group's period was set later, as it may be
        return max(entry for entry in period if entry[0] <= step)
    return 0, period


def is_refresh(period: Period, step: int, phase: int = 0) -> bool:
    """Whether step ``step`` (counted from 0) is a refresh.

    The first step of every segment is one for all phases; after it phase p refreshes at start + p, start + p + K, ...
    """
    start, every = period_at(period, step)
    if step == start:
        return True
    return every is not None and (step - start - phase) % every == 0


def kind_of_step(due: Sequence[bool]) -> StepKind:
    """What a step is in which those parameters refresh."""
    if all(due):
        return "refresh"
    return "mixed" if any(due) else "row"


def assign_phases(costs: Sequence[float], periods: Sequence[Period]) -> list[int]:
    """A phase for each parameter such that every step of a period costs about the same.

    Each parameter in turn takes the phase that is least loaded so far. So the result depends on the order and the
    costs alone, and a parameter that is added later doesn't move the earlier ones.

    Args:
        costs: cost of each parameter's refresh, in any unit.
        periods: each parameter's period. Under a schedule the phase is balanced for all of its K at once.
    """
    loads: dict[tuple[int, int], float] = {}
    phases: list[int] = []
    for cost, period in zip(costs, periods, strict=True):
        segments = period if isinstance(period, (tuple, list)) else ((0, period),)
        every = sorted({k for _, k in segments if k is not None})
        # As many phases as there are parameters are enough, and the lcm of a schedule's K can be huge.
        num_phases = min(math.lcm(*every), max(_MAX_PHASES, len(phases) + 1)) if every else 1
        # relative to the mean load of that K, or the largest K would hardly count
        best = min(
            range(num_phases),
            key=lambda phase: (sum(k * loads.get((k, phase % k), 0.0) for k in every), phase),
        )
        for k in every:
            loads[k, best % k] = loads.get((k, best % k), 0.0) + cost
        phases.append(best)
    return phases
