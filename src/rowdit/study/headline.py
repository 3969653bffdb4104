"""`headline.json`: the runs that a study's headline stands on, and nothing that is computed over them.

A list with one object a run:

    dataset, size       what was trained; num_parameters of the model
    optimizer           "adamw", "muon" or "periodic"
    seed, lr, settings  settings: all that the optimizer reads, lr too
    score_name          what the scores are; lower is better
    curve               rows [step, score on the samples that select, score on the samples that report]
    loss_curve          rows [step, loss of held-out images at fixed t and noise]
    best                the reporting score of the row with the smallest selecting score
    steps_to_best       that row's step
    final               the reporting score of the last row

Each optimizer has exactly one setting for a size and data set, and the same seeds as the others there. `read_headline`
checks all of it, so a table can't be printed from a file in which a best was picked otherwise. A score that isn't
finite, of a run that diverged, is null; a best then comes from the rows before.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from rowdit.models.dit import DiT, DiTConfig
from rowdit.study.cases import Study
from rowdit.study.evaluator import SCORE_NAME
from rowdit.study.staging import Rows, seed_task, tuning
from rowdit.study.summary import best_row
from rowdit.train.config import ConfigError, OptimizerConfig

Run = dict[str, Any]

OPTIMIZERS = ("adamw", "muon", "periodic")
KEYS = (
    *("dataset", "size", "num_parameters", "optimizer", "seed", "lr", "settings", "score_name"),
    *("best", "final", "steps_to_best", "curve", "loss_curve"),
)


def headline_runs(study: Study, rows: Rows, periodic: str | None = None) -> list[Run]:
    """The headline of what has run: for each case the seeds that all three optimizers have finished.

    Args:
        study: with entries "adamw" and "muon", and one for the periodic method.
        rows: finished runs by name.
        periodic: label of the entry that stands for the periodic method; None takes the study's.
    """
    labels = {"adamw": "adamw", "muon": "muon", "periodic": periodic or study.periodic}
    labels = {name: label for name, label in labels.items() if label in study.entries}
    runs = []
    for case in study.cases:
        own = {name: label for name, label in labels.items() if case in study.cases_of(label)}
        choices = {name: (label, tuning(study, case, label, rows).choice) for name, label in own.items()}
        for seed in study.seeds:
            found = {}
            for name, (label, choice) in choices.items():
                row = rows.get(seed_task(case, choice, label, seed).name) if choice else None
                if row is not None:
                    found[name] = row
            if own and len(found) == len(own):
                place = (case.dataset, case.size, count_parameters(case.comparison.model))
                runs += [run_of_row(*place, name, row) for name, row in found.items()]
    return runs


def run_of_row(dataset: str, size: str, num_parameters: int, label: str, row: Mapping[str, Any]) -> Run:
    """One object of `headline.json` from a finished run's row."""
    evaluations = row["evaluations"]
    curve = [[e["step"], _finite(e["score_select"]), _finite(e["score_report"])] for e in evaluations]
    best, step = best_of(curve)
    return {
        "dataset": dataset,
        "size": size,
        "num_parameters": num_parameters,
        "optimizer": label,
        "seed": row["seed"],
        "lr": row["settings"]["lr"],
        "settings": _complete(row["settings"]),
        "score_name": SCORE_NAME,
        "best": best,
        "final": curve[-1][2],
        "steps_to_best": step,
        "curve": curve,
        "loss_curve": [[e["step"], _finite(e["val_loss"])] for e in evaluations],
    }


def _complete(settings: Mapping[str, Any]) -> dict[str, Any]:
    """With the defaults of settings that didn't exist yet when the run was made: else it would seem to have others."""
    return {**OptimizerConfig(name=settings["name"]).settings(), **settings}


