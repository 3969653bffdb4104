"""The study's tables as Markdown, for documents: `tables.md` beside the records, made from them alone."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from rowdit.study.cases import HEADLINE, Case, Study
from rowdit.study.headline import OPTIMIZERS, headline_runs
from rowdit.study.headline_numbers import CaseNumbers, goals, headline_numbers
from rowdit.study.headline_table import PAIR_NAMES, TIMES_NAME, percent, read_step_prices, score, setting
from rowdit.study.run import seeds_line
from rowdit.study.staging import Rows, selecting_score, tuning
from rowdit.train.log import write_bytes

TABLES_NAME = "tables.md"
_MET = {True: "yes", False: "**no**", None: "not known"}


def write_markdown(study: Study, out: Path, rows: Rows) -> Path:
    """Writes `tables.md` into a study's folder.

    Args:
        study: what was wanted.
        out: the folder; a `times.json` in it prices the steps.
        rows: what has run.
    """
    prices = read_step_prices(out / TIMES_NAME)
    numbers: dict[tuple[str, str], list[tuple[str, CaseNumbers]]] = {}
    for label in study.contenders():
        runs = headline_runs(study, rows, label)
        for case in headline_numbers(runs, prices if label == study.periodic else {}):
            if "periodic" in case.scores:
                numbers.setdefault((case.dataset, case.size), []).append((label, case))
    lines = [
        "# The study's tables",
        "",
        "Made by `rowdit study` from the records beside this file. Scores are Frechet distances, lower is better:",
        "means over the seeds with 95 % intervals by Student's t; loss of held-out images at fixed (t, noise), last",
        "step; differences are paired by seed, negative is better; shares with Fieller's interval. While tuning: the",
        "selecting score at the last step, a number a tuning seed; what was chosen is in bold.",
    ]
    for place in study.cases:
        parts = list(_case(study, place, rows, numbers.get((place.dataset, place.size), [])))
        if parts:
            lines += ["", f"## {place.name}: {place.dataset}, {place.size}", *parts]
    write_bytes(out / TABLES_NAME, ("\n".join(lines) + "\n").encode())
    return out / TABLES_NAME


def _case(study: Study, case: Case, rows: Rows, numbers: list[tuple[str, CaseNumbers]]) -> Iterator[str]:
    for label, own in numbers:
        yield from _headline(label, own)
    for question in study.questions():
        labels = [label for label in study.labels_of(case) if study.entries[label].question == question]
        known = [(label, cells) for label in labels if (cells := seeds_line(study, case, label, rows))]
        if known and question != HEADLINE:
            yield from ("", f"### {case.name}, {question}", "")
            yield from _table("", "best", "final", "final loss", "seeds", "setting")
            for label, cells in known:
                yield _row(label, *cells[:5])
        tried = [line for label in labels for line in _tuning(study, case, label, rows)]
        if tried:
            yield from ("", f"### {case.name}, {question}: tuning", "")
            yield from _table("", "setting", "score", "loss")
            yield from tried


def _headline(label: str, case: CaseNumbers) -> Iterator[str]:
    """The tables of one case, with the entry `label` as the periodic method."""
    num = len(case.seeds)
    yield from ("", f"### {label} beside Muon and AdamW", "")
    yield from (f"{case.num_parameters:,} parameters, {num} seed{'s' if num > 1 else ''}.", "")
    yield from _table("", "setting", "best", "final", "final loss")
    names = {name: label if name == "periodic" else name for name in OPTIMIZERS}
    for name in OPTIMIZERS:
        if name in case.scores:
            own = case.scores[name]
            cells = (score(own["best"], 1), score(own["final"], 1), score(own["loss"], 4))
            yield _row(names[name], setting(case.settings[name]), *cells)
    yield ""
    yield from _table("paired differences", "best", "final", "final loss")
    for pair, name in PAIR_NAMES.items():
        if pair in case.differences:
            shown = name.replace("periodic", label)
            yield _row(shown, *(percent(case.differences[pair][metric]) for metric in ("best", "final", "loss")))
    if case.kept:
        shares = (score(case.kept[metric], 2) for metric in ("best", "final", "loss"))
        yield _row(f"share of Muon's gain that {label} keeps", *shares)
    yield ""
    yield from _table("goal", "wanted", "got", "met")
    for goal in goals(case):
        share = goal.name.startswith("share")
        got = "-" if goal.got is None else score(goal.got, 2) if share else percent(goal.got)
        yield _row(goal.name.replace("periodic", label), goal.wanted, got, _MET[goal.met])


def _tuning(study: Study, case: Case, label: str, rows: Rows) -> Iterator[str]:
    """A line a point that was tried, by learning rate; with what differs from the entry's start."""
    seeds = study.tuning_seeds_of(case, label)
    choice = tuning(study, case, label, rows).choice
    chosen = setting(choice.comparison.optimizers[label].settings()) if choice else None
    points: dict[str, tuple[float, dict[int, tuple[float, float]], bool]] = {}
    for row in rows.values():
        if (row["case"], row["label"]) == (case.name, label) and row["seed"] in seeds:
            text = setting(row["settings"])
            found = points.setdefault(text, (row["settings"]["lr"], {}, text == chosen))
            found[1][row["seed"]] = (selecting_score(row), float(row["evaluations"][-1]["val_loss"]))
    for text, (_, values, is_chosen) in sorted(points.items(), key=lambda item: (item[1][0], item[0])):
        scores = ", ".join(_number(values[seed][0], 0) for seed in sorted(values))
        losses = ", ".join(_number(values[seed][1], 4) for seed in sorted(values))
        yield _row(label, text, f"**{scores}**" if is_chosen else scores, losses)


def _table(*head: str) -> Iterator[str]:
    yield _row(*head)
    yield "|" + "---|" * len(head)


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _number(value: float, digits: int) -> str:
    return f"{value:.{digits}f}" if math.isfinite(value) else "diverged"
