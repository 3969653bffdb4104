"""Grids of runs."""

from __future__ import annotations

import io
import json
import signal
import time
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rowdit.study import pool
from rowdit.study.sweep import make_tasks, parse_grid, parse_seeds, print_sweep, sweep
from rowdit.train.config import ConfigError, TrainConfig
from rowdit.train.stop import StopRequest
from toy_training import toy_comparison


def test_grids() -> None:
    assert parse_grid(["lr=1e-3,2e-3", "row-scale=1,0.5", "adaln=muon,adamw"]) == {
        "lr": [1e-3, 2e-3],
        "row_scale": [1, 0.5],
        "adaln": ["muon", "adamw"],
    }
    assert parse_grid(["betas=[0.9,0.95],[0.9,0.99]", "period=3,null"]) == {
        "betas": [[0.9, 0.95], [0.9, 0.99]],
        "period": [3, None],
    }
    for bad in ("lr", "lr=", "=3"):
        with pytest.raises(ConfigError, match="must be KEY=VALUE"):
            parse_grid([bad])
    with pytest.raises(ConfigError, match="row_scale was given before"):
        parse_grid(["row_scale=1", "row-scale=2"])


def test_what_is_asked_for_twice_is_one_run() -> None:
    tasks = make_tasks(toy_comparison(), "muon", {"lr": [1e-3, 0.001, 1, 1.0]}, (0, 0, 1))
    assert [(task.point["lr"], task.seed) for task in tasks] == [(1e-3, 0), (1, 0), (1e-3, 1), (1, 1)]


def test_a_seed_out_of_range_is_refused_before_anything_runs() -> None:
    with pytest.raises(ConfigError, match="seed = -1"):
        make_tasks(toy_comparison(), "muon", {"lr": [1e-3]}, (0, -1))


def test_some_process_must_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="processes = 0: must be an integer >= 1"):
        sweep(make_tasks(toy_comparison(), "muon", {"lr": [1e-3]}, (0,)), tmp_path / "out", num_processes=0)
    assert not (tmp_path / "out").exists()


def test_seed_lists() -> None:
    assert parse_seeds("0,2") == (0, 2)
    with pytest.raises(ConfigError, match="seeds = '0;1'"):
        parse_seeds("0;1")


def test_every_point_with_every_seed_and_seeds_last() -> None:
    tasks = make_tasks(toy_comparison(), "periodic", {"lr": [1e-3, 2e-3], "train.ema_decay": [0.5, 0.9]}, (0, 1))
    assert len(tasks) == len({task.name for task in tasks}) == 8
    assert [task.seed for task in tasks] == [0] * 4 + [1] * 4
    config = tasks[-1].config
    assert (config.optimizer.lr, config.train.ema_decay, config.train.seed) == (2e-3, 0.9, 1)
    assert config.optimizer.row_scale == 0.5  # what the grid doesn't vary is the recipe's


def test_names_tell_settings_apart_but_not_seeds() -> None:
    a, b = make_tasks(toy_comparison(), "muon", {"lr": [1e-3]}, (0, 1))
    assert a.name.rpartition("-")[0] == b.name.rpartition("-")[0]
    other = make_tasks(toy_comparison(steps=13), "muon", {"lr": [1e-3]}, (0,))[0]
    assert other.name != a.name


def test_a_change_of_another_optimizer_keeps_the_name() -> None:
    import dataclasses

    comparison = toy_comparison()
    optimizers = comparison.optimizers | {"adamw": dataclasses.replace(comparison.optimizers["adamw"], lr=0.5)}
    changed = dataclasses.replace(comparison, optimizers=optimizers)
    assert make_tasks(comparison, "muon", {}, (0,))[0].name == make_tasks(changed, "muon", {}, (0,))[0].name


