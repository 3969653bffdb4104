"""`rowdit study`: tunes every optimizer in every case, trains what won on every seed, and keeps the records.

    OUT/study.jsonl      a line a finished run: what `rowdit tune` keeps, and case, dataset, size, num_parameters,
                         question, stage ("tuning" or "seeds")
    OUT/study.csv        the same, tidy: a line an evaluation
    OUT/headline.json    see `rowdit.study.headline`
    OUT/choices.json     what tuning chose: per case and entry the point, how many runs it took, whether at an edge
    OUT/study.html       the page
    OUT/runs/, OUT/evaluation/   as `rowdit tune` has them

Killed or interrupted, the same command goes on; what is finished isn't run again, and a run under way resumes at its
last checkpoint. Entries, cases and seeds may be added later.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console

from rowdit.study.cases import Case, Study
from rowdit.study.compare import prepare
from rowdit.study.evaluator import MEASURES
from rowdit.study.headline import count_parameters, headline_runs, run_of_row
from rowdit.study.headline_table import print_headline, score, setting
from rowdit.study.lock import lock_folder
from rowdit.study.pool import Upcoming, run_tasks, run_tasks_together
from rowdit.study.staging import EVERYTHING, Part, Rows, next_tasks, seed_task, tuning
from rowdit.study.statistics import mean_interval
from rowdit.study.sweep import RunLog
from rowdit.study.table import new_table
from rowdit.study.task import Task
from rowdit.train.config import ConfigError, nearest
from rowdit.train.log import read_jsonl, write_bytes, write_json
from rowdit.train.stop import Interrupted, StopRequest
from rowdit.train.world import World

ROWS_NAME = "study.jsonl"


def run_study(
    study: Study,
    out: Path,
    *,
    num_processes: int,
    part: Part = EVERYTHING,
    world: World | None = None,
    console: Console | None = None,
) -> bool:
    """Runs what hasn't run yet, and writes the tables; False if it was interrupted.

    Args:
        study: what is wanted.
        out: folder of the study.
        num_processes: runs at a time, each in a process with one thread. With several ranks, one run at a time.
        part: what of the study to run now.
        world: the ranks, as torchrun starts them; all of them call this alike. None is this process alone.
        console: where the main rank reports.

    Raises:
        ConfigError: the folder is in use, a run in it has another config, a process died, or `part` names what the
            study hasn't.
        Exception: what a run raised, at once; the others are saved.
    """
    console, world = console or Console(), world or World()
    if num_processes < 1:
        raise ConfigError(f"processes = {num_processes}: must be an integer >= 1")
    _check_part(study, part)
    with ExitStack() as stack:
        if world.is_main:
            stack.enter_context(lock_folder(out))
        stop = stack.enter_context(StopRequest())
        world.barrier()
        log = RunLog(out / ROWS_NAME, console)

        def upcoming() -> list[Task]:
            return next_tasks(study, by_name(log.rows), part)

        def done(task: Task, row: dict[str, Any]) -> None:
            log.add(described(study, task, row))
            write_headline(study, out, by_name(log.rows))

        if world.size > 1:
            complete = run_tasks_together(upcoming, out, world=world, stop=stop, done=done)
        else:
            complete = _run_in_processes(upcoming, out, num_processes, stop, done, console)
        if world.is_main:
            write_tables(study, out, log.rows)
    return complete


def _run_in_processes(
    upcoming: Upcoming, out: Path, num_processes: int, stop: StopRequest, done: Any, console: Console
) -> bool:
    ahead = upcoming()
    console.print(f"{len(ahead)} runs can start now", highlight=False)
    try:
        if ahead:  # once here, and not in each process at the same time
            prepare(ahead[0].comparison, out / "evaluation", stop, lambda text: console.print(text, highlight=False))
        return run_tasks(upcoming, out, num_processes=num_processes, stop=stop, done=done)
    except Interrupted:
        return False


def _check_part(study: Study, part: Part) -> None:
    known = {"case": [case.name for case in study.cases], "question": study.questions()}
    for what, wanted in (("case", part.cases), ("question", part.questions)):
        for name in wanted or ():
            if name not in known[what]:
                raise ConfigError(f"the study has no {what} {name!r}{nearest(name, known[what])}")


def by_name(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Finished runs by their task's name."""
    return {row["run"]: row for row in rows}


