"""The other sections: where a step's time goes, sample grids, settings, the score's fingerprint, the command."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping

from .data import Study
from .formatting import MISSING, duration, number, percent, percent_change, relative
from .markup import Markup, join, tag
from .names import key, long_name, short_name, style
from .parts import flatten, image, pairs, readable, step_panels
from .reading import as_number


def savings(study: Study) -> str:
    """What row steps save against Muon, if both were compared: of the optimizer's time and of the whole step."""
    results = {result.name: result for result in study.results}
    if not {"muon", "periodic"} <= results.keys():
        return ""
    muon, periodic = results["muon"], results["periodic"]
    optimizer = relative(periodic.optimizer_seconds["mean"], muon.optimizer_seconds["mean"])
    step = relative(periodic.step_seconds, muon.step_seconds)
    if not (math.isfinite(optimizer) and math.isfinite(step)):
        return ""
    return f" Against Muon, here: optimizer {percent_change(optimizer)}, whole step {percent_change(step)}."


def step_bars(study: Study) -> Markup:
    """One bar per optimizer: what the whole step takes, and the optimizer's part of it."""
    longest = max((r.step_seconds for r in study.results if math.isfinite(r.step_seconds)), default=math.nan)
    items = []
    for result in study.results:
        total, mean = result.step_seconds, result.optimizer_seconds["mean"]
        if not (math.isfinite(total) and math.isfinite(mean) and total > 0):
            continue
        part = tag("b", style=f"width:{min(100 * mean / total, 100):.1f}%", class_=f"s{style(study, result.name)}")
        items.append(
            tag(
                "li",
                tag("span", short_name(result.name)),
                tag(
                    "div",
                    tag("div", part, style=f"width:{100 * total / longest:.1f}%"),
                    class_="split",
                    aria_hidden="true",
                ),
                tag(
                    "small",
                    f"{duration(total)}, of which the optimizer {duration(mean)} ({percent(100 * mean / total)})",
                ),
            )
        )
    caption = tag("figcaption", tag("strong", "Where a step’s time goes"), tag("span", "coloured: the optimizer"))
    body = tag("ul", *items, class_="splits") if items else tag("p", "No finite value to draw.", class_="empty")
    return tag("figure", caption, body, class_="chart filled")


def samples(study: Study) -> Markup:
    """Sample grids side by side, one panel per step."""
    grids = {result.name: study.runs[result.name][0].samples for result in study.results}
    panels = {
        step: [
            tag(
                "figure",
                tag("figcaption", key(study, name), long_name(name)),
                image(paths.get(step), f"Grid of samples of {long_name(name)} at step {step}"),
            )
            for name, paths in grids.items()
        ]
        for step in sorted(set().union(*grids.values()))
    }
    return step_panels(panels)


def comparison_table(study: Study, tables: Mapping[str, Mapping[str, str]]) -> tuple[Markup | None, dict[str, str]]:
    """What differs between optimizers as a table, and what is the same for all as pairs. Keys in their first order."""
    keys = list(dict.fromkeys(key for table in tables.values() for key in table))
    same = {
        key: next(iter(tables.values()))[key]
        for key in keys
        if all(key in table for table in tables.values()) and len({table[key] for table in tables.values()}) == 1
    }
    rows = [
        tag("tr", tag("th", key, scope="row"), *(tag("td", table.get(key, MISSING)) for table in tables.values()))
        for key in keys
        if key not in same
    ]
    if not rows:
        return None, same
    head = tag("tr", tag("td"), *(tag("th", key(study, name), short_name(name), scope="col") for name in tables))
    table = tag("table", tag("thead", head), tag("tbody", *rows), class_="settings", style=f"--columns:{len(tables)}")
    return tag("div", table, class_="scroll", tabindex="0", role="region", aria_label="Differences"), same


def settings(study: Study) -> Markup:
    """Settings: a table of what differs; everything that is the same for all folded away below it."""
    tables = {r.name: {"lr": readable(r.lr), **flatten(r.settings)} for r in study.results}
    if all(table.get("name") == name for name, table in tables.items()):  # says what the column's head says
        tables = {name: {k: v for k, v in table.items() if k != "name"} for name, table in tables.items()}
    differing, same = comparison_table(study, tables)
    shared_config = comparison_table(study, {r.name: flatten(study.runs[r.name][0].config) for r in study.results})[1]
    return join(
        [
            differing or tag("p", "No setting differs.", class_="empty"),
            tag("details", tag("summary", "Settings of the optimizer that are the same for all"), pairs(same)),
            tag(
                "details",
                tag("summary", "The whole configuration that is the same for all"),
                pairs(shared_config),
            ),
        ]
    )


def fingerprint(study: Study) -> Markup:
    """What the score depends on, and the machine; a warning where the fingerprints of the optimizers differ."""
    differing, same = comparison_table(study, {r.name: flatten(r.fingerprint) for r in study.results if r.fingerprint})
    warning = None
    if differing is not None:
        warning = join(
            [tag("p", "The fingerprints differ: these scores can’t be compared.", class_="warning"), differing]
        )
    return join(
        [
            warning or "",
            tag("details", tag("summary", "Fingerprint of the score"), pairs(same | _limits(study)), open=True),
            tag("details", tag("summary", "Machine and time"), pairs(flatten(study.machine) | _times(study))),
        ]
    )


def _limits(study: Study) -> dict[str, str]:
    """What the measures can reach on real images."""
    labels = {
        "floor": "floor",
        "kid_floor": "kid_floor",
        "classifier_accuracy_on_real": "class accuracy of real images",
    }
    return {
        label: number(as_number(study.summary.get(name))) for name, label in labels.items() if name in study.summary
    }


def _times(study: Study) -> dict[str, str]:
    labels = {"wall_seconds": "all runs together", "evaluation_seconds": "of it evaluation"}
    return {
        label: duration(as_number(study.summary.get(name))) for name, label in labels.items() if name in study.summary
    }


def command(study: Study) -> str:
    """The command that repeats this comparison: the one recorded, else one from recipe, optimizers, seeds, steps."""
    recorded = study.summary.get("command")
    if isinstance(recorded, str) and recorded.strip():
        return recorded
    if isinstance(recorded, list) and recorded:
        return shlex.join(map(str, recorded))
    options = ["--optimizers", ",".join(result.name for result in study.results), "--seeds", str(study.num_seeds)]
    config = study.summary.get("config")
    train = config.get("train") if isinstance(config, Mapping) else None
    if isinstance(train, Mapping) and isinstance(train.get("steps"), int):
        options += ["--steps", str(train["steps"])]
    return shlex.join(["rowdit", "compare", study.recipe, *options])
