"""`rowdit compare` as a user runs it, at toy scale: to the end, interrupted and resumed, and with mistakes."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from rowdit.cli import main
from rowdit.train.log import read_jsonl

TOY = [
    "--model.image-size", "8", "--model.patch-size", "2", "--model.hidden-size", "16", "--model.depth", "1",
    "--model.num-heads", "2", "--train.batch-size", "8", "--train.checkpoint-every", "3", "--train.warmup-steps", "2",
    "--evaluate.num-samples", "30", "--evaluate.num-val-images", "40", "--evaluate.num-steps", "2",
    "--evaluate.num-evaluations", "3", "--muon.lr", "3e-3", "--threads", "1",
]  # fmt: skip
LABELS = ["adamw", "muon", "periodic"]


def _environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2] / "src"), "COLUMNS": "80"}


def rowdit(*arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    """Runs `python -m rowdit` and checks its exit code."""
    command = [sys.executable, "-m", "rowdit", *arguments]
    result = subprocess.run(command, env=_environment(), capture_output=True, text=True, timeout=240)
    assert result.returncode == code, f"exit code {result.returncode}\n{result.stdout}\n{result.stderr}"
    assert "Traceback" not in result.stderr, result.stderr
    return result


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """One comparison that ran through: its folder and what it printed."""
    out = tmp_path_factory.mktemp("compare") / "out"
    result = rowdit("compare", "quickstart", *TOY, "--steps", "9", "--out", str(out))
    return out, result.stdout


@pytest.fixture
def prepared(finished: tuple[Path, str], tmp_path: Path) -> Path:
    """A new folder in which the evaluation is prepared already."""
    shutil.copytree(finished[0] / "evaluation", tmp_path / "out" / "evaluation")
    return tmp_path / "out"


def _summary(out: Path) -> dict[str, Any]:
    return json.loads((out / "summary.json").read_text(), parse_constant=pytest.fail)


def _scores(out: Path) -> dict[str, list[tuple[int, float, float, float]]]:
    """What doesn't depend on the clock."""
    keys = ("step", "score_select", "score_report", "val_loss")
    return {
        run.name: [tuple(row[key] for key in keys) for row in read_jsonl(run / "evaluations.jsonl")]
        for run in sorted((out / "runs").iterdir())
    }


def test_the_summary_has_what_it_promises(finished: tuple[Path, str]) -> None:
    summary = _summary(finished[0])
    assert summary["score_name"] == "fd_effnet_lite0"
    assert list(summary["optimizers"]) == LABELS
    assert summary["floor"] > 0 and summary["seeds"] == [0] and summary["machine"]["num_threads"] == 1
    for label, entry in summary["optimizers"].items():
        for metric in (entry, entry["val_loss"]):
            for kind in ("best", "final", "at_fixed_step", "at_fixed_time"):
                point = metric[kind]
                assert all(math.isfinite(point[key]) and point[key] >= 0 for key in ("score", "step", "seconds")), kind
            assert "time_to_adamw_best" in metric
        assert entry["final"]["step"] == 9
        cost = entry["optimizer_seconds_per_step"]
        assert 0 < cost["mean"] < entry["step_seconds"] and 0 < entry["optimizer_share"] < 1
        assert (cost["refresh"] is None, cost["row"] is None) == (label == "adamw", label != "periodic")
        assert entry["lr"] == entry["settings"]["lr"] and entry["seeds"] == [0]
        assert entry["fingerprint"]["network"]["name"] == "effnet_lite0"
        assert entry["curve"][0]["rows"] == [
            {key: value for key, value in row.items() if key != "fingerprint"}
            for row in read_jsonl(finished[0] / "runs" / f"{label}-seed0" / "evaluations.jsonl")
        ]
    assert {entry["at_fixed_time"]["seconds"] for entry in summary["optimizers"].values()} == {
        min(entry["final"]["seconds"] for entry in summary["optimizers"].values())
    }


def test_the_runs_have_what_they_promise(finished: tuple[Path, str]) -> None:
    for label in LABELS:
        run = finished[0] / "runs" / f"{label}-seed0"
        assert [row["step"] for row in read_jsonl(run / "log.jsonl")] == list(range(1, 10))
        assert [row["step"] for row in read_jsonl(run / "evaluations.jsonl")] == [3, 6, 9]
        assert json.loads((run / "config.json").read_text())["optimizer"]["name"] == label
        for step in (3, 6, 9):
            with Image.open(run / "samples" / f"step_{step:06d}.png") as grid:
                assert grid.size == (10 * 8, 3 * 8)


def test_all_start_from_the_same_weights_and_see_the_same_data(finished: tuple[Path, str]) -> None:
    firsts = [read_jsonl(finished[0] / "runs" / f"{label}-seed0" / "log.jsonl")[0] for label in LABELS]
    assert len({(row["loss"], row["grad_norm"]) for row in firsts}) == 1


