"""Where a run's time goes: seconds by phase of the mean step, of all steps and of each kind."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from .formatting import MISSING, duration, percent
from .markup import Markup, tag
from .run_data import PHASES, TrainingRun

_KIND_LABEL = {"refresh": "Full steps", "row": "Row steps", "mixed": "Mixed steps", "adamw": "AdamW steps"}
_PARTS = {  # key: (label, what it is, class of its colour); parts of the optimizer are the coloured ones
    "data": ("Data", "waiting for the batch", "g0"),
    "forward": ("Forward", "", "g1"),
    "backward": ("Backward", "", "g2"),
    "gather": ("Gather", "optimizer; packing and sending", "s1"),
    "newton_schulz": ("Newton-Schulz", "optimizer", "s4"),
    "row_step": ("Row step", "optimizer", "s2"),
    "other": ("AdamW and other", "optimizer", "s3"),
    "ema": ("EMA", "averaged weights", "g3"),
    "rest": ("Rest", "noise, clipping and so on", "g4"),
}
SHOWN = 5e-4  # of a step: less is noise of the clock, "0.0 %"
OPTIMIZER_PARTS = ("gather", "newton_schulz", "row_step", "other")


@dataclass(frozen=True)
class Breakdown:
    """The mean step of one kind. `parts` are seconds by key of `_PARTS`, and sum to `seconds`."""

    label: str
    num_steps: int
    seconds: float
    parts: Mapping[str, float]

    @property
    def optimizer(self) -> float:
        """Seconds of the optimizer."""
        return sum(self.parts[key] for key in OPTIMIZER_PARTS)

    @property
    def share(self) -> float:
        """The optimizer's share of the step, in [0, 1]."""
        return self.optimizer / self.seconds if self.seconds > 0 else 0.0


def breakdowns(run: TrainingRun) -> list[Breakdown]:
    """All steps first, then each kind if there are several. A skipped step counts in the first and is no kind."""
    kinds = run.log["kind"]
    if not kinds:
        return []
    found = [kind for kind in (*_KIND_LABEL, *dict.fromkeys(kinds)) if kind in kinds and kind != "skipped"]
    found = list(dict.fromkeys(found))
    every = [_breakdown(run, "All steps", range(len(kinds)))]
    if len(found) < 2:
        return every
    return every + [
        _breakdown(run, _KIND_LABEL.get(kind, kind), [i for i, other in enumerate(kinds) if other == kind])
        for kind in found
    ]


def _breakdown(run: TrainingRun, label: str, rows: range | list[int]) -> Breakdown:
    log = run.log
    means = {phase: statistics.fmean(log[phase][i] for i in rows) for phase in PHASES}
    seconds = statistics.fmean(log["step_seconds"][i] for i in rows)
    inside = means["gather"] + means["newton_schulz"] + means["row_step"]
    outside = means["data"] + means["forward"] + means["backward"] + means["ema"] + means["optimizer"]
    # Clocks of parts and whole are read apart, so a remainder can come out a little below zero.
    other, rest = max(means["optimizer"] - inside, 0.0), max(seconds - outside, 0.0)
    parts = {key: {"other": other, "rest": rest}.get(key, means.get(key, 0.0)) for key in _PARTS}
    return Breakdown(label, len(rows), seconds, parts)


def phase_bars(found: list[Breakdown]) -> Markup:
    """One stacked bar per kind of step, as long as the step takes; the optimizer's parts are the coloured ones."""
    caption = tag(
        "figcaption", tag("strong", "Where a step’s time goes"), tag("span", "means; coloured: the optimizer’s parts")
    )
    longest = max((b.seconds for b in found), default=0.0)
    if longest <= 0:
        return tag("figure", caption, tag("p", "No finite value to draw.", class_="empty"), class_="chart filled")
    used = [key for key in _PARTS if any(b.parts[key] > 0 for b in found)]
    legend = tag("ul", *(tag("li", _key(key), tag("span", _PARTS[key][0])) for key in used), class_="legend")
    items = []
    for b in found:
        segments = [
            tag("b", style=f"width:{100 * b.parts[key] / longest:.2f}%", class_=_PARTS[key][2], title=_PARTS[key][0])
            for key in used
        ]
        items.append(
            tag(
                "li",
                tag("span", f"{b.label} ({b.num_steps:,})"),
                tag("div", *segments, class_="split stack", aria_hidden="true"),
                tag("small", f"{duration(b.seconds)}, of which the optimizer {duration(b.optimizer)} "
                    f"({percent(100 * b.share)})"),
            )
        )  # fmt: skip
    return tag("figure", caption, legend, tag("ul", *items, class_="splits"), class_="chart filled")


def _key(key: str) -> Markup:
    return tag("i", class_=f"key {_PARTS[key][2]}", aria_hidden="true")


def phase_table(found: list[Breakdown]) -> Markup | None:
    """The same as numbers: seconds and share of the step, by phase and kind of step."""
    if not found:
        return None

    def row(name: Markup | str, hint: str, seconds: list[float]) -> Markup:
        cells = [
            tag("td", tag("b", duration(s)), tag("span", percent(100 * s / b.seconds), class_="change"))
            if b.seconds > 0 and s / b.seconds >= SHOWN
            else tag("td", MISSING)
            for s, b in zip(seconds, found, strict=True)
        ]
        return tag("tr", tag("th", name, tag("small", hint) if hint else None, scope="row"), *cells)

    rows = [row("Whole step", "", [b.seconds for b in found]), row("Optimizer", "", [b.optimizer for b in found])]
    for key, (label, hint, _) in _PARTS.items():
        if any(b.parts[key] > 0 for b in found):
            rows.append(row(tag("span", _key(key), label), hint, [b.parts[key] for b in found]))
    heads = [tag("th", b.label, tag("small", f"{b.num_steps:,}"), scope="col") for b in found]
    table = tag(
        "table",
        tag("caption", "Mean seconds of a step by phase, and its share of the step", class_="vh"),
        tag("thead", tag("tr", tag("td"), *heads)),
        tag("tbody", *rows),
        class_="numbers phases",
        style=f"--columns:{len(found)}",
    )
    return tag("div", table, class_="scroll", tabindex="0", role="region", aria_label="Time by phase")
