"""What a headline says, computed from its runs alone: means with intervals, paired differences, times, and the goals.

Differences are relative and paired by seed: (a / b - 1), negative where a is better. The share of Muon's gain that the
periodic method keeps is (AdamW - periodic) / (AdamW - Muon), a ratio of means over seeds.

Time to Muon's best: the step at which the straight lines between the periodic run's reporting scores first reach the
best of Muon's run of that seed, over Muon's own step to its best, times the price of a step: periodic over Muon. It has
two prices: the one measured on these models, and the paper's, whose step takes 15.7 to 24.3 % less at K = 3.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rowdit.study.headline import OPTIMIZERS, Run
from rowdit.study.statistics import Interval, mean_interval, ratio_of_means, relative_difference
from rowdit.study.summary import time_to_reach

PAPER_STEP_PRICES = (1 - 0.157, 1 - 0.243)  # arXiv:2608.20818, abstract: end-to-end step time, periodic over Muon
METRICS = ("best", "final", "loss")
PAIRS = (("muon", "adamw"), ("periodic", "adamw"), ("periodic", "muon"))


@dataclass(frozen=True)
class TimeToBest:
    """Periodic over Muon, to the best of Muon's run of the same seed.

    Attributes:
        steps: ratio of steps, over the seeds that got there; None if none did.
        num_reached, num_seeds: how many of the seeds' periodic runs reach it at all.
        measured: ratio of times at the measured price of a step; None if that isn't known.
        paper: the same at the paper's prices, from its least to its largest saving.
    """

    steps: Interval | None
    num_reached: int
    num_seeds: int
    measured: Interval | None
    paper: tuple[Interval, Interval] | None


@dataclass(frozen=True)
class CaseNumbers:
    """The numbers of one size on one data set. `scores[optimizer][metric]`, `differences[a, b][metric]`."""

    dataset: str
    size: str
    num_parameters: int
    seeds: tuple[int, ...]
    settings: Mapping[str, Mapping[str, Any]]
    scores: Mapping[str, Mapping[str, Interval]]
    differences: Mapping[tuple[str, str], Mapping[str, Interval]]
    kept: Mapping[str, Interval]
    time: TimeToBest | None


def headline_numbers(
    runs: Sequence[Run], step_prices: Mapping[tuple[str, str], float] | None = None
) -> list[CaseNumbers]:
    """The numbers of every case, smallest model first within a data set, data sets in the order of the runs.

    Args:
        runs: from `read_headline`.
        step_prices: (dataset, size) -> measured seconds of a periodic step over a Muon step.
    """
    cases: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        cases.setdefault((run["dataset"], run["size"]), []).append(run)
    datasets = list(dict.fromkeys(dataset for dataset, _ in cases))
    numbers = [_case_numbers(own, (step_prices or {}).get(key)) for key, own in cases.items()]
    return sorted(numbers, key=lambda case: (datasets.index(case.dataset), case.num_parameters))


def _case_numbers(runs: Sequence[Run], step_price: float | None) -> CaseNumbers:
    by_optimizer = {
        name: sorted((run for run in runs if run["optimizer"] == name), key=lambda run: run["seed"])
        for name in OPTIMIZERS
        if any(run["optimizer"] == name for run in runs)
    }
    values = {name: {m: [_value(run, m) for run in own] for m in METRICS} for name, own in by_optimizer.items()}
    kept = {}
    if len(by_optimizer) == len(OPTIMIZERS):
        for metric in METRICS:
            adamw, muon, periodic = (values[name][metric] for name in OPTIMIZERS)
            kept[metric] = ratio_of_means(_gains(adamw, periodic), _gains(adamw, muon))
    first = runs[0]
    return CaseNumbers(
        dataset=first["dataset"],
        size=first["size"],
        num_parameters=first["num_parameters"],
        seeds=tuple(run["seed"] for run in next(iter(by_optimizer.values()))),
        settings={name: own[0]["settings"] for name, own in by_optimizer.items()},
        scores={name: {m: mean_interval(v) for m, v in own.items()} for name, own in values.items()},
        differences={
            (a, b): {m: relative_difference(values[a][m], values[b][m]) for m in METRICS}
            for a, b in PAIRS
            if a in values and b in values
        },
        kept=kept,
        time=_time_to_best(by_optimizer, step_price),
    )


def _gains(baseline: Sequence[float], values: Sequence[float]) -> list[float]:
    return [a - b for a, b in zip(baseline, values, strict=True)]


def _value(run: Run, metric: str) -> float:
    value = run["loss_curve"][-1][1] if metric == "loss" else run[metric]
    return math.nan if value is None else value


def _time_to_best(by_optimizer: Mapping[str, Sequence[Run]], step_price: float | None) -> TimeToBest | None:
    if "muon" not in by_optimizer or "periodic" not in by_optimizer:
        return None
    pairs = list(zip(by_optimizer["periodic"], by_optimizer["muon"], strict=True))
    ratios = [ratio for ratio in (steps_ratio(periodic, muon) for periodic, muon in pairs) if ratio is not None]
    if not ratios:
        return TimeToBest(None, 0, len(pairs), None, None)

    def priced(price: float) -> Interval:
        return mean_interval([ratio * price for ratio in ratios])

    return TimeToBest(
        steps=mean_interval(ratios),
        num_reached=len(ratios),
        num_seeds=len(pairs),
        measured=None if step_price is None else priced(step_price),
        paper=(priced(PAPER_STEP_PRICES[0]), priced(PAPER_STEP_PRICES[1])),
    )


def steps_ratio(run: Run, target: Run) -> float | None:
    """Steps of `run` to the best of `target`, over `target`'s own; None if it never gets there."""
    if target["best"] is None:
        return None
    rows = [{"seconds": step, "score": math.nan if report is None else report} for step, _, report in run["curve"]]
    steps = time_to_reach(rows, "score", target["best"])
    return None if steps is None else steps / target["steps_to_best"]


