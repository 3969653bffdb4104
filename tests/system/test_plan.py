"""`rowdit plan` as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rowdit import recipes
from rowdit.cli import main

TINY = ["--model.hidden-size", "16", "--model.num-heads", "2", "--model.depth", "2"]


def plan(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    assert main(["plan", *arguments]) == code
    shown = capsys.readouterr()
    return shown.err if code else shown.out


def test_json_is_alone_on_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(plan(capsys, "scale_1p3b", "--world-size", "8", "--json", "--refresh", "gather"))
    assert found["num_parameters"] == 1_283_776_528
    assert found["optimizer_bytes_per_step"] == found["optimizer_steps"]["refresh"]["bytes_sent"] / 3 > 0
    assert found["optimizer_flops_per_step"] > 0
    assert {"weights", "gradients", "optimizer", "ema", "activations", "unsharded", "refresh"} <= set(
        found["memory_bytes_per_rank"]
    )
    assert (found["recipe"], found["refresh_mode"], found["num_shards"]) == ("scale_1p3b", "gather", 8)


@pytest.mark.parametrize("name", recipes.RECIPES)
def test_any_recipe_and_its_fields(capsys: pytest.CaptureFixture[str], name: str) -> None:
    text = plan(capsys, name, "--world-size", "4", "--replicas", "2", "--train.batch-size", "12", *TINY)
    assert "2 blocks of width 16" in text and "12 images a step = 4 ranks x 3" in text
    assert "2 replicas of 2 shards" in text


def test_options_reach_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    sent = {}
    for period in ("1", "4"):
        for mode in ("gather", "exchange"):
            arguments = ["--world-size", "4", "--period", period, "--refresh", mode, "--json", *TINY]
            sent[period, mode] = json.loads(plan(capsys, "quickstart", *arguments))["optimizer_bytes_per_step"]
    assert sent["1", "gather"] == 4 * sent["4", "gather"] and sent["1", "exchange"] == 4 * sent["4", "exchange"]
    assert sent["1", "gather"] > sent["1", "exchange"]
    adamw = json.loads(plan(capsys, "quickstart", "--label", "adamw", "--world-size", "4", "--json", *TINY))
    assert adamw["optimizer"] == "adamw" and adamw["optimizer_bytes_per_step"] == 0


def test_a_size_of_a_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    assert "674,816,272 parameters" in plan(capsys, "imagenet256:XL/2", "--world-size", "8")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["scale_2c"], "did you mean 'scale_2b'"),
        (["scale_2b:XL"], "has no sizes"),
        (["imagenet256:XXL/2"], "did you mean 'XL/2'"),
        (["scale_2b", "--world-size", "6", "--replicas", "4"], "6 ranks can't be divided"),
        (["scale_2b", "--world-size", "0"], "at least one rank"),
        (["scale_2b", "--label", "muon"], "one run"),
        (["scale_2b", "--cluster", "h101"], "did you mean 'h100'"),
        (["quickstart", "--label", "adamw", "--sweep"], "AdamW has neither"),
        (["quickstart", "--device", "cpu", "--sweep"], "--sweep needs --cluster"),
        (["quickstart", "--label", "sgd"], "there is no 'sgd'"),
        (["quickstart", "--label", "adamw", "--period", "3"], "has no period"),
    ],
)
def test_mistakes_are_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], words: str) -> None:
    shown = plan(capsys, *arguments, code=2)
    assert words in shown and shown.count("\n") == 1


def test_a_batch_that_cannot_be_shared_is_said_beside(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "quickstart", "--world-size", "128", "--json", *TINY]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["batch"]["images_per_rank"] == 1
    assert "--train.batch-size 128" in shown.err


def test_time_is_predicted_for_a_cluster(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text = plan(capsys, "quickstart", "--world-size", "8", "--cluster", "a100", *TINY)
    assert "time on a100" in text and "hangs most on" in text
    found = json.loads(plan(capsys, "quickstart", "--world-size", "8", "--cluster", "b200", "--json", *TINY))
    seconds = found["seconds"]
    assert seconds["step"] > seconds["optimizer"] > 0 and seconds["cluster"]["name"] == "b200"
    assert "seconds" not in json.loads(plan(capsys, "quickstart", "--device", "cpu", "--json", *TINY))
    arguments = ["--world-size", "8", "--sweep", "--out", str(tmp_path / "sweep"), *TINY]
    assert "K = 3 saves" in plan(capsys, "quickstart", *arguments)
    assert (tmp_path / "sweep" / "sweep.svg").read_text().startswith("<svg")
    assert {row["world_size"] for row in json.loads((tmp_path / "sweep" / "sweep.json").read_text())} >= {8, 4096}


def test_a_run_is_no_comparison(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "scale_2b"]) == 2
    assert "rowdit train scale_2b" in capsys.readouterr().err
