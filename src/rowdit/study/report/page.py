"""The page that a comparison ends with. Equal folders give equal pages, byte for byte."""

from __future__ import annotations

from pathlib import Path

from rowdit.train.log import write_bytes

from . import curves, sections, tables, verdict
from .charts import render
from .data import Study, read_study
from .markup import Markup, join, tag
from .shell import axis_switch, document, navigation, section


def write_comparison_report(out_dir: Path) -> Path:
    """Writes `out_dir/report.html` from what `rowdit compare` left in `out_dir`.

    Args:
        out_dir: folder with `summary.json` and `runs/<optimizer>-seed<k>/` (see `data.read_study`).

    Returns:
        The page's path. An earlier page is replaced only when the new one is complete.

    Raises:
        StudyError: a file or key is missing or malformed; the message names it.
        OSError: the page can't be written; nothing is left of the attempt.
    """
    out_dir = Path(out_dir)
    page = out_dir / "report.html"
    text = render_report(read_study(out_dir))
    write_bytes(page, text.encode("utf-8"))
    return page


def render_report(study: Study) -> str:
    """The whole page as text."""
    title = f"{verdict.headline(study)} · {study.recipe}"
    return document(title, _top(study), _main(study), _footer(study))


_SECTIONS = {
    "numbers": "Four numbers",
    "curves": "Curves",
    "cost": "Cost of a step",
    "samples": "Samples",
    "settings": "Settings",
    "again": "Run it again",
}


def _section(key: str, intro: str, *content: object) -> Markup:
    return section(key, _SECTIONS[key], intro, *content)


def _top(study: Study) -> Markup:
    seeds = "1 seed" if study.num_seeds == 1 else f"{study.num_seeds} seeds"
    return tag(
        "header",
        tag("p", f"Comparison of optimizers · {study.recipe} · {seeds}", class_="eyebrow"),
        tag("h1", verdict.headline(study)),
        tag("p", " ".join(verdict.beside(study)), class_="lede"),
        tag("p", verdict.how_scored(study), class_="about"),
        verdict.cards(study),
        navigation(_SECTIONS),
        class_="top",
    )


def _definitions(study: Study) -> str:
    """What the fixed step and the fixed time are, in the words of the summary."""
    definitions = study.summary.get("definitions")
    if not isinstance(definitions, dict):
        return "The fixed step and the fixed time are ones that all optimizers reached."
    named = {"Fixed step": "at_fixed_step", "Fixed time": "at_fixed_time"}
    return " ".join(f"{title}: {definitions[key]}." for title, key in named.items() if key in definitions)


def _curves(study: Study) -> Markup:
    """Every curve against steps and against time, and the numbers behind them."""

    def charts(axis: curves.Axis) -> list[Markup]:
        makers = (curves.score_chart, curves.val_loss_chart, curves.train_loss_chart)
        return [render(make(study, axis)) for make in makers]

    return join([axis_switch(charts("step"), charts("seconds")), tables.evaluations_table(study)])


def _main(study: Study) -> Markup:
    return tag(
        "main",
        _section(
            "numbers",
            "A best checkpoint alone can flatter, so here are four. " + _definitions(study),
            tables.numbers_table(study),
        ),
        _section(
            "curves",
            "Time is active training time: evaluation, sampling and saving don’t count. Point at a chart, or focus it "
            "and use the arrow keys, to read its values.",
            _curves(study),
        ),
        _section(
            "cost",
            "Row steps only normalise the rows of the momentum; full steps orthogonalise whole matrices. What that "
            "saves in all depends on the optimizer’s share of a step." + sections.savings(study),
            tag("div", render(curves.optimizer_time_chart(study)), sections.step_bars(study), class_="charts"),
        ),
        _section(
            "samples",
            "The same labels and the same noise for every optimizer and step, from the averaged weights"
            + (f"; seed {study.results[0].seeds[0]} of {study.num_seeds}." if study.num_seeds > 1 else "."),
            sections.samples(study),
        ),
        _section(
            "settings",
            "What differs between the optimizers; all else is shared.",
            sections.settings(study),
            sections.fingerprint(study),
        ),
        _section(
            "again",
            "This repeats the comparison. Weights, data order and noise depend on the seeds alone; times depend on the "
            "machine.",
            tag("pre", tag("code", sections.command(study))),
        ),
    )


def _footer(study: Study) -> Markup:
    return tag(
        "footer", "Made by rowdit compare. The numbers behind this page are in summary.json and runs/ beside it."
    )
