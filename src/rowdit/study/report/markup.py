"""HTML and SVG written from Python, escaped by construction.

Text becomes markup in one place, `tag`, which escapes every child and attribute that isn't `Markup` already. So a name
that comes from a file can't become an element, whatever it holds.
"""

from __future__ import annotations

import html

_VOID = frozenset({"br", "img", "input", "link", "meta"})


class Markup(str):
    """A string that is HTML already; everything else is text and gets escaped."""

    __slots__ = ()


def text(value: object) -> Markup:
    """`value` as markup: escaped, unless it is `Markup`."""
    return value if isinstance(value, Markup) else Markup(html.escape(str(value), quote=True))


def join(children: object, separator: str = "") -> Markup:
    """One markup from an iterable of children."""
    return Markup(separator.join(text(child) for child in children))  # type: ignore[attr-defined]


def tag(name: str, /, *children: object, **attributes: object) -> Markup:
    """One element.

    Args:
        name: element name.
        children: markup as it is, anything else as escaped text; None is left out.
        attributes: names with `_` for `-`, a trailing `_` dropped (`class_`, `for_`); None and False leave the
            attribute out, True writes it bare.

    Example:
        >>> tag("a", "1 < 2", href="#x", class_="quiet")
        '<a href="#x" class="quiet">1 &lt; 2</a>'
    """
    parts = [name]
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        key = key.rstrip("_").replace("_", "-")
        parts.append(key if value is True else f'{key}="{text(value)}"')
    head = "<" + " ".join(parts) + ">"
    if name in _VOID:
        return Markup(head)
    body = "".join(text(child) for child in children if child is not None)
    return Markup(f"{head}{body}</{name}>")
