"""Who won and by how much: the headline, what a fair reader has to know beside it, and the cards."""

from __future__ import annotations

import math
from collections.abc import Mapping

from rowdit.evaluate.score import caution
from rowdit.study.summary import BASELINE

from .data import KINDS, Result, Study
from .formatting import duration, number, percent, percent_change, relative
from .markup import Markup, join, tag
from .names import key, long_name, short_name, style, where

CLOSE = 0.02  # two scores of one seed nearer than this are called too close to decide
_KIND_IN_SENTENCE = {"at_fixed_step": "at the fixed step", "at_fixed_time": "at the fixed time", "final": "at the end"}


def _ranked(study: Study, kind: str = "best") -> list[Result]:
    """Results with a finite score of this kind, the best first."""
    finite = [result for result in study.results if math.isfinite(result.score[kind].value)]
    return sorted(finite, key=lambda result: result.score[kind].value)


def _change(first: Result, second: Result) -> float:
    """How far `first`'s best score is from `second`'s, as a fraction; paired by seed where `second` is the baseline."""
    point, other = first.score["best"], second.score["best"]
    if second.name == BASELINE and math.isfinite(point.change):
        return point.change
    return relative(point.value, other.value)


def headline(study: Study) -> str:
    """Who has the best score and by how much: against AdamW where it took part and lost, else against the next."""
    ranked = _ranked(study)
    if not ranked:
        return "No optimizer reached a finite score"
    first, value = ranked[0], ranked[0].score["best"].value
    if len(ranked) == 1:
        return f"{long_name(first.name)} reached a score of {number(value)}"
    other = next((result for result in ranked[1:] if result.name == BASELINE), ranked[1])
    change = _change(first, other)
    if change == 0:
        return f"{long_name(first.name)} and {long_name(other.name)} end level at {number(value)}"
    if study.num_seeds == 1 and abs(change) < CLOSE:
        names = f"{long_name(first.name)} is just ahead of {long_name(other.name)}"
        return f"{names}, {number(value)} to {number(other.score['best'].value)}: too close to call"
    by = f"{percent(-100 * change)} lower than" if math.isfinite(change) else f"{number(value)}, lower than"
    return f"{long_name(first.name)} has the best score, {by} {long_name(other.name)}’s"


def _wins(first: Result, second: Result) -> list[str]:
    """In how many of the common seeds `first` is ahead of `second`; nothing for a single seed."""
    ours, theirs = first.score["best"].by_seed, second.score["best"].by_seed
    seeds = ours.keys() & theirs.keys()
    if len(seeds) < 2:
        return []
    wins = sum(ours[seed] < theirs[seed] for seed in seeds)
    return [f"{short_name(first.name)} is ahead of {short_name(second.name)} in {wins} of {len(seeds)} seeds."]


def beside(study: Study) -> list[str]:
    """What a fair reader has to know beside the headline, a sentence each."""
    ranked, sentences = _ranked(study), []
    if len(ranked) > 1:
        first, second = ranked[0], ranked[1]
        gap = relative(second.score["best"].value, first.score["best"].value)
        sentence = f"{long_name(second.name)} comes next with {number(second.score['best'].value)}"
        sentence += f", {percent(100 * gap)} higher" if math.isfinite(gap) else ""
        if study.num_seeds == 1 and gap < CLOSE:
            sentence += ", too close to call from one seed"
        sentences.append(sentence + ".")
        sentences += _wins(first, second)
        leaders = {kind: _ranked(study, kind) for kind in KINDS[1:]}
        target, time = study.baseline and study.baseline.time_to_adamw_best, first.time_to_adamw_best
        if first.name != BASELINE and target and time:
            sentences.append(
                f"{short_name(first.name)} reached AdamW’s best score after {duration(time)} of training, "
                f"AdamW after {duration(target)}."
            )
        changed = [
            f"{_KIND_IN_SENTENCE[kind]} {short_name(order[0].name)} leads ({number(order[0].score[kind].value)})"
            for kind, order in leaders.items()
            if order and order[0].name != first.name
        ]
        if changed:
            sentences.append("The order isn’t the same throughout: " + "; ".join(changed) + ".")
    for result in study.results:
        if result.diverged:
            seed, reason = next(iter(result.diverged.items()))
            count = f" in {len(result.diverged)} of {len(result.seeds)} runs" if len(result.seeds) > 1 else ""
            sentences.append(f"{long_name(result.name)} diverged{count} (seed {seed}: {reason}).")
    if study.num_seeds == 1:
        sentences.append("This is one seed: a difference of a few per cent can be chance.")
    else:
        sentences.append(f"Every number is a mean over {study.num_seeds} seeds.")
    return sentences


def how_scored(study: Study) -> str:
    """One paragraph on what the score is."""
    floor = (
        f" Real images against other real images get {number(study.floor)}: the floor."
        if math.isfinite(study.floor)
        else " The floor, real images against real ones, wasn’t measured."
    )
    return (
        f"The score is {study.score_name}; lower is better. The best step of a run was chosen on one set of generated "
        f"samples and scored on another{_sample_sets(study)}, so that luck in choosing doesn’t count.{floor}"
        + "".join(sorted({f" Caution: {text}." for result in study.results if (text := caution(result.fingerprint))}))
    )


def _sample_sets(study: Study) -> str:
    """Which samples chose and which scored, where the fingerprint tells: the scoring ones follow the choosing ones."""
    fingerprint = next((result.fingerprint for result in study.results if result.fingerprint), {})
    sampling, num = fingerprint.get("sampling"), fingerprint.get("num_images")
    first = sampling.get("first_index") if isinstance(sampling, Mapping) else None
    if not isinstance(num, int) or not isinstance(first, int) or first != num:
        return ""
    return f" (images 0 to {num - 1:,} chose, images {first:,} to {first + num - 1:,} scored)"


def cards(study: Study) -> Markup:
    """One card per optimizer: best score, its distance from AdamW, a bar with the floor marked."""
    ranked = _ranked(study)
    top = max([result.score["best"].value for result in ranked if result.score["best"].value > 0], default=1.0)
    items = []
    for result in study.results:
        point, wins = result.score["best"], len(ranked) > 1 and result is ranked[0]
        finite = math.isfinite(point.value)
        if not finite:
            note = "diverged: no finite score" if result.diverged else "no finite score"
        elif result.name == BASELINE:
            note = "the baseline"
        else:
            note = f"{percent_change(point.change)} against AdamW" if math.isfinite(point.change) else "best score"
        bar = None
        if finite:
            floor = tag("i", style=f"left:{100 * study.floor / top:.1f}%") if 0 < study.floor < top else None
            fill = tag(
                "b", style=f"width:{max(100 * point.value / top, 0):.1f}%", class_=f"s{style(study, result.name)}"
            )
            bar = tag("div", fill, floor, class_="bar", aria_hidden="true")
        items.append(
            tag(
                "li",
                tag("h3", key(study, result.name), long_name(result.name)),
                tag("p", number(point.value), tag("span", "best", class_="badge") if wins else None, class_="big"),
                tag("p", note + ("; diverged after it" if finite and result.diverged else ""), class_="note"),
                bar,
                tag("p", where(point), class_="where"),
                class_="card wins" if wins else "card",
            )
        )
    legend = tag("p", "Best scores; shorter is better. The tick is the floor.", class_="about small")
    return join([tag("ul", *items, class_="cards"), legend])
