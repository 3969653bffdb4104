"""What every page is: one HTML file with style and script inside, sections, and curves against steps or time.

It makes no request (a content security policy forbids any), opens from a file, follows the viewer's light or dark
setting, and reads without scripts.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from importlib import resources

from .markup import Markup, join, tag


def document(title: str, *body: Markup) -> str:
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
        tag("title", title),
        tag("style", Markup(style)),
    )
    whole = tag("body", *body, tag("script", Markup(script)))
    return "<!doctype html>\n" + tag("html", head, "\n", whole, lang="en") + "\n"


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath("assets").joinpath(name).read_text(encoding="utf-8")


def navigation(sections: Mapping[str, str]) -> Markup:
    """Links to the sections, whose titles are given by key."""
    links = (tag("a", title, href=f"#{key}") for key, title in sections.items())
    return tag("nav", *links, aria_label="Sections")


def section(key: str, title: str, intro: str, *content: object) -> Markup:
    """A section with a heading, a sentence under it, and what it holds."""
    heading = tag("h2", title, id=f"{key}-title")
    return tag("section", heading, tag("p", intro), *content, id=key, aria_labelledby=f"{key}-title")


def axis_switch(by_step: Sequence[Markup], by_time: Sequence[Markup]) -> Markup:
    """Both versions of the curves; two radio buttons, by CSS alone, say which one shows."""

    def button(axis: str, label: str, checked: bool) -> Markup:
        return tag(
            "input", type="radio", name="axis", id=f"axis-{axis}", class_="vh", checked=checked, aria_label=label
        )

    return join(
        [
            button("step", "Against steps", True),
            button("time", "Against training time", False),
            tag(
                "div",
                tag("span", "Against"),
                tag("label", "steps", for_="axis-step"),
                tag("label", "training time", for_="axis-time"),
                class_="switch",
            ),
            tag("div", *by_step, class_="charts by-step"),
            tag("div", *by_time, class_="charts by-time"),
        ]
    )
