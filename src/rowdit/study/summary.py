"""What a comparison says, as numbers: pure functions from the runs' records to `summary.json`.

A run's curve has a row an evaluation: step, seconds of training so far (evaluation excluded), `score_select`,
`score_report`, `val_loss`, ... Lower is better. Four numbers describe a curve, never one alone:

    best             the step is chosen by `score_select`; the number given is `score_report`, on other samples, because
                     a minimum over noisy evaluations flatters the noisiest run
    final            the last row
    at_fixed_step    the row whose step is nearest to half of the run (of two, the earlier), the same for all
    at_fixed_time    at the time at which the fastest optimizer's run of that seed was done; between two rows the value
                     and the step are interpolated linearly in the seconds

and one says how soon: `time_to_adamw_best`, the seconds at which the piecewise linear curve of `score_report` first
reaches the best of AdamW's run of that seed; None if it never does, or if AdamW isn't there. It isn't extrapolated:
if the first row is already better, the first row's seconds are given. The validation loss is treated alike; it needs no
second set, for at fixed images, t and noise it has no sampling error to be flattered by.

With several seeds every number is the mean over the seeds, beside `per_seed`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Row = Mapping[str, Any]

KINDS = ("best", "final", "at_fixed_step", "at_fixed_time")
BASELINE = "adamw"
WARM_UP_STEPS = 3  # left out of the timings: first touches of memory, thread pools, lazily loaded kernels


@dataclass(frozen=True)
class RunRecord:
    """One finished run: its name in the comparison, its seed, and the rows of its two logs."""

    optimizer: str
    seed: int
    log: Sequence[Row]
    evaluations: Sequence[Row]


def summarize_optimizers(runs: Sequence[RunRecord], names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The part of the summary that is computed: for each optimizer in `names` its entry.

    Args:
        runs: finished runs; every optimizer with the same seeds, all with at least one evaluation.
        names: the optimizers, in the order of the summary.

    Raises:
        ValueError: an optimizer without a run, or a run without an evaluation.
    """
    by_name = {name: sorted((r for r in runs if r.optimizer == name), key=lambda r: r.seed) for name in names}
    for name, own in by_name.items():
        if not own:
            raise ValueError(f"no finished run of {name}")
        for run in own:
            if not run.evaluations:
                raise ValueError(f"{name}, seed {run.seed}: no evaluation")
    entries = {}
    for name, own in by_name.items():
        entry: dict[str, Any] = _metric(own, by_name, select="score_select", report="score_report")
        entry["val_loss"] = _metric(own, by_name, select="val_loss", report="val_loss")
        entry |= _timing(own)
        entry["seeds"] = [run.seed for run in own]
        entry["curve"] = [{"seed": run.seed, "rows": [dict(row) for row in run.evaluations]} for run in own]
        entries[name] = entry
    _add_gains(entries)
    return entries


# ---------------------------------------------------------------------------------------------------------------------
# the numbers of one curve


def best_row(rows: Sequence[Row], select: str) -> Row | None:
    """The row with the smallest finite `select`; of equal ones the earliest. None if no value is finite."""
    finite = [row for row in rows if _is_finite(row[select])]
    return min(finite, key=lambda row: row[select]) if finite else None


def row_nearest(rows: Sequence[Row], step: float) -> Row:
    """The row whose step is nearest to `step`; of two the earlier."""
    return min(rows, key=lambda row: (abs(row["step"] - step), row["step"]))


def value_at_time(rows: Sequence[Row], report: str, seconds: float) -> dict[str, Any]:
    """Value and step at a time, linear between rows; before the first row, the first; after the last, the last."""
    if seconds <= rows[0]["seconds"] or len(rows) == 1:
        row = rows[0] if seconds <= rows[0]["seconds"] else rows[-1]
        return {"score": _finite(row[report]), "step": row["step"], "seconds": seconds}
    for left, right in zip(rows, rows[1:], strict=False):
        if left["seconds"] <= seconds <= right["seconds"]:
            width = right["seconds"] - left["seconds"]
            share = (seconds - left["seconds"]) / width if width > 0 else 1.0
            step = round(left["step"] + share * (right["step"] - left["step"]))
            return {"score": _between(left[report], right[report], share), "step": step, "seconds": seconds}
    return {"score": _finite(rows[-1][report]), "step": rows[-1]["step"], "seconds": seconds}


def time_to_reach(rows: Sequence[Row], report: str, target: float) -> float | None:
    """The first time at which the piecewise linear curve is at or below `target`; None if it never is."""
    previous: Row | None = None
    for row in rows:
        value = _finite(row[report])
        if value is not None and value <= target:
            before = _finite(previous[report]) if previous else None
            if previous is None or before is None:
                return row["seconds"]
            share = (before - target) / (before - value)
            return previous["seconds"] + share * (row["seconds"] - previous["seconds"])
        previous = row
    return None


