"""The headline as tables in the terminal. They fit 80 columns, for terminals and logs alike."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from rowdit.study.headline import OPTIMIZERS, read_headline
from rowdit.study.headline_numbers import CaseNumbers, goals, headline_numbers
from rowdit.study.statistics import Interval
from rowdit.study.table import new_table
from rowdit.train.config import ConfigError

TIMES_NAME = "times.json"
PAIR_NAMES = {
    ("muon", "adamw"): "Muon against AdamW",
    ("periodic", "adamw"): "periodic against AdamW",
    ("periodic", "muon"): "periodic against Muon",
}


def print_headline(path: Path, console: Console) -> None:
    """Reads and checks a `headline.json`, computes its numbers and prints them.

    Args:
        path: the file. The measured price of a step is taken from `times.json` beside it, if there is one.
        console: where to print.

    Raises:
        ConfigError: see `read_headline`; or a `times.json` that can't be read.
    """
    runs = read_headline(path)
    cases = headline_numbers(runs, read_step_prices(path.with_name(TIMES_NAME)))
    name = runs[0]["score_name"]
    console.print(
        f"{name}, lower is better. Mean over seeds [95 % interval]. best: the step is chosen on one set of samples and "
        "scored on another. loss: held-out images at fixed (t, noise), last step. Differences are paired by seed; "
        "negative is better.",
        highlight=False,
    )
    for case in cases:
        for table in (_scores(case), _differences(case), _goals(case)):
            console.print(table)


def read_step_prices(path: Path) -> dict[tuple[str, str], float]:
    """(dataset, size) -> measured seconds of a periodic step over a Muon step; empty if there is no file.

    Raises:
        ConfigError: it isn't what `rowdit study --measure-times` writes.
    """
    if not path.exists():
        return {}
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))["times"]
        seconds = {(row["dataset"], row["size"], row["optimizer"]): float(row["step_seconds"]) for row in rows}
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} isn't a file of measured times ({error!r}); make it with --measure-times") from None
    cases = {(dataset, size) for dataset, size, _ in seconds}
    return {
        case: seconds[*case, "periodic"] / seconds[*case, "muon"]
        for case in cases
        if (*case, "periodic") in seconds and (*case, "muon") in seconds
    }


def _scores(case: CaseNumbers) -> Table:
    num = len(case.seeds)
    title = f"{case.dataset}, {case.size}: {case.num_parameters:,} parameters, {num} seed{'s' if num > 1 else ''}"
    table = new_table(title, "best", "final", "loss", "setting", wrap=True)
    for name in OPTIMIZERS:
        if name in case.scores:
            own = case.scores[name]
            numbers = (score(own["best"], 1), score(own["final"], 1), score(own["loss"], 4))
            table.add_row(name, *numbers, setting(case.settings[name]))
    return table


def _differences(case: CaseNumbers) -> Table:
    table = new_table("paired differences", "best", "final", "loss", first="", wrap=True)
    for pair, name in PAIR_NAMES.items():
        if pair in case.differences:
            own = case.differences[pair]
            table.add_row(name, percent(own["best"]), percent(own["final"]), percent(own["loss"]))
    if case.kept:
        table.add_row("share of Muon's gain", *(score(case.kept[metric], 2) for metric in ("best", "final", "loss")))
    return table


def _goals(case: CaseNumbers) -> Table:
    table = new_table("goals", "wanted", "got", "met", first="", wrap=True)
    for goal in goals(case):
        share = goal.name.startswith("share")
        got = "-" if goal.got is None else score(goal.got, 2) if share else percent(goal.got)
        table.add_row(goal.name, goal.wanted, got, {True: "yes", False: "no", None: "-"}[goal.met])
    return table


def setting(settings: Mapping[str, Any]) -> str:
    """The settings that tuning may have changed, shortly."""
    keys = {"lr": "lr", "betas": "betas", "adamw_lr": "adamw", "momentum": "mu", "row_scale": "scale"}
    shown = []
    for key, name in keys.items():
        value = settings.get(key)
        if value is None or (key == "betas" and "momentum" in settings):
            continue
        shown.append(f"{name} {'/'.join(f'{v:g}' for v in value) if isinstance(value, Sequence) else f'{value:g}'}")
    return ", ".join(shown)


def score(interval: Interval, digits: int) -> str:
    """`12.3 [11.8, 12.9]`."""
    return _format(interval, lambda value: f"{value:.{digits}f}")


def percent(interval: Interval) -> str:
    """`-12.3 % [-13.0, -11.6]`."""
    return _format(interval, lambda value: f"{100 * value:+.1f}", " %")


def _format(interval: Interval, form: Any, unit: str = "") -> str:
    if not math.isfinite(interval.mean):
        return "-"
    text = form(interval.mean) + unit
    if math.isnan(interval.low):
        return text
    if math.isinf(interval.low):
        return f"{text} [unbounded]"
    return f"{text} [{form(interval.low)}, {form(interval.high)}]"
