"""A finished comparison read back from its folder, checked once, as frozen values.

Keys that the report doesn't know are kept or ignored; one that it needs and doesn't find is an error with file and key.
A number that isn't finite is no error: runs diverge, and the report has to say so.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rowdit.study.comparison import run_name
from rowdit.study.summary import BASELINE

from .reading import StudyError, Table, as_number, find_samples, read_json, read_rows

KINDS = ("best", "at_fixed_step", "at_fixed_time", "final")  # in the order of the page
_RERUN = "finish or repeat the comparison with `rowdit compare` and the same `--out`"


@dataclass(frozen=True)
class Point:
    """A score or a loss with its step and seconds of active training; NaN for what isn't known.

    Attributes:
        change: from AdamW's value, as a fraction: -0.1 is 10 % lower. NaN without AdamW.
        by_seed: the value of each seed; `value` is their mean.
    """

    value: float
    step: float
    seconds: float
    change: float = math.nan
    by_seed: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Result:
    """One optimizer's entry of the summary.

    Attributes:
        score, val_loss: a `Point` for each of `KINDS`; lower is better.
        time_to_adamw_best: seconds of active training until the score reached AdamW's best; None if it never did.
        val_time_to_adamw_best: the same for the validation loss.
        optimizer_seconds: per step: "mean", "refresh" and "row"; NaN for a kind that this optimizer hasn't.
        step_seconds: whole training step.
        optimizer_share: optimizer's part of a step, in [0, 1].
        diverged: seeds of the runs that ended without finite numbers, each with what is known of why.
    """

    name: str
    score: Mapping[str, Point]
    val_loss: Mapping[str, Point]
    time_to_adamw_best: float | None
    val_time_to_adamw_best: float | None
    optimizer_seconds: Mapping[str, float]
    step_seconds: float
    optimizer_share: float
    lr: float
    settings: Mapping[str, Any]
    seeds: tuple[int, ...]
    fingerprint: Mapping[str, Any]
    diverged: Mapping[int, str]


@dataclass(frozen=True)
class Run:
    """One training.

    Attributes:
        log: columns "step", "seconds" (of active training so far), "loss", "optimizer_seconds", "kind": equally long.
        evaluations: columns "step", "seconds" and the measures.
        samples: sample grids by step.
    """

    optimizer: str
    seed: int
    config: Mapping[str, Any]
    log: Mapping[str, list[Any]]
    evaluations: Mapping[str, list[float]]
    samples: Mapping[int, Path]

    @property
    def diverged_at(self) -> int | None:
        """First step of the non-finite losses or scores that the run ends with; None if it ends with finite ones."""
        tails = (_bad_tail(self.log, "loss"), _bad_tail(self.evaluations, "score_report"))
        return min((step for step in tails if step is not None), default=None)


def _bad_tail(table: Mapping[str, list[Any]], column: str) -> int | None:
    """First step of the rows at the end of a table whose `column` isn't finite; None if the last one is."""
    first = None
    for step, value in zip(reversed(table["step"]), reversed(table[column]), strict=True):
        if math.isfinite(value):
            break
        first = int(step)
    return first


@dataclass(frozen=True)
class Study:
    """The whole comparison. `floor` is the score of real images against real ones at the same number of images."""

    folder: Path
    score_name: str
    recipe: str
    machine: Mapping[str, Any]
    floor: float
    results: tuple[Result, ...]
    runs: Mapping[str, tuple[Run, ...]]
    summary: Mapping[str, Any]

    @property
    def baseline(self) -> Result | None:
        """AdamW's result, if it took part."""
        return next((result for result in self.results if result.name == BASELINE), None)

    @property
    def num_seeds(self) -> int:
        return max(len(result.seeds) for result in self.results)


def _table(path: Path) -> Table:
    return Table(read_json(path, _RERUN), str(path), _RERUN)


