"""The evidence that is kept: its runs agree with themselves, and what is printed and written is computed from them."""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from rowdit.study.headline import KEYS, OPTIMIZERS, read_headline
from rowdit.train.config import OptimizerConfig

ROOT = Path(__file__).parents[2]
HEADLINE = ROOT / "docs" / "evidence" / "headline.json"
RUNS = json.loads(HEADLINE.read_text(encoding="utf-8"))
CASES = sorted({(run["dataset"], run["size"]) for run in RUNS})


def of(case: tuple[str, str], optimizer: str) -> list[dict]:
    own = [run for run in RUNS if (run["dataset"], run["size"], run["optimizer"]) == (*case, optimizer)]
    return sorted(own, key=lambda run: run["seed"])


def test_the_reader_takes_it() -> None:
    assert read_headline(HEADLINE) == RUNS


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_every_run_is_as_the_page_says(case: tuple[str, str]) -> None:
    """Once more without the reader: one setting an optimizer, the same seeds, the best picked by the other samples."""
    for optimizer in OPTIMIZERS:
        runs = of(case, optimizer)
        assert len({json.dumps(run["settings"], sort_keys=True) for run in runs}) == 1
        assert [run["seed"] for run in runs] == [run["seed"] for run in of(case, "adamw")]
        for run in runs:
            assert set(KEYS) <= set(run)
            selecting = [row[1] for row in run["curve"]]
            step, _, report = run["curve"][selecting.index(min(selecting))]
            assert (run["best"], run["steps_to_best"], run["final"]) == (report, step, run["curve"][-1][2])


def test_no_headline_seed_was_tuned_on() -> None:
    rows = [json.loads(line) for line in (HEADLINE.parent / "study.jsonl").read_text("utf-8").splitlines()]
    tuned = {row["seed"] for row in rows if row["stage"] == "tuning"}
    assert tuned and not tuned & {run["seed"] for run in RUNS}
    kept = {(row["dataset"], row["size"], row["label"], row["seed"]): row for row in rows if row["stage"] == "seeds"}
    for run in RUNS:
        row = kept[run["dataset"], run["size"], run["optimizer"], run["seed"]]
        defaults = OptimizerConfig(name=run["optimizer"]).settings()  # of settings that came after the run
        assert defaults | row["settings"] == run["settings"]
        assert [[e["step"], e["score_select"], e["score_report"]] for e in row["evaluations"]] == run["curve"]


def test_what_is_printed_is_the_mean_of_what_is_kept() -> None:
    command = [sys.executable, "-m", "rowdit", "study", "--table", str(HEADLINE)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={"COLUMNS": "200"})
    text = done.stdout
    for case in CASES:
        section = text[text.index(f"{case[0]}, {case[1]}: ") :]
        for optimizer in OPTIMIZERS:
            line = re.search(rf"^ ?{optimizer} .*$", section, re.MULTILINE)
            assert line is not None
            for metric in ("best", "final"):
                values = [run[metric] for run in of(case, optimizer)]
                interval = " [" if len(values) > 1 else " "  # one seed has none
                assert f"{statistics.fmean(values):.1f}{interval}" in line[0]