@pytest.mark.parametrize(
    ("label", "grid", "message"),
    [
        ("moun", {}, "there is no optimizer 'moun'; did you mean 'muon'"),
        ("muon", {"lrr": [1]}, "unknown key lrr; did you mean 'lr'"),
        ("muon", {"train.step": [1]}, "unknown key train.step; did you mean 'steps'"),
        ("muon", {"lr": [-1]}, r"optimizers\.muon\.lr = -1\.0"),
        ("muon", {"row_scale": [0.25]}, "the optimizer 'muon' doesn't read it"),
    ],
)
def test_mistakes_are_named_before_anything_runs(label: str, grid: dict[str, list[Any]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_tasks(toy_comparison(), label, grid, (0,))


def _line(lr: float, seed: int, final: float | str) -> dict[str, Any]:
    row = {"step": 4, "score_select": final, "score_report": final, "val_loss": 0.5, "seconds": 1.0}
    return {"run": f"muon-{lr}-{seed}", "label": "muon", "seed": seed, "grid": {"lr": lr}, "evaluations": [row]}


def _printed(lines: list[dict[str, Any]], folder: Path) -> str:
    (folder / "sweep.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    file = io.StringIO()
    print_sweep(folder, Console(file=file, width=120))
    return file.getvalue()


def test_the_table_is_sorted_and_points_out_an_edge(tmp_path: Path) -> None:
    finals = [(1e-3, 0, 30.0), (1e-3, 1, 34.0), (2e-3, 0, 20.0), (2e-3, 1, 22.0), (4e-3, 0, "nan")]
    lines = [_line(*final) for final in finals]
    text = _printed(lines, tmp_path)
    positions = [text.index(f"lr={lr}") for lr in ("0.002", "0.001", "0.004")]
    assert positions == sorted(positions)
    assert "21.0" in text and "32.0" in text and "edge" not in text
    assert "the best lr, 0.001, is at the grid's edge" in _printed([*lines, _line(1e-3, 2, -999.0)], tmp_path)


def test_a_setting_at_its_default_leaves_the_name_as_it_is() -> None:
    """So a field that a later version adds doesn't make finished runs unknown."""
    import dataclasses

    @dataclasses.dataclass(frozen=True)
    class LaterTrainConfig(TrainConfig):
        new_field: float = 1.5

    comparison = toy_comparison()
    name = make_tasks(comparison, "muon", {}, (0,))[0].name
    fields = dataclasses.asdict(comparison.train)
    later = dataclasses.replace(comparison, train=LaterTrainConfig(**fields))
    assert make_tasks(later, "muon", {}, (0,))[0].name == name
    changed = dataclasses.replace(comparison, train=LaterTrainConfig(**fields, new_field=2.0))
    assert make_tasks(changed, "muon", {}, (0,))[0].name != name


@pytest.mark.parametrize("is_told", [True, False])
def test_processes_that_end_because_all_were_told_to_are_no_error(is_told: bool) -> None:
    """SIGTERM for the whole group of processes once read "killed, or out of memory?"."""
    died: Future[Any] = Future()
    died.set_exception(BrokenProcessPool())
    (task,) = make_tasks(toy_comparison(), "adamw", {"lr": [1e-3]}, (0,))
    stop = StopRequest(also=lambda: is_told)
    if is_told:
        assert pool._result(died, task, stop) is None
    else:
        with pytest.raises(ConfigError, match="a process died during adamw.*out of memory"):
            pool._result(died, task, stop)


def test_a_process_of_the_pool_saves_before_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """When SIGTERM comes during a run, the run is asked to stop, and the process goes after it has handed that back."""
    left: list[tuple[int, ...]] = []
    monkeypatch.setattr(pool.os, "_exit", lambda *code: left.append(code))
    monkeypatch.setattr(pool, "SECONDS_TO_LEAVE", 0.01)
    monkeypatch.setattr(pool, "_is_told_to_end", False)

    def run_task(task: object, out: Path) -> None:
        stop = StopRequest(also=pool._should_stop)
        assert not stop.requested
        pool._on_sigterm(signal.SIGTERM, None)
        assert stop.requested and not left

    assert pool._run_in_pool(run_task, None, Path()) is None  # type: ignore[arg-type]
    deadline = time.monotonic() + 10
    while not left and time.monotonic() < deadline:
        time.sleep(0.01)
    assert left == [(0,)]
    pool._on_sigterm(signal.SIGTERM, None)  # with nothing to do it goes at once
    assert left == [(0,), (0,)]
