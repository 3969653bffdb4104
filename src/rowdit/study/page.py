"""The figures of a study, as SVG files for documents and together on one page, `OUT/study.html`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rowdit.study.cases import HEADLINE, Case, Study
from rowdit.study.figures import Figure, Line, draw
from rowdit.study.headline import OPTIMIZERS, Run, headline_runs
from rowdit.study.headline_numbers import CaseNumbers, headline_numbers
from rowdit.study.report.markup import Markup, join, tag
from rowdit.study.run import SHOWN, by_name, read_rows, seeds_line
from rowdit.study.staging import Rows, selecting_score
from rowdit.study.statistics import mean_interval
from rowdit.train.log import write_bytes

STYLE = """
body { font: 16px/1.5 sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222; background: #fff }
table { border-collapse: collapse; margin: 1rem 0; font-size: .85rem }
td, th { padding: .25rem .75rem; text-align: right; border-bottom: 1px solid #ddd }
td:first-child, th:first-child { text-align: left }
svg { max-width: 100%; height: auto }
"""


def write_page(study: Study, out: Path) -> Path:
    """Makes `OUT/figures/*.svg` and `OUT/study.html` from the records.

    Raises:
        ConfigError: `out` holds no finished run.
    """
    rows = by_name(read_rows(out))
    body: list[Markup] = [tag("h1", "Study"), tag("p", INTRODUCTION)]
    for key, figure in figures(study, rows):
        text = draw(figure)
        write_bytes(out / "figures" / f"{key}.svg", text.encode())
        body.append(Markup(text))
    for case in study.cases:
        body.append(_table(study, case, rows))
    head = tag("head", tag("meta", charset="utf-8"), tag("title", "Study"), tag("style", Markup(STYLE)))
    page = "<!doctype html>\n" + tag("html", head, tag("body", join(body, "\n")), lang="en") + "\n"
    write_bytes(out / "study.html", page.encode())
    return out / "study.html"


INTRODUCTION = (
    "Scores: lower is better. Points are means over seeds, bars 95 % intervals by Student's t. The best step is chosen "
    "on one set of samples and scored on another."
)


def figures(study: Study, rows: Rows) -> Iterator[tuple[str, Figure]]:
    """File name and figure: curves of each case, the trend over size, tuning, and each further question."""
    runs = headline_runs(study, rows)
    for case in study.cases:
        own = [run for run in runs if (run["dataset"], run["size"]) == (case.dataset, case.size)]
        if own:
            for what, name in (("curve", "score"), ("loss_curve", "loss at fixed (t, noise)")):
                title = f"{case.dataset}, {case.size}: {name} on {len({run['seed'] for run in own})} seeds"
                yield f"{case.name}-{name.split()[0]}", Figure(title, "step", name, _curves(own, what), log_y=True)
        lines = tuple(_tuning_lines(study, case, rows))
        if lines:
            title = f"{case.dataset}, {case.size}: learning rates, one seed"
            yield f"{case.name}-tuning", Figure(title, "lr", "score at the last step", lines, log_x=True, log_y=True)
    if runs:
        yield from _trends(headline_numbers(runs))


def _curves(runs: Sequence[Run], what: str) -> tuple[Line, ...]:
    lines = []
    for name in OPTIMIZERS:
        own = [run for run in runs if run["optimizer"] == name]
        if own:
            steps = [row[0] for row in own[0][what]]
            columns = [[_number(run[what][k][-1]) for run in own] for k in range(len(steps))]
            lines.append(_line(name, steps, columns))
    return tuple(lines)


def _tuning_lines(study: Study, case: Case, rows: Rows) -> Iterator[Line]:
    """The grid of learning rates at an entry's starting setting, of the headline's entries."""
    for label in study.labels_of(case):
        if study.entries[label].question != HEADLINE:
            continue
        keys = list(study.entries[label].axes)
        own = [row for row in rows.values() if _is_tuning(row, study, case, label)]
        start = [row["grid"].get(key) for row in own[:1] for key in keys]
        found: dict[float, list[float]] = {}
        for r in own:
            if [r["grid"].get(key) for key in keys] == start:
                found.setdefault(r["settings"]["lr"], []).append(selecting_score(r))
        means = ((lr, sum(values) / len(values)) for lr, values in found.items())
        points = sorted((lr, value) for lr, value in means if math.isfinite(value))
        if points:
            yield Line(label, tuple(lr for lr, _ in points), tuple(value for _, value in points))


def _is_tuning(row: Any, study: Study, case: Case, label: str) -> bool:
    return (row.get("case"), row["label"]) == (case.name, label) and row["seed"] in study.tuning_seeds


def _trends(numbers: Sequence[CaseNumbers]) -> Iterator[tuple[str, Figure]]:
    """Differences over model size, a line a data set and pair."""
    for metric in ("best", "final"):
        lines = []
        for dataset in dict.fromkeys(case.dataset for case in numbers):
            own = [case for case in numbers if case.dataset == dataset]
            for pair in (("muon", "adamw"), ("periodic", "adamw"), ("periodic", "muon")):
                known = [case for case in own if pair in case.differences]
                intervals = [case.differences[pair][metric] for case in known]
                if intervals:
                    x = tuple(float(case.num_parameters) for case in known)
                    values = tuple(tuple(100 * getattr(i, end) for i in intervals) for end in ("mean", "low", "high"))
                    lines.append(Line(f"{dataset}: {pair[0]} vs {pair[1]}", x, *values))
        title = f"{metric.capitalize()} score, paired differences in per cent"
        yield f"trend-{metric}", Figure(title, "parameters", "per cent", tuple(lines), log_x=True)


def _line(label: str, x: Sequence[float], columns: Sequence[Sequence[float]]) -> Line:
    intervals = [mean_interval(column) for column in columns]
    ends = (tuple(i.low for i in intervals), tuple(i.high for i in intervals))
    return Line(label, tuple(float(v) for v in x), tuple(i.mean for i in intervals), *ends)


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _table(study: Study, case: Case, rows: Rows) -> Markup:
    head = tag("tr", *(tag("th", name) for name in ("optimizer", *SHOWN)))
    lines = [(label, seeds_line(study, case, label, rows)) for label in study.labels_of(case)]
    body = [tag("tr", *(tag("td", cell) for cell in (label, *line))) for label, line in lines if line]
    return join([tag("h2", f"{case.dataset}, {case.size}"), tag("table", head, *body)])
