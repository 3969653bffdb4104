"""An HTML page read back as its elements, for tests of what writes one."""

from __future__ import annotations

import json
from html.parser import HTMLParser

VOID = {"br", "img", "input", "link", "meta"}


class Page(HTMLParser):
    """Elements in document order, each with tag, attributes, its own text and that of what is inside, and its parents.
    Raises where an element isn't closed in order."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[Element] = []
        self._open: list[Element] = []
        self.feed(html)
        self.close()
        assert not self._open, f"not closed: {self._open[-1].tag}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = Element(tag, dict(attrs), list(self._open))
        self.elements.append(element)
        if tag not in VOID:
            self._open.append(element)

    def handle_endtag(self, tag: str) -> None:
        assert self._open and self._open[-1].tag == tag, f"</{tag}> closes <{self._open[-1].tag}>"
        self._open.pop()

    def handle_data(self, data: str) -> None:
        for element in self._open:
            element.text += data

    def all(self, tag: str, class_: str = "", inside: Element | None = None) -> list[Element]:
        return [
            e
            for e in self.elements
            if e.tag == tag
            and class_ in [*(e.attributes.get("class") or "").split(), ""]
            and (inside is None or inside in e.parents)
        ]

    def one(self, tag: str, class_: str = "", inside: Element | None = None) -> Element:
        found = self.all(tag, class_, inside)
        assert len(found) == 1, f"{len(found)} <{tag} class={class_}>"
        return found[0]

    def by_id(self, key: str) -> Element:
        (element,) = (e for e in self.elements if e.attributes.get("id") == key)
        return element

    def visible_text(self) -> str:
        return self.one("body").text.replace(self.one("script").text, "")


class Element:
    def __init__(self, tag: str, attributes: dict[str, str | None], parents: list[Element]) -> None:
        self.tag, self.attributes, self.parents, self.text = tag, attributes, parents, ""


def charts_of(page: Page) -> dict[str, dict]:
    """What the hover box of each chart knows, by the chart's key."""
    charts = {}
    for plot in page.all("div", "plot"):
        title_id = page.one("title", inside=plot).attributes["id"]
        charts[title_id.removesuffix("-title")] = json.loads(plot.attributes["data-chart"])
    return charts
