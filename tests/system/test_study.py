"""A study from end to end: killed, gone on with, its tables and its page; and a run that raises."""

from __future__ import annotations

import csv
import io
import json
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rowdit.study import pool
from rowdit.study.cases import Case, Entry, Study
from rowdit.study.headline import read_headline
from rowdit.study.page import write_page
from rowdit.study.run import ROWS_NAME, print_study, run_study
from rowdit.study.staging import Part
from rowdit.study.task import Task, make_tasks
from rowdit.train.config import ConfigError
from rowdit.train.stop import StopRequest
from toy_training import toy_comparison

LRS = (1e-3, 2e-3, 4e-3, 8e-3, 16e-3)


def toy_study() -> Study:
    entries = {
        "adamw": Entry(LRS),
        "muon": Entry(LRS),
        "periodic": Entry(LRS, axes={"row_scale": (0.25,)}),
        "gram": Entry(LRS[1:4], changes={"cheap_step": "gram"}, follow="periodic", question="cheap step", num_seeds=1),
    }
    return Study((Case("S", "toy", "S", toy_comparison(steps=4, checkpoint_every=2)),), entries, seeds=(0, 1))


class Runs:
    """In the place of a pool of processes: makes rows up, without training, and can be told to stop or to raise."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, stop_after: int | None = None) -> None:
        self.names: list[str] = []
        self.stop_after = stop_after
        monkeypatch.setattr("rowdit.study.run.prepare", lambda *arguments: None)
        monkeypatch.setattr("rowdit.study.run.run_tasks", self.run_tasks)

    def run_tasks(self, upcoming: Any, out: Path, *, num_processes: int, stop: Any, done: Any) -> bool:
        while tasks := upcoming():
            if self.stop_after is not None and len(self.names) >= self.stop_after:
                return False
            self.names.append(tasks[0].name)
            done(tasks[0], made_up_row(tasks[0]))
        return True


def made_up_row(task: Task) -> dict[str, Any]:
    config = task.config
    score = 10.0 + abs(config.optimizer.lr - 4e-3) * 1000 + 0.1 * (task.seed % 7)
    evaluations = [
        {"step": s, "seconds": float(s), "score_select": score / s, "score_report": score / s + 0.01, "kid": 0.1}
        | {"val_loss": score / s / 100, "accuracy": 0.5}
        for s in config.evaluate.steps(config.train.steps)
    ]
    row = {"run": task.name, "label": task.label, "seed": task.seed, "grid": task.point, "evaluations": evaluations}
    return row | {"settings": config.optimizer.settings(), "diverged": ""}


def test_a_stopped_study_goes_on_and_writes_its_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quiet = Console(file=io.StringIO())
    first = Runs(monkeypatch, stop_after=7)
    assert run_study(toy_study(), tmp_path, num_processes=1, console=quiet) is False
    with open(tmp_path / ROWS_NAME, "a") as file:
        file.write('{"run": "cut sho')  # as a kill leaves it
    second = Runs(monkeypatch)
    assert run_study(toy_study(), tmp_path, num_processes=1, console=quiet) is True
    assert len(first.names) == 7 and not set(first.names) & set(second.names)

    runs = read_headline(tmp_path / "headline.json")
    assert [(run["optimizer"], run["seed"]) for run in runs] == [
        (name, seed) for seed in (0, 1) for name in ("adamw", "muon", "periodic")
    ]
    assert {run["lr"] for run in runs} == {4e-3}
    rows = [json.loads(line) for line in (tmp_path / ROWS_NAME).read_text().splitlines()]
    assert {row["stage"] for row in rows} == {"tuning", "seeds"} and {row["question"] for row in rows} == {
        "headline",
        "cheap step",
    }
    lines = list(csv.DictReader(io.StringIO((tmp_path / "study.csv").read_text())))
    assert len(lines) == sum(len(row["evaluations"]) for row in rows)
    assert float(lines[0]["lr"]) == json.loads(lines[0]["settings"])["lr"]
    chosen = json.loads((tmp_path / "choices.json").read_text())
    assert {(c["optimizer"], c["lr"], c["num_runs"]) for c in chosen} == {
        *(("adamw", 4e-3, 5), ("muon", 4e-3, 5), ("periodic", 4e-3, 6), ("gram", 4e-3, 3))
    }
    page = write_page(toy_study(), tmp_path).read_text()
    assert page.count("<svg") >= 5 and "<script" not in page and (tmp_path / "figures" / "S-score.svg").exists()
    file = io.StringIO()
    print_study(toy_study(), tmp_path, Console(file=file, width=100))
    assert "gram" in file.getvalue() and "paired differences" in file.getvalue()


def test_a_part_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the study has no case 'X'; there are: S"):
        run_study(toy_study(), tmp_path, num_processes=1, part=Part(cases=("X",)))
    with pytest.raises(ConfigError, match="processes = 0"):
        run_study(toy_study(), tmp_path, num_processes=0)


def one_fails_one_sleeps(task: Task, out: Path, *_: Any) -> dict[str, Any] | None:
    """In a process of the pool: a run that raises at once, and one that would take a minute but for the stop."""
    if task.seed == 0:
        raise ValueError("out of luck")
    start = time.monotonic()
    while time.monotonic() - start < 60:
        if pool._stop_event is not None and pool._stop_event.is_set():
            return None
        time.sleep(0.05)
    return {}


def test_an_exception_in_one_run_surfaces_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "run_task", one_fails_one_sleeps)
    tasks = make_tasks(toy_comparison(), "muon", {}, (0, 1, 2, 3))
    start = time.monotonic()
    with pytest.raises(ValueError, match="out of luck") as caught:
        pool.run_tasks(lambda: tasks, tmp_path, num_processes=2, stop=StopRequest(), done=lambda task, row: None)
    assert time.monotonic() - start < 50  # the start of two processes, and no more of the other run than one look
    assert tasks[0].name in caught.value.__notes__[0]


def kill_yourself(task: Task, out: Path, *_: Any) -> dict[str, Any] | None:
    import os
    import signal

    os.kill(os.getpid(), signal.SIGKILL)
    return None


def test_a_killed_process_is_told_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "run_task", kill_yourself)
    tasks = make_tasks(toy_comparison(), "muon", {}, (0,))
    with pytest.raises(ConfigError, match=f"a process died during {tasks[0].name}"):
        pool.run_tasks(lambda: tasks, tmp_path, num_processes=1, stop=StopRequest(), done=lambda task, row: None)


@pytest.mark.slow
def test_torchrun_runs_a_study_with_all_ranks(tmp_path: Path) -> None:
    """Two ranks work on one run after another and leave the same records as one process; slow: two processes train."""
    import subprocess
    import sys

    program = tmp_path / "program.py"
    program.write_text(
        "import sys\n"
        "from pathlib import Path\n"
        f"sys.path[:0] = [{str(Path(__file__).parent)!r}, {str(Path(__file__).parents[1])!r}]\n"
        "import rowdit.study.compare as compare\n"
        "from rowdit.models.parallel import ParallelConfig\n"
        "from rowdit.study.cases import Case, Entry, Study\n"
        "from rowdit.study.run import run_study\n"
        "from rowdit.train.world import join_world\n"
        "from toy_training import toy_comparison, toy_dataset\n"
        "compare.open_dataset = lambda source, split, *_, **__: toy_dataset(40, seed=split == 'train')\n"
        "toy = toy_comparison(steps=4, checkpoint_every=2)\n"
        "study = Study((Case('S', 'toy', 'S', toy),), {'muon': Entry((1e-3, 2e-3, 4e-3, 8e-3, 1e-2))}, seeds=(0,))\n"
        "if __name__ == '__main__':\n"  # the processes of the pool import this program too
        "    with join_world(ParallelConfig()) as world:\n"
        "        sys.exit(0 if run_study(study, Path(sys.argv[1]), num_processes=1, world=world) else 3)\n"
    )
    losses = []
    for name, command in (("one", []), ("two", ["-m", "torch.distributed.run", "--nproc-per-node", "2"])):
        out = tmp_path / name
        subprocess.run([sys.executable, *command, str(program), str(out)], check=True, timeout=300)
        rows = [json.loads(line) for line in (out / ROWS_NAME).read_text().splitlines()]
        assert len(rows) == len({row["run"] for row in rows}) >= 6
        losses.append([row["evaluations"][-1]["val_loss"] for row in rows])
    # The order of sums differs between one rank and two.
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