# ---------------------------------------------------------------------------------------------------------------------
# over seeds


def _metric(
    own: Sequence[RunRecord], by_name: Mapping[str, Sequence[RunRecord]], *, select: str, report: str
) -> dict[str, Any]:
    """The four numbers and the time to AdamW's best, each as the mean over seeds with the seeds beside it."""
    peers = {
        run.seed: [other for others in by_name.values() for other in others if other.seed == run.seed] for run in own
    }
    points: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
    times: list[float | None] = []
    for run in own:
        rows = run.evaluations
        last_common = min(other.evaluations[-1]["step"] for other in peers[run.seed])
        first_done = min(other.evaluations[-1]["seconds"] for other in peers[run.seed])
        best = best_row(rows, select)
        points["best"].append(_point(best, report) if best else {"score": None, "step": None, "seconds": None})
        points["final"].append(_point(rows[-1], report))
        points["at_fixed_step"].append(_point(row_nearest(rows, last_common / 2), report))
        points["at_fixed_time"].append(value_at_time(rows, report, first_done))
        baseline = next((other for other in peers[run.seed] if other.optimizer == BASELINE), None)
        target = best_row(baseline.evaluations, select) if baseline else None
        target_value = _finite(target[report]) if target else None
        times.append(None if target_value is None else time_to_reach(rows, report, target_value))
    result: dict[str, Any] = {}
    for kind in KINDS:
        per_seed = [{"seed": run.seed} | point for run, point in zip(own, points[kind], strict=True)]
        result[kind] = {key: _mean([p[key] for p in per_seed]) for key in ("score", "step", "seconds")}
        result[kind]["per_seed"] = per_seed
    result["time_to_adamw_best"] = _mean(times)
    result["time_to_adamw_best_per_seed"] = [
        {"seed": run.seed, "seconds": seconds} for run, seconds in zip(own, times, strict=True)
    ]
    return result


def _point(row: Row, report: str) -> dict[str, Any]:
    return {"score": _finite(row[report]), "step": row["step"], "seconds": row["seconds"]}


def _mean(values: Sequence[float | None]) -> float | None:
    """The mean; None if a value is missing, for a mean over the rest would flatter. Equal integers stay an integer."""
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        return None
    return known[0] if all(value == known[0] for value in known) else statistics.fmean(known)


def _timing(own: Sequence[RunRecord]) -> dict[str, Any]:
    """Seconds per step: medians of each kind of step, weighted by how often the kind occurs.

    A median shrugs off the steps in which the machine did something else; weighting keeps the mean over a period.
    """
    rows = [row for run in own for row in run.log if row["step"] > WARM_UP_STEPS and row["kind"] != "skipped"]
    rows = rows or [row for run in own for row in run.log if row["kind"] != "skipped"]
    kinds = sorted({row["kind"] for row in rows})
    optimizer = {kind: statistics.median(r["optimizer_seconds"] for r in rows if r["kind"] == kind) for kind in kinds}
    step = {kind: statistics.median(r["seconds"] for r in rows if r["kind"] == kind) for kind in kinds}
    share = {kind: sum(r["kind"] == kind for r in rows) / len(rows) for kind in kinds}
    optimizer_mean = sum(share[kind] * optimizer[kind] for kind in kinds) if rows else None
    step_mean = sum(share[kind] * step[kind] for kind in kinds) if rows else None
    return {
        "optimizer_seconds_per_step": {
            "mean": optimizer_mean,
            "refresh": optimizer.get("refresh"),
            "row": optimizer.get("row"),
        },
        "step_seconds": step_mean,
        "optimizer_share": optimizer_mean / step_mean if optimizer_mean is not None and step_mean else None,
        "num_skipped": sum(row["kind"] == "skipped" for run in own for row in run.log),
    }


def _add_gains(entries: dict[str, dict[str, Any]]) -> None:
    """`gain_over_adamw` for each of the four numbers: 1 - score / AdamW's, paired by seed, the mean over the seeds."""
    if BASELINE not in entries:
        return
    for entry in entries.values():
        for metric, baseline in ((entry, entries[BASELINE]), (entry["val_loss"], entries[BASELINE]["val_loss"])):
            metric["gain_over_adamw"] = {kind: _paired_gain(metric[kind], baseline[kind]) for kind in KINDS}


def _paired_gain(point: Row, baseline: Row) -> float | None:
    base = {p["seed"]: p["score"] for p in baseline["per_seed"]}
    pairs = [(p["score"], base.get(p["seed"])) for p in point["per_seed"]]
    return _mean([1 - own / other if own is not None and other else None for own, other in pairs])


def _is_finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _finite(value: Any) -> float | None:
    return value if _is_finite(value) else None


def _between(left: Any, right: Any, share: float) -> float | None:
    a, b = _finite(left), _finite(right)
    return None if a is None or b is None else a + share * (b - a)
