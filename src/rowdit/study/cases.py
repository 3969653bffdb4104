"""What a study is: cases (a size on a data set) x entries (an optimizer with how it is tuned) x seeds. Plain values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rowdit.study.comparison import Comparison
from rowdit.study.task import change
from rowdit.train.config import ConfigError, nearest

HEADLINE = "headline"


@dataclass(frozen=True)
class Entry:
    """One optimizer in a study and how it is tuned, by itself, in every case.

    First the grid of learning rates, growing by one value beyond an edge as long as the best is there. Then, at the
    best learning rate, each value of each further axis, one at a time. The best point of all is the setting.

    Args:
        lrs: ascending, at least three (five for a headline), > 0. The factor between the outer two is that of growth.
        axes: key -> values, as points of `rowdit.study.task.change`; the starting value isn't repeated.
        changes: what distinguishes this entry from the comparison's optimizer of the same label, or from `follow`.
        follow: label of an entry whose chosen setting this one starts from, all but what `changes` says.
        num_seeds: how many of the study's seeds it runs on; None takes all.
        num_tuning_seeds: how many of the study's tuning seeds it is tuned on; None takes all.
        question: what it is for. Those with `"headline"` make the headline table.
        cases: names of the cases that it runs in; None takes all.
    """

    lrs: tuple[float, ...]
    axes: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    changes: Mapping[str, Any] = field(default_factory=dict)
    follow: str | None = None
    num_seeds: int | None = None
    num_tuning_seeds: int | None = None
    question: str = HEADLINE
    cases: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        ascending = all(a < b for a, b in zip(self.lrs, self.lrs[1:], strict=False))
        if len(self.lrs) < 3 or not ascending or not all(0 < lr < math.inf for lr in self.lrs):
            raise ConfigError(f"lrs = {self.lrs!r}: must be at least three ascending numbers > 0")
        if self.question == HEADLINE and len(self.lrs) < 5:
            raise ConfigError(f"lrs = {self.lrs!r}: a headline's grid has at least five values")
        for key in ("num_seeds", "num_tuning_seeds"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise ConfigError(f"{key} = {value}: must be an integer >= 1, or None")


@dataclass(frozen=True)
class Case:
    """One size on one data set.

    Args:
        name: in files; unique.
        dataset: the data set's name in tables.
        size: the model's name in tables; with the data set it tells cases apart.
        comparison: model, data, training, evaluation, and the optimizers to start from.
        follow: name of a case whose chosen settings are taken, all but the learning rates, which are tuned here too, on
            the first tuning seed alone.
    """

    name: str
    dataset: str
    size: str
    comparison: Comparison
    follow: str | None = None


@dataclass(frozen=True)
class Study:
    """A whole study. What is tuned is tuned on `tuning_seeds`, none of which is one of `seeds`.

    `periodic` is the label of the entry that stands for the periodic method in the headline; it runs on all seeds.

    Raises:
        ConfigError: names that are unknown or used twice, circles of `follow`, no tuning seed, or one among the seeds.
    """

    cases: tuple[Case, ...]
    entries: Mapping[str, Entry]
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    tuning_seeds: tuple[int, ...] = (100,)
    periodic: str = "periodic"

    def __post_init__(self) -> None:
        if not self.tuning_seeds or set(self.tuning_seeds) & set(self.seeds):
            raise ConfigError(
                f"tuning_seeds = {self.tuning_seeds}: must be at least one seed, and none of the seeds {self.seeds}"
            )
        names = [case.name for case in self.cases]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"there are two cases {name!r}")
        for case in self.cases:
            _check_follow(f"case {case.name!r}", case.follow, names[: names.index(case.name)])
        labels = list(self.entries)
        if self.periodic in labels and self.entries[self.periodic].num_seeds is not None:
            raise ConfigError(f"periodic = {self.periodic!r}: that entry doesn't run on all seeds")
        for label, entry in self.entries.items():
            _check_follow(f"entry {label!r}", entry.follow, labels[: labels.index(label)])
            for name in entry.cases or ():
                if name not in names:
                    raise ConfigError(f"entry {label!r}: there is no case {name!r}{nearest(name, names)}")
            for case in self.cases_of(label):
                self.starting(case, label)  # refused here, not when its turn comes

    def case(self, name: str) -> Case:
        """The case of this name."""
        return next(case for case in self.cases if case.name == name)

    def cases_of(self, label: str) -> list[Case]:
        """The cases in which an entry runs."""
        wanted = self.entries[label].cases
        return [case for case in self.cases if wanted is None or case.name in wanted]

    def labels_of(self, case: Case) -> list[str]:
        """The entries that run in a case."""
        return [label for label in self.entries if case in self.cases_of(label)]

    def questions(self) -> list[str]:
        """The questions in the order of their first entries, the headline first."""
        return list(dict.fromkeys([HEADLINE, *(entry.question for entry in self.entries.values())]))

    def seeds_of(self, label: str) -> tuple[int, ...]:
        """The seeds that an entry runs on: the first ones, so that any two entries share all of the shorter list."""
        return self.seeds[: self.entries[label].num_seeds]

    def contenders(self) -> list[str]:
        """The entries that could stand for the periodic method in the headline: those on all seeds, its own first."""
        others = [label for label, entry in self.entries.items() if entry.num_seeds is None]
        return [label for label in dict.fromkeys([self.periodic, *others]) if label not in ("adamw", "muon")]

    def tuning_seeds_of(self, case: Case, label: str) -> tuple[int, ...]:
        """The seeds that an entry is tuned on in a case, the first ones likewise."""
        return self.tuning_seeds[: 1 if case.follow else self.entries[label].num_tuning_seeds]

    def starting(self, case: Case, label: str) -> Comparison:
        """The case's comparison with the entry's optimizer under its label and its changes in it, before any tuning."""
        follow = self.entries[label].follow
        comparison = case.comparison if follow is None else self.starting(case, follow)
        source = label if follow is None else follow
        if source not in comparison.optimizers:
            raise ConfigError(f"case {case.name!r} has no optimizer {source!r}{nearest(source, comparison.optimizers)}")
        return change(with_label(comparison, source, label), label, self.entries[label].changes)


def with_label(comparison: Comparison, source: str, label: str) -> Comparison:
    """The comparison with the optimizer `source` under `label` too."""
    optimizers = {**comparison.optimizers, label: comparison.optimizers[source]}
    return Comparison(comparison.model, comparison.data, comparison.train, comparison.evaluate, optimizers)


def _check_follow(what: str, follow: str | None, before: list[str]) -> None:
    if follow is not None and follow not in before:
        raise ConfigError(f"{what}: follows {follow!r}, which must stand before it{nearest(follow, before)}")