def described(study: Study, task: Task, row: Mapping[str, Any]) -> dict[str, Any]:
    """A run's row with its place in the study."""
    case = study.case(task.case)
    return {
        **row,
        "case": case.name,
        "dataset": case.dataset,
        "size": case.size,
        "num_parameters": count_parameters(case.comparison.model),
        "question": study.entries[task.label].question,
        "stage": "tuning" if task.seed in study.tuning_seeds else "seeds",
    }


def write_headline(study: Study, out: Path, rows: Rows) -> None:
    """`headline.json` of what has run; none while no seed is complete."""
    runs = headline_runs(study, rows)
    if runs:
        text = "[\n" + ",\n".join(json.dumps(run, allow_nan=False) for run in runs) + "\n]\n"
        write_bytes(out / "headline.json", text.encode())


def write_tables(study: Study, out: Path, rows: list[dict[str, Any]]) -> None:
    """`headline.json`, `choices.json`, `study.csv`; the records themselves are left as they are."""
    named = by_name(rows)
    write_headline(study, out, named)
    write_json(out / "choices.json", choices(study, named))
    write_bytes(out / "study.csv", tidy_csv(rows).encode())


def choices(study: Study, rows: Rows) -> list[dict[str, Any]]:
    """What tuning has chosen so far."""
    found = []
    for case in study.cases:
        for label in study.labels_of(case):
            choice = tuning(study, case, label, rows).choice
            if choice:
                place = {"case": case.name, "optimizer": label, "question": study.entries[label].question}
                found.append(place | {"num_runs": choice.num_runs, "at_edge": choice.at_edge} | dict(choice.point))
    return found


CSV_KEYS = (
    *("case", "dataset", "size", "num_parameters", "question", "stage", "label", "seed", "lr", "settings"),
    *("step", *MEASURES, "seconds"),
)


def tidy_csv(rows: list[dict[str, Any]]) -> str:
    """A line an evaluation; `settings` is JSON in one cell."""
    file = io.StringIO()
    writer = csv.DictWriter(file, CSV_KEYS, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        run = {key: row.get(key) for key in CSV_KEYS if key in row}
        run |= {"lr": row["settings"]["lr"], "settings": json.dumps(row["settings"])}
        for evaluation in row["evaluations"]:
            writer.writerow(run | {key: evaluation[key] for key in ("step", *MEASURES, "seconds")})
    return file.getvalue()


def read_rows(out: Path) -> list[dict[str, Any]]:
    """The finished runs of a study's folder.

    Raises:
        ConfigError: there are none.
    """
    rows = read_jsonl(out / ROWS_NAME)
    if not rows:
        raise ConfigError(f"{out} holds no finished run of a study; rowdit study RECIPE --out {out} makes them")
    return rows


def print_study(study: Study, out: Path, console: Console) -> None:
    """What was chosen and what the seeds gave, a table a case; then the headline, if there is one."""
    rows = by_name(read_rows(out))
    for case in study.cases:
        table = new_table(f"{case.name}: {case.dataset}, {case.size}", *SHOWN, wrap=True)
        for label in study.labels_of(case):
            line = seeds_line(study, case, label, rows)
            if line:
                table.add_row(label, *line)
        console.print(table)
    path = out / "headline.json"
    if path.exists():
        print_headline(path, console)


SHOWN = ("best", "final", "loss", "seeds", "setting", "tuning runs")


def seeds_line(study: Study, case: Case, label: str, rows: Rows) -> tuple[str, ...] | None:
    """The cells of `SHOWN` for one entry; None while it has no choice."""
    choice = tuning(study, case, label, rows).choice
    if choice is None:
        return None
    runs = [rows.get(seed_task(case, choice, label, seed).name) for seed in study.seeds_of(label)]
    summaries = [run_of_row(case.dataset, case.size, 0, label, run) for run in runs if run]
    cells = ["-"] * 3
    if summaries:
        losses = [run["loss_curve"][-1][1] for run in summaries]
        columns = ([run["best"] for run in summaries], [run["final"] for run in summaries], losses)
        known = [[math.nan if value is None else value for value in column] for column in columns]
        cells = [score(mean_interval(column), digits) for column, digits in zip(known, (1, 1, 4), strict=True)]
    tuned = f"{choice.num_runs}{', lr at the edge' if choice.at_edge else ''}"
    optimizer = choice.comparison.optimizers[label]
    return (*cells, str(len(summaries)), setting(optimizer.settings()), tuned)