def test_a_table_and_a_page(finished: tuple[Path, str]) -> None:
    out, text = finished
    table = text[text.index("quickstart: fd_effnet_lite0") :]
    assert "vs adamw" in table and "refresh" in table and all(label in table for label in LABELS)
    assert "…" not in table and all(len(line) <= 80 or str(out) in line for line in table.splitlines())
    assert str(out / "report.html") in text and "periodic" in (out / "report.html").read_text()


def test_the_same_command_again_runs_nothing(finished: tuple[Path, str]) -> None:
    out = finished[0]
    before = {path: path.stat().st_mtime_ns for path in (out / "runs").rglob("*")}
    summary = _summary(out)
    assert main(["compare", "quickstart", *TOY, "--steps", "9", "--out", str(out)]) == 0
    assert {path: path.stat().st_mtime_ns for path in (out / "runs").rglob("*")} == before
    assert _summary(out) == summary


def test_interrupted_it_goes_on_where_it_was(finished: tuple[Path, str], prepared: Path) -> None:
    """Ctrl-C in the second of three runs; afterwards everything is as if nothing had happened."""
    command = ["compare", "quickstart", *TOY, "--steps", "9", "--out", str(prepared)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-m", "rowdit", *command], env=_environment(), **pipes)
    log = prepared / "runs" / "muon-seed0" / "log.jsonl"
    deadline = time.monotonic() + 120
    while not (log.exists() and log.read_text().count("\n") >= 2):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert f"To go on: rowdit {' '.join(command)}" in errors and "Traceback" not in errors
    assert not (prepared / "summary.json").exists()
    assert len(read_jsonl(prepared / "runs" / "adamw-seed0" / "evaluations.jsonl")) == 3  # the first run was done
    assert main(command) == 0
    assert _scores(prepared) == _scores(finished[0])


def test_seeds_and_a_choice_of_optimizers(prepared: Path) -> None:
    assert (
        main(["compare", *TOY, "--steps", "3", "--seeds", "2", "--optimizers", "periodic", "--out", str(prepared)]) == 0
    )
    (entry,) = _summary(prepared)["optimizers"].values()
    assert [p["seed"] for p in entry["best"]["per_seed"]] == entry["seeds"] == [0, 1]
    scores = [p["score"] for p in entry["final"]["per_seed"]]
    assert entry["final"]["score"] == pytest.approx(sum(scores) / 2) and scores[0] != scores[1]
    assert entry["time_to_adamw_best"] is None


def test_another_config_is_refused_and_fresh_starts_over(
    finished: tuple[Path, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    shutil.copytree(finished[0], out)
    command = ["compare", *TOY, "--steps", "9", "--optimizers", "periodic", "--out", str(out)]
    command += ["--periodic.row-scale", "0.75"]
    assert main(command) == 2
    errors = capsys.readouterr().err
    assert "optimizer.row_scale: " in errors and "-> 0.75" in errors and "--fresh" in errors
    assert _scores(out) == _scores(finished[0])
    (out / "runs" / "periodic-seed0" / "notes.txt").write_text("mine")
    assert main([*command, "--fresh"]) == 0
    assert _summary(out)["optimizers"]["periodic"]["settings"]["row_scale"] == 0.75
    assert (out / "runs" / "periodic-seed0" / "notes.txt").exists()  # only what a run wrote is deleted


def test_changed_data_is_refused_with_the_way_out(
    finished: tuple[Path, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    shutil.copytree(finished[0], out)
    place = out / "runs" / "periodic-seed0" / "dataset.json"
    place.write_text(json.dumps({"fingerprint": "other-images"}))
    assert main(["compare", *TOY, "--steps", "9", "--out", str(out)]) == 2
    errors = capsys.readouterr().err
    assert "data: other-images -> fashion-mnist-bundled" in errors and "--fresh" in errors and "--out" in errors
    assert _scores(out) == _scores(finished[0])


def test_a_run_that_diverges_is_reported(prepared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--adamw.lr", "1e37", "--train.max-skipped-in-row", "2", "--train.warmup-steps", "0"]
    assert main(["compare", *TOY, "--steps", "9", "--optimizers", "adamw", "--out", str(prepared), *options]) == 0
    adamw = _summary(prepared)["optimizers"]["adamw"]
    assert adamw["final"]["score"] is None and "2 steps in a row" in adamw["diverged"]["0"]
    assert "lower the learning rate" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["compare", "quikstart"], "no recipe 'quikstart'; did you mean 'quickstart'"),
        (["compar"], "no verb 'compar'; did you mean 'compare'"),
        (["compare", "--optimizers", "adam"], "there is no 'adam'; did you mean 'adamw'"),
        (["compare", "--seeds", "0"], "seeds = 0: must be an integer >= 1"),
        (["compare", "--threads", "0"], "threads = 0: must be"),
        (["compare", "--steps", "0"], "steps = 0: must be an integer >= 1"),
        (["compare", "--train.step", "5"], "--train.steps"),
        (["compare", "--periodic.row-scale", "-1"], "row_scale = -1.0"),
        (["compare", "--muon.period", "2"], "doesn't read it"),
        (["compare", "--muon.ns-coefficients", "polar"], "must be one of keller_jordan, polar_express"),
        (["compare", "--model.mlp-ratio", "nan"], "mlp_ratio is nan"),
        (["compare", "--model.image-size", "10", "--model.patch-size", "4"], "nearest valid sizes"),
        (["compare", "--model.num-classes", "4", "--out", "OUT"], "the data has 10 classes"),
        (["compare", "--data.source", "bundeld", "--out", "OUT"], "bundeld"),
        (["compare", "--evaluate.num-samples", "100000", "--out", "OUT"], "evaluate.num_samples = 100000"),
        (["compare", "--out", "/dev/null/out"], "/dev/null is a file, so nothing can lie in it"),
        (["tune", "--optimizer", "sgd"], "there is no optimizer 'sgd'"),
        (["tune", "--grid", "lr"], "must be KEY=VALUE"),
        (["tune", "--grid", "train.steps.x=1"], "unknown key train.steps.x"),
        (["tune", "--grid", "optimizers.muon=1"], "optimizers.muon is a section"),
        (["tune", "--processes", "0", "--out", "OUT"], "processes = 0: must be an integer >= 1"),
        (["report", "OUT"], "no such folder"),
        (["data", "get", "mnist"], "rowdit data get fashion-mnist"),
    ],
)
def test_a_mistake_is_one_clear_message(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main([str(tmp_path / "out") if argument == "OUT" else argument for argument in arguments])
    except SystemExit as ending:  # tyro's own errors
        code = ending.code
    assert code == 2
    # tyro draws boxes and breaks lines; the words are what counts
    assert message in " ".join(capsys.readouterr().err.replace("│", " ").split())


@pytest.mark.parametrize("package", ["tyro", "numpy"])
def test_the_library_alone_says_how_to_get_the_system(package: str, tmp_path: Path) -> None:
    code = (
        f"import sys, importlib.abc\n"
        f"class Absent(importlib.abc.MetaPathFinder):\n"
        f"    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.partition('.')[0] == {package!r}:\n"
        f"            raise ModuleNotFoundError(f'No module named {{name!r}}', name=name)\n"
        f"sys.meta_path.insert(0, Absent())\n"
        f"import rowdit.cli\n"
        f"sys.exit(rowdit.cli.main(['compare', '--out', {str(tmp_path / 'out')!r}]))"
    )
    result = subprocess.run([sys.executable, "-c", code], env=_environment(), capture_output=True, text=True)
    assert result.returncode != 0 and "Traceback" not in result.stderr, result.stderr
    assert f"No module named '{package}" in result.stderr and "pip install '.[rowdit]'" in result.stderr


def test_help_is_quick_and_names_the_verbs(capsys: pytest.CaptureFixture[str]) -> None:
    code = "import sys, rowdit.cli; rowdit.cli.main(['--help']); sys.exit('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], env=_environment(), capture_output=True, text=True)
    assert result.returncode == 0, "the command line imports torch before it knows the verb"
    assert all(verb in result.stdout for verb in ("compare", "tune", "report", "data get"))
    with pytest.raises(SystemExit):
        main(["compare", "--help"])
    assert "--periodic.row-scale" in capsys.readouterr().out
    for arguments in (["data", "--help"], ["data", "get", "--help"], ["data", "get", "-h"]):
        assert main(arguments) == 0
        assert "data get fashion-mnist" in capsys.readouterr().out


def test_tune_runs_a_grid_and_agrees_with_compare(
    finished: tuple[Path, str], prepared: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["tune", *TOY[: TOY.index("--threads")], "--steps", "9", "--optimizer", "muon", "--lr", "3e-3,9e-3"]
    command += ["--out", str(prepared)]
    text = rowdit(*command).stdout
    rows = read_jsonl(prepared / "sweep.jsonl")
    assert sorted(row["grid"]["lr"] for row in rows) == [3e-3, 9e-3]
    assert "lr=0.009" in text and not list(prepared.glob("runs/*/checkpoints"))
    recipe = next(row for row in rows if row["grid"]["lr"] == 3e-3)
    compared = read_jsonl(finished[0] / "runs" / "muon-seed0" / "evaluations.jsonl")
    assert [e["score_report"] for e in recipe["evaluations"]] == [e["score_report"] for e in compared]
    # The same command again has nothing to do.
    assert main(command) == 0
    assert "2 runs, 2 of them done before" in capsys.readouterr().out
    assert read_jsonl(prepared / "sweep.jsonl") == rows
