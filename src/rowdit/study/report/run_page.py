"""The page of one run of `rowdit train`, at any time of its life. Equal folders give equal pages, byte for byte."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from rowdit.evaluate.score import caution
from rowdit.train.log import write_bytes

from . import run_curves
from .charts import render
from .formatting import MISSING, duration, number, percent, tick
from .markup import Markup, join, tag
from .names import long_name
from .parts import flatten, image, pairs, step_panels
from .reading import as_number
from .run_data import TrainingRun, read_run
from .run_phases import Breakdown, breakdowns, phase_bars, phase_table
from .shell import axis_switch, document, navigation, section

MOST_GRIDS = 12  # sample grids on a page; a long run writes more than a browser likes to hold
MOST_SKIPPED = 50
_SECTIONS = {
    "curves": "Curves",
    "cost": "Cost of a step",
    "samples": "Samples",
    "settings": "Settings",
}


def write_run_report(folder: Path) -> Path:
    """Writes `folder/report.html` from what `rowdit train` has left in `folder` so far.

    Args:
        folder: with `config.json`; the records beside it are taken as far as they are there.

    Returns:
        The page's path. An earlier page is replaced only when the new one is complete.

    Raises:
        StudyError: a file or key is missing or malformed; the message names it.
        OSError: the page can't be written; nothing is left of the attempt.
    """
    page = folder / "report.html"
    write_bytes(page, render_run_report(read_run(folder)).encode("utf-8"))
    return page


def render_run_report(run: TrainingRun) -> str:
    """The whole page as text."""
    costs = breakdowns(run)
    footer = tag("footer", "Made by rowdit report. The numbers behind this page are in log.jsonl and "
                 "evaluations.jsonl beside it.")  # fmt: skip
    return document(f"{headline(run)} · {run.name}", _top(run, costs), _main(run, costs), footer)


# ------------------------------------------------------------------------------------------------------- how it stands
class _Best(NamedTuple):
    value: float
    step: float
    seconds: float


def _best(run: TrainingRun, column: str) -> _Best | None:
    """The lowest finite value of a measure, and where it was."""
    table = run.evaluations
    rows = zip(table.get(column, []), table["step"], table["seconds"], strict=False)
    return min((_Best(*row) for row in rows if math.isfinite(row[0])), default=None)


def headline(run: TrainingRun) -> str:
    """How far it came, and with what validation loss (training loss where none was measured)."""
    steps, total = f"{run.last_step:,}", f"{run.num_steps:,}" if run.num_steps else "an unknown number of"
    if run.status == "diverged":
        return f"Diverged after {steps} of {total} steps"
    last = next((v for v in reversed(run.evaluations.get("val_loss", [])) if math.isfinite(v)), math.nan)
    what = "validation loss" if math.isfinite(last) else "training loss"
    value = last if math.isfinite(last) else _last_loss(run)[0]
    with_loss = f", {what} {number(value)}" if math.isfinite(value) else ""
    if run.status == "finished":
        return f"Finished {steps} steps{with_loss}"
    return f"At step {steps} of {total}{with_loss}" if run.log["step"] else "No step yet"


def _last_loss(run: TrainingRun) -> tuple[float, int]:
    """Mean training loss of the last window, and the steps in it."""
    (_, _, means), size = run_curves.smoothed(run, "step", "loss")
    return (means[-1], round(size)) if means else (math.nan, 0)


def _standing(run: TrainingRun) -> Iterable[str]:
    """What a reader has to know beside the headline, a sentence each."""
    optimizer, lr = long_name(run.optimizer), as_number(run.setting("optimizer", "lr"))
    period, batch = run.setting("optimizer", "period"), as_number(run.setting("train", "batch_size"))
    with_period = f", period {period}" if run.optimizer == "periodic" and isinstance(period, int) else ""
    yield f"{optimizer}{with_period}, learning rate {_short(lr)}, {_short(batch)} images a step."
    if run.status == "unfinished":
        yield "It is on its way, or was interrupted; the same command of rowdit train goes on."
    if run.reason:
        yield f"Why it ended: {run.reason}."
    if num := len(run.skipped):
        steps = "1 step was" if num == 1 else f"{num:,} steps were"
        yield f"{steps} skipped, because the gradient norm wasn’t finite or was above the limit."
    if not run.evaluations["step"]:
        yield "Nothing was evaluated" + (" yet." if run.status == "unfinished" else ".")


def _short(value: float) -> str:
    return tick(value) if math.isfinite(value) else MISSING


def _card(title: str, big: str, note: str, where: str = "", bar: float = math.nan) -> Markup:
    fill = tag("b", style=f"width:{min(max(100 * bar, 0), 100):.1f}%", class_="s2")
    return tag(
        "li",
        tag("h3", title),
        tag("p", big, class_="big"),
        tag("p", note, class_="note"),
        tag("div", fill, class_="bar", aria_hidden="true") if math.isfinite(bar) else None,
        tag("p", where, class_="where") if where else None,
        class_="card",
    )


def _best_card(run: TrainingRun, title: str, column: str, what: str) -> Markup:
    best = _best(run, column)
    if best is None:
        return _card(title, MISSING, "none measured")
    return _card(title, number(best.value), what, f"step {best.step:,.0f} · {duration(best.seconds)}")


def _cards(run: TrainingRun, costs: list[Breakdown]) -> Markup:
    seconds = run.log["seconds"][-1] if run.log["seconds"] else math.nan
    total = run.num_steps
    loss, window = _last_loss(run)
    batch = as_number(run.setting("train", "batch_size"))
    whole = costs[0] if costs else None
    rate = batch / whole.seconds if whole and whole.seconds > 0 else math.nan
    return tag(
        "ul",
        _card(
            "Steps",
            f"{run.last_step:,}",
            f"of {total:,}" if total else "",
            duration(seconds) + " of training" if math.isfinite(seconds) else "",
            bar=run.last_step / total if total else math.nan,
        ),
        _card("Training loss", number(loss), f"mean of the last {window:,} steps" if window else "no step yet"),
        _best_card(run, "Validation loss", "val_loss", "the lowest"),
        _best_card(run, "Score", "score_report", "the lowest distance"),
        _card("Speed", number(rate, 3), "images per second", f"{duration(whole.seconds)} a step" if whole else ""),
        _card(
            "Optimizer",
            percent(100 * whole.share) if whole else MISSING,
            "of a step",
            f"{duration(whole.optimizer)} a step" if whole else "",
            bar=whole.share if whole else math.nan,
        ),
        class_="cards stats",
    )


def _top(run: TrainingRun, costs: list[Breakdown]) -> Markup:
    return tag(
        "header",
        tag("p", f"Training run · {run.name} · {run.status}", class_="eyebrow"),
        tag("h1", headline(run)),
        tag("p", " ".join(_standing(run)), class_="lede"),
        _cards(run, costs),
        navigation(_SECTIONS),
        class_="top",
    )


# ----------------------------------------------------------------------------------------------------------- sections
def _evaluations(run: TrainingRun) -> Markup | None:
    """Every evaluation, folded away: what the curves show, as numbers."""
    table = run.evaluations
    if not table["step"]:
        return None
    titles = {"val_loss": "validation loss", "score_report": "score", "kid": "kernel distance",
              "accuracy": "class accuracy", "evaluation_seconds": "evaluating took"}  # fmt: skip
    columns = {titles[key]: [number(v) for v in table[key]] for key in titles if key in table}
    if "evaluation_seconds" in table:
        columns[titles["evaluation_seconds"]] = [duration(v) for v in table["evaluation_seconds"]]
    columns |= {f"loss, t in {name.replace('-', ' to ')}": [number(v) for v in run.by_t[name]] for name in run.by_t}
    columns = {"time": [duration(v) for v in table["seconds"]], **columns}
    return _folded_table("All evaluations as numbers", [f"{step:,.0f}" for step in table["step"]], columns)


def _skipped(run: TrainingRun) -> Markup | None:
    """The last steps that were skipped, folded away."""
    rows = run.skipped[-MOST_SKIPPED:]
    if not rows:
        return None
    columns = {key: [_raw(run.log[key][i]) for i in rows] for key in ("loss", "grad_norm")}
    title = "Skipped steps" if len(rows) == len(run.skipped) else f"The last {len(rows)} of {len(run.skipped)} skipped"
    named = {"loss": columns["loss"], "gradient norm": columns["grad_norm"]}
    return _folded_table(title, [f"{run.log['step'][i]:,.0f}" for i in rows], named)


def _raw(value: float) -> str:
    return number(value) if math.isfinite(value) else "not finite"


def _folded_table(title: str, steps: list[str], columns: dict[str, list[str]]) -> Markup:
    head = tag("tr", tag("th", "step", scope="col"), *(tag("th", name, scope="col") for name in columns))
    rows = [
        tag("tr", tag("th", step, scope="row"), *(tag("td", values[i]) for values in columns.values()))
        for i, step in enumerate(steps)
    ]
    table = tag("table", tag("thead", head), tag("tbody", *rows), class_="settings wide",
                style=f"--columns:{len(columns)}")  # fmt: skip
    scroll = tag("div", table, class_="scroll", tabindex="0", role="region", aria_label=title)
    return tag("details", tag("summary", title), scroll)


def _samples(run: TrainingRun) -> Markup:
    """The grids over the steps, of a long run an even choice with the first and the last."""
    steps = _chosen(sorted(run.samples))
    return step_panels(
        {step: [tag("figure", image(run.samples[step], f"Grid of samples at step {step}"))] for step in steps}
    )


def _chosen(steps: list[int]) -> list[int]:
    if len(steps) <= MOST_GRIDS:
        return steps
    return [steps[round(i * (len(steps) - 1) / (MOST_GRIDS - 1))] for i in range(MOST_GRIDS)]


def _settings(run: TrainingRun) -> Markup:
    routing = None
    if run.routing:
        summary = tag("summary", "Which parameter goes to which algorithm")
        routing = tag("details", summary, tag("pre", run.routing, class_="table"))
    data = {"data": run.dataset} if run.dataset else {}
    return join(
        [
            tag("details", tag("summary", "The whole configuration"), pairs(flatten(run.config)), open=True),
            tag("details", tag("summary", "Fingerprint of the data and of the score"),
                pairs(data | flatten(run.fingerprint)), open=True),
            routing or "",
        ]
    )  # fmt: skip


def _main(run: TrainingRun, costs: list[Breakdown]) -> Markup:
    by_step, by_time = ([render(chart) for chart in run_curves.charts(run, axis)] for axis in ("step", "seconds"))
    num_grids, shown = len(run.samples), len(_chosen(sorted(run.samples)))
    return tag(
        "main",
        section(
            "curves",
            _SECTIONS["curves"],
            "Time is active training time: evaluation, sampling and saving don’t count. Point at a chart, or focus it "
            "and use the arrow keys, to read its values.",
            axis_switch(by_step, by_time),
            tag("p", f"Caution: {text}.", class_="warning") if (text := caution(run.fingerprint)) else None,
            _evaluations(run),
            _skipped(run),
        ),
        section(
            "cost",
            _SECTIONS["cost"],
            "Of the main rank. Full steps orthogonalise whole matrices; row steps only normalise the rows of the "
            "momentum. A gradient that travels during the backward pass counts there.",
            tag("div", render(run_curves.optimizer_time_chart(run)), phase_bars(costs), class_="charts"),
            phase_table(costs),
        ),
        section(
            "samples",
            _SECTIONS["samples"],
            "The same labels and the same noise at every step, from the averaged weights."
            + (f" {shown} of {num_grids} grids; all are in samples/." if shown < num_grids else ""),
            _samples(run),
        ),
        section("settings", _SECTIONS["settings"], "As they were resolved.", _settings(run)),
    )
