"""The study's tables as Markdown, from made-up runs and from the published ones."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from rowdit.recipes.studies import load_study
from rowdit.study.cases import Case, Entry, Study
from rowdit.study.headline import headline_runs
from rowdit.study.markdown import write_markdown
from rowdit.study.run import by_name
from rowdit.study.staging import next_tasks
from rowdit.study.task import Task
from rowdit.train.log import read_jsonl
from toy_training import toy_comparison

LRS = (1e-3, 2e-3, 4e-3, 8e-3, 16e-3)
PUBLISHED = Path(__file__).parents[4] / "docs" / "evidence"


def made_up(study: Study) -> dict[str, Any]:
    """All runs of a study; Muon scores 70, AdamW 100, the row step 80, its scaled variant 70.35, plus the seed."""
    rows: dict[str, Any] = {}

    def row(task: Task) -> dict[str, Any]:
        optimizer = task.config.optimizer
        base = {"adamw": 100.0, "muon": 70.0, "periodic": 80.0 if optimizer.row_scale == 0.5 else 70.35}[optimizer.name]
        value = base + math.log(optimizer.lr / 4e-3) ** 2 + (task.seed if task.seed < 100 else 0)
        steps = task.config.evaluate.steps(task.config.train.steps)
        evaluations = [
            {"step": s, "score_select": value, "score_report": value, "val_loss": value / 100, "seconds": s}
            for s in steps
        ]
        place = {"case": task.case, "label": task.label, "seed": task.seed, "run": task.name, "grid": task.point}
        return place | {"settings": optimizer.settings(), "evaluations": evaluations}

    while tasks := next_tasks(study, rows):
        rows |= {task.name: row(task) for task in tasks}
    return rows


def test_each_contender_stands_beside_muon_and_adamw(tmp_path: Path) -> None:
    changes = {"row_scale": 0.25}
    entries = {"adamw": Entry(LRS), "muon": Entry(LRS), "periodic": Entry(LRS)}
    other = Entry(LRS, changes=changes, follow="periodic", question="other")
    side = Entry(LRS, changes=changes, follow="periodic", question="side", num_seeds=1)
    study = Study(
        (Case("S", "toy", "S", toy_comparison()),), entries | {"quarter": other, "side": side}, seeds=(0, 1, 2)
    )
    assert study.contenders() == ["periodic", "quarter"]
    rows = made_up(study)
    text = write_markdown(study, tmp_path, rows).read_text()
    assert "| Muon against AdamW | -29.7 % [-30.4, -29.0] |" in text
    assert "| share of Muon's gain that periodic keeps | 0.67 [0.67, 0.67] |" in text
    assert "| quarter against Muon | +0.5 % [+0.5, +0.5] |" in text
    assert "| quarter against Muon, best | <= 0.5 %, high <= 3 % | +0.5 % [+0.5, +0.5] | yes |" in text
    assert "| periodic against Muon, best | <= 0.5 %, high <= 3 % | +14.1 % [+13.6, +14.6] | **no** |" in text
    assert "| muon | lr 0.004, betas" not in text and "**70**" in text
    assert "### S, side" in text and "side beside Muon" not in text
    runs = headline_runs(study, rows, "quarter")
    assert {run["settings"]["row_scale"] for run in runs if run["optimizer"] == "periodic"} == {0.25}


def test_the_published_tables_are_those_of_the_published_records(tmp_path: Path) -> None:
    study = load_study("small", {"digits": "folder:digits", "emoji": "folder:emoji"})
    rows = by_name(read_jsonl(PUBLISHED / "study.jsonl"))
    if (PUBLISHED / "times.json").exists():
        (tmp_path / "times.json").write_bytes((PUBLISHED / "times.json").read_bytes())
    assert write_markdown(study, tmp_path, rows).read_text() == (PUBLISHED / "tables.md").read_text()
