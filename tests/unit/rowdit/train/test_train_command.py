"""`rowdit train` as it is typed: recipes, fields, what is printed, what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rowdit import recipes
from rowdit.cli import main
from rowdit.commands.train import parse
from rowdit.train.config import ConfigError, RunConfig
from rowdit.train.log import read_jsonl
from rowdit.train.loop import train
from toy_training import toy_config, toy_dataset

FIELDS = {
    "model": {"hidden-size": 16, "num-heads": 2, "depth": 1, "patch-size": 7},
    "train": {"batch-size": 4, "checkpoint-every": 2},
    "evaluate": {"num-evaluations": 1, "num-val-images": 8, "num-samples": 4, "grid-images": 4, "num-steps": 1},
}
TINY = [word for part, fields in FIELDS.items() for key, v in fields.items() for word in (f"--{part}.{key}", str(v))]


def test_a_comparison_gives_one_of_its_runs() -> None:
    assert parse(["quickstart"])[1].optimizer.name == "periodic"
    options, config, name = parse(["quickstart", "--label", "adamw", "--train.batch-size", "32", "--out", "x"])
    assert (config.optimizer.name, config.train.batch_size, name, options.out) == ("adamw", 32, "quickstart", Path("x"))
    with pytest.raises(ConfigError, match="there is no 'adam'; did you mean 'adamw'"):
        parse(["quickstart", "--label", "adam"])
    with pytest.raises(ConfigError, match="is one run, with one optimizer"):
        parse(["folder", "--label=adamw"])


@pytest.mark.parametrize("name", [name for name in recipes.RECIPES if isinstance(recipes.load(name), RunConfig)])
def test_recipes_of_single_runs(name: str) -> None:
    """T14: what doesn't fit is seen before the first step, not when the first evaluation is due, hours later."""
    config = recipes.load(name)
    assert config.evaluate.at_start
    _, changed, _ = parse([name, "--parallel.param-dtype", "bfloat16", "--optimizer.period", "5"])
    assert changed.parallel.param_dtype == "bfloat16" and changed.optimizer.period == 5


@pytest.mark.slow
def test_first_steps_of_fashion_s(tmp_path: Path) -> None:
    arguments = ["--data.source", "bundled", "--train.batch-size", "8", "--train.steps", "4", "--no-evaluate"]
    assert main(["train", "fashion_s", "--out", str(tmp_path), *arguments]) == 0
    rows = read_jsonl(tmp_path / "log.jsonl")
    assert [row["kind"] for row in rows] == ["refresh", "row", "row", "refresh"] and rows[-1]["loss"] < 2


def test_train_says_where_parameters_go_and_what_it_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """T23: the routing is shown; T14: with `at_start` there is a sample before the first step."""
    command = ["train", "quickstart", "--out", str(tmp_path), *TINY, "--evaluate.at-start"]
    assert main([*command, "--train.steps", "2"]) == 0
    out = capsys.readouterr().out
    assert "optimizer: periodic, 5 parameters (4,608 numbers) by muon, " in out
    assert "blocks.0.attn.qkv.weight" in (tmp_path / "optimizer.txt").read_text()
    assert [row["step"] for row in read_jsonl(tmp_path / "evaluations.jsonl")] == [0, 2]
    assert sorted(path.name for path in (tmp_path / "samples").iterdir()) == ["step_0000000.png", "step_0000002.png"]
    assert main([*command, "--train.steps", "3"]) == 2
    assert "train.steps: 2 -> 3" in capsys.readouterr().err
    assert main([*command, "--train.steps", "3", "--allow-changes"]) == 0
    assert json.loads((tmp_path / "finished.json").read_text())["step"] == 3


def test_bf16_on_one_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A process group of one rank, made for it and left again."""
    import torch.distributed as dist

    arguments = ["--no-evaluate", "--train.steps", "2", "--parallel.param-dtype", "bfloat16", "--label", "adamw"]
    assert main(["train", "quickstart", "--out", str(tmp_path), *TINY, *arguments]) == 0
    assert not dist.is_initialized()


def test_a_sample_at_step_0(tmp_path: Path) -> None:
    """T14: before anything is trained; not without `at_start`."""
    import dataclasses

    config = toy_config(steps=2)
    for at_start, first in ((True, 0), (False, 1)):
        evaluate = dataclasses.replace(config.evaluate, at_start=at_start)
        folder = tmp_path / str(at_start)
        train(dataclasses.replace(config, evaluate=evaluate), toy_dataset(), folder, evaluate=lambda model, step: {})
        assert read_jsonl(folder / "evaluations.jsonl")[0]["step"] == first