def best_of(curve: Sequence[Sequence[Any]]) -> tuple[float | None, int | None]:
    """The reporting score where the selecting score is smallest, and its step; of equal ones the earliest."""
    row = best_row([{"step": s, "select": a, "report": b} for s, a, b in curve], "select")
    return (row["report"], row["step"]) if row else (None, None)


def count_parameters(model: DiTConfig) -> int:
    """Trainable parameters of the model; nothing is allocated."""
    with torch.device("meta"):
        return sum(p.numel() for p in DiT(model).parameters() if p.requires_grad)


def read_headline(path: Path) -> list[Run]:
    """The runs of a `headline.json`, checked.

    Raises:
        ConfigError: not such a file, or a run that contradicts itself or the others; the run is named.
    """
    try:
        runs = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"can't read {path}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{path} isn't JSON: {error}") from None
    if not isinstance(runs, list) or not runs:
        raise ConfigError(f"{path}: must be a list of runs with at least one")
    for i, run in enumerate(runs):
        problem = _problem_of_run(run)
        if problem:
            raise ConfigError(f"{path}, run {i} ({_name(run)}): {problem}")
    problem = _problem_between(runs)
    if problem:
        raise ConfigError(f"{path}: {problem}")
    return runs


def _problem_of_run(run: Any) -> str:
    if not isinstance(run, dict):
        return "isn't an object"
    missing = [key for key in KEYS if key not in run]
    if missing:
        return f"lacks {', '.join(missing)}"
    if run["optimizer"] not in OPTIMIZERS:
        return f"optimizer = {run['optimizer']!r}: must be one of {', '.join(OPTIMIZERS)}"
    if run["settings"].get("lr") != run["lr"]:
        return f"lr = {run['lr']}, but settings say {run['settings'].get('lr')}"
    steps = [row[0] for row in run["curve"]]
    if not steps or steps != sorted(set(steps)) or any(len(row) != 3 for row in run["curve"]):
        return "curve: must be rows [step, selecting score, reporting score] whose steps rise"
    if steps != [row[0] for row in run["loss_curve"]]:
        return "loss_curve: must have the steps of curve"
    best, step = best_of(run["curve"])
    if (run["best"], run["steps_to_best"]) != (best, step):
        return f"best = {run['best']} at step {run['steps_to_best']}, but the selecting score picks {best} at {step}"
    if run["final"] != run["curve"][-1][2]:
        return f"final = {run['final']}, but the last row reports {run['curve'][-1][2]}"
    return ""


def _problem_between(runs: Sequence[Run]) -> str:
    seen: dict[tuple[Any, ...], Any] = {}

    def same(what: str, key: tuple[Any, ...], value: Any) -> str:
        before = seen.setdefault((what, *key), value)
        return (
            "" if before == value else f"{', '.join(map(str, key))}: {what} is {before} in one run, {value} in another"
        )

    seeds: dict[tuple[str, str], dict[str, list[int]]] = {}
    for run in runs:
        case = (run["dataset"], run["size"])
        problem = (
            same("score_name", (), run["score_name"])
            or same("num_parameters", case, run["num_parameters"])
            or same("the grid of steps", case, [row[0] for row in run["curve"]])
            or same("settings", (*case, run["optimizer"]), run["settings"])
        )
        if problem:
            return problem
        seeds.setdefault(case, {}).setdefault(run["optimizer"], []).append(run["seed"])
    for case, by_optimizer in seeds.items():
        lists = [sorted(values) for values in by_optimizer.values()]
        if any(values != sorted(set(values)) or values != lists[0] for values in lists):
            return f"{', '.join(case)}: every optimizer needs the same seeds, each once, not {by_optimizer}"
    return ""


def _name(run: Any) -> str:
    keys = ("dataset", "size", "optimizer", "seed")
    return ", ".join(str(run.get(key)) for key in keys) if isinstance(run, dict) else "?"


def _finite(value: Any) -> float | None:
    """A number of a row; NaN and infinity stand there as strings."""
    number = float(value)
    return number if math.isfinite(number) else None
