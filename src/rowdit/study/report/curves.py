"""A study's curves: what is drawn against what, and which runs are joined into a mean."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from .charts import Chart, Reference, Series
from .data import Result, Run, Study
from .formatting import number
from .names import short_name, style

Axis = Literal["step", "seconds"]
Columns = tuple[list[float], list[float], list[float]]  # steps, x and y of one run
NUM_WINDOWS = 60  # of the smoothed training loss
NUM_SINGLE_STEPS = 48


def time_unit(seconds: float) -> tuple[str, float]:
    """Unit for an axis that reaches `seconds`, and how many seconds it has."""
    if seconds < 300:
        return "seconds", 1.0
    return ("minutes", 60.0) if seconds < 3 * 3600 else ("hours", 3600.0)


def _last_second(study: Study) -> float:
    return max(
        (s for runs in study.runs.values() for run in runs for s in run.log["seconds"] if math.isfinite(s)), default=0.0
    )


def _axis_name(study: Study, axis: Axis) -> tuple[str, float]:
    return ("step", 1.0) if axis == "step" else time_unit(_last_second(study))


def _mean_columns(columns: Sequence[Columns]) -> tuple[list[float], list[float]]:
    """Mean x and y over runs at the steps that all of them have; where one y isn't finite, the mean isn't either."""
    tables = [{step: (x, y) for step, x, y in zip(*column, strict=True)} for column in columns]
    steps = sorted(set.intersection(*(set(table) for table in tables)))
    xs = [statistics.fmean(table[step][0] for table in tables) for step in steps]
    ys = [statistics.fmean(table[step][1] for table in tables) for step in steps]
    return xs, ys


def _curves(study: Study, result: Result, columns: Sequence[Columns], *, markers: bool) -> list[Series]:
    """One optimizer's series from (steps, x, y) of each run: a line, or for several seeds faint ones and their mean."""
    slot, label = style(study, result.name), short_name(result.name)
    diverged = bool(result.diverged)
    if len(columns) == 1:
        _, x, y = columns[0]
        return [Series(label, slot, tuple(x), tuple(y), markers=markers, ends_badly=diverged)]
    faint = [
        Series(f"{label}, seed {seed}", slot, tuple(x), tuple(y), "faint")
        for seed, (_, x, y) in zip(result.seeds, columns, strict=True)
    ]
    x, y = _mean_columns(columns)
    mean = Series(f"{label}, mean of {len(columns)}", slot, tuple(x), tuple(y), markers=markers, ends_badly=diverged)
    return [*faint, mean]


def _evaluation_columns(run: Run, column: str, axis: Axis, unit: float) -> Columns:
    table = run.evaluations
    x = table["step"] if axis == "step" else [second / unit for second in table["seconds"]]
    return table["step"], x, table[column]


def _position(study: Study, key: str, axis: Axis, unit: float, what: str) -> Reference | None:
    """Where the fixed step (or fixed time) lies, if all optimizers agree on one."""
    points = [(result.score if what == "score" else result.val_loss)[key] for result in study.results]
    values = {point.step if axis == "step" else point.seconds for point in points}
    values = {value for value in values if math.isfinite(value)}
    if len(values) != 1:
        return None
    return Reference("fixed step" if key == "at_fixed_step" else "fixed time", x=values.pop() / unit)


def _evaluation_chart(study: Study, axis: Axis, column: str, key: str, title: str, subtitle: str) -> Chart:
    name, unit = _axis_name(study, axis)
    series = []
    for result in study.results:
        columns = [_evaluation_columns(run, column, axis, unit) for run in study.runs[result.name]]
        series += _curves(study, result, columns, markers=True)
    what = "score" if column == "score_report" else "val_loss"
    marks = [_position(study, "at_fixed_step" if axis == "step" else "at_fixed_time", axis, unit, what)]
    if what == "score" and math.isfinite(study.floor):
        scores = [y for line in series for _, y in line.finite()]
        if _fits(study.floor, scores):
            marks.append(Reference("floor: real against real", y=study.floor))
        else:
            subtitle += f"; the floor, {number(study.floor)}, lies below the chart"
    return Chart(key, title, name, tuple(series), subtitle, tuple(mark for mark in marks if mark is not None))


def _fits(floor: float, scores: Sequence[float]) -> bool:
    """Whether the floor can be drawn without taking more of the (logarithmic) height than the scores themselves."""
    if not scores or min(floor, *scores) <= 0:
        return False
    return math.log(min(scores) / floor) <= max(math.log(max(scores) / min(scores)), 0.1)


