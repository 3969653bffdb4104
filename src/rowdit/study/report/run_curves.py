"""A run's curves, each against steps and against time of active training."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from .charts import Chart, Reference, Series
from .curves import NUM_WINDOWS, Axis, Columns, single_steps, single_steps_chart, time_unit, window_means
from .reading import as_number
from .run_data import TrainingRun

STYLE = 2  # a solid line
NUM_ENVELOPES = 500  # of the raw values: a page of a long run stays small
SMALLEST_WINDOW = 5  # steps


def thinned(x: Sequence[float], y: Sequence[float], num: int = NUM_ENVELOPES) -> tuple[list[float], list[float]]:
    """At most 2 `num` points that look the same: the lowest and the highest of equal stretches, in their order.

    A value that isn't finite is left out, unless its whole stretch is such.

    Example:
        >>> thinned([0, 1, 2, 3, 4, 5], [5.0, 1.0, 9.0, 2.0, 2.0, 3.0], num=2)
        ([1, 2, 3, 5], [1.0, 9.0, 2.0, 3.0])
    """
    if len(x) <= 2 * num:
        return list(x), list(y)
    kept: list[int] = []
    for i in range(num):
        stretch = range(i * len(x) // num, (i + 1) * len(x) // num)
        finite = [index for index in stretch if math.isfinite(y[index])]
        if finite:
            kept += sorted({min(finite, key=y.__getitem__), max(finite, key=y.__getitem__)})
        else:
            kept.append(stretch[0])
    return [x[index] for index in kept], [y[index] for index in kept]


def smoothed(run: TrainingRun, axis: Axis, column: str) -> tuple[Columns, float]:
    """Means of a column of the log over equal windows of steps, and the steps in a window."""
    steps, x = run.log["step"], run.log["step" if axis == "step" else "seconds"]
    if not steps:
        return ([], [], []), 0.0
    first, last = steps[0], steps[-1]
    num_windows = max(1, min(NUM_WINDOWS, int(last - first + 1) // SMALLEST_WINDOW))
    return window_means((steps, x, run.log[column]), first, last, num_windows), (last - first + 1) / num_windows


def _axis(run: TrainingRun, axis: Axis) -> tuple[str, float]:
    if axis == "step":
        return "step", 1.0
    return time_unit(max([*run.log["seconds"], *run.evaluations["seconds"]], default=0.0))


def _end(run: TrainingRun, axis: Axis, unit: float) -> float | None:
    """Where the axis ends: all curves of a run have the same one."""
    ends = run.log["step" if axis == "step" else "seconds"]
    return ends[-1] / unit if ends else None


def _log_chart(run: TrainingRun, axis: Axis, column: str, key: str, title: str, unit_of_y: str = "") -> Chart:
    """Raw values as a faint line, and their means over windows as a line."""
    name, unit = _axis(run, axis)
    x = [value / unit for value in run.log["step" if axis == "step" else "seconds"]]
    (_, mean_x, mean_y), size = smoothed(run, axis, column)
    mean_x = [value / unit for value in mean_x]
    raw_x, raw_y = thinned(x, run.log[column])
    bad_end = bool(run.log[column]) and not math.isfinite(run.log[column][-1])
    diverged = run.status == "diverged" and bad_end
    label = f"mean of {size:.0f} steps" if round(size) > 1 else "every step"
    series = (
        Series("every step", STYLE, tuple(raw_x), tuple(raw_y), "faint"),
        Series(label, STYLE, tuple(mean_x), tuple(mean_y), ends_badly=diverged),
    )
    subtitle = f"{unit_of_y}; faint: every step" if unit_of_y else "faint: every step"
    return Chart(f"{key}-by-{axis}", title, name, series, subtitle, x_end=_end(run, axis, unit))


def loss_chart(run: TrainingRun, axis: Axis) -> Chart:
    """Training loss of each batch, raw and smoothed."""
    return _log_chart(run, axis, "loss", "loss", "Training loss", "of each batch")


def grad_norm_chart(run: TrainingRun, axis: Axis) -> Chart:
    """Gradient norm before clipping, raw and smoothed; the limits that the config sets; the steps that were skipped."""
    chart = _log_chart(run, axis, "grad_norm", "grad-norm", "Gradient norm", "before clipping")
    name, unit = _axis(run, axis)
    x = run.log["step" if axis == "step" else "seconds"]
    norms_of_skipped = [(x[i] / unit, run.log["grad_norm"][i]) for i in run.skipped]
    skipped = [point for point in norms_of_skipped if math.isfinite(point[1])]
    series = chart.series
    if skipped:
        series += (Series("skipped", 0, tuple(p[0] for p in skipped), tuple(p[1] for p in skipped), "squares"),)
    norms = [y for line in series for _, y in line.finite() if y > 0]
    limits = {"clipped above": "grad_clip", "skipped above": "skip_grad_norm"}
    references = [Reference(label, y=as_number(run.setting("train", key))) for label, key in limits.items()]
    shown = [r for r in references if norms and r.y is not None and min(norms) / 3 <= r.y <= 3 * max(norms)]
    return Chart(chart.key, chart.title, name, series, chart.subtitle, tuple(shown), chart.x_end)


def lr_chart(run: TrainingRun, axis: Axis) -> Chart:
    """Learning rate of the optimizer's main groups."""
    name, unit = _axis(run, axis)
    x, y = thinned([v / unit for v in run.log["step" if axis == "step" else "seconds"]], run.log["lr"])
    series = (Series("learning rate", STYLE, tuple(x), tuple(y)),)
    return Chart(f"lr-by-{axis}", "Learning rate", name, series, "after the schedule", x_end=_end(run, axis, unit))


