"""What a study runs next. Runs are made up: their score is a function of the setting."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from rowdit.study.cases import Case, Entry, Study
from rowdit.study.staging import Part, next_tasks, seed_task, tuning
from rowdit.study.task import Task
from rowdit.train.config import ConfigError
from toy_training import toy_comparison

LRS = (1e-3, 2e-3, 4e-3, 8e-3, 16e-3)
Rows = dict[str, dict[str, Any]]


def small_study(**fields: Any) -> Study:
    toy = toy_comparison()
    cases = (Case("S", "toy", "S", toy), Case("M", "toy", "M", toy_comparison(steps=9), follow="S"))
    entries = {
        "adamw": Entry(LRS, axes={"betas": ([0.9, 0.9], [0.9, 0.99])}),
        "muon": Entry(LRS),
        "skip": Entry(LRS[:3], changes={"row_scale": 0.0}, follow="periodic", question="cheap", cases=("S",)),
    }
    entries = {"periodic": Entry(LRS, axes={"row_scale": (0.25,)}), **entries}
    return Study(cases, **({"entries": entries, "seeds": (0, 1)} | fields))


def bowl(optimum: float) -> Callable[[Task], float]:
    """A score that is best at one learning rate."""
    return lambda task: 10 + math.log(task.config.optimizer.lr / optimum) ** 2


def run(tasks: list[Task], rows: Rows, score: Callable[[Task], float]) -> None:
    for task in tasks:
        rows[task.name] = {"run": task.name, "evaluations": [{"score_select": score(task)}]}


def run_all(study: Study, score: Callable[[Task], float], rows: Rows | None = None) -> tuple[Rows, list[Task]]:
    rows = {} if rows is None else rows
    order: list[Task] = []
    for _ in range(500):
        tasks = next_tasks(study, rows)
        if not tasks:
            return rows, order
        run(tasks, rows, score)
        order += tasks
    raise AssertionError("the study doesn't end")


def test_it_tunes_and_then_trains_what_won_on_every_seed() -> None:
    study = small_study()
    rows, order = run_all(study, bowl(4e-3))
    for case in study.cases:
        for label in study.labels_of(case):
            choice = tuning(study, case, label, rows).choice
            assert choice is not None and choice.comparison.optimizers[label].lr == 4e-3 and not choice.at_edge
            for seed in study.seeds_of(label):
                assert seed_task(case, choice, label, seed).name in rows
    assert len(order) == len(rows) == len({task.name for task in order})
    tuned = [task for task in order if task.seed in study.tuning_seeds]
    assert {task.config.evaluate.num_evaluations for task in tuned} == {1}
    assert {task.config.evaluate.num_evaluations for task in order if task.seed in study.seeds} == {3}


def test_the_grid_grows_until_the_best_is_inside() -> None:
    study = small_study(entries={"muon": Entry(LRS)})
    rows, order = run_all(study, bowl(50e-3))
    lrs = sorted({t.config.optimizer.lr for t in order if (t.case, t.label, t.seed) == ("S", "muon", 100)})
    assert lrs == [*LRS, 32e-3, 64e-3, 0.13]  # two digits
    choice = tuning(study, study.case("S"), "muon", rows).choice
    assert choice is not None and choice.point["lr"] == 64e-3 and choice.num_runs == 8 and not choice.at_edge
    rows, _ = run_all(study, bowl(0.3e-3))
    choice = tuning(study, study.case("S"), "muon", rows).choice
    assert choice is not None and choice.point["lr"] == 0.25e-3 and choice.num_runs == 8


def test_the_mean_over_the_tuning_seeds_decides() -> None:
    axes = {"momentum": (0.9, 0.97)}
    entries = {"muon": Entry(LRS, axes=axes), "one": Entry(LRS, follow="muon", num_tuning_seeds=1)}
    study = small_study(entries=entries, tuning_seeds=(100, 101))
    optima = {100: 8e-3, 101: 2e-3}

    def score(task: Task) -> float:
        return bowl(optima.get(task.seed, 1.0))(task) - (task.config.optimizer.momentum == 0.97 and task.seed == 101)

    rows, order = run_all(study, score)
    choice = tuning(study, study.case("S"), "muon", rows).choice
    assert choice is not None and choice.point == {"lr": 4e-3, "momentum": 0.97} and choice.num_runs == 14
    tuned = [task for task in order if (task.case, task.label) == ("S", "muon") and task.seed in (100, 101)]
    assert {task.seed for task in tuned} == {100, 101} and len(tuned) == 14
    assert {task.seed for task in order if task.label == "one"} == {100, *study.seeds}
    # A case that follows another tunes its learning rate on the first seed.
    assert {task.seed for task in order if task.case == "M"} == {100, *study.seeds}
    # A run that diverges on one seed alone isn't chosen either.
    rows, _ = run_all(
        study, lambda task: math.nan if task.seed == 101 and task.config.optimizer.lr > 3e-3 else score(task)
    )
    choice = tuning(study, study.case("S"), "muon", rows).choice
    assert choice is not None and choice.point["lr"] == 2e-3


def test_growth_ends_and_the_edge_is_told() -> None:
    study = small_study(entries={"muon": Entry(LRS)})
    rows, _ = run_all(study, lambda task: -task.config.optimizer.lr)
    choice = tuning(study, study.case("S"), "muon", rows).choice
    assert choice is not None and choice.at_edge


def test_axes_are_tried_at_the_best_lr_and_count_alone() -> None:
    study = small_study()

    def score(task: Task) -> float:
        return bowl(2e-3)(task) - (1 if task.config.optimizer.betas == (0.9, 0.99) else 0)

    rows, order = run_all(study, score)
    tried = [t for t in order if (t.case, t.label, t.seed) == ("S", "adamw", 100)]
    assert [t.config.optimizer.betas[1] for t in tried] == [0.95] * 5 + [0.9, 0.99]
    assert {t.config.optimizer.lr for t in tried[5:]} == {2e-3}
    choice = tuning(study, study.case("S"), "adamw", rows).choice
    assert choice is not None and choice.point == {"lr": 2e-3, "betas": [0.9, 0.99]}


def test_a_case_that_follows_takes_all_but_the_learning_rate() -> None:
    study = small_study()

    def score(task: Task) -> float:
        optimum = 2e-3 if task.case == "S" else 8e-3
        return bowl(optimum)(task) - (1 if task.config.optimizer.row_scale == 0.25 else 0)

    rows, order = run_all(study, score)
    choice = tuning(study, study.case("M"), "periodic", rows).choice
    assert choice is not None
    assert (choice.comparison.optimizers["periodic"].lr, choice.comparison.optimizers["periodic"].row_scale) == (
        8e-3,
        0.25,
    )
    assert choice.num_runs == 5  # no axis of its own
    places = [(task.case, task.seed == 100) for task in order if task.label == "periodic"]
    assert places.index(("M", True)) > max(i for i, place in enumerate(places) if place == ("S", True))


def test_an_entry_that_follows_starts_from_what_was_chosen() -> None:
    study = small_study()
    rows, order = run_all(study, lambda task: bowl(4e-3)(task) - (task.config.optimizer.row_scale == 0.25))
    skips = [task for task in order if task.label == "skip"]
    assert {task.config.optimizer.row_scale for task in skips} == {0.0} and {task.case for task in skips} == {"S"}
    assert {task.config.optimizer.lr for task in skips} == {1e-3, 2e-3, 4e-3, 8e-3}  # grew by one
    waiting = next_tasks(study, {name: row for name, row in rows.items() if name.startswith("periodic")})
    labels = [task.label for task in waiting]
    assert labels.index("skip") > max(i for i, label in enumerate(labels) if label == "adamw")  # the headline first


def test_a_part_keeps_to_its_cases_and_questions() -> None:
    study = small_study()
    assert {task.case for task in next_tasks(study, {}, Part(cases=("S",)))} == {"S"}
    assert next_tasks(study, {}, Part(questions=("cheap",))) == []  # what it follows isn't tuned
    rows, _ = run_all(study, bowl(4e-3))
    more = small_study(seeds=(0, 1, 2))
    assert {task.label for task in next_tasks(more, rows, Part(questions=("cheap",)))} == {"skip"}


def test_seeds_may_be_added_and_nothing_runs_twice() -> None:
    rows, before = run_all(small_study(), bowl(4e-3))
    _, after = run_all(small_study(seeds=(0, 1, 2)), bowl(4e-3), rows)
    assert {task.seed for task in after} == {2} and not {t.name for t in before} & {t.name for t in after}


def test_a_diverged_run_is_never_chosen() -> None:
    study = small_study()
    rows, _ = run_all(study, lambda task: math.nan if task.config.optimizer.lr > 3e-3 else bowl(2e-3)(task))
    choice = tuning(study, study.case("S"), "muon", rows).choice
    assert choice is not None and choice.point["lr"] == 2e-3


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"seeds": (0, 100)}, r"tuning_seeds = \(100,\): must be at least one seed, and none of the seeds"),
        ({"tuning_seeds": ()}, "must be at least one seed"),
        ({"entries": {"moun": Entry(LRS)}}, "has no optimizer 'moun'; did you mean 'muon'"),
        ({"entries": {"muon": Entry(LRS, changes={"row_scale": 0.5})}}, "doesn't read it"),
        (
            {"entries": {"a": Entry(LRS, follow="b"), "b": Entry(LRS)}},
            "entry 'a': follows 'b', which must stand before",
        ),
        ({"entries": {"muon": Entry(LRS, cases=("X",))}}, "entry 'muon': there is no case 'X'"),
    ],
)
def test_mistakes_are_named_before_anything_runs(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        small_study(**fields)


@pytest.mark.parametrize("lrs", [(1e-3, 2e-3), (2e-3, 1e-3, 3e-3), (0.0, 1e-3, 2e-3), (1e-3, 2e-3, 4e-3)])
def test_headline_grids_are_real_grids(lrs: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError, match="lrs = "):
        Entry(lrs)
