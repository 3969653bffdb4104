"""Parts that pages of a comparison and of a run have in common: images, a switch between steps, lists of settings."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .markup import Markup, join, tag

_PNG = b"\x89PNG\r\n\x1a\n"


def image(path: Path | None, description: str) -> Markup:
    """A PNG file as an `<img>` with its data inside, or a sentence where there is none to show."""
    data = path.read_bytes() if path is not None and path.exists() else b""
    if not data:
        return tag("p", "No samples at this step.", class_="empty")
    if not data.startswith(_PNG) or len(data) < 24:
        return tag("p", "This file of samples isn’t a PNG image.", class_="empty")
    width, height = int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")
    source = "data:image/png;base64," + base64.b64encode(data).decode("ascii")
    return tag("img", src=source, alt=description, width=width, height=height, decoding="async")


def step_panels(panels: Mapping[int, Sequence[Markup]]) -> Markup:
    """One panel per step; radio buttons choose it by CSS alone, the last one at first."""
    if not panels:
        return tag("p", "No sample grids were written.", class_="empty")
    inputs, labels, bodies, rules = [], [], [], []
    for index, (step, figures) in enumerate(panels.items()):
        radio = f"sample-{index}"
        inputs.append(
            tag("input", type="radio", name="sample", id=radio, class_="vh", checked=index == len(panels) - 1,
                aria_label=f"Samples at step {step}")
        )  # fmt: skip
        labels.append(tag("label", f"{step:,}", for_=radio))
        bodies.append(tag("div", *figures, class_="panel"))
        rules.append(
            f"#{radio}:checked~.panels>.panel:nth-child({index + 1}){{display:grid}}"
            f"#{radio}:checked~.switch>label:nth-of-type({index + 1}){{background:var(--ink);color:var(--paper)}}"
            f"#{radio}:focus-visible~.switch>label:nth-of-type({index + 1})"
            "{outline:2px solid var(--focus);outline-offset:2px}"
        )
    switch = tag("div", tag("span", "Step"), *labels, class_="switch")
    return join([tag("style", Markup("".join(rules))), *inputs, switch, tag("div", *bodies, class_="panels")])


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested settings as dotted keys and readable values."""
    flat: dict[str, str] = {}
    for part, value in values.items():
        name = f"{prefix}{part}"
        if isinstance(value, Mapping):
            flat.update(flatten(value, name + "."))
        else:
            flat[name] = readable(value)
    return flat


def readable(value: object) -> str:
    """A JSON value as a person would write it."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return ", ".join(f"({readable(v)})" if isinstance(v, (list, tuple)) else readable(v) for v in value)
    return str(value)


def pairs(values: Mapping[str, str]) -> Markup:
    """Names and values, in as many columns as there is room for."""
    rows = [tag("div", tag("dt", key), tag("dd", value)) for key, value in values.items()]
    return tag("dl", *rows, class_="pairs") if rows else tag("p", "Nothing recorded.", class_="empty")
