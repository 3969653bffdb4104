"""The tables of numbers: four of score and of validation loss, the cost of a step, and every evaluation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rowdit.study.summary import BASELINE

from .data import KINDS, Point, Result, Study
from .formatting import MISSING, duration, number, percent, percent_change, relative
from .markup import Markup, tag
from .names import key, short_name, where

_KIND_LABEL = {"best": "Best", "at_fixed_step": "Fixed step", "at_fixed_time": "Fixed time", "final": "Final"}


class _Cell(NamedTuple):
    """`value` decides which cell of a row is marked as the lowest; `change` is the fraction from the baseline."""

    shown: str
    value: float = math.nan
    change: float = math.nan
    small: str | Markup = ""


def _row(label: str, cells: Sequence[_Cell], hint: str = "") -> Markup:
    finite = [cell.value for cell in cells if math.isfinite(cell.value)]  # a NaN isn't ranked
    lowest = min(finite) if len(finite) > 1 else math.nan
    out = [tag("th", label, tag("small", hint) if hint else None, scope="row")]
    for cell in cells:
        leads = cell.value == lowest
        out.append(
            tag(
                "td",
                tag("b", cell.shown),
                tag("span", "lowest", class_="vh") if leads else None,
                tag("span", percent_change(cell.change), class_="change") if math.isfinite(cell.change) else None,
                tag("small", cell.small) if cell.small else None,
                class_="leads" if leads else None,
            )
        )
    return tag("tr", *out)


def _points_rows(study: Study, points: Sequence[Mapping[str, Point]]) -> list[Markup]:
    def cell(result: Result, point: Point) -> _Cell:
        if not math.isfinite(point.value):
            return _Cell("diverged" if result.diverged else MISSING)
        change = math.nan if result.name == BASELINE else point.change
        return _Cell(number(point.value), point.value, change, where(point))

    return [
        _row(_KIND_LABEL[kind], [cell(result, p[kind]) for result, p in zip(study.results, points, strict=True)])
        for kind in KINDS
    ]


def _seconds_row(study: Study, label: str, values: Sequence[float | None], hint: str = "", missing: str = "") -> Markup:
    """A row of durations, each compared with the baseline's."""
    names = [result.name for result in study.results]
    base = values[names.index(BASELINE)] if BASELINE in names else None

    def cell(name: str, value: float | None) -> _Cell:
        if value is None or not math.isfinite(value):
            return _Cell(missing or MISSING)
        change = relative(value, base) if name != BASELINE else math.nan
        return _Cell(duration(value), value, change)

    return _row(label, [cell(name, value) for name, value in zip(names, values, strict=True)], hint)


def numbers_table(study: Study) -> Markup:
    """The four numbers of score and validation loss, the time to AdamW's best, and the cost of the optimizer."""
    results = study.results
    score = _points_rows(study, [result.score for result in results])
    val_loss = _points_rows(study, [result.val_loss for result in results])
    if study.baseline:
        label = "Time to AdamW’s best"
        score.append(_seconds_row(study, label, [r.time_to_adamw_best for r in results], missing="never"))
        val_loss.append(_seconds_row(study, label, [r.val_time_to_adamw_best for r in results], missing="never"))
    shares = [r.optimizer_share for r in results]
    cost = [
        _seconds_row(study, "Whole step", [r.step_seconds for r in results]),
        _seconds_row(study, "Optimizer", [r.optimizer_seconds["mean"] for r in results], "mean over a period"),
        _row("Full step", [_Cell(duration(r.optimizer_seconds["refresh"])) for r in results], "of the optimizer"),
        _row("Row step", [_Cell(duration(r.optimizer_seconds["row"])) for r in results], "of the optimizer"),
        _row("Share", [_Cell(percent(100 * s) if math.isfinite(s) else MISSING) for s in shares], "of the optimizer"),
    ]
    groups = []
    for title, rows in ((f"Score ({study.score_name})", score), ("Validation loss", val_loss), ("Time per step", cost)):
        head = tag("tr", tag("th", title, scope="rowgroup", colspan=len(results) + 1), class_="group")
        groups.append(tag("tbody", head, *rows))
    caption = "Lower is better; the lowest of each row is marked. Changes are from AdamW."
    heads = [tag("th", key(study, r.name), tag("span", short_name(r.name)), scope="col") for r in results]
    table = tag(
        "table",
        tag("caption", caption, class_="vh"),
        tag("thead", tag("tr", tag("td"), *heads)),
        *groups,
        class_="numbers",
        style=f"--columns:{len(results)}",
    )
    return tag("div", table, class_="scroll", tabindex="0", role="region", aria_label="The four numbers")


def evaluations_table(study: Study) -> Markup:
    """Every evaluation of every run, folded away: what the curves show, as numbers."""
    columns = ("score_report", "kid", "accuracy", "val_loss")
    rows = []
    for result in study.results:
        for run in study.runs[result.name]:
            values = run.evaluations
            name = short_name(result.name) + (f", seed {run.seed}" if study.num_seeds > 1 else "")
            for index, step in enumerate(values["step"]):
                numbers = (number(values[column][index]) for column in columns)
                cells = (f"{step:,.0f}", duration(values["seconds"][index]), *numbers)
                rows.append(tag("tr", tag("th", name, scope="row"), *(tag("td", cell) for cell in cells)))
    titles = ("", "step", "time", "score", "kernel distance", "class accuracy", "validation loss")
    head = tag("thead", tag("tr", *(tag("th", title, scope="col") if title else tag("td") for title in titles)))
    table = tag("table", head, tag("tbody", *rows), class_="settings", style=f"--columns:{len(titles) - 1}")
    scroll = tag("div", table, class_="scroll", tabindex="0", role="region", aria_label="All evaluations")
    return tag("details", tag("summary", "All evaluations as numbers"), scroll)