def _rows(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        raise StudyError(f"{path} doesn't exist; {_RERUN}")
    return read_rows(path, _RERUN)


def _columns(rows: list[dict[str, Any]], names: tuple[str, ...], path: Path) -> dict[str, list[Any]]:
    for row in rows:
        for name in names:
            if name not in row:
                raise StudyError(f"{path}: the row of step {row['step']} has no key {name!r}; {_RERUN}")
    return {name: [row[name] if name == "kind" else as_number(row[name]) for row in rows] for name in names}


def _read_run(folder: Path, optimizer: str, seed: int) -> Run:
    log_path, evaluations_path = folder / "log.jsonl", folder / "evaluations.jsonl"
    log = _columns(_rows(log_path), ("step", "loss", "seconds", "optimizer_seconds", "kind"), log_path)
    log["seconds"] = list(itertools.accumulate(log["seconds"]))  # a row holds the seconds of its own step
    evaluations = _columns(
        _rows(evaluations_path),
        ("step", "seconds", "score_select", "score_report", "kid", "val_loss", "accuracy"),
        evaluations_path,
    )
    config = _table(folder / "config.json").values
    return Run(optimizer, seed, config, log, evaluations, find_samples(folder))


def _read_runs(folder: Path, name: str, table: Table) -> tuple[Run, ...]:
    if not name or name in (".", "..") or "/" in name or "\\" in name:
        raise StudyError(f"{table.where}: {name!r} can't be the name of a run's folder; {_RERUN}")
    seeds = table.get("seeds")
    if not isinstance(seeds, list) or not seeds or not all(isinstance(seed, int) for seed in seeds):
        raise StudyError(f"{table.where}: 'seeds' should be a list of at least one integer, but is {seeds!r}; {_RERUN}")
    return tuple(_read_run(folder / "runs" / run_name(name, seed), name, seed) for seed in seeds)


def _points(table: Table) -> dict[str, Point]:
    gains = table.values.get("gain_over_adamw") or {}
    points = {}
    for kind in KINDS:
        entry = table.table(kind)
        points[kind] = Point(
            entry.number("score"),
            entry.number("step"),
            entry.number("seconds"),
            change=-as_number(gains.get(kind)),
            by_seed={int(p["seed"]): as_number(p["score"]) for p in entry.values.get("per_seed", [])},
        )
    return points


def _seconds_or_none(value: object) -> float | None:
    seconds = as_number(value)
    return seconds if math.isfinite(seconds) else None


def _read_result(name: str, table: Table, runs: tuple[Run, ...]) -> Result:
    """An entry of the summary. `runs` are those of its seeds; a run that ends non-finite counts as diverged even where
    the summary doesn't say so."""
    val_loss = table.table("val_loss")
    cost = table.table("optimizer_seconds_per_step")
    diverged = {run.seed: f"not finite from step {run.diverged_at:,}" for run in runs if run.diverged_at is not None}
    diverged |= {int(seed): str(reason) for seed, reason in (table.values.get("diverged") or {}).items()}
    return Result(
        name=name,
        score=_points(table),
        val_loss=_points(val_loss),
        time_to_adamw_best=_seconds_or_none(table.get("time_to_adamw_best")),
        val_time_to_adamw_best=_seconds_or_none(val_loss.values.get("time_to_adamw_best")),
        optimizer_seconds={
            "mean": cost.number("mean"),
            "refresh": as_number(cost.values.get("refresh")),
            "row": as_number(cost.values.get("row")),
        },
        step_seconds=table.number("step_seconds"),
        optimizer_share=table.number("optimizer_share"),
        lr=table.number("lr"),
        settings=table.table("settings").values,
        seeds=tuple(run.seed for run in runs),
        fingerprint=table.table("fingerprint").values,
        diverged=diverged,
    )


def read_study(folder: Path) -> Study:
    """Reads `folder` as `rowdit compare` leaves it.

    Args:
        folder: with `summary.json` and `runs/OPTIMIZER-seedK/`, each with `config.json`, `log.jsonl`,
            `evaluations.jsonl` and `samples/step_XXXXXX.png`.

    Raises:
        StudyError: a file or key is missing or malformed; the message names it and says what to do.
    """
    path = folder / "summary.json"
    summary = _table(path)
    optimizers = summary.table("optimizers")
    if not optimizers.values:
        raise StudyError(f"{path}: 'optimizers' is empty; {_RERUN}")
    runs = {name: _read_runs(folder, name, optimizers.table(name)) for name in optimizers.values}
    results = tuple(_read_result(name, optimizers.table(name), runs[name]) for name in runs)
    return Study(
        folder=folder,
        score_name=str(summary.get("score_name")),
        recipe=str(summary.get("recipe")),
        machine=summary.table("machine").values,
        floor=summary.number("floor"),
        results=results,
        runs=runs,
        summary=summary.values,
    )
