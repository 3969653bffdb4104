"""The page that a comparison ends with: one HTML file with everything in it.

It makes no request (a content security policy forbids any), opens from a file, follows the viewer's light or dark
setting, and reads without scripts. Equal folders give equal pages, byte for byte.
"""

from __future__ import annotations

import base64
import hashlib
from importlib import resources
from pathlib import Path

from rowdit.train.log import write_bytes

from . import curves, sections, tables, verdict
from .charts import render
from .data import Study, StudyError, read_study
from .markup import Markup, join, tag

__all__ = ["StudyError", "write_report"]


def write_report(out_dir: Path) -> Path:
    """Writes `out_dir/report.html` from what `rowdit compare` left in `out_dir`.

    Args:
        out_dir: folder with `summary.json` and `runs/<optimizer>-seed<k>/` (see `report_data.read_study`).

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
    style, script = _asset("report.css"), _asset("report.js")
    script_hash = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{script_hash}'"
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("link", rel="icon", href="data:,"),
        tag("title", f"{verdict.headline(study)} · {study.recipe}"),
        tag("style", Markup(style)),
    )
    body = tag("body", _top(study), _main(study), _footer(study), tag("script", Markup(script)))
    return "<!doctype html>\n" + tag("html", head, "\n", body, lang="en") + "\n"


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath("assets").joinpath(name).read_text(encoding="utf-8")


_SECTIONS = {
    "numbers": "Four numbers",
    "curves": "Curves",
    "cost": "Cost of a step",
    "samples": "Samples",
    "settings": "Settings",
    "again": "Run it again",
}


def _section(key: str, intro: str, *content: object) -> Markup:
    heading = tag("h2", _SECTIONS[key], id=f"{key}-title")
    return tag("section", heading, tag("p", intro), *content, id=key, aria_labelledby=f"{key}-title")


def _top(study: Study) -> Markup:
    seeds = "1 seed" if study.num_seeds == 1 else f"{study.num_seeds} seeds"
    return tag(
        "header",
        tag("p", f"Comparison of optimizers · {study.recipe} · {seeds}", class_="eyebrow"),
        tag("h1", verdict.headline(study)),
        tag("p", " ".join(verdict.beside(study)), class_="lede"),
        tag("p", verdict.how_scored(study), class_="about"),
        verdict.cards(study),
        tag("nav", *(tag("a", title, href=f"#{key}") for key, title in _SECTIONS.items()), aria_label="Sections"),
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
    """Both versions of the curves; two radio buttons, by CSS alone, say which one shows."""

    def charts(axis: curves.Axis) -> list[Markup]:
        makers = (curves.score_chart, curves.val_loss_chart, curves.train_loss_chart)
        return [render(make(study, axis)) for make in makers]

    return join(
        [
            tag(
                "input",
                type="radio",
                name="axis",
                id="axis-step",
                class_="vh",
                checked=True,
                aria_label="Against steps",
            ),
            tag("input", type="radio", name="axis", id="axis-time", class_="vh", aria_label="Against training time"),
            tag(
                "div",
                tag("span", "Against"),
                tag("label", "steps", for_="axis-step"),
                tag("label", "training time", for_="axis-time"),
                class_="switch",
            ),
            tag("div", *charts("step"), class_="charts by-step"),
            tag("div", *charts("seconds"), class_="charts by-time"),
            tables.evaluations_table(study),
        ]
    )


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