# ---------------------------------------------------------------------------------------------------------------------
# the goals


@dataclass(frozen=True)
class Goal:
    """One goal in one case. `met` is None where it can't be judged (one seed, or not all of them got there)."""

    name: str
    wanted: str
    got: Interval | None
    met: bool | None


def goals(case: CaseNumbers) -> list[Goal]:
    """The goals that the project set itself, judged. Where a goal speaks of a bound, the 95 % interval's is taken."""
    found = []

    def add(name: str, wanted: str, got: Interval | None, met: Any) -> None:
        known = got is not None and math.isfinite(got.mean)
        found.append(Goal(name, wanted, got, bool(met(got)) if known else None))

    def difference(a: str, b: str, metric: str) -> Interval | None:
        return case.differences.get((a, b), {}).get(metric)

    add("Muon against AdamW, best", "<= -12.9 %", difference("muon", "adamw", "best"), lambda d: d.mean <= -0.129)
    for metric in ("best", "final"):
        got = difference("periodic", "adamw", metric)
        add(f"periodic against AdamW, {metric}", "<= -12.9 %", got, lambda d: d.mean <= -0.129)
    kept = case.kept.get("loss")
    name = "share of Muon's gain kept, final loss"
    add(name, ">= 0.97, low >= 0.90", kept, lambda k: k.mean >= 0.97 and k.low >= 0.9)
    best = difference("periodic", "muon", "best")
    add("periodic against Muon, best", "<= 0.5 %, high <= 3 %", best, lambda d: d.mean <= 0.005 and d.high <= 0.03)
    final = difference("periodic", "muon", "final")
    add("periodic against Muon, final", "<= 0.5 %", final, lambda d: d.mean <= 0.005)
    return found + (_time_goals(case.time) if case.time else [])


def _time_goals(time: TimeToBest) -> list[Goal]:
    found = []
    for price, got in (("measured", time.measured), ("the paper's", time.paper[0] if time.paper else None)):
        name, wanted = f"time to Muon's best, at {price} price of a step", "<= -33.7 %"
        if time.num_reached < time.num_seeds:
            found.append(Goal(f"{name}; {time.num_reached} of {time.num_seeds} get there", wanted, None, False))
            continue
        saved = None if got is None else Interval(got.mean - 1, got.low - 1, got.high - 1, got.num)
        found.append(Goal(name, wanted, saved, None if saved is None else saved.mean <= -0.337))
    return found
