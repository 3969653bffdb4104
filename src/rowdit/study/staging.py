"""What a study runs next, as a pure function of what has run: tune, then train the setting that won on every seed.

Nothing is remembered but the finished runs, by name. So a study that was killed, or whose seeds or entries were added
to, goes on by asking again.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rowdit.study.cases import Case, Study, with_label
from rowdit.study.comparison import Comparison
from rowdit.study.task import Task, change, make_tasks

Row = Mapping[str, Any]
Rows = Mapping[str, Row]
"""Finished runs by the name of their task."""

MAX_GROWTH = 8  # values that a grid may grow by; beyond, the best stays at the edge and is reported so


@dataclass(frozen=True)
class Part:
    """The part of a study that is to run now: cases and questions by name; None is all of them."""

    cases: tuple[str, ...] | None = None
    questions: tuple[str, ...] | None = None

    def holds(self, case: str, question: str) -> bool:
        """Whether this case and question are in it."""
        return (self.cases is None or case in self.cases) and (self.questions is None or question in self.questions)


EVERYTHING = Part()


@dataclass(frozen=True)
class Choice:
    """The setting that tuning found.

    Attributes:
        comparison: with the setting in it, under the entry's label.
        point: what was tuned, and its values.
        num_runs: how many runs the tuning took.
        at_edge: whether the best learning rate is at the edge of its grid after all growth.
    """

    comparison: Comparison
    point: dict[str, Any]
    num_runs: int
    at_edge: bool


@dataclass(frozen=True)
class Stage:
    """Where one entry stands in one case: its choice if tuning is done, and the tasks it needs next."""

    choice: Choice | None
    missing: tuple[Task, ...]


Memo = dict[tuple[str, str], Stage]


def next_tasks(study: Study, rows: Rows, part: Part = EVERYTHING) -> list[Task]:
    """All tasks that can run now and haven't, most urgent first.

    The headline comes first, then the other questions in the order of their entries; within a question case by case,
    in a case tuning before seeds, and a seed of all entries before the next seed, so that what is done is comparable at
    any time.

    Args:
        study: what is wanted.
        rows: what has run.
        part: to which cases and questions to keep. What these follow from outside of it isn't run for them.
    """
    tasks: list[Task] = []
    memo: Memo = {}
    for question in study.questions():
        for case in study.cases:
            if not part.holds(case.name, question):
                continue
            labels = [label for label in study.labels_of(case) if study.entries[label].question == question]
            chosen = {}
            for label in labels:
                stage = tuning(study, case, label, rows, memo)
                tasks += stage.missing
                if stage.choice:
                    chosen[label] = stage.choice
            for seed in study.seeds:
                for label, choice in chosen.items():
                    if seed in study.seeds_of(label):
                        tasks.append(seed_task(case, choice, label, seed))
    return [task for task in {task.name: task for task in tasks}.values() if task.name not in rows]


def seed_task(case: Case, choice: Choice, label: str, seed: int) -> Task:
    """The run of a chosen setting on a seed."""
    return Task(label, seed, choice.point, choice.comparison, case.name)


def tuning(study: Study, case: Case, label: str, rows: Rows, memo: Memo | None = None) -> Stage:
    """How far the tuning of an entry in a case is; `memo` keeps the answers for one state of `rows`."""
    memo = {} if memo is None else memo
    if (case.name, label) not in memo:
        memo[case.name, label] = _tuning(study, case, label, rows, memo)
    return memo[case.name, label]


def _tuning(study: Study, case: Case, label: str, rows: Rows, memo: Memo) -> Stage:
    start = _start(study, case, label, rows, memo)
    if isinstance(start, Stage):
        return start
    entry, seeds = study.entries[label], study.tuning_seeds_of(case, label)
    tried: dict[str, Task] = {}

    def run(comparison: Comparison, key: str, values: tuple[Any, ...]) -> list[Task]:
        """The runs of these values, on the first of the tuning seeds; raises if some are missing, on any."""
        tasks = [
            dataclasses.replace(task, point={**_tuned(comparison, label, study), **task.point}, case=case.name)
            for task in make_tasks(_once(comparison), label, {key: list(values)}, seeds)
        ]
        missing = tuple(task for task in tasks if task.name not in rows)
        if missing:
            raise _Missing(missing)
        tried.update((task.name, task) for task in tasks)
        return [task for task in tasks if task.seed == seeds[0]]

    def best_of(tasks: list[Task]) -> Task:
        return min(tasks, key=lambda task: tuning_score(study, task, rows))

    try:
        lrs = entry.lrs
        best = best_of(run(start, "lr", lrs))
        while at_edge(best.point["lr"], lrs) and len(lrs) < len(entry.lrs) + MAX_GROWTH:
            lrs = _grown(lrs, best.point["lr"])
            best = best_of(run(start, "lr", lrs))
        edge = at_edge(best.point["lr"], lrs)
        if case.follow is None:
            at_best = change(start, label, {"lr": best.point["lr"]})
            for key, values in entry.axes.items():
                best = best_of([best, *run(at_best, key, values)])
    except _Missing as missing:
        return Stage(None, missing.tasks)
    chosen = change(start, label, best.point)
    return Stage(Choice(chosen, best.point, len(tried), edge), ())


class _Missing(Exception):
    def __init__(self, tasks: tuple[Task, ...]) -> None:
        super().__init__()
        self.tasks = tasks


def _start(study: Study, case: Case, label: str, rows: Rows, memo: Memo) -> Comparison | Stage:
    """What tuning starts from; a stage without tasks while what it follows isn't chosen."""
    entry = study.entries[label]
    comparison = study.starting(case, label)
    if entry.follow is not None:
        followed = tuning(study, case, entry.follow, rows, memo).choice
        if followed is None:
            return Stage(None, ())
        comparison = with_label(followed.comparison, entry.follow, label)
        comparison = change(comparison, label, entry.changes)
    if case.follow is not None:
        followed = tuning(study, study.case(case.follow), label, rows, memo).choice
        if followed is None:
            return Stage(None, ())
        own = set(entry.changes) - set(entry.axes)
        carried = {key: value for key, value in followed.point.items() if key != "lr" and key not in own}
        comparison = change(comparison, label, carried)
    return comparison