def score_chart(study: Study, axis: Axis) -> Chart:
    """Score of the reported samples against steps or active training time."""
    subtitle = f"{study.score_name}, lower is better"
    return _evaluation_chart(study, axis, "score_report", f"score-by-{axis}", "Score of the samples", subtitle)


def val_loss_chart(study: Study, axis: Axis) -> Chart:
    """Validation loss at fixed times and noise against steps or active training time."""
    subtitle = "held-out images at fixed (t, noise), lower is better"
    return _evaluation_chart(study, axis, "val_loss", f"val-by-{axis}", "Validation loss", subtitle)


def window_means(columns: Columns, first: float, last: float, num_windows: int) -> Columns:
    """Means over equal windows of the steps `first` to `last`; the windows don't depend on where a run ends.

    A y that isn't finite doesn't count; a window without a finite one is NaN. So the curve breaks where a run has
    diverged and not at a single skipped step.

    Returns:
        Numbers of the windows that have rows, mean x and mean y in each.
    """
    windows: dict[int, list[tuple[float, float]]] = {}
    for step, x, y in zip(*columns, strict=True):
        windows.setdefault(int((step - first) * num_windows // (last - first + 1)), []).append((x, y))
    out: Columns = ([], [], [])
    for index in sorted(windows):
        finite = [y for _, y in windows[index] if math.isfinite(y)]
        out[0].append(index)
        out[1].append(statistics.fmean(x for x, _ in windows[index]))
        out[2].append(statistics.fmean(finite) if finite else math.nan)
    return out


def train_loss_chart(study: Study, axis: Axis) -> Chart:
    """Training loss in windows, the same for every run."""
    name, unit = _axis_name(study, axis)
    logs = [run.log for runs in study.runs.values() for run in runs if run.log["step"]]
    first = min((log["step"][0] for log in logs), default=1.0)
    last = max((log["step"][-1] for log in logs), default=1.0)
    num_windows = min(NUM_WINDOWS, int(last - first + 1))
    series = []
    for result in study.results:
        columns = []
        for run in study.runs[result.name]:
            x = run.log["step"] if axis == "step" else [second / unit for second in run.log["seconds"]]
            columns.append(window_means((run.log["step"], x, run.log["loss"]), first, last, num_windows))
        series += _curves(study, result, columns, markers=False)
    size = round((last - first + 1) / num_windows)
    subtitle = f"means over windows of about {size} steps" if size > 1 else "of every step"
    end = last if axis == "step" else max((log["seconds"][-1] for log in logs), default=1.0) / unit
    return Chart(f"train-by-{axis}", "Training loss", name, tuple(series), subtitle, x_end=end)


_KINDS = {"refresh": ", full step", "row": ", row step", "mixed": ", mixed step"}


def single_steps(name: str, slot: int, log: Mapping[str, list[Any]]) -> list[Series]:
    """Optimizer time of each of the last steps of a run, in milliseconds; each kind of step a series of its own, so
    that the period shows."""
    rows = [
        (step, 1e3 * seconds, str(kind))
        for step, seconds, kind in zip(log["step"], log["optimizer_seconds"], log["kind"], strict=True)
        if seconds > 0
    ][-NUM_SINGLE_STEPS:]
    series: list[Series] = []
    kinds = sorted({kind for _, _, kind in rows}, key=lambda kind: (kind != "refresh", kind))
    if len(kinds) > 1:
        series.append(Series(name, slot, tuple(r[0] for r in rows), tuple(r[1] for r in rows), "faint"))
    for kind in kinds:
        points = [(step, ms) for step, ms, row_kind in rows if row_kind == kind]
        label = short_name(name) + _KINDS.get(kind, "")
        x, y = tuple(step for step, _ in points), tuple(ms for _, ms in points)
        series.append(Series(label, slot, x, y, "squares" if kind == "refresh" else "dots"))
    return series


def single_steps_chart(runs: Sequence[Sequence[Series]]) -> Chart:
    """The chart of the `single_steps` of one run or of several."""
    shown = max((sum(len(s.x) for s in series if s.kind != "faint") for series in runs), default=0)
    subtitle = f"milliseconds, the last {shown} steps"
    series = tuple(s for run in runs for s in run)
    return Chart("optimizer-time", "Optimizer time of single steps", "step", series, subtitle)


def optimizer_time_chart(study: Study) -> Chart:
    """Optimizer time of single steps of the first seed of every optimizer."""
    runs = [(result.name, study.runs[result.name][0].log) for result in study.results]
    return single_steps_chart([single_steps(name, style(study, name), log) for name, log in runs])
