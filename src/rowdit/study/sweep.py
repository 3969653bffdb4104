"""`rowdit tune`: a grid of settings for one optimizer, each a run of its own; for finding learning rates.

    OUT/sweep.jsonl     a line a finished run: run, label, seed, grid (the settings that vary), settings (all that the
                        optimizer reads), evaluations, seconds, optimizer_seconds_per_step, diverged
    OUT/runs/           a folder a run, as `rowdit compare` makes them; checkpoints only while a run isn't finished

Runs share the machine, one thread each, so their scores are good and their times aren't. What was interrupted goes on
with the same command; another grid into the same folder adds to it.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import shutil
import signal
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from rowdit.evaluate.fingerprint import digest
from rowdit.study.compare import evaluate_into, prepare, read_record
from rowdit.study.comparison import Comparison
from rowdit.study.lock import lock_folder
from rowdit.study.summary import best_row, summarize_optimizers
from rowdit.train.config import ConfigError, RunConfig, from_dict, nearest, to_dict
from rowdit.train.log import read_jsonl
from rowdit.train.loop import train
from rowdit.train.stop import Interrupted, StopRequest

Grid = dict[str, list[Any]]


@dataclass(frozen=True)
class Task:
    """One run of a sweep."""

    label: str
    seed: int
    point: dict[str, Any]
    comparison: Comparison

    @property
    def config(self) -> RunConfig:
        return self.comparison.run_config(self.label, self.seed)

    @property
    def name(self) -> str:
        """Label, a hash of the whole config but the seed, and the seed."""
        return f"{self.label}-{digest(to_dict(self.comparison.run_config(self.label, 0)))[:10]}-seed{self.seed}"


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


def make_tasks(comparison: Comparison, label: str, grid: Grid, seeds: Sequence[int]) -> list[Task]:
    """Every point of the grid with every seed; seeds are the outer loop, so that a stopped sweep has whole grids.

    What is asked for twice (a value, a seed, 1 and 1.0) is one task: two would write into the same folder.

    Raises:
        ConfigError: an unknown label or key, or a value or seed that its config refuses.
    """
    if label not in comparison.optimizers:
        raise ConfigError(f"there is no optimizer {label!r}{nearest(label, comparison.optimizers)}")
    points = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    varied = [(point, _apply(comparison, label, point)) for point in points]
    tasks: dict[str, Task] = {}
    for seed in seeds:
        for point, changed in varied:
            task = Task(label, seed, point, changed)
            _ = task.config  # made here once, so that a bad seed is refused before any work
            tasks.setdefault(task.name, task)
    return list(tasks.values())


def _apply(comparison: Comparison, label: str, point: dict[str, Any]) -> Comparison:
    config = to_dict(comparison)
    for key, value in point.items():
        path = key.split(".") if "." in key else ["optimizers", label, key]
        table: Any = config
        for part in path[:-1]:
            table = table.get(part) if isinstance(table, dict) else None
        if not isinstance(table, dict) or path[-1] not in table:
            known = table if isinstance(table, dict) else config
            raise ConfigError(f"unknown key {key}{nearest(path[-1] if known is table else path[0], known)}")
        if isinstance(table[path[-1]], dict) and not isinstance(value, dict):
            raise ConfigError(f"{key} is a section; name one of its keys: {', '.join(table[path[-1]])}")
        table[path[-1]] = value
    return from_dict(Comparison, config)


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
        return _run_pool(ahead, out, num_processes, stop, console)


def _run_pool(ahead: Sequence[Task], out: Path, num_processes: int, stop: StopRequest, console: Console) -> bool:
    context = multiprocessing.get_context("spawn")
    stop_event = context.Event()
    start = time.perf_counter()
    num_done = 0
    with ProcessPoolExecutor(num_processes, context, initializer=_start_worker, initargs=(stop_event,)) as pool:
        futures: set[Future[dict[str, Any] | None]] = {pool.submit(_run_task, task, out) for task in ahead}
        while futures:
            if stop.requested and not stop_event.is_set():
                console.print("stopping: saving the runs under way", highlight=False)
                stop_event.set()
                for future in futures:
                    future.cancel()
            finished, futures = wait(futures, timeout=0.5, return_when=FIRST_COMPLETED)
            for future in finished:
                row = None if future.cancelled() else future.result()
                if row is None:
                    continue
                with open(out / "sweep.jsonl", "a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
                num_done += 1
                left = (time.perf_counter() - start) / num_done * (len(ahead) - num_done)
                console.print(
                    f"{num_done}/{len(ahead)} {_describe(row)}; about {left / 60:.0f} min left", highlight=False
                )
    return num_done == len(ahead)


_stop_event: Event | None = None


def _start_worker(stop_event: Event) -> None:
    """One thread a process; Ctrl-C is the parent's to handle, which asks by the event."""
    global _stop_event
    _stop_event = stop_event
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)


def _run_task(task: Task, out: Path) -> dict[str, Any] | None:
    """Trains one run to its end and gives its line; None if it was asked to stop."""
    folder = out / "runs" / task.name
    stop = StopRequest(also=_stop_event.is_set) if _stop_event else StopRequest()
    try:
        context = prepare(task.comparison, out / "evaluation", stop, lambda text: None)
    except Interrupted:
        return None
    outcome = train(task.config, context.training, folder, evaluate=evaluate_into(context.evaluator, folder), stop=stop)
    if outcome.status == "interrupted":
        return None
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    record = read_record(folder, task.label, task.seed)
    timing = summarize_optimizers([record], [task.label])[task.label]
    return {
        "run": task.name,
        "label": task.label,
        "seed": task.seed,
        "grid": task.point,
        "settings": task.config.optimizer.settings(),
        "train": to_dict(task.config.train),
        "evaluations": [{k: v for k, v in row.items() if k != "fingerprint"} for row in record.evaluations],
        "seconds": sum(row["seconds"] for row in record.log),
        "step_seconds": timing["step_seconds"],
        "optimizer_seconds_per_step": timing["optimizer_seconds_per_step"],
        "diverged": outcome.reason,
    }


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
