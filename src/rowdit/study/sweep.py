"""`rowdit tune`: a grid of settings for one optimizer, each a run of its own; for finding learning rates.

    OUT/sweep.jsonl     a line a finished run: run, label, seed, grid (the settings that vary), settings (all that the
                        optimizer reads), evaluations, seconds, optimizer_seconds_per_step, diverged
    OUT/runs/           a folder a run, as `rowdit compare` makes them; checkpoints only while a run isn't finished

Runs share the machine, one thread each, so their scores are good and their times aren't. What was interrupted goes on
with the same command; another grid into the same folder adds to it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from rowdit.study.compare import prepare
from rowdit.study.lock import lock_folder
from rowdit.study.pool import run_tasks
from rowdit.study.summary import best_row
from rowdit.study.task import Grid, Task, make_tasks
from rowdit.train.config import ConfigError
from rowdit.train.log import read_jsonl, write_bytes
from rowdit.train.stop import Interrupted, StopRequest

__all__ = ["Grid", "RunLog", "Task", "make_tasks", "parse_grid", "parse_seeds", "print_sweep", "sweep"]


def parse_grid(entries: Sequence[str]) -> Grid:
    """`["lr=1e-3,2e-3", "betas=[0.9,0.95],[0.9,0.99]"]` as `{"lr": [0.001, 0.002], "betas": [[...], [...]]}`.

    Values are JSON, or else strings. A key without a dot is the optimizer's; with one, the run's: `train.ema_decay`.

    Raises:
        ConfigError: an entry without `=` or without values, or a key that was given before.

    >>> parse_grid(["lr=1e-3,2e-3", "adaln=muon"])
    {'lr': [0.001, 0.002], 'adaln': ['muon']}
    """
    grid: Grid = {}
    for entry in entries:
        key, equals, text = entry.partition("=")
        if not equals or not text.strip() or not key.strip():
            raise ConfigError(f"grid {entry!r}: must be KEY=VALUE,VALUE,..., such as lr=1e-3,2e-3")
        try:
            values = json.loads(f"[{text}]")
        except json.JSONDecodeError:
            values = [_value(item) for item in text.split(",")]
        key = key.strip().replace("-", "_")
        if key in grid:
            raise ConfigError(f"grid {entry!r}: {key} was given before; give all its values at once")
        grid[key] = values
    return grid


def parse_seeds(text: str) -> tuple[int, ...]:
    """`"0,1"` as (0, 1).

    Raises:
        ConfigError: something that isn't a list of integers.
    """
    try:
        return tuple(int(item) for item in text.split(","))
    except ValueError:
        raise ConfigError(f"seeds = {text!r}: must be integers, comma-separated") from None


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text.strip()


def sweep(tasks: Sequence[Task], out: Path, *, num_processes: int, console: Console | None = None) -> bool:
    """Runs what `out/sweep.jsonl` doesn't have yet; False if it was interrupted.

    Raises:
        ConfigError: the folder is in use, or a run in it has another config.
    """
    console = console or Console()
    if num_processes < 1:
        raise ConfigError(f"processes = {num_processes}: must be an integer >= 1")
    with lock_folder(out), StopRequest() as stop:
        path = out / "sweep.jsonl"
        done = {row["run"] for row in read_jsonl(path)}
        ahead = [task for task in tasks if task.name not in done]
        console.print(f"{len(tasks)} runs, {len(tasks) - len(ahead)} of them done before", highlight=False)
        if not ahead:
            return True
        try:  # here and not in each process, so that they don't do the same slow work at once
            prepare(ahead[0].comparison, out / "evaluation", stop, lambda text: console.print(text, highlight=False))
        except Interrupted:
            return False
        log = RunLog(path, console, expected=len(ahead))
        return run_tasks(
            lambda: [task for task in ahead if task.name not in log.names],
            out,
            num_processes=num_processes,
            stop=stop,
            done=lambda task, row: log.add(row),
        )


class RunLog:
    """The file of finished runs, a line each: appended to when a run ends, with a word on the console.

    Args:
        path: the JSON Lines file; what it holds counts as done. A line that a kill cut short is dropped.
        console: where to report.
        expected: runs ahead, for the estimate of the time left; None leaves it out.
    """

    def __init__(self, path: Path, console: Console, expected: int | None = None) -> None:
        self.path, self.console, self.expected = path, console, expected
        self.rows = read_jsonl(path)
        self.names = {row["run"] for row in self.rows}
        self._num_before, self._start = len(self.rows), time.perf_counter()
        if path.exists():  # or the next line would be glued to the cut one
            write_bytes(path, "".join(json.dumps(row) + "\n" for row in self.rows).encode())

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        self.names.add(row["run"])
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        num_done = len(self.rows) - self._num_before
        if self.expected is None:
            self.console.print(f"{num_done} {_describe(row)}", highlight=False)
            return
        left = (time.perf_counter() - self._start) / num_done * (self.expected - num_done)
        self.console.print(
            f"{num_done}/{self.expected} {_describe(row)}; about {left / 60:.0f} min left", highlight=False
        )


def _describe(row: dict[str, Any]) -> str:
    settings = " ".join(f"{key}={value}" for key, value in row["grid"].items())
    last = row["evaluations"][-1]
    numbers = f"score {_number(last['score_report'])}, val {_number(last['val_loss'], 4)}"
    return f"{row['label']} {settings} seed {row['seed']}: {numbers}"


def print_sweep(out: Path, console: Console | None = None) -> None:
    """The grid as a table, best final score first, mean over seeds; an optimum at the grid's edge is pointed out."""
    console = console or Console()
    by_point: dict[str, list[dict[str, Any]]] = {}
    for row in read_jsonl(out / "sweep.jsonl"):
        by_point.setdefault(f"{row['label']} " + json.dumps(row["grid"]), []).append(row)
    lines = sorted((_line(rows) for rows in by_point.values()), key=lambda line: line["final"])
    table = Table(title=f"{out}", title_justify="left")
    for name in ("optimizer", "settings", "seeds", "best", "final", "val loss", "final of each seed"):
        table.add_column(name)
    for line in lines:
        settings = " ".join(f"{key}={value}" for key, value in line["grid"].items())
        seeds = " ".join(_number(score) for score in line["per_seed"])
        numbers = (_number(line["best"]), _number(line["final"]), _number(line["val_loss"], 4))
        table.add_row(line["label"], settings, str(len(line["per_seed"])), *numbers, seeds)
    console.print(table)
    last = [row["evaluations"][-1] for rows in by_point.values() for row in rows if row["evaluations"]]
    for warning in sorted({row["caution"] for row in last if "caution" in row}):
        console.print(f"Caution: {warning}.", highlight=False)
    for label in sorted({line["label"] for line in lines}):
        own = [line for line in lines if line["label"] == label]
        for key in own[0]["grid"]:
            values = sorted({line["grid"][key] for line in own if isinstance(line["grid"].get(key), (int, float))})
            if len(values) > 2 and own[0]["grid"][key] in (values[0], values[-1]):
                console.print(f"{label}: the best {key}, {own[0]['grid'][key]}, is at the grid's edge", highlight=False)


def _line(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """One point of the grid, over its seeds. NaN sorts last as infinity."""
    finals = [float(row["evaluations"][-1]["score_report"]) for row in rows]
    bests = [best_row(row["evaluations"], "score_select") for row in rows]
    best = [float(row["score_report"]) if row else float("inf") for row in bests]
    val = [float(row["evaluations"][-1]["val_loss"]) for row in rows]
    mean = [sum(values) / len(values) for values in (finals, best, val)]
    final = mean[0] if mean[0] == mean[0] else float("inf")
    return {
        "label": rows[0]["label"],
        "grid": rows[0]["grid"],
        "per_seed": finals,
        "final": final,
        "best": mean[1],
        "val_loss": mean[2],
    }


def _number(value: Any, digits: int = 1) -> str:
    return format(float(value), f".{digits}f")
