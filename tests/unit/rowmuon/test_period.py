"""When a parameter refreshes, against a count by hand."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from rowmuon.period import Period, assign_phases, check_period, is_refresh, period_at


def schedules() -> st.SearchStrategy[Period]:
    every = st.one_of(st.none(), st.integers(1, 9))
    starts = st.lists(st.integers(1, 40), unique=True, max_size=4).map(lambda s: [0, *sorted(s)])
    schedule = starts.flatmap(lambda s: st.tuples(*(st.tuples(st.just(a), every) for a in s)))
    return st.one_of(every, schedule)


def by_hand(period: Period, phase: int, num_steps: int) -> list[bool]:
    """Walks through the steps with a countdown."""
    segments = dict(period) if isinstance(period, tuple) else {0: period}
    out = []
    countdown: int | None = None
    every: int | None = None
    for step in range(num_steps):
        if step in segments:
            every = segments[step]
            # the first step of a segment is one for all; the next is the phase, counted from there
            countdown = None if every is None else phase % every
            out.append(True)
            if countdown == 0:
                countdown = every
        else:
            out.append(countdown == 0)
            if countdown == 0:
                countdown = every
        if countdown is not None:
            countdown -= 1
    return out


@pytest.mark.parametrize(
    ("period", "expected"),
    [
        (1, "RRRRRRRRRR"),
        (3, "R..R..R..R"),
        (None, "R........."),
        (((0, 3), (4, 1)), "R..RRRRRRR"),
        (((0, 3), (5, 2)), "R..R.R.R.R"),
        (((0, None), (5, 3)), "R....R..R."),
        (((0, 1), (3, None), (7, 2)), "RRRR...R.R"),
    ],
    ids=str,
)
def test_refreshes(period: Period, expected: str) -> None:
    assert "".join("R" if is_refresh(period, step) else "." for step in range(10)) == expected


@given(schedules(), st.integers(0, 20))
def test_refreshes_against_a_countdown(period: Period, phase: int) -> None:
    assert [is_refresh(period, step, phase) for step in range(60)] == by_hand(period, phase, 60)


@given(schedules())
def test_checking_keeps_what_is_right(period: Period) -> None:
    assert check_period(period) == period
    if isinstance(period, tuple):
        assert check_period([list(entry) for entry in period]) == period


def test_period_at() -> None:
    schedule = ((0, 3), (5, None), (9, 1))
    assert [period_at(schedule, step) for step in (0, 4, 5, 8, 9, 99)] == [
        (0, 3), (0, 3), (5, None), (5, None), (9, 1), (9, 1)
    ]  # fmt: skip
    assert period_at(7, 12) == (0, 7)


# ------------------------------------------------------------------------------------------------------------ phases
@given(st.lists(st.integers(1, 100), min_size=1, max_size=40), st.integers(1, 12))
def test_steps_of_a_period_cost_about_the_same(costs: list[int], every: int) -> None:
    phases = assign_phases(costs, [every] * len(costs))
    assert all(0 <= phase < every for phase in phases)
    loads = [sum(c for c, p in zip(costs, phases, strict=True) if p == phase) for phase in range(every)]
    # Each went to the least loaded phase, so no two differ by more than the costliest parameter.
    assert max(loads) - min(loads) <= max(costs)


@given(st.lists(st.tuples(st.integers(1, 100), schedules()), max_size=20))
def test_later_parameters_dont_move_earlier_ones(params: list[tuple[int, Period]]) -> None:
    costs, periods = [c for c, _ in params], [p for _, p in params]
    phases = assign_phases(costs, periods)
    for n in range(len(params)):
        assert assign_phases(costs[:n], periods[:n]) == phases[:n]


def test_a_schedule_is_balanced_for_each_of_its_periods() -> None:
    phases = assign_phases([1.0] * 12, [((0, 3), (100, 4))] * 12)
    for every in (3, 4):
        loads = [sum(phase % every == k for phase in phases) for k in range(every)]
        assert max(loads) - min(loads) <= 1, (every, phases)


def test_no_period_no_phase() -> None:
    assert assign_phases([1.0, 2.0], [None, 1]) == [0, 0]
    assert assign_phases([], []) == []


@pytest.mark.timeout(20)
def test_large_periods_take_no_time() -> None:
    # The least common multiple of these is 2 * 10^12.
    phases = assign_phases([1.0] * 300, [((0, 9973), (5, 9967), (9, 20011))] * 300)
    assert len(set(phases)) > 200
    assert len(set(assign_phases([1.0] * 300, [1_000_000] * 300))) == 300