def _evaluation_chart(
    run: TrainingRun, axis: Axis, key: str, title: str, subtitle: str, lines: dict[str, list[float]]
) -> Chart:
    name, unit = _axis(run, axis)
    x = tuple(value / unit for value in run.evaluations["step" if axis == "step" else "seconds"])
    one = len(lines) == 1
    series = tuple(
        Series(label, STYLE if one else slot, x, tuple(y), markers=True, ends_badly=not math.isfinite(y[-1]))
        for slot, (label, y) in enumerate(lines.items())
    )
    return Chart(f"{key}-by-{axis}", title, name, series, subtitle, x_end=_end(run, axis, unit))


def _evaluation_charts(run: TrainingRun, axis: Axis) -> Iterator[Chart]:
    table = run.evaluations
    if not table["step"]:
        return
    if "val_loss" in table:
        subtitle = "held-out images at fixed (t, noise), averaged weights"
        lines = {"validation loss": table["val_loss"]}
        yield _evaluation_chart(run, axis, "val", "Validation loss", subtitle, lines)
    if run.by_t:
        subtitle = "t = 0 is the image, t = 1 is noise"
        lines = {f"t in {name.replace('-', ' to ')}": values for name, values in run.by_t.items()}
        yield _evaluation_chart(run, axis, "val-t", "Validation loss by t", subtitle, lines)
    if "score_report" in table:
        lines = {"Frechet distance": table["score_report"]}
        subtitle = "Frechet distance of samples from held-out images, lower is better"
        yield _evaluation_chart(run, axis, "score", "Score of the samples", subtitle, lines)


def charts(run: TrainingRun, axis: Axis) -> list[Chart]:
    """What there is to draw of a run: loss and gradient norm always; the learning rate if it changes."""
    drawn = [loss_chart(run, axis), grad_norm_chart(run, axis), *_evaluation_charts(run, axis)]
    rates = {rate for rate in run.log["lr"] if math.isfinite(rate)}
    return [*drawn, lr_chart(run, axis)] if len(rates) > 1 else drawn


def optimizer_time_chart(run: TrainingRun) -> Chart:
    """Optimizer time of the last steps, refreshes and row steps told apart."""
    return single_steps_chart([single_steps(run.optimizer, STYLE, run.log)])