def _tuned(comparison: Comparison, label: str, study: Study) -> dict[str, Any]:
    """The present values of all that is tuned, so that a task's point says its whole setting."""
    optimizer = dataclasses.asdict(comparison.optimizers[label])
    return {"lr": optimizer["lr"]} | {
        key: list(optimizer[key]) if isinstance(optimizer[key], tuple) else optimizer[key]
        for key in study.entries[label].axes
        if key in optimizer
    }


def _once(comparison: Comparison) -> Comparison:
    """With one evaluation, at the end: all that tuning looks at."""
    return dataclasses.replace(comparison, evaluate=dataclasses.replace(comparison.evaluate, num_evaluations=1))


def tuning_score(study: Study, task: Task, rows: Rows) -> float:
    """What tuning goes by: the mean over the tuning seeds of the selecting score of a task's setting."""
    seeds = study.tuning_seeds_of(study.case(task.case), task.label)
    return sum(selecting_score(rows[dataclasses.replace(task, seed=seed).name]) for seed in seeds) / len(seeds)


def selecting_score(row: Row) -> float:
    """The selecting samples' score at the last step; infinity if it isn't finite."""
    score = float(row["evaluations"][-1]["score_select"])
    return score if math.isfinite(score) else math.inf


def at_edge(lr: float, lrs: tuple[float, ...]) -> bool:
    """Whether the best learning rate is the grid's lowest or highest, so that a better one may lie beyond."""
    return lr in (lrs[0], lrs[-1])


def _grown(lrs: tuple[float, ...], best: float) -> tuple[float, ...]:
    """One more value beyond the edge at which the best is, as far from it as its neighbour."""
    if best == lrs[0]:
        return (float(f"{lrs[0] ** 2 / lrs[1]:.2g}"), *lrs)
    return (*lrs, float(f"{lrs[-1] ** 2 / lrs[-2]:.2g}"))
